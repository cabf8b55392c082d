"""Find out what onnxruntime's own kernels round in a file with quantized weights, whose activations the file leaves as
they are.

    file, as onnxruntime runs it     x --- rounded to 8 bits --- product of integers --- y
    its exact form                   x --- product with dequantized weights ----------- y'      nothing is rounded

The module computes the exact form. So its results must agree with those of the exact form within `export.tolerance`,
and what remains to the file itself, y - y', is what the kernels round: it is measured on the same rows, said, and
allowed as far as MOST_ROUNDING. Where the rounding comes from, and what the exact form has in its place:

    MatMulNBits with accuracy_level 4         accuracy_level 1
    DequantizeLinear of a weight, MatMul      the same nodes without optimisation, which makes MatMulNBits of them
    DynamicQuantizeLSTM                       LSTM with dequantized weights
    QMoE                                      accuracy_level 1; MoE with dequantized weights of 2 or 8 bits

Files without these have no such allowance.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper

from onward.trainer.errors import ExportRefused
from onward.trainer.export.model_file import ModelFile
from onward.trainer.onnx_graph.files.index import attributes_of

log = logging.getLogger(__name__)

MOST_ROUNDING = 0.2
"""Of an output's greatest value. Measured: 0.3 to 0.8 % for one product, 0.5 to 1.6 % for an LSTM of 20 steps. A scale
that is read wrongly moves a result by its own size."""

EXACT_LEVEL = 1
"""The accuracy level of MatMulNBits that computes in fp32."""

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True)
class ExactForm:
    """A file in which no kernel rounds, if it is run without optimisation."""

    model: ModelFile | onnx.ModelProto
    folder: Path | None
    """The directory of its external data, if it is no file."""
    kernels: str
    """The operators that round in the file itself, with numbers."""


def exact_form(model: ModelFile | onnx.ModelProto) -> ExactForm | None:
    """Return the exact form of a file; None if nothing of the file makes its kernels round."""
    proto = model.proto if isinstance(model, ModelFile) else model
    rounding = Counter(_rounding(proto.graph))
    if not rounding:
        return None
    kernels = ", ".join(f"{number} {operator}" for operator, number in rounding.items())
    if not any(node.op_type in REPLACED for node in proto.graph.node):
        return ExactForm(model, None, kernels)
    folder = model.path.parent if isinstance(model, ModelFile) else None
    copy = deepcopy(proto)
    stored = {tensor.name: tensor for tensor in copy.graph.initializer}

    def array(name: str) -> Array:
        return numpy_helper.to_array(stored[name], str(folder or ""))

    for node in copy.graph.node:
        if node.op_type in REPLACED:
            copy.graph.initializer.extend(REPLACED[node.op_type](node, array))
    return ExactForm(copy, folder, kernels)


@dataclass(frozen=True)
class Measured:
    """How far a file, its exact form and the module are apart, relative to an output's greatest value."""

    problems: Sequence[str]
    """Where the exact form differs from the module by more than `export.tolerance`."""
    parity: float
    """The difference of the exact form from the module."""
    rounding: float
    """The difference of the file from its exact form."""


def beyond_rounding(problems: list[str], form: ExactForm, measure: Callable[[], Measured]) -> tuple[list[str], float]:
    """Return the problems that the rounding of kernels does not explain, and the rounding that is allowed.

    problems: where the file differs from the module.
    """
    try:
        found = measure()
    except ExportRefused as error:
        return [*problems, f"what its kernels round ({form.kernels}) cannot be measured: {error}"], 0.0
    # written with `not`, because a comparison with NaN is false
    if found.problems or not found.rounding <= MOST_ROUNDING:
        return [f"{problem}; {_refusal(form, found)}" for problem in problems], 0.0
    log.warning(
        "onnxruntime's kernels round inside this file by %.2g of the greatest value (%s); without their rounding it "
        "differs from the module by %.2g",
        *(found.rounding, form.kernels, found.parity),
    )
    return [], found.rounding


def _refusal(form: ExactForm, found: Measured) -> str:
    if found.problems:
        return (
            f"its kernels round ({form.kernels}), but that does not explain it: without their rounding, "
            f"{'; '.join(found.problems)}"
        )
    return (
        f"its kernels ({form.kernels}) round by {found.rounding:.3g} of the greatest value, and at most "
        f"{MOST_ROUNDING:g} is allowed; without their rounding it is {found.parity:.2g} off: quantize the model with "
        "smaller blocks or an accuracy_level below 4, or raise export.tolerance"
    )


def _rounding(graph: onnx.GraphProto) -> Iterator[str]:
    """Yield the operator of each node whose kernel may round activations."""
    stored = {tensor.name for tensor in graph.initializer}
    makers = {name: node for node in graph.node for name in node.output}
    for node in graph.node:
        if node.op_type in REPLACED:
            yield node.op_type
        elif node.op_type in ("MatMul", "Gemm") and _has_weight_alone_quantized(node, makers, stored):
            yield f"{node.op_type} with DequantizeLinear"


def _has_weight_alone_quantized(node: onnx.NodeProto, makers: dict[str, onnx.NodeProto], stored: set[str]) -> bool:
    """Return whether the right operand of a product is a dequantized weight, and the left one is not dequantized."""
    left, right = (makers.get(name) for name in node.input[:2])
    # a weight may be transposed or cast after it is dequantized
    while right is not None and right.op_type in ("Transpose", "Cast", "Reshape"):
        right = makers.get(right.input[0])
    dequantized = right is not None and right.op_type == "DequantizeLinear" and right.input[0] in stored
    # with both operands dequantized the file itself rounds activations
    return dequantized and (left is None or left.op_type != "DequantizeLinear")


# -- what replaces a node; each changes it in place and yields new initializers


def _matmul_nbits(node: onnx.NodeProto, array: Callable[[str], Array]) -> Iterator[onnx.TensorProto]:
    _set(node, accuracy_level=EXACT_LEVEL)
    yield from ()


def _lstm(node: onnx.NodeProto, array: Callable[[str], Array]) -> Iterator[onnx.TensorProto]:
    for place, at in ((1, 8), (2, 10)):
        integers, scale, zero = (array(node.input[each]) for each in (place, at, at + 1))
        # [directions, inputs, 4 x hidden] here, [directions, 4 x hidden, inputs] in LSTM
        directions = len(integers)
        scale, zero = (each.astype(np.float32).reshape(directions, 1, -1) for each in (scale, zero))
        weight = ((integers.astype(np.float32) - zero) * scale).transpose(0, 2, 1)
        node.input[place] += f"/exact/{node.output[0] or node.output[-1]}"
        yield numpy_helper.from_array(np.ascontiguousarray(weight), node.input[place])
    del node.input[8:]
    node.op_type = "LSTM"
    node.domain = ""


def _mixture(node: onnx.NodeProto, array: Callable[[str], Array]) -> Iterator[onnx.TensorProto]:
    """Rows with one scale, and blocks of 4 bits, have a kernel that rounds nothing; MoE takes the place of others.

    MoE has no router_weights: with these the node stays as it is.
    """
    attributes = attributes_of(node)
    names = [*node.input, *[""] * 15]
    # each of the two products may have its own number of bits
    shared = attributes.get("expert_weight_bits", 4)
    bits = [attributes.get(f"fc{number}_expert_weight_bits", shared) for number in (1, 2)]
    if bits == [4, 4] or not attributes.get("block_size") or names[14]:
        _set(node, accuracy_level=EXACT_LEVEL)
        return
    for own, place, zero_place in ((bits[0], 2, 11), (bits[1], 5, 12)):
        integers = _unpack(array(names[place]), own)
        scale = array(names[place + 1]).astype(np.float32)
        # without zero points the integers are symmetric around the middle of their range
        middle = np.full(scale.shape, 2 ** (own - 1), np.float32)
        zero = _unpack(array(names[zero_place]), own)[..., : scale.shape[-1]] if names[zero_place] else middle
        blocks = integers.reshape(*scale.shape, -1)
        names[place] += f"/exact/{node.output[0]}"
        weight = ((blocks - zero[..., None]) * scale[..., None]).reshape(integers.shape)
        yield numpy_helper.from_array(weight.astype(np.float32), names[place])
    kept = ("k", "activation_type", "activation_alpha", "activation_beta", "swiglu_limit", "swiglu_fusion")
    values = {name: value for name, value in attributes.items() if name in kept}
    del node.attribute[:], node.input[:]
    node.input.extend(names[place] for place in (0, 1, 2, 4, 5, 7))
    node.op_type = "MoE"
    # QMoE's kernel takes the softmax over the chosen experts alone
    _set(node, **values, normalize_routing_weights=1)


REPLACED: dict[str, Callable[[onnx.NodeProto, Callable[[str], Array]], Iterator[onnx.TensorProto]]] = {
    "MatMulNBits": _matmul_nbits,
    "DynamicQuantizeLSTM": _lstm,
    "QMoE": _mixture,
}


def _unpack(packed: Array, bits: int) -> Array:
    """Return the integers of the last dimension of bytes as floats, the lowest bits first."""
    # a byte holds 8 / bits integers
    parts = packed[..., None] >> np.arange(0, 8, bits, dtype=np.uint8) & np.uint8(2**bits - 1)
    return parts.reshape(*packed.shape[:-1], -1).astype(np.float32)


def _set(node: onnx.NodeProto, **values: Any) -> None:
    """Set attributes of a node."""
    kept = [attribute for attribute in node.attribute if attribute.name not in values]
    del node.attribute[:]
    node.attribute.extend(kept)
    node.attribute.extend(onnx.helper.make_attribute(name, value) for name, value in values.items())
