"""Models of one node, run by onnxruntime and by the imported module on the same inputs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
import onnxruntime
import torch
from onnx import helper, numpy_helper

from onward.trainer.onnx_import.driver import to_module

Array = np.ndarray[Any, np.dtype[Any]]


def one_node(
    kind: str,
    inputs: Mapping[str, Array],
    constants: Mapping[str, Array] | None = None,
    *,
    opset: int = 20,
    domain: str = "",
    outputs: int = 1,
    dynamic: bool = False,
    **attributes: Any,
) -> onnx.ModelProto:
    """A node that reads the inputs, then the constants, in this order; a name that begins with "_" is left out."""
    constants = constants or {}
    names = ["" if name.startswith("_") else name for name in (*inputs, *constants)]
    node = helper.make_node(kind, names, [f"y{i}" for i in range(outputs)], domain=domain, **attributes)
    declared = [
        helper.make_tensor_value_info(
            name,
            helper.np_dtype_to_tensor_dtype(array.dtype),
            [f"{name}{i}" if dynamic and i != 1 else n for i, n in enumerate(array.shape)],
        )
        for name, array in inputs.items()
        if not name.startswith("_")
    ]
    results = [helper.make_empty_tensor_value_info(name) for name in node.output]
    stored = [numpy_helper.from_array(a, name) for name, a in constants.items() if not name.startswith("_")]
    opsets = [helper.make_opsetid("", opset), helper.make_opsetid("com.microsoft", 1)]
    body = helper.make_graph([node], "one", declared, results, stored)
    return helper.make_model(body, opset_imports=opsets, ir_version=10)


def onnxruntime_and_ours(model: onnx.ModelProto, inputs: Mapping[str, Array]) -> tuple[list[Array], list[Array]]:
    """The outputs of the model by onnxruntime, unoptimised, and by the imported module."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    given = {name: array for name, array in inputs.items() if not name.startswith("_")}
    want = onnxruntime.InferenceSession(model.SerializeToString(), options).run(None, given)
    for output, array in zip(model.graph.output, want, strict=True):
        kind = helper.np_dtype_to_tensor_dtype(array.dtype)
        output.CopyFrom(helper.make_tensor_value_info(output.name, kind, [None] * array.ndim))
    module = to_module(model).eval()
    got = module(*(torch.from_numpy(array.copy()) for array in given.values()))
    return want, [value.detach().numpy() for value in (got if isinstance(got, tuple) else (got,))]


def assert_agrees(kind: str, inputs: Mapping[str, Array], constants: Any = None, **settings: Any) -> None:
    """The imported node computes what onnxruntime computes, types and shapes included."""
    want, got = onnxruntime_and_ours(one_node(kind, inputs, constants, **settings), inputs)
    for theirs, ours in zip(want, got, strict=True):
        assert ours.dtype == theirs.dtype
        assert ours.shape == theirs.shape
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)
