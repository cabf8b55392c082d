"""Compute a file's outputs for weights that are given with each call, in float64 where a runtime can.

The trained weights become inputs of the graph, so that one session computes for all of them and nothing folds them. The
first of these that runs the graph:

    onnxruntime, float64         every float of the graph is a double; it lacks Conv, Erf and others in this type
    onnx.reference, float64      numpy, slow
    onnxruntime, float32         the difference of two losses is coarse then, and the bound of the comparison says so
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import torch
from onnx import TensorProto, helper, inliner, numpy_helper
from torch import Tensor

from onward.trainer.errors import reason_of
from onward.trainer.export.measuring.reference_evaluator import open_reference
from onward.trainer.export.model_file import ModelFile, fp32_copy
from onward.trainer.onnx_graph.attribute_weights import held_attributes
from onward.trainer.onnx_graph.files.index import attribute_value, graphs_of
from onward.trainer.onnx_graph.files.onnxruntime_session import open_session

Array = np.ndarray[Any, np.dtype[Any]]
SLOWEST_S = 5.0
"""A pass under onnx.reference may take this long; the comparison needs six."""
FLOAT_SLOTS = {"Resize": (2,), "Upsample": (1,)}
"""Operands that are fp32 whatever the type of the data is."""


@dataclass(frozen=True)
class SecondPath:
    """A runtime that computes the file."""

    name: str
    dtype: torch.dtype
    compute: Callable[[Mapping[str, Array]], list[Array]]
    inputs: tuple[str, ...]
    """The inputs of the file."""
    weights: frozenset[str]
    """The trained tensors that it reads."""

    def outputs(self, inputs: Sequence[Tensor], weights: Mapping[str, Tensor]) -> list[Tensor]:
        """Return the outputs, in the type of this path. weights: initializer name -> value, all that are trained."""
        own = {name: value for name, value in weights.items() if name in self.weights}
        given = {**dict(zip(self.inputs, inputs, strict=True)), **own}
        feed = {
            name: (value.to(self.dtype) if value.is_floating_point() else value).detach().numpy()
            for name, value in given.items()
        }
        return [torch.from_numpy(np.array(result)) for result in self.compute(feed)]


def open_second_path(
    file: ModelFile | onnx.ModelProto, names: Iterable[str], inputs: Sequence[Tensor], weights: Mapping[str, Tensor]
) -> SecondPath:
    """Return the first path that runs the file. names: the trained tensors; inputs, weights: to try it on.

    Raises RuntimeError with the reasons if none does.
    """
    # half precision would round more than the comparison allows
    plain = fp32_copy(file)
    if held := sorted({name for name, *_ in held_attributes(plain.graph)} & set(names)):
        raise RuntimeError(f"weights are stored as attributes of nodes ({held[0]}, ...), which no input can replace")
    if plain.functions:
        plain = inliner.inline_local_functions(plain)
    stored = {tensor.name for tensor in plain.graph.initializer}
    # before the weights become inputs as well
    own = tuple(value.name for value in plain.graph.input if value.name not in stored)
    _open_weights(plain, set(names))
    read = frozenset(value.name for value in plain.graph.input) & set(names)
    wide = deepcopy(plain)
    _widen(wide)
    reasons = []
    for name, dtype, model, opened in (
        ("onnxruntime in float64", torch.float64, wide, _onnxruntime),
        ("onnx.reference in float64", torch.float64, wide, _reference),
        ("onnxruntime in float32", torch.float32, plain, _onnxruntime),
    ):
        try:
            path = SecondPath(name, dtype, opened(model), own, read)
            began = time.monotonic()
            results = path.outputs(inputs, weights)
        except Exception as error:  # those of onnxruntime and of onnx.reference have no common base class
            reasons.append(f"{name}: {reason_of(error)[:160]}")
            continue
        # the comparison needs six such passes
        if time.monotonic() - began > SLOWEST_S:
            reasons.append(f"{name}: a pass takes {time.monotonic() - began:.0f} s")
        elif any(result.is_floating_point() and result.dtype != dtype for result in results):
            reasons.append(f"{name}: it returns another type")
        else:
            return path
    raise RuntimeError("; ".join(reasons))


def _onnxruntime(model: onnx.ModelProto) -> Callable[[Mapping[str, Array]], list[Array]]:
    session = open_session(model, share_constants=False)
    kinds = {value.name: value.type.tensor_type.elem_type for value in model.graph.input}

    def run(feed: Mapping[str, Array]) -> list[Array]:
        typed = {
            name: each.astype(helper.tensor_dtype_to_np_dtype(kinds[name]), copy=False) for name, each in feed.items()
        }
        return list(session.run(None, typed))

    return run


def _reference(model: onnx.ModelProto) -> Callable[[Mapping[str, Array]], list[Array]]:
    evaluator = open_reference(model)
    # of the first pass, which is a trial
    evaluator.ends_at = time.monotonic() + SLOWEST_S

    def run(feed: Mapping[str, Array]) -> list[Array]:
        results = list(evaluator.run(None, dict(feed)))
        evaluator.ends_at = math.inf
        return results

    return run


def _open_weights(model: onnx.ModelProto, names: set[str]) -> None:
    """Make stored tensors of the main graph inputs, in place."""
    graph = model.graph
    declared = {value.name for value in graph.input}
    for tensor in [tensor for tensor in graph.initializer if tensor.name in names]:
        if tensor.name not in declared:
            graph.input.append(helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims))
        # an input alone: a default value could be folded into its readers
        graph.initializer.remove(tensor)
    for node in [node for node in graph.node if node.op_type == "Constant"]:
        if node.output[0] in names:
            [value] = [attribute_value(attribute) for attribute in node.attribute]
            graph.input.append(helper.make_tensor_value_info(node.output[0], value.data_type, value.dims))
            graph.node.remove(node)


def _widen(model: onnx.ModelProto) -> None:
    """Make every fp32 of a graph a double, in place."""
    for graph in graphs_of(model.graph):
        # declared types of inner values would contradict the new ones
        del graph.value_info[:]
        for value in (*graph.input, *graph.output):
            if value.type.tensor_type.elem_type == TensorProto.FLOAT:
                value.type.tensor_type.elem_type = TensorProto.DOUBLE
        for tensor in graph.initializer:
            _widen_tensor(tensor)
        # copies: clearing the field would invalidate them
        nodes = [onnx.NodeProto.FromString(node.SerializeToString()) for node in graph.node]
        del graph.node[:]
        for node in nodes:
            graph.node.extend(_widened(node))


def _widened(node: onnx.NodeProto) -> list[onnx.NodeProto]:
    """Return a node for doubles, behind the casts that it needs."""
    casts = []
    for slot in FLOAT_SLOTS.get(node.op_type, ()):
        if slot < len(node.input) and node.input[slot]:
            name = f"{node.output[0]}.operand{slot}.fp32"
            casts.append(helper.make_node("Cast", [node.input[slot]], [name], to=TensorProto.FLOAT))
            node.input[slot] = name
    for attribute in list(node.attribute):
        if attribute.name in ("to", "dtype", "output_dtype") and attribute.i == TensorProto.FLOAT:
            attribute.i = TensorProto.DOUBLE
        elif attribute.type == onnx.AttributeProto.TENSOR:
            _widen_tensor(attribute.t)
        elif node.op_type == "Constant" and attribute.name in ("value_float", "value_floats"):
            array = np.asarray(attribute_value(attribute), np.float64)
            node.attribute.remove(attribute)
            node.attribute.append(helper.make_attribute("value", numpy_helper.from_array(array)))
    if node.op_type == "ConstantOfShape" and not node.attribute:  # of fp32 zeros
        node.attribute.append(helper.make_attribute("value", numpy_helper.from_array(np.zeros(1))))
    return [*casts, node]


def _widen_tensor(tensor: TensorProto) -> None:
    if tensor.data_type == TensorProto.FLOAT:
        tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor).astype(np.float64), tensor.name))
