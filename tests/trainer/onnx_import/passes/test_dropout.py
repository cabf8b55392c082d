"""Dropout where exporters strip it: it goes where it is said to, and neither evaluation nor the file knows of it."""

from __future__ import annotations

import pytest
import torch

from onward.trainer.onnx_import.driver import to_module
from onward.trainer.onnx_import.ops.norm import Dropout
from onward.trainer.onnx_import.passes.dropout import add_dropout
from tests.support import graphs
from tests.support.graphs import feed
from tests.support.trained_models import model_with_weights


def test_dropout_is_added_to_embeddings_residual_branches_and_attention_and_each_place_is_listed() -> None:
    module = to_module(graphs.tiny_bert())
    nodes = len(module.graph.nodes)
    layers = [f"encoder.layer.{i}.{part}.weight" for i in (0, 1) for part in ("output", "down")]
    assert add_dropout(module, 0.25) == [
        "the embedding of embeddings.word.weight",
        *(f"the residual branch of {name}" for name in layers),
        "the weights of attention_0",
        "the weights of attention_1",
    ]
    assert len(module.graph.nodes) == nodes + 5
    x = [torch.from_numpy(value) for value in feed(graphs.tiny_bert(), batch=3).values()]
    torch.manual_seed(0)
    first = module.train()(*x)
    assert not torch.equal(first, module(*x))


def test_a_dropout_of_the_file_keeps_its_ratio() -> None:
    module = to_module(graphs.tiny_transformer(dropout=0.1))
    add_dropout(module, 0.5)
    ratios = {child.ratio for child in module.modules() if isinstance(child, Dropout)}
    assert list(ratios) == [pytest.approx(0.1)]


@pytest.mark.parametrize("name", sorted(graphs.MODELS))
def test_evaluation_computes_the_same_bits_and_the_file_is_the_same(name: str) -> None:
    model = graphs.MODELS[name]()
    module = to_module(model).eval()
    inputs = [torch.from_numpy(value) for value in feed(model, batch=3).values()]
    before = module(*inputs)
    add_dropout(module, 0.5)
    after = module.eval()(*inputs)
    pairs = (
        zip((before,), (after,), strict=True) if isinstance(before, torch.Tensor) else zip(before, after, strict=True)
    )
    assert all(torch.equal(a, b) for a, b in pairs)
    assert model_with_weights(module, model).SerializeToString() == model.SerializeToString()


def test_a_ratio_of_zero_changes_nothing() -> None:
    module = to_module(graphs.tiny_transformer())
    nodes = len(module.graph.nodes)
    assert add_dropout(module, 0.0) == []
    assert len(module.graph.nodes) == nodes
