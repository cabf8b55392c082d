"""Token ids are those of the tokenizers library, under the graph's names, padded to the batch or the fixed length."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers

from onward.trainer.config.loading import build_config
from onward.trainer.config.run_config import RunConfig
from onward.trainer.data.batches.batches import Batch, one_batch
from onward.trainer.data.schema.signature import read_training_signature
from onward.trainer.data.storage.opened_shards import open_shards
from onward.trainer.data.storage.sharding import make_training_shards, try_first_rows
from onward.trainer.data.storage.shards import ShardManifest
from onward.trainer.diagnostics.config_check import check_files_and_data
from onward.trainer.errors import ConfigError, DataError
from tests.support.graphs import tiny_bert
from tests.support.texts import bert_tokenizer, gpt2_tokenizer, reviews, write_csv

TEXTS = [
    "a good film",
    "the plot was awful, the actor was great",
    "bad",
    "unbelievable!",
    "naïve café 漢字 🙂",
    "007",
    "NA",
]


def configured(folder: Path, proto: onnx.ModelProto, data: dict[str, Any], **sections: Any) -> RunConfig:
    """The configuration of a model and of data, with the tokenizer in the same folder."""
    (folder / "model.onnx").write_bytes(proto.SerializeToString())
    text = {"tokenizer": folder / "tokenizer.json"} | data.pop("text", {})
    return build_config(
        {
            "model": {"path": folder / "model.onnx"} | sections.pop("model", {}),
            "data": {"source": str(folder / "data.csv"), "evaluation_fraction": 0.25, "text": text} | data,
            "train": sections.pop("train", {"num_steps": 4, "global_batch_size": 8}),
            **sections,
        }
    )


def problems(config: RunConfig) -> list[str]:
    """What `onward run` refuses before it starts anything."""
    return check_files_and_data(dict(config))


def sharded(config: RunConfig, folder: Path) -> tuple[Path, ShardManifest]:
    directory, manifest, _ = make_training_shards(config, folder / "cache")
    return directory, manifest


def training_batch(config: RunConfig, directory: Path) -> Batch:
    """All training rows as one batch, in the order of the file."""
    shards = open_shards(directory, "train")
    return one_batch(shards, config, read_training_signature(config.model), np.arange(shards.num_rows))


def given_texts(config: RunConfig, directory: Path) -> list[int]:
    """The labels of the training rows, which these tests set to the number of the row in the file."""
    shards = open_shards(directory, "train")
    return [int(label) for label in np.asarray(shards.read(np.arange(shards.num_rows))["label"])]


def wide_bert(**changes: Any) -> onnx.ModelProto:
    return tiny_bert(**{"vocab_size": 400, "positions": 64, "num_types": 2, "num_classes": 40} | changes)


@pytest.mark.parametrize("max_length", [0, 6])
@pytest.mark.parametrize("pairs", [False, True])
def test_ids_masks_and_types_are_those_of_encode_batch_with_padding(
    tmp_path: Path, max_length: int, pairs: bool
) -> None:
    library = bert_tokenizer(tmp_path / "tokenizer.json")
    others = [text for text, _ in reviews(len(TEXTS))]
    rows = [(text, other, at) for at, (text, other) in enumerate(zip(TEXTS, others, strict=True))]
    write_csv(tmp_path / "data.csv", ["first", "second", "label"], rows)
    columns = ["first", "second"] if pairs else "first"
    config = configured(tmp_path, wide_bert(), {"text": {"columns": columns, "max_length": max_length}})
    assert problems(config) == []
    directory, manifest = sharded(config, tmp_path)
    batch = training_batch(config, directory)
    library.enable_padding()
    library.enable_truncation(max_length or 64)
    given = [rows[at] for at in given_texts(config, directory)]
    wanted = library.encode_batch([row[:2] if pairs else row[0] for row in given])
    assert torch.equal(batch.inputs[0], torch.tensor([each.ids for each in wanted]))
    assert torch.equal(batch.inputs[1], torch.tensor([each.attention_mask for each in wanted]))
    assert torch.equal(batch.inputs[2], torch.tensor([each.type_ids for each in wanted]))
    assert {tensor.dtype for tensor in batch.inputs} == {torch.int64}
    assert "tokens in 7 rows" in manifest.preprocessing
    assert ("were truncated" in manifest.preprocessing) == bool(max_length)


def test_a_graph_of_fixed_length_gets_rows_of_that_length_in_its_own_type(tmp_path: Path) -> None:
    library = bert_tokenizer(tmp_path / "tokenizer.json")
    write_csv(tmp_path / "data.csv", ["text", "label"], [(text, at) for at, text in enumerate(TEXTS)])
    proto = wide_bert()
    for value in proto.graph.input:
        value.type.tensor_type.shape.dim[1].dim_value = 9
    config = configured(tmp_path, proto, {})
    assert problems(config) == []
    directory, manifest = sharded(config, tmp_path)
    assert {manifest.table[name].shape for name in ("input_ids", "attention_mask", "token_type_ids")} == {(9,)}
    library.enable_padding(length=9)
    library.enable_truncation(9)
    wanted = library.encode_batch([TEXTS[at] for at in given_texts(config, directory)])
    assert training_batch(config, directory).inputs[0].tolist() == [each.ids for each in wanted]


def test_a_model_with_other_names_and_without_types_gets_only_what_it_takes(tmp_path: Path) -> None:
    bert_tokenizer(tmp_path / "tokenizer.json")
    write_csv(tmp_path / "data.csv", ["text", "label"], [(text, at) for at, text in enumerate(TEXTS)])
    proto = tiny_bert(vocab_size=400, num_classes=40)
    for node in proto.graph.node:
        node.input[:] = ["words" if name == "input_ids" else name for name in node.input]
    proto.graph.input[0].name = "words"
    config = configured(tmp_path, proto, {})
    assert any("no input 'input_ids', only words, attention_mask" in problem for problem in problems(config))
    config = configured(tmp_path, proto, {"text": {"inputs": {"input_ids": "words"}, "special_tokens": False}})
    assert problems(config) == []
    directory, manifest = sharded(config, tmp_path)
    assert sorted(manifest.table) == ["attention_mask", "label", "words"]
    library = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    rows = open_shards(directory, "train").read(np.arange(3))["words"]
    wanted = [library.encode(TEXTS[at], add_special_tokens=False).ids for at in given_texts(config, directory)[:3]]
    assert [row.tolist() for row in rows] == wanted


def test_what_does_not_fit_is_refused_before_the_start_with_the_numbers(tmp_path: Path) -> None:
    bert_tokenizer(tmp_path / "tokenizer.json")
    gpt2_tokenizer(tmp_path / "gpt2.json")
    write_csv(tmp_path / "data.csv", ["text", "label"], reviews(20))
    (tmp_path / "vocab.txt").write_text("[PAD]\n[UNK]\n")
    (tmp_path / "other.json").write_text("[1, 2]")

    def refused(proto: onnx.ModelProto | None = None, **text: Any) -> str:
        return "\n".join(problems(configured(tmp_path, proto or wide_bert(), {"text": text})))

    assert "ids up to 399, but the embedding embeddings.word.weight of the model has 32 rows" in refused(tiny_bert())
    assert "max_length 65 is above the 64 position embeddings of the model" in refused(max_length=65)
    assert "max_length 2 leaves no token of the text beside 2 special tokens" in refused(max_length=2)
    assert "names 'review', which the data does not have; there is text, label" in refused(columns="review")
    assert "has 3 entries" in refused(columns=["text", "text", "text"])
    assert "absent.json cannot be read" in refused(tokenizer=tmp_path / "absent.json")
    assert "vocab.txt is another file of a tokenizer" in refused(tokenizer=tmp_path / "vocab.txt")
    assert "other.json is not a tokenizer.json" in refused(tokenizer=tmp_path / "other.json")
    assert "gpt2.json has no padding token; name one" in refused(tokenizer=tmp_path / "gpt2.json")
    assert "'[NO]', which" in refused(tokens={"pad": "[NO]"})
    assert "inputs.input_ids names 'ids', which is not an input" in refused(inputs={"input_ids": "ids"})
    with pytest.raises(ConfigError, match=r"unknown key data.text.tokeniser; did you mean data.text.tokenizer\?"):
        configured(tmp_path, wide_bert(), {"text": {"tokeniser": "x"}})
    # everything at once
    found = refused(tiny_bert(), columns="review", max_length=17)
    assert all(part in found for part in ("'review'", "16 position embeddings", "has 32 rows"))


def test_texts_without_a_token_are_bad_rows_with_their_line(tmp_path: Path) -> None:
    bert_tokenizer(tmp_path / "tokenizer.json")
    rows = [*reviews(20), ("", 1), ("   ", 0), ("a fine film", 1)]
    write_csv(tmp_path / "data.csv", ["text", "label"], rows)
    config = configured(tmp_path, wide_bert(), {})
    with pytest.raises(DataError) as caught:
        sharded(config, tmp_path)
    assert "line 22: text is empty" in str(caught.value)
    assert "line 23: text has no token" in str(caught.value)
    assert not list((tmp_path / "cache").iterdir())
    skipping = configured(tmp_path, wide_bert(), {"bad_rows": "skip"})
    assert sharded(skipping, tmp_path)[1].skipped == 2


def test_another_tokenizer_or_length_gives_other_shards_and_the_same_ones_give_the_same(tmp_path: Path) -> None:
    bert_tokenizer(tmp_path / "tokenizer.json")
    write_csv(tmp_path / "data.csv", ["text", "label"], reviews(20))
    keys = [sharded(configured(tmp_path, wide_bert(), {"text": {"max_length": n}}), tmp_path)[1].key for n in (8, 9, 8)]
    (tmp_path / "moved").mkdir()
    (tmp_path / "tokenizer.json").rename(tmp_path / "moved" / "tokenizer.json")
    moved = configured(tmp_path, wide_bert(), {"text": {"max_length": 8, "tokenizer": tmp_path / "moved"}})
    keys.append(sharded(moved, tmp_path)[1].key)
    bert_tokenizer(tmp_path / "moved" / "tokenizer.json", size=300)
    keys.append(sharded(moved, tmp_path)[1].key)
    assert keys[0] == keys[2] == keys[3]
    assert len(set(keys)) == 3


def test_the_planner_reckons_with_the_longest_rows(tmp_path: Path) -> None:
    bert_tokenizer(tmp_path / "tokenizer.json")
    write_csv(tmp_path / "data.csv", ["text", "label"], reviews(20))
    config = configured(tmp_path, wide_bert(), {"text": {"max_length": 48}})
    schema = try_first_rows(config, read_training_signature(config.model))[0]
    assert schema["input_ids"].shape == (48,)
    assert schema["input_ids"].variable


def test_a_text_that_the_tokenizer_refuses_is_a_bad_row(tmp_path: Path) -> None:
    library = Tokenizer(models.WordLevel({"[PAD]": 0, "good": 1, "bad": 2}, unk_token="[UNK]"))
    library.pre_tokenizer = pre_tokenizers.Whitespace()
    library.save(str(tmp_path / "tokenizer.json"))
    texts = ["good", "other", "bad bad", "good bad"] * 4
    write_csv(tmp_path / "data.csv", ["text", "label"], [(text, at) for at, text in enumerate(texts)])
    config = configured(tmp_path, wide_bert(), {"text": {"special_tokens": False}, "bad_rows": "skip"})
    assert problems(config) == []
    directory, _ = sharded(config, tmp_path)
    assert {at % 4 for at in given_texts(config, directory)} == {0, 2, 3}
    strict = config.model_copy(update={"data": config.data.model_copy(update={"bad_rows": "fail"})})
    with pytest.raises(DataError, match=r"data\.csv, line 3: the tokenizer refuses the text: .*UNK"):
        sharded(strict, tmp_path)


@pytest.mark.slow
def test_blocks_without_a_good_row_are_left_out(tmp_path: Path) -> None:
    bert_tokenizer(tmp_path / "tokenizer.json")
    # the first and the last blocks of the file have good rows, and all between them are bad
    texts = ["a good film"] * 20 + [""] * 400_000 + ["bad"] * 20
    write_csv(tmp_path / "data.csv", ["text", "label"], [(text, 1) for text in texts])
    config = configured(tmp_path, wide_bert(), {"bad_rows": "skip"})
    directory, _ = sharded(config, tmp_path)
    counts = [open_shards(directory, split).num_rows for split in ("train", "evaluation")]
    assert sum(counts) == 40
