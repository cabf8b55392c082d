"""Reductions and cumulative sums give what onnxruntime gives where torch's own functions do not."""

import numpy as np
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

from onward.trainer.onnx_graph.files.onnxruntime_session import open_session
from onward.trainer.onnx_import.driver import to_module


def results(operator: str, x: np.ndarray, operand: np.ndarray, **attributes: int) -> tuple[np.ndarray, np.ndarray]:
    """Return what the imported module and onnxruntime compute for one node."""
    kind = helper.np_dtype_to_tensor_dtype(x.dtype)
    graph = helper.make_graph(
        [helper.make_node(operator, ["x", "operand"], ["y"], **attributes)],
        "g",
        [helper.make_tensor_value_info("x", kind, ["n", *x.shape[1:]])],
        [helper.make_tensor_value_info("y", kind, None)],
        [numpy_helper.from_array(operand, "operand")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)
    (expected,) = open_session(model).run(None, {"x": x})
    return to_module(model)(torch.from_numpy(x)).numpy(), expected


@pytest.mark.parametrize("reverse", [0, 1])
@pytest.mark.parametrize("row", [[1, np.inf, 2, 3], [1e8, 1, 1, 1]])
def test_an_exclusive_sum_never_holds_the_element_itself(row, reverse):
    ours, expected = results("CumSum", np.array([row], np.float32), np.array(1), exclusive=1, reverse=reverse)
    np.testing.assert_array_equal(ours, expected)


@pytest.mark.parametrize("operator", ["ReduceL2", "ReduceLogSum", "ReduceLogSumExp"])
def test_reductions_of_integers_are_integers(operator):
    ours, expected = results(operator, np.array([[1, 2, 3], [4, 5, 6]], np.int32), np.array([1]))
    assert ours.dtype == expected.dtype == helper.tensor_dtype_to_np_dtype(TensorProto.INT32)
    np.testing.assert_array_equal(ours, expected)
