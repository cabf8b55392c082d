"""Repeated blocks of a graph become calls of one module, which computes the same bits."""

from __future__ import annotations

import copy
from typing import Any

import onnx
import pytest
import torch

from onward.trainer.model.repeated_blocks import outline_repeated_blocks
from onward.trainer.onnx_graph.examples.reference_models import build_gpt2
from onward.trainer.onnx_graph.node_builder import GraphWriter
from onward.trainer.onnx_import.driver import to_module
from onward.trainer.onnx_import.imported_graph import ImportedGraph
from tests.support import graphs
from tests.support.graphs import feed


def gpt2(num_layers: int, *, dropout: float = 0.0) -> onnx.ModelProto:
    return build_gpt2(vocab_size=32, sequence_length=16, num_layers=num_layers, num_heads=2, width=32, dropout=dropout)


def layers(*slopes: float, shared: bool = False) -> onnx.ModelProto:
    """A layer for each slope: x + LeakyRelu(tanh(relu(x W)) V)."""
    g = GraphWriter("layers")
    x = g.input("x", ("batch", 8))
    for number, slope in enumerate(slopes):
        name = "all" if shared else f"layer_{number}"
        weights = [f"{name}.{each}" for each in ("w", "v", "u")]
        if number == 0 or not shared:
            for weight in weights:
                g.weight(weight, g.normal(0.3, 8, 8))
        h = g.op("Relu", g.op("MatMul", x, weights[0]))
        h = g.op("Tanh", g.op("Sigmoid", g.op("MatMul", h, weights[1])))
        h = g.op("LeakyRelu", g.op("MatMul", h, weights[2]), alpha=slope)
        x = g.op("Add", x, g.op("Sqrt", g.op("Exp", h)))
    g.op("Softplus", x, outputs="y")
    g.output("y", ("batch", 8))
    return g.model()


def outlined(module: ImportedGraph) -> tuple[ImportedGraph, list[int]]:
    """Return a copy with repeated blocks as modules, and how often each of these is called."""
    again = copy.deepcopy(module)
    names = outline_repeated_blocks(again)
    called = [node.target for node in again.graph.find_nodes(op="call_module")]
    return again, [called.count(name) for name in names]


def assert_equal_bits(one: ImportedGraph, other: ImportedGraph, inputs: list[torch.Tensor]) -> None:
    results = []
    for module in (one, other):
        torch.manual_seed(0)
        outputs: Any = module(*inputs)
        outputs = [outputs] if isinstance(outputs, torch.Tensor) else list(outputs)
        sum(output.square().mean() for output in outputs).backward()
        results.append([*outputs, *(weight.grad for weight in module.parameters())])
    assert [name for name, _ in one.named_parameters()] == [name for name, _ in other.named_parameters()]
    for mine, theirs in zip(*results, strict=True):
        assert (mine is None and theirs is None) or torch.equal(mine, theirs)


@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_the_layers_of_a_transformer_are_one_module(dropout: float) -> None:
    module = to_module(gpt2(5, dropout=dropout)).train()
    again, blocks = outlined(module)
    assert blocks == [1, 5, 1]
    calls = [str(node.target) for node in again.graph.nodes if node.op.startswith("call_")]
    assert calls == ["block_0", *["block_1"] * 5, "block_2"]
    assert_equal_bits(module, again, [torch.randint(32, (2, 16))])


@pytest.mark.parametrize("name", ["tiny_bert", "tiny_llama", "tiny_conv_net", "tiny_resnet", "tiny_mlp"])
def test_results_gradients_and_names_of_weights_stay(name: str) -> None:
    model = getattr(graphs, name)()
    module = to_module(model)
    again, blocks = outlined(module)
    assert bool(blocks) == (name in ("tiny_bert", "tiny_llama"))
    assert again.onnx_names == module.onnx_names
    assert_equal_bits(module, again, [torch.from_numpy(value) for value in feed(model, 2).values()])


def test_layers_with_other_constants_are_other_blocks() -> None:
    module = to_module(layers(0.1, 0.1, 0.1, 0.2, 0.2, 0.2))
    again, blocks = outlined(module)
    assert [times for times in blocks if times > 1] == [3, 3]
    assert_equal_bits(module, again, [torch.randn(4, 8)])


def test_layers_that_share_their_weights_are_one_module_too() -> None:
    module = to_module(layers(0.1, 0.1, 0.1, 0.1, shared=True))
    again, blocks = outlined(module)
    assert max(blocks) == 4
    assert_equal_bits(module, again, [torch.randn(4, 8)])


def test_what_does_not_repeat_stays_as_it_is() -> None:
    module = to_module(layers(0.1, 0.2, 0.3))
    before = module.code
    again, blocks = outlined(module)
    assert blocks == []
    assert again.code == before


def test_an_evaluation_follows_the_mode_of_the_graph() -> None:
    module = to_module(gpt2(3, dropout=0.5))
    again, _ = outlined(module)
    ids = torch.randint(32, (2, 16))
    assert torch.equal(again.eval()(ids), module.eval()(ids))
    assert torch.equal(again(ids), again(ids))
