"""Labels of words are aligned with the first token of each word; names are sorted or given; misfits are bad rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from onward.trainer.config.run_config import RunConfig
from onward.trainer.data.batches.batches import one_batch
from onward.trainer.data.schema.signature import read_training_signature
from onward.trainer.data.storage.first_rows import read_first_rows
from onward.trainer.data.storage.opened_shards import open_shards
from onward.trainer.errors import DataError
from tests.support.graphs import tiny_token_classifier
from tests.support.texts import bert_tokenizer, gpt2_tokenizer, write_csv
from tests.trainer.data.text.test_tokenized_rows import configured, problems, sharded

ROWS = [
    (["Anna", "lives", "in", "Berlin", "."], ["B-PER", "O", "O", "B-LOC", "O"]),
    (["unbelievable", "film"], ["O", "O"]),
    (["in", "New", "York"], ["O", "B-LOC", "I-LOC"]),
    (["a"], ["O"]),
] * 6
NAMES = ["B-LOC", "B-PER", "I-LOC", "O"]


def tagged(folder: Path, source: str, data: dict[str, Any] | None = None, **text: Any) -> RunConfig:
    bert_tokenizer(folder / "tokenizer.json")
    settings = {"task": "tokens", "columns": "words", **text}
    data = {"source": str(folder / source), "label": "tags", "text": settings, **(data or {})}
    return configured(folder, tiny_token_classifier(vocab_size=400, num_classes=4), data)


def write(path: Path, rows: Any) -> None:
    if path.suffix == ".csv":
        write_csv(path, ["words", "tags"], [(" ".join(words), " ".join(map(str, tags))) for words, tags in rows])
    elif path.suffix == ".parquet":
        pq.write_table(pa.table({"words": [row[0] for row in rows], "tags": [row[1] for row in rows]}), path)
    else:
        path.write_text("".join(json.dumps({"words": words, "tags": tags}) + "\n" for words, tags in rows))


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "csv"])
@pytest.mark.parametrize("given", ["sorted names", "data.classes", "ids"])
def test_the_first_token_of_a_word_gets_its_label_and_the_others_are_ignored(
    tmp_path: Path, kind: str, given: str
) -> None:
    order = NAMES[::-1] if given == "data.classes" else NAMES
    rows = [(words, [order.index(tag) for tag in tags]) if given == "ids" else (words, tags) for words, tags in ROWS]
    write(tmp_path / f"data.{kind}", rows)
    config = tagged(tmp_path, f"data.{kind}", {"classes": order} if given == "data.classes" else {}, max_length=7)
    assert problems(config) == []
    directory, manifest = sharded(config, tmp_path)
    if given != "ids":
        assert list(manifest.fitted["tags"].classes) == order
    library = bert_tokenizer(tmp_path / "tokenizer.json")
    library.enable_truncation(7)
    shards = open_shards(directory, "train")
    batch = one_batch(shards, config, read_training_signature(config.model), np.arange(shards.num_rows))
    labels = batch.labels[0]
    assert labels is not None
    encodings = [(library.encode(words, is_pretokenized=True), tags) for words, tags in ROWS]
    encoded = {tuple(encoding.ids): (encoding, tags) for encoding, tags in encodings}
    longest = batch.inputs[0].shape[1]
    for ids, mask, row in zip(batch.inputs[0].tolist(), batch.inputs[1].tolist(), labels.tolist(), strict=True):
        encoding, tags = encoded[tuple(ids[: sum(mask)])]
        wanted = [-100] * longest
        for word, tag in enumerate(tags):
            if word in encoding.word_ids:
                wanted[encoding.word_ids.index(word)] = order.index(tag)
        assert row == wanted


def test_the_rehearsals_first_rows_have_the_same_labels(tmp_path: Path) -> None:
    write(tmp_path / "data.jsonl", ROWS)
    config = tagged(tmp_path, "data.jsonl")
    directory, _ = sharded(config, tmp_path)
    first = read_first_rows(config, read_training_signature(config.model), 5)
    stored = open_shards(directory, "train").read(np.arange(5))["tags"]
    assert [row.tolist() for row in first.read(np.arange(5))["tags"]] == [row.tolist() for row in stored]


def test_rows_whose_labels_do_not_fit_their_words_are_bad_rows(tmp_path: Path) -> None:
    write(tmp_path / "data.jsonl", [*ROWS, (["one", "two"], ["O"]), ([], []), (["x"], [[1]]), (["y"], None)])
    with pytest.raises(DataError) as caught:
        sharded(tagged(tmp_path, "data.jsonl"), tmp_path)
    message = str(caught.value)
    assert "line 25: tags has 1 labels for 2 words" in message
    assert "line 26: words is empty" in message
    assert "line 27: tags holds [[1]], not a list of words" in message
    assert "line 28: tags is missing" in message
    write(tmp_path / "data.jsonl", [*ROWS, (["one"], ["B-ORG"])])
    with pytest.raises(DataError, match="line 25: tags holds 'B-ORG', which is none of the classes B-LOC, B-PER"):
        sharded(tagged(tmp_path, "data.jsonl", {"classes": NAMES}), tmp_path)


def test_what_does_not_fit_is_refused_before_the_start(tmp_path: Path) -> None:
    write(tmp_path / "data.jsonl", [*ROWS, (["one"], ["B-ORG"])])
    found = " ".join(problems(tagged(tmp_path, "data.jsonl")))
    assert "has 5 class names for column 'tags'" in found
    found = " ".join(problems(tagged(tmp_path, "data.jsonl", {"label": "ner"})))
    assert "data.label names 'ner', which the data does not have" in found
    found = " ".join(problems(tagged(tmp_path, "data.jsonl", columns=["words", "tags"])))
    assert "a sample of tokens is one column" in found
    config = tagged(tmp_path, "data.jsonl")
    gpt2_tokenizer(tmp_path / "tokenizer.json")
    settings = config.data.text
    assert settings is not None
    padded = config.data.model_copy(update={"text": settings.model_copy(update={"tokens": {"pad": "<|endoftext|>"}})})
    assert "add_prefix_space" in " ".join(problems(config.model_copy(update={"data": padded})))
