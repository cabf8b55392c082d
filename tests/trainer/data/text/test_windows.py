"""Long texts become the windows that the tokenizers library cuts, each a row with the label of its text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from onward.trainer.config.run_config import RunConfig
from onward.trainer.data.schema.signature import read_training_signature
from onward.trainer.data.storage.first_rows import read_first_rows
from onward.trainer.data.storage.opened_shards import open_shards
from onward.trainer.data.storage.shards import Shards, Split
from onward.trainer.errors import DataError
from tests.support.graphs import tiny_token_classifier
from tests.support.texts import bert_tokenizer, sentences, write_csv
from tests.trainer.data.text.test_tokenized_rows import configured, problems, sharded, wide_bert

TEXTS = [*sentences(24), "a", "naïve café 漢字 unbelievable extraordinarily", " ".join(sentences(5))]


def divided(folder: Path, data: dict[str, Any] | None = None, **text: Any) -> RunConfig:
    """A classifier of texts whose labels are their numbers."""
    if not (folder / "tokenizer.json").exists():
        bert_tokenizer(folder / "tokenizer.json")
    write_csv(folder / "data.csv", ["text", "label"], [(text, at) for at, text in enumerate(TEXTS)])
    return configured(folder, wide_bert(), {"text": {"max_length": 12, "stride": 3, **text}, **(data or {})})


def everything(directory: Path, split: Split) -> tuple[Shards, dict[str, Any]]:
    shards = open_shards(directory, split)
    return shards, shards.read(np.arange(shards.num_rows))


@pytest.mark.parametrize("direction", ["right", "left"])
@pytest.mark.parametrize("stride", [0, 3])
def test_windows_are_those_of_the_library_and_both_splits_have_whole_texts(
    tmp_path: Path, stride: int, direction: str
) -> None:
    library = bert_tokenizer(tmp_path / "tokenizer.json")
    library.enable_truncation(12, stride=stride, direction=direction)
    library.save(str(tmp_path / "tokenizer.json"))
    config = divided(tmp_path, stride=stride)
    assert problems(config) == []
    directory, manifest = sharded(config, tmp_path)
    seen = []
    for split in ("train", "evaluation"):
        shards, rows = everything(directory, split)
        labels = np.asarray(rows["label"]).tolist()
        texts = list(dict.fromkeys(labels))
        seen += texts
        windows = []
        for text in texts:
            encoding = library.encode(TEXTS[text])
            own = [encoding, *encoding.overflowing]
            windows += [(text, at, each) for at, each in enumerate(own[::-1] if direction == "left" else own)]
        assert labels == [text for text, *_ in windows]
        assert np.asarray(rows["input_ids/window"]).tolist() == [at for _, at, _ in windows]
        assert [row.tolist() for row in rows["input_ids"]] == [each.ids for *_, each in windows]
        assert [row.tolist() for row in rows["attention_mask"]] == [each.attention_mask for *_, each in windows]
        assert [row.tolist() for row in rows["token_type_ids"]] == [each.type_ids for *_, each in windows]
        assert shards.num_rows > len(texts)
    assert sorted(seen) == list(range(len(TEXTS)))
    longer = sum(len(library.encode(text).overflowing) > 0 for text in TEXTS)
    assert (
        f"{longer} longer texts are divided into windows that share {stride} tokens: losses and metrics are over "
        "windows, not over texts"
    ) in manifest.preprocessing
    assert f"tokens in {manifest.rows('train') + manifest.rows('evaluation')} rows" in manifest.preprocessing


def test_blocks_and_first_rows_give_the_same_windows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = divided(tmp_path)
    _, whole = everything(sharded(config, tmp_path)[0], "train")
    from onward.trainer.data.formats import table_readers as tables
    from onward.trainer.data.schema import column_computers

    monkeypatch.setattr(tables, "BLOCK_BYTES", 300)
    monkeypatch.setattr(column_computers, "MAX_ROWS", 3)
    (tmp_path / "again").mkdir()
    _, again = everything(sharded(config, tmp_path / "again")[0], "train")
    first = read_first_rows(config, read_training_signature(config.model), 5)
    assert first.counts is None  # of windows, which sharding counts
    few = first.read(np.arange(5))
    for name, values in whole.items():
        assert [np.asarray(row).tolist() for row in again[name]] == [np.asarray(row).tolist() for row in values]
        assert [np.asarray(row).tolist() for row in few[name]] == [np.asarray(row).tolist() for row in values[:5]]


def test_each_word_has_its_label_at_its_first_token_in_every_window_that_holds_it(tmp_path: Path) -> None:
    bert_tokenizer(tmp_path / "tokenizer.json")
    rows = [text.replace("漢字", "").split() for text in TEXTS]  # of which each sign would be a word
    # the label of a word says which word it is, up to 40
    lines = [{"words": words, "tags": [at % 40 for at in range(len(words))]} for words in rows]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    text = {"task": "tokens", "columns": "words", "max_length": 9, "stride": 2}
    data = {"source": str(tmp_path / "data.jsonl"), "label": "tags", "text": text, "evaluation_fraction": 0.1}
    config = configured(tmp_path, tiny_token_classifier(vocab_size=400, num_classes=40), data)
    assert problems(config) == []
    _, stored = everything(sharded(config, tmp_path)[0], "train")
    library = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    library.enable_truncation(9, stride=2)
    starts = np.flatnonzero(np.asarray(stored["input_ids/window"]) == 0)
    by_ids = {}
    for words in rows:
        encoding = library.encode(words, is_pretokenized=True)
        own = [encoding, *encoding.overflowing]
        by_ids[tuple(tuple(each.ids) for each in own)] = own
    cut = 0
    for first, end in zip(starts, [*starts[1:], len(stored["input_ids"])], strict=True):
        windows = by_ids[tuple(tuple(row.tolist()) for row in stored["input_ids"][first:end])]
        for window, labels in zip(windows, stored["tags"][first:end], strict=True):
            # WordPiece marks the tokens that continue a word
            begins = [
                word is not None and not token.startswith("##")
                for word, token in zip(window.word_ids, window.tokens, strict=True)
            ]
            wanted = [word % 40 if begin else -100 for word, begin in zip(window.word_ids, begins, strict=True)]
            assert labels.tolist() == wanted
            cut += window.tokens[1].startswith("##")
    assert cut > 5


def test_bad_rows_are_named_by_their_line_or_left_out_whole(tmp_path: Path) -> None:
    config = divided(tmp_path)
    write_csv(tmp_path / "data.csv", ["text", "label"], [(sentences(9)[8], 0), ("", 1), *[(text, 2) for text in TEXTS]])
    with pytest.raises(DataError, match="line 3: text is empty"):
        sharded(config, tmp_path)
    assert not list((tmp_path / "cache").iterdir())
    skipping = config.model_copy(update={"data": config.data.model_copy(update={"bad_rows": "skip"})})
    directory, manifest = sharded(skipping, tmp_path)
    labels = [np.asarray(everything(directory, split)[1]["label"]).tolist() for split in ("train", "evaluation")]
    assert manifest.skipped == 1
    assert {label for each in labels for label in each} == {0, 2}


def test_windows_that_cannot_be_are_refused_and_other_runs_keep_their_shards(tmp_path: Path) -> None:
    (problem,) = problems(divided(tmp_path, stride=10))
    assert problem.endswith("windows of 12 tokens, 2 of them special, would not move on; set it below 10")
    unlimited = configured(
        tmp_path, tiny_token_classifier(vocab_size=400), {"text": {"task": "masked", "stride": 0}, "label": "x"}
    )
    assert any(
        "data.text.max_length, which is not set and which the model does not say" in each
        for each in problems(unlimited)
    )
    keys = [sharded(divided(tmp_path, stride=stride), tmp_path)[1].key for stride in (None, 0, 3)]
    assert len(set(keys)) == 3
    truncated = configured(tmp_path, wide_bert(), {"text": {"max_length": 12}})
    assert sharded(truncated, tmp_path)[1].key == keys[0]
