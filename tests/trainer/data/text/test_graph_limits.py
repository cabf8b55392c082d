"""The positions that a graph has are found behind the operators that exporters put between Range and Gather."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto

from onward.trainer.data.text.graph_limits import embedding_rows, position_rows
from onward.trainer.onnx_graph.node_builder import GraphWriter


def decoder(added: int, *, positions: int = 64, order: str = "left") -> onnx.ModelProto:
    """Range -> Add -> Unsqueeze -> Gather, as transformers 5 exports GPT-2 (added 0) and OPT (added 2)."""
    g = GraphWriter("decoder")
    ids = g.input("input_ids", ("batch", "length"), TensorProto.INT64)
    length = g.op("Gather", g.op("Shape", ids), g.weight("second", np.array(1)))
    places = g.op("Range", g.weight("zero", np.array(0)), length, g.weight("one", np.array(1)))
    constant = g.weight("past", np.array(added))
    places = g.op("Add", *((places, constant) if order == "left" else (constant, places)))
    places = g.op("Unsqueeze", places, g.weight("axes", [0]))
    x = g.op("Gather", g.weight("wte", g.normal(0.5, 300, 8)), ids)
    x = g.op("Add", x, g.op("Gather", g.weight("wpe", g.normal(0.5, positions, 8)), places))
    g.op("MatMul", x, g.weight("head", g.normal(0.5, 8, 300)), outputs="logits")
    g.output("logits", ("batch", "length", 300))
    return g.model()


def of_a_mask(*, multiplied_by: str = "mask") -> onnx.ModelProto:
    """CumSum(mask) * mask + 1, as RoBERTa counts the tokens that are no padding."""
    g = GraphWriter("roberta")
    ids = g.input("input_ids", ("batch", "length"), TensorProto.INT64)
    other = g.input("other", ("batch", "length"), TensorProto.INT64)
    equal = g.op("Equal", ids, g.weight("pad", np.array(1)))
    mask = g.op("Cast", g.op("Not", equal), to=TensorProto.INT64)
    total = g.op("CumSum", mask, g.weight("axis", np.array(1)))
    places = g.op("Mul", total, g.op("Cast", mask, to=TensorProto.INT64) if multiplied_by == "mask" else other)
    places = g.op("Add", g.op("Cast", places, to=TensorProto.INT64), g.weight("one", np.array(1)))
    g.op("Gather", g.weight("wpe", g.normal(0.5, 66, 8)), places, outputs="x")
    g.output("x", ("batch", "length", 8))
    return g.model()


@pytest.mark.parametrize("order", ["left", "right"])
@pytest.mark.parametrize(("added", "fit"), [(0, 64), (2, 62)])
def test_positions_are_found_behind_an_addition_and_count_from_what_is_added(added: int, fit: int, order: str) -> None:
    graph = decoder(added, order=order).graph
    assert position_rows(graph) == (fit, "wpe")
    assert embedding_rows(graph, "input_ids") == (300, "wte")


def test_positions_that_are_the_sum_of_a_mask_are_found() -> None:
    assert position_rows(of_a_mask().graph) == (64, "wpe")
    assert position_rows(of_a_mask().graph, with_masks=False) is None, "they do not count the padding"
    assert position_rows(of_a_mask(multiplied_by="other").graph) is None, "this product may be anything"
