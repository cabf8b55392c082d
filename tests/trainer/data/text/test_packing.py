"""Texts of files and columns become windows of tokens whose labels are the next tokens, each split for itself."""

from __future__ import annotations

import json
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto
from tokenizers import Tokenizer

from onward.trainer.config.run_config import RunConfig
from onward.trainer.data.batches.batches import one_batch
from onward.trainer.data.schema.signature import read_training_signature
from onward.trainer.data.storage.first_rows import read_first_rows
from onward.trainer.data.storage.opened_shards import open_shards
from onward.trainer.data.storage.shards import Split
from onward.trainer.errors import DataError
from onward.trainer.onnx_graph.node_builder import GraphWriter
from tests.support.graphs import tiny_transformer
from tests.support.texts import END, bert_tokenizer, gpt2_tokenizer, sentences
from tests.trainer.data.text.test_tokenized_rows import configured, problems, sharded


def causal(folder: Path, source: str, data: dict[str, Any] | None = None, **text: Any) -> RunConfig:
    proto = tiny_transformer(vocab_size=400, sequence_length=32)
    data = {"source": str(folder / source), "text": {"task": "causal", **text}} | (data or {})
    return configured(folder, proto, data)


def windows(directory: Path, split: Split) -> tuple[list[list[int]], list[list[int]]]:
    shards = open_shards(directory, split)
    rows = shards.read(np.arange(shards.num_rows))
    return np.asarray(rows["input_ids"]).tolist(), np.asarray(rows["label"]).tolist()


def stream_of(library: Tokenizer, texts: list[str]) -> list[int]:
    end = library.token_to_id(END)
    return list(chain.from_iterable([*encoding.ids, end] for encoding in library.encode_batch(texts)))


def test_a_folder_of_files_becomes_windows_over_all_of_them_split_by_file(tmp_path: Path) -> None:
    library = gpt2_tokenizer(tmp_path / "tokenizer.json")
    (tmp_path / "books").mkdir()
    texts = {f"{at}.txt": "\n".join([f"book {at} 🙂 naïve", *sentences(9, seed=at)]) for at in range(8)}
    for name, text in texts.items():
        (tmp_path / "books" / name).write_text(text)
    config = causal(tmp_path, "books", max_length=20)
    assert problems(config) == []
    directory, manifest = sharded(config, tmp_path)
    found = {split: windows(directory, split) for split in ("train", "evaluation")}
    # the tokens of whole files, one after the other
    whole = {name: stream_of(library, [text]) for name, text in texts.items()}
    for split in ("train", "evaluation"):
        inputs, labels = (list(chain.from_iterable(each)) for each in found[split])
        assert labels[:-1] == inputs[1:]
        assert inputs.count(library.token_to_id(END)) > 0
    flat = {split: list(chain.from_iterable(found[split][0])) for split in found}
    evaluated = [name for name in texts if contains(flat["evaluation"], whole[name][:12])]
    trained = [name for name in texts if contains(flat["train"], whole[name][:12])]
    assert len(evaluated) == 2
    assert len(trained) == 6
    assert not set(trained) & set(evaluated)
    wanted = list(chain.from_iterable(whole[name] for name in sorted(trained)))
    assert flat["train"] == wanted[: len(flat["train"])]
    assert len(wanted) - len(flat["train"]) <= 20
    assert "windows of 20" in manifest.preprocessing
    size = sum(len(text.encode()) for text in texts.values()) / sum(map(len, whole.values()))
    assert f"{size:.4g} bytes of text a token" in manifest.preprocessing


def contains(stream: list[int], part: list[int]) -> bool:
    return any(stream[at : at + len(part)] == part for at in range(len(stream) - len(part) + 1))


@pytest.mark.parametrize("documents", ["line", "paragraph", "auto"])
def test_one_file_is_split_into_lines_or_paragraphs(tmp_path: Path, documents: str) -> None:
    library = gpt2_tokenizer(tmp_path / "tokenizer.json")
    groups = [sentences(2, seed=number) for number in range(30)]
    (tmp_path / "book.txt").write_text("\n\n\n".join("\n".join(group) for group in groups) + "\n")
    config = causal(tmp_path, "book.txt", documents=documents)
    directory, manifest = sharded(config, tmp_path)
    texts = list(chain.from_iterable(groups)) if documents == "line" else ["\n".join(group) for group in groups]
    streams = [stream_of(library, [text]) for text in texts]
    for split in ("train", "evaluation"):
        inputs, _ = windows(directory, split)
        assert len(inputs[0]) == 32  # the position embeddings of the model
        flat = list(chain.from_iterable(inputs))
        # whole texts in their order, cut off at the end
        position = 0
        for stream in streams:
            if flat[position : position + len(stream)] == stream:
                position += len(stream)
        assert len(flat) - position < max(map(len, streams))
    assert f"in {len(texts)} rows" in manifest.preprocessing


def test_columns_of_texts_are_packed_too_and_windows_do_not_depend_on_how_the_file_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpt2_tokenizer(tmp_path / "tokenizer.json")
    lines = [json.dumps({"text": text, "label": "unused"}) for text in sentences(60)]
    (tmp_path / "data.jsonl").write_text("\n".join(lines))
    config = causal(tmp_path, "data.jsonl")
    assert problems(config) == []
    whole = windows(sharded(config, tmp_path)[0], "train")
    from onward.trainer.data.formats import table_readers as tables
    from onward.trainer.data.schema import column_computers

    monkeypatch.setattr(tables, "BLOCK_BYTES", 700)
    monkeypatch.setattr(column_computers, "MAX_ROWS", 3)
    (tmp_path / "again").mkdir()
    assert windows(sharded(config, tmp_path / "again")[0], "train") == whole
    first = read_first_rows(config, read_training_signature(config.model), 4)
    assert np.asarray(first.read(np.arange(2))["input_ids"]).tolist() == whole[0][:2]
    assert np.asarray(first.read(np.arange(2))["label"]).tolist() == whole[1][:2]


def test_unpacked_texts_are_padded_and_the_last_token_has_no_label(tmp_path: Path) -> None:
    library = gpt2_tokenizer(tmp_path / "tokenizer.json")
    (tmp_path / "data.txt").write_text("\n".join(sentences(20)))
    config = causal(tmp_path, "data.txt", packing="none", documents="line", max_length=14)
    assert problems(config) == []
    directory, _ = sharded(config, tmp_path)
    shards = open_shards(directory, "train")
    batch = one_batch(shards, config, read_training_signature(config.model), np.arange(shards.num_rows))
    labels = batch.labels[0] if isinstance(batch.labels, tuple) else batch.labels
    assert labels is not None
    wanted = {tuple(stream_of(library, [text])[:14]) for text in sentences(20)}
    for ids, label, stored in zip(
        batch.inputs[0].tolist(), labels.tolist(), shards.read(np.arange(shards.num_rows))["input_ids"], strict=True
    ):
        assert tuple(ids[: len(stored)]) in wanted
        assert label == [*ids[1 : len(stored)], *[-100] * (14 - len(stored) + 1)][: len(label)]


@pytest.mark.parametrize("packing", ["joined", "none"])
def test_a_graph_that_computes_its_own_loss_gets_the_ids_as_labels_unshifted(tmp_path: Path, packing: str) -> None:
    gpt2_tokenizer(tmp_path / "tokenizer.json")
    (tmp_path / "data.txt").write_text("\n".join(sentences(20)))
    g = GraphWriter("own_loss", seed=0)
    ids, labels = (g.input(name, ("batch", "length"), TensorProto.INT64) for name in ("input_ids", "labels"))
    scores = g.op("ReduceMean", g.op("Gather", g.weight("words", g.normal(0.5, 400, 8)), ids), keepdims=0)
    mean = g.op("ReduceMean", g.op("Cast", labels, to=TensorProto.FLOAT), keepdims=0)
    g.op("Mul", scores, mean, outputs="loss")
    g.output("loss", ())
    text = {"task": "causal", "packing": packing, "documents": "line", "max_length": 64}
    data = {"source": str(tmp_path / "data.txt"), "text": text}
    config = configured(tmp_path, g.model(), data, model={"loss": "output"})
    assert problems(config) == []
    shards = open_shards(sharded(config, tmp_path)[0], "train")
    assert sorted(shards.columns) == ["input_ids", "labels"]
    batch = one_batch(shards, config, read_training_signature(config.model), np.arange(shards.num_rows))
    ids_given, labels_given = batch.inputs
    end = Tokenizer.from_file(str(tmp_path / "tokenizer.json")).token_to_id(END)
    assert ((ids_given == labels_given) | ((labels_given == -100) & (ids_given == end))).all()
    assert ((labels_given == -100).any()) == (packing == "none")
    shifted = configured(tmp_path, tiny_transformer(vocab_size=400), {**data, "text": text}, model={"loss": "output"})
    assert "makes labels, but nothing takes them" in " ".join(problems(shifted))


def test_what_cannot_be_packed_is_refused(tmp_path: Path) -> None:
    gpt2_tokenizer(tmp_path / "tokenizer.json")
    (tmp_path / "data.txt").write_text("\n\n".join(sentences(20)))
    (tmp_path / "short.txt").write_text("a\n\nb\n\nc\n\nd")
    (tmp_path / "bad.txt").write_bytes(b"fine\n\n\xff\xfe\n\nfine")
    assert "set it to 32 or less" in " ".join(problems(causal(tmp_path, "data.txt", max_length=33)))
    with pytest.raises(DataError, match="fewer tokens than a window of 32"):
        read_first_rows(config := causal(tmp_path, "short.txt"), read_training_signature(config.model), 4)
    with pytest.raises(DataError, match="0 rows to train on") as caught:
        sharded(config, tmp_path)
    assert "a window of 32 tokens" in str(caught.value)
    with pytest.raises(DataError, match=r"bad.txt, line 3: text holds bytes that are not UTF-8"):
        sharded(causal(tmp_path, "bad.txt"), tmp_path)
    bert_tokenizer(tmp_path / "tokenizer.json")
    found = " ".join(problems(causal(tmp_path, "data.txt")))
    assert "has no token that ends a text; name one of its tokens in data.text.tokens.end" in found
