"""The parts of a graph compute bit for bit what the graph computes, wherever it is cut; what crosses a cut."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto
from torch import Tensor

from onward.trainer.onnx_graph.node_builder import GraphWriter
from onward.trainer.onnx_import.driver import to_module
from onward.trainer.onnx_import.imported_graph import ImportedGraph, named_weights
from onward.trainer.parallel.cost import NodeCost, estimate_costs
from onward.trainer.parallel.pipeline.cut_points import CutPoint, find_cut_points
from onward.trainer.parallel.pipeline.rematerialise import partitioned_nodes
from onward.trainer.parallel.pipeline.split import split
from onward.trainer.parallel.pipeline.stage import Chain, Stage, build_stages
from tests.support import graphs
from tests.support.trained_models import running_statistics

# -- graphs with lengths that cross cuts


def doubled() -> onnx.ModelProto:
    """Multiplies by a length of a tensor that no later node reads: `x` [batch, rows, 4] -> `z` [batch, 4], `x`, count.

    `noise` is random, though computed from a weight alone.
    """
    g = GraphWriter("doubled")
    x = g.input("x", ("batch", "rows", 4))
    twice = g.op("Concat", x, x, axis=1, outputs="twice")
    rows = g.op("Gather", g.op("Shape", twice), g.weight("one", np.array(1)))
    h = g.op("ReduceMean", twice, g.weight("axes", [1]), keepdims=0)
    noise = g.op("RandomNormalLike", g.weight("w", g.normal(0.5, 4, 4)), outputs="noise")
    h = g.op("Tanh", g.op("MatMul", h, g.op("Add", "w", noise)), outputs="h")
    h = g.op("Add", g.op("MatMul", h, g.weight("v", g.normal(0.5, 4, 4))), g.op("ReduceSum", noise, keepdims=0))
    g.op("Mul", h, g.op("Cast", rows, to=TensorProto.FLOAT), outputs="z")
    g.op("Identity", rows, outputs="count")
    g.output("z", ("batch", 4))
    g.output("x", ("batch", "rows", 4))
    g.output("count", (), TensorProto.INT64)
    return g.model()


def halved() -> onnx.ModelProto:
    """Divides by the length that a stride leaves: `x` [batch, 4, time] -> `y` [batch, 4].

    At the size of the example this length is equal to that of the batch."""
    g = GraphWriter("halved")
    x = g.op("Conv", g.input("x", ("batch", 4, "time")), g.weight("w", g.normal(0.5, 4, 4, 3)), strides=[2])
    steps = g.op("Gather", g.op("Shape", x), g.weight("two", np.array(2)))
    for name in ("v", "u"):
        x = g.op("Relu", g.op("Conv", x, g.weight(name, g.normal(0.5, 4, 4, 1))))
    x = g.op("ReduceSum", x, g.weight("axes", [2]), keepdims=0)
    g.op("Div", x, g.op("Cast", steps, to=TensorProto.FLOAT), outputs="y")
    g.output("y", ("batch", 4))
    return g.model()


MODELS: dict[str, Callable[[], onnx.ModelProto]] = {
    **graphs.MODELS,
    "with dropout": lambda: graphs.tiny_transformer(dropout=0.2),
    "doubled": doubled,
    "halved": halved,
}


def load(build: Callable[[], onnx.ModelProto]) -> tuple[ImportedGraph, list[Tensor], dict[str, NodeCost]]:
    model = build()
    module, inputs = to_module(model), [torch.from_numpy(value) for value in graphs.feed(model, 4).values()]
    return module.train(), inputs, estimate_costs(module, inputs)


def cut_in(module: ImportedGraph, points: Sequence[CutPoint], found: dict[str, NodeCost]) -> list[Stage]:
    return build_stages(module, [[part] for part in split(module, points)], found)


def run(stages: Sequence[Stage], inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    values: tuple[Tensor, ...] = ()
    for stage in stages:
        assert _kinds(values) == _kinds(stage.received_meta)
        values = stage.chain(*values, *(inputs[place] for place in stage.input_positions))
        assert _kinds(values) == _kinds(stage.output_meta)
    return values


def _kinds(tensors: Sequence[Tensor]) -> list[tuple[object, ...]]:
    return [(tensor.shape, tensor.dtype, tensor.requires_grad) for tensor in tensors]


def step(module: ImportedGraph, compute: Callable[[], tuple[Tensor, ...] | Tensor]) -> list[Tensor]:
    """Return outputs, gradients and running statistics of a training step, and undo the step."""
    before = {name: tensor.clone() for name, tensor in running_statistics(module).items()}
    torch.manual_seed(0)
    outputs = compute()
    outputs = (outputs,) if isinstance(outputs, Tensor) else outputs
    torch.stack([(output.float() ** 2).sum() for output in outputs]).sum().backward()
    after = {name: tensor.clone() for name, tensor in running_statistics(module).items()}
    for name, tensor in running_statistics(module).items():
        tensor.copy_(before[name])
    gradients = [torch.zeros(()) if weight.grad is None else weight.grad for weight in module.parameters()]
    module.zero_grad()
    return [*outputs, *gradients, *after.values()]


def same(found: Sequence[Tensor], expected: Sequence[Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


# -- the same bits


@pytest.mark.parametrize("name", MODELS)
def test_parts_compute_the_same_bits_wherever_the_graph_is_cut(name: str) -> None:
    module, inputs, found = load(MODELS[name])
    expected = step(module, lambda: module(*inputs))
    points = find_cut_points(module.graph, found)
    assert points
    for chosen in (*((point,) for point in points), points, points[::3], ()):
        stages = cut_in(module, chosen, found)
        assert len(stages) == len(chosen) + 1
        assert same(step(module, lambda stages=stages: run(stages, inputs)), expected), chosen


@pytest.mark.parametrize("name", MODELS)
def test_a_chain_of_all_parts_computes_what_the_graph_computes(name: str) -> None:
    module, inputs, found = load(MODELS[name])
    parts = split(module, find_cut_points(module.graph, found))
    assert [node for part in parts for node in part.nodes] == [node.name for node in partitioned_nodes(module.graph)]
    (stage,) = build_stages(module, [parts], found)
    assert len(stage.chain.units) == len(parts)
    for chain in (stage.chain, build_stages(module, [split(module, ())], found)[0].chain):
        assert isinstance(chain, Chain)
        assert {id(weight) for weight in chain.parameters()} == {id(weight) for weight in module.parameters()}
        expected = step(module, lambda: module(*inputs))
        assert same(step(module, lambda chain=chain: chain(*inputs)), expected)


def test_stages_name_their_weights_as_the_file_does() -> None:
    module, _, found = load(graphs.tiny_transformer)
    first, *_, last = cut_in(module, find_cut_points(module.graph, found), found)
    names = [list(named_weights(next(iter(stage.chain.units.children())))) for stage in (first, last)]
    assert names == [["transformer.wte.weight"], ["transformer.wte.weight"]], "the tied head is at both ends"


# -- what crosses


@pytest.mark.parametrize("name", MODELS)
def test_values_of_weights_constants_and_lengths_alone_never_cross(name: str) -> None:
    module, _, found = load(MODELS[name])
    of_data: set[str] = set()
    for node in module.graph.nodes:  # `noise` is the exception: drawn twice, it would be another
        reads = {read.name for read in node.all_input_nodes} & of_data
        if node.op == "placeholder" or (reads and node.target != "size") or "noise" in node.meta.get("onnx", ()):
            of_data.add(node.name)
    for point in find_cut_points(module.graph, found):
        assert of_data >= {*point.crossing}


def test_masks_cross_up_to_their_last_reader_and_inputs_come_from_the_data() -> None:
    module, _, found = load(graphs.tiny_bert)
    narrow = [point for point in find_cut_points(module.graph, found) if point.is_narrow]
    stages = cut_in(module, narrow[::3], found)
    assert [stage.received_names for stage in stages] == [
        (),
        ("mul", "gather_rows"),
        ("mul", "add_8"),
        ("mul", "layer_norm_12"),
        ("add_28",),
        ("linear",),
    ]
    assert stages[0].input_positions == (0, 1)
    module, _, found = load(graphs.tiny_loss_model)
    stages = cut_in(module, find_cut_points(module.graph, found)[:2], found)
    assert [stage.input_positions for stage in stages] == [(0,), (), (1,)], "labels go to the stage of the loss alone"


def test_a_length_is_rematerialised_where_its_tensor_is_at_hand_and_crosses_elsewhere() -> None:
    module, inputs, found = load(doubled)
    for point in find_cut_points(module.graph, found):
        first, last = cut_in(module, [point], found)
        lengths = [name for name in last.received_names if name not in point.crossing]
        assert lengths == ([] if "cat" in point.crossing else ["size_1"])
        assert last.input_positions == (0,), "an output that is an input needs no crossing"
        assert first.chain(*inputs)[-1].dtype == (torch.float32 if "cat" in point.crossing else torch.int64)
    module, _, found = load(graphs.tiny_transformer)
    assert all(
        not any("size" in name for name in cut_in(module, [point], found)[1].received_names)
        for point in find_cut_points(module.graph, found)
    )


def test_stages_run_with_other_lengths_than_those_of_the_example() -> None:
    for build in (graphs.tiny_llama, graphs.tiny_bert, doubled, halved):
        model = build()
        module, _, found = load(build)
        stages = cut_in(module, find_cut_points(module.graph, found)[::2], found)
        other = [
            torch.from_numpy(value[..., :5] if build is halved else value[:, :5])
            for value in graphs.feed(model, 2).values()
        ]
        values: tuple[Tensor, ...] = ()
        torch.manual_seed(0)
        for stage in stages:
            values = stage.chain(*values, *(other[place] for place in stage.input_positions))
        torch.manual_seed(0)
        expected = module(*other)
        assert same(values, (expected,) if isinstance(expected, Tensor) else expected)
