"""Texts that share a window are computed as if each were alone, where masks and positions allow it; else refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto

from onward.trainer.config.run_config import RunConfig
from onward.trainer.data.batches.batches import one_batch
from onward.trainer.data.schema.signature import read_training_signature
from onward.trainer.data.storage.opened_shards import open_shards
from onward.trainer.onnx_graph.node_builder import GraphWriter
from onward.trainer.parallel.planning.estimate_layouts import example_batch
from tests.support.texts import bert_tokenizer, gpt2_tokenizer, sentences
from tests.trainer.data.text.test_packing import causal
from tests.trainer.data.text.test_tokenized_rows import configured, problems, sharded


def masked_attention(*, heads: bool = True, mask_type: int = TensorProto.BOOL) -> onnx.ModelProto:
    """One layer of attention whose mask and positions are inputs."""
    g = GraphWriter("masked_attention", seed=0)
    ids = g.input("input_ids", ("batch", "length"), TensorProto.INT64)
    places = g.input("position_ids", ("batch", "length"), TensorProto.INT64)
    mask = g.input("attention_mask", ("batch", *((1,) if heads else ()), "length", "length"), mask_type)
    x = g.op("Gather", g.weight("words", g.normal(0.5, 400, 8)), ids)
    x = g.op("Add", x, g.op("Gather", g.weight("places", g.normal(0.5, 24, 8)), places))
    x = g.op("Unsqueeze", x, g.weight("head_axis", [1])) if heads else x
    scores = g.op("MatMul", x, g.op("Transpose", x, perm=[0, 1, 3, 2] if heads else [0, 2, 1]))
    seen = g.op("Cast", mask, to=TensorProto.BOOL)
    h = g.op("MatMul", g.op("Softmax", g.op("Where", seen, scores, g.weight("low", -1e9)), axis=-1), x)
    h = g.op("Squeeze", h, g.weight("axis_of_heads", [1])) if heads else h
    g.op("MatMul", h, g.weight("head", g.normal(0.5, 8, 400)), outputs="logits")
    g.output("logits", ("batch", "length", 400))
    return g.model()


def packed(folder: Path, proto: onnx.ModelProto, task: str = "causal", **data: Any) -> RunConfig:
    (bert_tokenizer if task == "masked" else gpt2_tokenizer)(folder / "tokenizer.json")
    (folder / "data.txt").write_text("\n".join([*sentences(30), " ".join(sentences(4))]))
    text = {"task": task, "packing": "separate", "documents": "line", "max_length": 24}
    return configured(folder, proto, {"source": str(folder / "data.txt"), "text": text, **data})


@pytest.mark.parametrize("heads", [True, False])
def test_logits_and_labels_are_those_of_each_text_alone(tmp_path: Path, heads: bool) -> None:
    config = packed(tmp_path, masked_attention(heads=heads))
    assert problems(config) == []
    directory, manifest = sharded(config, tmp_path)
    shards = open_shards(directory, "train")
    batch = one_batch(shards, config, read_training_signature(config.model), np.arange(shards.num_rows))
    session = onnxruntime.InferenceSession(str(tmp_path / "model.onnx"))
    names = [info.name for info in session.get_inputs()]
    logits = session.run(None, {name: tensor.numpy() for name, tensor in zip(names, batch.inputs, strict=True)})[0]
    numbers = np.asarray(shards.read(np.arange(shards.num_rows))["attention_mask"])
    labels, compared = batch.labels[0], 0
    assert labels is not None
    assert numbers.max() >= 2
    for row, texts in enumerate(numbers):
        for number in range(1, texts.max() + 1):
            at = np.flatnonzero(texts == number)
            ids = batch.inputs[0].numpy()[row, at][None]
            size = len(at)
            triangle = np.tril(np.ones((size, size), bool))[None]
            alone = {"input_ids": ids, "position_ids": np.arange(size)[None]}
            alone["attention_mask"] = triangle[:, None] if heads else triangle
            np.testing.assert_allclose(logits[row, at], session.run(None, alone)[0][0], rtol=1e-4, atol=1e-5)
            assert labels[row, at].tolist() == [*ids[0, 1:].tolist(), -100]
            compared += 1
        assert (labels[row, texts == 0] == -100).all()
    assert compared > 15
    assert manifest.table["input_ids"].shape == (24,)
    inputs, _ = example_batch(config)
    assert inputs[2].shape[1:] == batch.inputs[2].shape[1:]


def test_masked_texts_see_both_sides_of_their_own_text_only(tmp_path: Path) -> None:
    config = packed(tmp_path, masked_attention(), "masked")
    assert problems(config) == []
    directory, _ = sharded(config, tmp_path)
    shards = open_shards(directory, "train")
    batch = one_batch(shards, config, read_training_signature(config.model), np.arange(4))
    numbers = np.asarray(shards.read(np.arange(4))["attention_mask"])
    assert np.array_equal(batch.inputs[2][:, 0].numpy(), numbers[:, :, None] == numbers[:, None, :])
    assert batch.labels[0] is not None
    assert ((batch.labels[0] != -100).numpy() <= (numbers > 0)).all()


def test_graphs_that_cannot_keep_texts_apart_are_refused_with_the_reason(tmp_path: Path) -> None:
    gpt2_tokenizer(tmp_path / "tokenizer.json")
    (tmp_path / "data.txt").write_text("\n\n".join(sentences(20)))
    found = " ".join(problems(causal(tmp_path, "data.txt", packing="separate")))
    assert "needs an input of masks" in found
    assert "counts positions through a window (embedding" in found
    two = masked_attention(heads=False)
    del two.graph.input[2].type.tensor_type.shape.dim[2]
    assert "input attention_mask has 2 dimensions" in " ".join(problems(packed(tmp_path, two)))
    floats = masked_attention(mask_type=TensorProto.FLOAT)
    assert "takes float32, which may be 1 and 0, or 0 and a large" in " ".join(problems(packed(tmp_path, floats)))
