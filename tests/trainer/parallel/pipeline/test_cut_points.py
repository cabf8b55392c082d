"""Where a graph may be cut, and how the user names cuts."""

from __future__ import annotations

from collections.abc import Callable

import onnx
import pytest
import torch
from torch import Tensor

from onward.trainer.errors import ConfigError
from onward.trainer.onnx_graph.node_builder import GraphWriter
from onward.trainer.onnx_import.driver import to_module
from onward.trainer.onnx_import.imported_graph import ImportedGraph
from onward.trainer.onnx_import.train_selection import select_trained
from onward.trainer.parallel.cost import NodeCost, estimate_costs
from onward.trainer.parallel.pipeline.cut_points import cuts_by_name, find_cut_points
from tests.support import graphs


def load(build: Callable[[], onnx.ModelProto]) -> tuple[ImportedGraph, list[Tensor], dict[str, NodeCost]]:
    model = build()
    module, inputs = to_module(model), [torch.from_numpy(value) for value in graphs.feed(model, 4).values()]
    return module.train(), inputs, estimate_costs(module, inputs)


# -- where a graph may be cut


def test_tuples_and_values_inside_a_tensor_parallel_region_do_not_cross() -> None:
    module, _, found = load(graphs.tiny_transformer)
    crossing = {name for point in find_cut_points(module.graph, found) for name in point.crossing}
    assert not crossing & {"split", "split_1"}, "a tuple"
    node = next(node for node in module.graph.nodes if node.name == "add_6")
    node.meta["tensor_parallel"] = 1
    points = find_cut_points(module.graph, found)
    assert points
    assert all("add_6" not in point.crossing for point in points)


def test_a_cut_is_narrow_where_exactly_one_crossing_tensor_has_a_gradient() -> None:
    module, inputs, found = load(graphs.tiny_bert)
    at = {point.crossing: point.is_narrow for point in find_cut_points(module.graph, found)}
    assert at["mul",] is False
    assert at["mul", "add_8"] is True
    assert at["mul", "layer_norm_11", "gelu"] is False
    select_trained(module, freeze=("embeddings.*",))
    points = find_cut_points(module.graph, estimate_costs(module, inputs))
    frozen = [point for point in points if "gather_rows" in point.crossing]
    assert [point.differentiable for point in frozen] == [()]


# -- cuts that the user names


def named_like_nodes() -> onnx.ModelProto:
    """A file with tensors `relu`, `tanh` and `tanh:0`, which are not the fx nodes of these names."""
    g = GraphWriter("named_like_nodes")
    x = g.op("MatMul", g.input("x", ("batch", 4)), g.weight("w", g.normal(0.5, 4, 4)), outputs="relu")
    g.op("Sigmoid", g.op("Relu", g.op("Tanh", x, outputs="tanh:0"), outputs="tanh"), outputs="y")
    g.output("y", ("batch", 4))
    return g.model()


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
    points = cuts_by_name(module.graph, find_cut_points(module.graph, found), [entry])
    assert [point.position for point in points] == positions


def test_masks_may_cross_unnamed_but_do_not_name_a_cut_alone() -> None:
    module, _, found = load(graphs.tiny_bert)
    points = find_cut_points(module.graph, found)
    assert cuts_by_name(module.graph, points, ["Add_48"])[0].crossing == ("mul", "add_8")
    assert cuts_by_name(module.graph, points, [("Add_57", "Mul_64")])[0].crossing == ("mul", "layer_norm_11", "gelu")
    with pytest.raises(ConfigError, match="where Mul_3 crosses, so does Gather_8"):
        cuts_by_name(module.graph, points[5:], ["Mul_3"])


def test_a_name_in_the_file_wins_over_that_of_a_node_and_may_hold_a_colon() -> None:
    module, _, found = load(named_like_nodes)
    points = find_cut_points(module.graph, found)
    assert [point.crossing for point in points] == [("matmul",), ("tanh",), ("relu",)]
    assert cuts_by_name(module.graph, points, ["relu", "tanh:0", "tanh"]) == points
    assert cuts_by_name(module.graph, points, ["matmul"]) == points[:1]


def test_all_wrong_cuts_are_refused_in_one_error() -> None:
    module, _, found = load(graphs.tiny_transformer)
    points = find_cut_points(module.graph, found)
    with pytest.raises(ConfigError) as raised:
        cuts_by_name(
            module.graph, points, ["Add_55", "Add_53x", "LayerNormalization_29", ("Add_28", "Add_55"), "Add_35"]
        )
    unknown, wide, nowhere, order = raised.value.problems
    assert "the graph computes no tensor Add_53x; did you mean " in unknown
    assert "Add_55" in unknown.partition("did you mean")[2]
    assert wide == (
        "parallel.cuts: where LayerNormalization_29 crosses, so does Add_28; name all of them, or another cut"
    )
    assert "no cut is crossed by Add_28 and Add_55" in nowhere
    assert "in the order of the graph" in order
    with pytest.raises(ConfigError, match="each at a different place"):
        cuts_by_name(module.graph, points, ["Add_35", "Add_35"])
