"""Wherever a graph is cut, its parts compute the same bits; what crosses; where it is cut, and why it is not."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto
from torch import Tensor

from onward.trainer.errors import ConfigError
from onward.trainer.onnx_graph.reference_models import GraphWriter
from onward.trainer.onnx_import.driver import to_module
from onward.trainer.onnx_import.imported_graph import ImportedGraph, named_weights
from onward.trainer.onnx_import.train_selection import select_trained
from onward.trainer.parallel.cost import NodeCost, costs
from onward.trainer.parallel.pipeline import split as cut
from onward.trainer.parallel.pipeline.split import SLACK, Chain, CutPoint, Stage
from tests.support import graphs
from tests.support.trained_models import running_statistics

# -- graphs that the models do not have


def doubled() -> onnx.ModelProto:
    """Multiplies by the length of what nobody reads at the end: `x` [batch, rows, 4] -> `z` [batch, 4], `x`, `count`.

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
    """Divides by a length that a stride has made: `x` [batch, 4, time] -> `y` [batch, 4]. Where the graph is traced,
    half of the time is the batch."""
    g = GraphWriter("halved")
    x = g.op("Conv", g.input("x", ("batch", 4, "time")), g.weight("w", g.normal(0.5, 4, 4, 3)), strides=[2])
    steps = g.op("Gather", g.op("Shape", x), g.weight("two", np.array(2)))
    for name in ("v", "u"):
        x = g.op("Relu", g.op("Conv", x, g.weight(name, g.normal(0.5, 4, 4, 1))))
    x = g.op("ReduceSum", x, g.weight("axes", [2]), keepdims=0)
    g.op("Div", x, g.op("Cast", steps, to=TensorProto.FLOAT), outputs="y")
    g.output("y", ("batch", 4))
    return g.model()


def named_like_nodes() -> onnx.ModelProto:
    """`relu`, `tanh` and `tanh:0` are tensors of the file, and others than the nodes that are called so."""
    g = GraphWriter("named_like_nodes")
    x = g.op("MatMul", g.input("x", ("batch", 4)), g.weight("w", g.normal(0.5, 4, 4)), outputs="relu")
    g.op("Sigmoid", g.op("Relu", g.op("Tanh", x, outputs="tanh:0"), outputs="tanh"), outputs="y")
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
    return module.train(), inputs, costs(module, inputs)


def cut_in(module: ImportedGraph, points: Sequence[CutPoint], found: dict[str, NodeCost]) -> list[Stage]:
    return cut.stages(module, [[part] for part in cut.split(module, points)], found)


def run(stages: Sequence[Stage], inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    values: tuple[Tensor, ...] = ()
    for stage in stages:
        assert _kinds(values) == _kinds(stage.crossing)
        values = stage.chain(*values, *(inputs[place] for place in stage.inputs))
        assert _kinds(values) == _kinds(stage.produced)
    return values


def _kinds(tensors: Sequence[Tensor]) -> list[tuple[object, ...]]:
    return [(tensor.shape, tensor.dtype, tensor.requires_grad) for tensor in tensors]


def step(module: ImportedGraph, compute: Callable[[], tuple[Tensor, ...] | Tensor]) -> list[Tensor]:
    """Outputs, gradients and running statistics of a training step, which leaves no trace."""
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
def test_cut_anywhere_and_everywhere_the_parts_compute_the_same_bits(name: str) -> None:
    module, inputs, found = load(MODELS[name])
    expected = step(module, lambda: module(*inputs))
    points = cut.cut_points(module.graph, found)
    assert points
    for chosen in (*((point,) for point in points), points, points[::3], ()):
        stages = cut_in(module, chosen, found)
        assert len(stages) == len(chosen) + 1
        assert same(step(module, lambda stages=stages: run(stages, inputs)), expected), chosen


@pytest.mark.parametrize("name", MODELS)
def test_a_chain_of_all_units_is_the_graph(name: str) -> None:
    module, inputs, found = load(MODELS[name])
    parts = cut.split(module, cut.cut_points(module.graph, found))
    assert [node for part in parts for node in part.nodes] == [node.name for node in cut.order(module.graph)]
    (stage,) = cut.stages(module, [parts], found)
    assert len(stage.chain.units) == len(parts)
    for chain in (stage.chain, cut.whole(module).chain):
        assert isinstance(chain, Chain)
        assert {id(weight) for weight in chain.parameters()} == {id(weight) for weight in module.parameters()}
        expected = step(module, lambda: module(*inputs))
        assert same(step(module, lambda chain=chain: chain(*inputs)), expected)


def test_stages_know_their_weights_by_the_files_names() -> None:
    module, _, found = load(graphs.tiny_transformer)
    first, *_, last = cut_in(module, cut.cut_points(module.graph, found), found)
    names = [list(named_weights(next(iter(stage.chain.units.children())))) for stage in (first, last)]
    assert names == [["transformer.wte.weight"], ["transformer.wte.weight"]], "the tied head is at both ends"


# -- what crosses


@pytest.mark.parametrize("name", MODELS)
def test_what_is_computed_from_weights_constants_and_lengths_alone_never_crosses(name: str) -> None:
    module, _, found = load(MODELS[name])
    of_data: set[str] = set()
    for node in module.graph.nodes:  # `noise` is the exception: drawn twice, it would be another
        reads = {read.name for read in node.all_input_nodes} & of_data
        if node.op == "placeholder" or (reads and node.target != "size") or "noise" in node.meta.get("onnx", ()):
            of_data.add(node.name)
    for point in cut.cut_points(module.graph, found):
        assert of_data >= {*point.crossing}


def test_masks_cross_up_to_their_last_reader_and_integer_inputs_come_from_the_data() -> None:
    module, _, found = load(graphs.tiny_bert)
    narrow = [point for point in cut.cut_points(module.graph, found) if point.narrow]
    stages = cut_in(module, narrow[::3], found)
    assert [stage.receives for stage in stages] == [
        (),
        ("mul", "gather_rows"),
        ("mul", "add_8"),
        ("mul", "layer_norm_12"),
        ("add_28",),
        ("linear",),
    ]
    assert stages[0].inputs == (0, 1)
    module, _, found = load(graphs.tiny_loss_model)
    stages = cut_in(module, cut.cut_points(module.graph, found)[:2], found)
    assert [stage.inputs for stage in stages] == [(0,), (), (1,)], "labels go to the stage of the loss alone"


def test_a_length_is_read_from_an_input_or_what_crosses_or_crosses_itself() -> None:
    module, inputs, found = load(doubled)
    for point in cut.cut_points(module.graph, found):
        first, last = cut_in(module, [point], found)
        lengths = [name for name in last.receives if name not in point.crossing]
        assert lengths == ([] if "cat" in point.crossing else ["size_1"])
        assert last.inputs == (0,), "an output that is an input needs no crossing"
        assert first.chain(*inputs)[-1].dtype == (torch.float32 if "cat" in point.crossing else torch.int64)
    module, _, found = load(graphs.tiny_transformer)
    assert all(
        not any("size" in name for name in cut_in(module, [point], found)[1].receives)
        for point in cut.cut_points(module.graph, found)
    )


def test_a_stage_adapts_to_other_lengths_than_it_was_cut_for() -> None:
    for build in (graphs.tiny_llama, graphs.tiny_bert, doubled, halved):
        model = build()
        module, _, found = load(build)
        stages = cut_in(module, cut.cut_points(module.graph, found)[::2], found)
        other = [
            torch.from_numpy(value[..., :5] if build is halved else value[:, :5])
            for value in graphs.feed(model, 2).values()
        ]
        values: tuple[Tensor, ...] = ()
        torch.manual_seed(0)
        for stage in stages:
            values = stage.chain(*values, *(other[place] for place in stage.inputs))
        torch.manual_seed(0)
        expected = module(*other)
        assert same(values, (expected,) if isinstance(expected, Tensor) else expected)


# -- where it may be cut


def test_what_is_no_tensor_or_part_of_a_sum_does_not_cross() -> None:
    module, _, found = load(graphs.tiny_transformer)
    crossing = {name for point in cut.cut_points(module.graph, found) for name in point.crossing}
    assert not crossing & {"split", "split_1"}, "a tuple"
    node = next(node for node in module.graph.nodes if node.name == "add_6")
    node.meta["tensor_parallel"] = 1
    points = cut.cut_points(module.graph, found)
    assert points
    assert all("add_6" not in point.crossing for point in points)


def test_narrow_counts_what_has_a_gradient() -> None:
    module, inputs, found = load(graphs.tiny_bert)
    at = {point.crossing: point.narrow for point in cut.cut_points(module.graph, found)}
    assert at["mul",] is False
    assert at["mul", "add_8"] is True
    assert at["mul", "layer_norm_11", "gelu"] is False
    select_trained(module, freeze=("embeddings.*",))
    frozen = [point for point in cut.cut_points(module.graph, costs(module, inputs)) if "gather_rows" in point.crossing]
    assert [point.gradients for point in frozen] == [()]


# -- balanced


def table(amounts: Sequence[int], sizes: Sequence[int]) -> tuple[list[CutPoint], list[int]]:
    """A place after each node but the last, where so many bytes cross."""
    return [CutPoint(place, ("x",), size, ("x",)) for place, size in enumerate(sizes, 1)], list(amounts)


@pytest.mark.parametrize(
    ("amounts", "sizes", "num", "cuts"),
    [
        ([1, 1, 1, 1], [9, 9, 9], 1, []),
        ([1, 1, 1, 1], [9, 9, 9], 2, [2]),
        ([1, 1, 1, 1], [1, 9, 1], 2, [2]),  # 3 to 1 is too uneven for any saving
        ([1, 1, 1, 1], [9, 9, 9], 4, [1, 2, 3]),
        ([6, 1, 1, 1], [9, 1, 1], 2, [1]),  # 7 is above 1.15 x 6
        ([9, 1, 1, 1, 1], [9, 1, 1, 1], 2, [2]),  # 10 is not above 1.15 x 9
        ([1, 1, 1, 10], [5, 5, 5], 2, [3]),  # where the same crosses, nothing is gained by 11
        ([0, 0, 0], [3, 2], 2, [2]),
        ([10] * 20, [100] * 10 + [1] * 9, 2, [11]),
    ],
)
def test_the_greatest_part_is_nearly_least_and_then_the_least_crosses(
    amounts: list[int], sizes: list[int], num: int, cuts: list[int]
) -> None:
    assert [point.position for point in cut.balanced(*table(amounts, sizes), num)] == cuts


@pytest.mark.parametrize("seed", range(30))
def test_no_other_cuts_are_better(seed: int) -> None:
    draw = random.Random(seed)
    length, num = draw.randint(6, 10), draw.randint(2, 5)
    points, amounts = table([draw.randint(0, 20) for _ in range(length)], draw.choices(range(9), k=length - 1))
    points = sorted(draw.sample(points, draw.randint(num - 1, len(points))), key=lambda point: point.position)

    def greatest(chosen: Sequence[CutPoint]) -> int:
        bounds = [0, *(point.position for point in chosen), length]
        return max(sum(amounts[start:stop]) for start, stop in itertools.pairwise(bounds))

    def crossing(chosen: Sequence[CutPoint]) -> int:
        return sum(point.num_bytes for point in chosen)

    every = [*itertools.combinations(points, num - 1)]
    least, found = min(map(greatest, every)), cut.balanced(points, amounts, num)
    assert greatest(found) <= SLACK * 1.002 * least
    near = [chosen for chosen in every if greatest(chosen) <= SLACK * least]
    assert crossing(found) <= min(map(crossing, near))
    assert greatest(found) <= 1.002 * min(greatest(other) for other in near if crossing(other) <= crossing(found))


def test_too_few_places_are_refused_with_their_number() -> None:
    with pytest.raises(ConfigError, match="in 2 places only, so into 3 parts at most, not 5"):
        cut.balanced(*table([1, 1, 1], [1, 1]), 5)


def test_real_graphs_are_cut_between_their_layers() -> None:
    module, _, found = load(graphs.tiny_transformer)
    points, amounts = cut.cut_points(module.graph, found), cut.work(module.graph, found)
    (middle,) = cut.balanced(points, amounts, 2)
    assert middle.crossing == ("add_6",)
    ends = [0, middle.position, len(amounts)]
    parts = [sum(amounts[start:stop]) for start, stop in itertools.pairwise(ends)]
    assert max(parts) < 0.6 * sum(parts)


# -- named

CUTS: dict[str, tuple[str | tuple[str, ...], list[int]]] = {
    "a tensor of the file": ("Add_35", [24]),
    "a node": ("add_6", [24]),
    "several tensors": (("Add_28", "LayerNormalization_29"), [20]),
    "with its consumers": ("Add_35-LayerNormalization_36/Add_55", [24]),
    "edges": ("Add_28-Add_35:Gelu_32-MatMul_33", [22]),
    "edges without consumers": ("Add_28:LayerNormalization_29", [20]),
}


@pytest.mark.parametrize("case", CUTS)
def test_a_cut_is_named_by_the_tensors_that_cross_it(case: str) -> None:
    module, _, found = load(graphs.tiny_transformer)
    entry, positions = CUTS[case]
    points = cut.named(module.graph, cut.cut_points(module.graph, found), [entry])
    assert [point.position for point in points] == positions


def test_masks_cross_unnamed_but_do_not_name_a_cut_where_others_cross() -> None:
    module, _, found = load(graphs.tiny_bert)
    points = cut.cut_points(module.graph, found)
    assert cut.named(module.graph, points, ["Add_48"])[0].crossing == ("mul", "add_8")
    assert cut.named(module.graph, points, [("Add_57", "Mul_64")])[0].crossing == ("mul", "layer_norm_11", "gelu")
    with pytest.raises(ConfigError, match="where Mul_3 cross, so do others: Gather_8"):
        cut.named(module.graph, points[5:], ["Mul_3"])


def test_the_files_names_are_stronger_than_the_nodes_and_may_hold_a_colon() -> None:
    module, _, found = load(named_like_nodes)
    points = cut.cut_points(module.graph, found)
    assert [point.crossing for point in points] == [("matmul",), ("tanh",), ("relu",)]
    assert cut.named(module.graph, points, ["relu", "tanh:0", "tanh"]) == points
    assert cut.named(module.graph, points, ["matmul"]) == points[:1]


def test_every_wrong_cut_is_refused_at_once() -> None:
    module, _, found = load(graphs.tiny_transformer)
    points = cut.cut_points(module.graph, found)
    with pytest.raises(ConfigError) as raised:
        cut.named(module.graph, points, ["Add_55", "Add_53x", "LayerNormalization_29", ("Add_28", "Add_55"), "Add_35"])
    unknown, wide, nowhere, order = raised.value.problems
    assert "the graph computes no tensor Add_53x; there is " in unknown
    assert "Add_55" in unknown.partition("there is")[2]
    assert wide == "parallel.cuts: where LayerNormalization_29 cross, so do others: Add_28"
    assert "Add_28 and Add_55 cross no cut" in nowhere
    assert "in the graph's order" in order
    with pytest.raises(ConfigError, match="each at a place of its own"):
        cut.named(module.graph, points, ["Add_35", "Add_35"])


# -- units


def unit_cuts(build: Callable[[], onnx.ModelProto], num: int, borders: Sequence[str] = ()) -> list[list[CutPoint]]:
    """The cuts inside each stage."""
    module, _, found = load(build)
    points, amounts = cut.cut_points(module.graph, found), cut.work(module.graph, found)
    stages = cut.named(module.graph, points, borders)
    places = cut.units(module, points, amounts, stages, num)
    assert all(place.narrow and place in points and place not in stages for place in places)
    assert places == sorted(places, key=lambda place: place.position)
    bounds = itertools.pairwise([0, *(stage.position for stage in stages), len(amounts)])
    return [[place for place in places if start < place.position < stop] for start, stop in bounds]


@pytest.mark.parametrize(
    ("num", "borders", "expected"),
    [(1, (), [0]), (3, (), [2]), (99, (), [7]), (2, ("Add_35",), [1, 1]), (99, ("Add_35",), [3, 3])],
)
def test_units_end_at_narrow_places_as_many_as_asked_for_in_each_stage(
    num: int, borders: tuple[str, ...], expected: list[int]
) -> None:
    assert [len(cuts) for cuts in unit_cuts(graphs.tiny_transformer, num, borders)] == expected


def test_left_to_the_graph_a_unit_has_weights_worth_sending(monkeypatch: pytest.MonkeyPatch) -> None:
    assert unit_cuts(graphs.tiny_llama, 0) == [[]], "too small for more than one"
    total = sum(weight.nbytes for weight in to_module(graphs.tiny_llama()).parameters())
    monkeypatch.setattr(cut, "UNIT_BYTES", total // 3)
    assert [len(cuts) for cuts in unit_cuts(graphs.tiny_llama, 0)] == [2]
    monkeypatch.setattr(cut, "UNIT_BYTES", total // 20)
    monkeypatch.setattr(cut, "MOST_UNITS", 4)
    assert [len(cuts) for cuts in unit_cuts(graphs.tiny_llama, 0)] == [3]
