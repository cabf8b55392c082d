"""Rows are padded on the side that the tokenizer or the configuration says, where the model allows it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from tokenizers import Tokenizer

from onward.trainer.config.run_config import RunConfig
from onward.trainer.data.batches.batches import one_batch
from onward.trainer.data.schema.signature import read_training_signature
from onward.trainer.data.storage.opened_shards import open_shards
from tests.support.graphs import tiny_bert, tiny_decoder, tiny_token_classifier, tiny_transformer
from tests.support.texts import END, bert_tokenizer, gpt2_tokenizer, sentences, write_csv
from tests.trainer.data.text.test_tokenized_rows import configured, problems, sharded, training_batch


def decoder(folder: Path, proto: onnx.ModelProto | None = None, *, says_left: bool = False, **text: Any) -> RunConfig:
    """A causal model of single texts, the lines of a CSV file."""
    tokenizer = gpt2_tokenizer(folder / "tokenizer.json")
    if says_left:
        tokenizer.enable_padding(direction="left", pad_id=7, pad_token="&")
        tokenizer.save(str(folder / "tokenizer.json"))
    texts = [text for text in sentences(40) if len(text) < 120]
    write_csv(folder / "data.csv", ["text"], [[text] for text in texts])
    settings = {"task": "causal", "packing": "none", **text}
    return configured(folder, proto or tiny_decoder(), {"text": settings})


def test_inputs_on_the_left_are_those_of_the_library_and_positions_count_tokens(tmp_path: Path) -> None:
    config = decoder(tmp_path, pad_side="left", max_length=24)
    assert problems(config) == []
    directory, manifest = sharded(config, tmp_path)
    assert "padded on the left" in manifest.preprocessing
    batch = training_batch(config, directory)
    ids, mask, places = (tensor.numpy() for tensor in batch.inputs)
    shards = open_shards(directory, "train")
    stored = shards.read(np.arange(shards.num_rows))["input_ids"]
    library = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    end = library.token_to_id(END)
    library.enable_truncation(24)
    texts = {tuple(library.encode(text + END).ids): text + END for text in sentences(40)}
    library.enable_padding(direction="left", pad_id=end, pad_token=END)
    wanted = library.encode_batch([texts[tuple(row.tolist())] for row in stored])
    assert batch.labels[0] is not None
    for row, (tokens, of_library) in enumerate(zip(stored, wanted, strict=True)):
        first = ids.shape[1] - len(tokens)
        assert ids[row].tolist() == of_library.ids
        assert mask[row].tolist() == of_library.attention_mask
        assert places[row].tolist() == [0] * first + list(range(len(tokens)))
        assert batch.labels[0][row].tolist() == [-100] * first + [*tokens[1:].tolist(), -100]
    assert len({len(row) for row in stored}) > 2


def test_a_text_has_the_same_logits_on_either_side(tmp_path: Path) -> None:
    found = []
    for side in ("left", "right"):
        config = decoder(tmp_path, pad_side=side)
        directory, _ = sharded(config, tmp_path)
        batch = training_batch(config, directory)
        session = onnxruntime.InferenceSession(str(tmp_path / "model.onnx"))
        names = [info.name for info in session.get_inputs()]
        fed = {name: tensor.numpy() for name, tensor in zip(names, batch.inputs, strict=True)}
        logits, mask = session.run(None, fed)[0], fed["attention_mask"] > 0
        found.append((fed["input_ids"][mask], fed["position_ids"][mask], batch.labels[0].numpy()[mask], logits[mask]))
        assert mask[:, -1].all() == (side == "left")
    for left, right in zip(*found, strict=True):
        np.testing.assert_allclose(left, right, atol=1e-5)


@pytest.mark.parametrize("says_left", [True, False])
def test_without_a_setting_the_tokenizer_decides(tmp_path: Path, says_left: bool) -> None:
    config = decoder(tmp_path, says_left=says_left)
    assert problems(config) == []
    directory, manifest = sharded(config, tmp_path)
    ids, mask, _ = training_batch(config, directory).inputs
    assert bool((mask[:, 0] == 0).any()) == says_left
    assert ("padded on the left" in manifest.preprocessing) == says_left
    if says_left:
        assert set(ids[mask == 0].tolist()) == {7}
        other = decoder(tmp_path, says_left=True, pad_side="right")
        assert (training_batch(other, sharded(other, tmp_path)[0]).inputs[1][:, 0] == 1).all()


def test_a_tokenizer_that_says_left_is_not_followed_where_the_model_would_compute_something_else(
    tmp_path: Path,
) -> None:
    for proto, why in (
        (tiny_transformer(vocab_size=400), "has no input attention_mask"),
        (tiny_bert(vocab_size=400, positions=64), "counts positions through the row (embedding "),
    ):
        config = decoder(tmp_path, proto, says_left=True, max_length=16)
        if "positions" in why:
            text = {"pad_side": "auto"}
            write_csv(
                tmp_path / "data.csv", ["text", "label"], [(text, at % 3) for at, text in enumerate(sentences(20))]
            )
            config = configured(tmp_path, proto, {"text": text})
        assert problems(config) == []
        summary = sharded(config, tmp_path)[1].preprocessing
        assert f"padded on the right, although tokenizer.json says left: the model {why}" in summary
        left = config.data.model_copy(update={"text": config.data.text.model_copy(update={"pad_side": "left"})})
        (problem,) = problems(config.model_copy(update={"data": left}))
        assert problem.startswith(f"data.text.pad_side 'left': the model {why}")
        assert problem.endswith("use pad_side = 'right'")


def test_a_graph_of_fixed_length_and_labels_of_words_are_padded_on_the_left(tmp_path: Path) -> None:
    library = bert_tokenizer(tmp_path / "tokenizer.json")
    rows = [{"words": text.split(), "tags": [str(len(word) % 2) for word in text.split()]} for text in sentences(12)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    batches = []
    for length in (0, 40):
        proto = tiny_token_classifier(vocab_size=400, num_classes=2)
        for value in proto.graph.input if length else ():
            value.type.tensor_type.shape.dim[1].dim_value = length
        text = {"task": "tokens", "columns": "words", "pad_side": "left", "max_length": 40}
        data = {"source": str(tmp_path / "data.jsonl"), "label": "tags", "text": text}
        config = configured(tmp_path, proto, data)
        assert problems(config) == []
        batches.append(training_batch(config, sharded(config, tmp_path)[0]))
    ids, mask = batches[1].inputs
    library.enable_padding(direction="left", length=40)
    wanted = {tuple(each.ids) for each in library.encode_batch([row["words"] for row in rows], is_pretokenized=True)}
    assert set(map(tuple, ids.tolist())) <= wanted
    longest = batches[0].inputs[0].shape[1]
    assert longest < 40
    for dynamic, fixed in zip((*batches[0].inputs, *batches[0].labels), (ids, mask, *batches[1].labels), strict=True):
        assert dynamic is not None
        assert fixed is not None
        assert torch.equal(dynamic, fixed[:, -longest:])
    assert (batches[1].labels[0][mask == 0] == -100).all()


def test_padding_on_the_right_needs_no_other_shards_than_before(tmp_path: Path) -> None:
    config = decoder(tmp_path)
    keys = [sharded(decoder(tmp_path, pad_side=side), tmp_path)[1].key for side in ("auto", "right", "left")]
    assert keys[0] == keys[1] != keys[2]
    signature = read_training_signature(config.model)
    directory, _ = sharded(config, tmp_path)
    assert not one_batch(open_shards(directory, "train"), config, signature, np.arange(3)).inputs[2][:, 0].any()
