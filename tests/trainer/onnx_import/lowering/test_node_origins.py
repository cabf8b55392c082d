"""Every call of an imported graph knows the node of the file that it belongs to, also after the passes."""

from __future__ import annotations

import copy
from collections.abc import Callable

import onnx
import pytest
from torch import fx

from onward.trainer.onnx_import.driver import to_module
from onward.trainer.onnx_import.lowering.node_origins import FUSED, Origin, origin_of
from tests.support import graphs

MODELS: dict[str, Callable[[], onnx.ModelProto]] = {
    "conv net": graphs.tiny_conv_net,
    "batch norm": graphs.tiny_conv_net_with_batch_norm,
    "transformer": graphs.tiny_transformer,
    "bert": graphs.tiny_bert,
    "llama": graphs.tiny_llama,
    "loss": graphs.tiny_loss_model,
}


def calls(module: fx.GraphModule) -> list[fx.Node]:
    return [node for node in module.graph.nodes if node.op not in ("placeholder", "get_attr", "output")]


@pytest.mark.parametrize("model", MODELS)
def test_every_call_belongs_to_a_node_of_the_file(model: str) -> None:
    proto = MODELS[model]()
    known = {Origin(node.output[0], node.name or node.output[0], node.op_type) for node in proto.graph.node}
    module = to_module(proto)
    for call in calls(module):
        assert origin_of(call) in known
        assert {*call.meta.get(FUSED, ())} <= known - {origin_of(call)}
    for node, copied in zip(calls(module), calls(copy.deepcopy(module)), strict=True):
        assert origin_of(node) == origin_of(copied)


def test_a_fused_product_has_the_name_of_its_result_and_those_of_what_is_in_it() -> None:
    proto = graphs.tiny_transformer()
    module = to_module(proto)
    (attention, *_) = [call for call in calls(module) if "attention" in str(call.target)]
    origin = origin_of(attention)
    assert origin is not None
    assert origin.operator == "MatMul"
    assert {"MatMul", "Softmax", "Div"} <= {each.operator for each in attention.meta[FUSED]}
    products = [call for call in calls(module) if str(call.target).startswith("<built-in function linear")]
    assert {
        (origin.operator, *(each.operator for each in call.meta[FUSED]))
        for call in products
        for origin in [origin_of(call)]
        if origin
    } == {("Add", "MatMul")}
