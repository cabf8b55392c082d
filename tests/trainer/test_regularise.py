"""Dropout where exporters strip it: it goes where it is said to, and neither evaluation nor the file knows of it."""

from __future__ import annotations

import pytest
import torch

from tests import graphs
from tests.graphs import feed
from trainer import graph
from trainer.ops.norm import Dropout
from trainer.ops.regularise import add_dropout


def test_it_goes_on_embeddings_residual_branches_and_attention_and_says_where() -> None:
    module = graph.to_module(graphs.tiny_transformer())
    for child in module.modules():
        if isinstance(child, Dropout):
            child.ratio = 0.0
    places = add_dropout(module, 0.25)
    assert len(places) == len(set(places))
    added = [name for name, child in module.named_modules() if isinstance(child, Dropout) and child.ratio == 0.25]
    attentions = [place for place in places if place.startswith("the weights of")]
    assert len(added) + len(attentions) == len(places)


@pytest.mark.parametrize("name", sorted(graphs.MODELS))
def test_evaluation_computes_the_same_bits_and_the_file_is_the_same(name: str) -> None:
    model = graphs.MODELS[name]()
    module = graph.to_module(model).eval()
    inputs = [torch.from_numpy(value) for value in feed(model, batch=3).values()]
    before = module(*inputs)
    add_dropout(module, 0.5)
    after = module.eval()(*inputs)
    pairs = (
        zip((before,), (after,), strict=True) if isinstance(before, torch.Tensor) else zip(before, after, strict=True)
    )
    assert all(torch.equal(a, b) for a, b in pairs)
    assert graph.to_onnx(module, model).SerializeToString() == model.SerializeToString()


def test_none_is_none() -> None:
    module = graph.to_module(graphs.tiny_transformer())
    nodes = len(module.graph.nodes)
    assert add_dropout(module, 0.0) == []
    assert len(module.graph.nodes) == nodes
