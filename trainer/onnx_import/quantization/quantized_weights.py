"""Train weights that a file stores as integers with a scale and a zero point.

    file        q (int8) ------------------------------------------------ DequantizeLinear(scale, zero) --- Conv
    module      w = scale (q - zero) --- quantized_values --- store_as --- DequantizeLinear(scale, zero) --- Conv
                Parameter, fp32          round, clamp        (int8)
    file        q' = round(w / scale) + zero, clamped; an element of w without change keeps its q

The parameter has the name of the stored integers. The module computes with the rounded values, so that it computes what
the written file will compute; gradients pass the rounding (ops/quantized/quant.py). What is smaller than half a scale
accumulates in the parameter and in checkpoints, and is lost in the written file. Scales and zero points do not change.

A tensor is trained so if the scale is stored in the file, is nowhere 0, and all nodes that read the integers agree on
it. In place of DequantizeLinear there may be Cast, Sub and Mul (scaled_integers.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import onnx
import torch

from onward.trainer.errors import ConfigError
from onward.trainer.onnx_graph.files.element_types import DTYPES
from onward.trainer.onnx_graph.files.index import attributes_of
from onward.trainer.onnx_graph.files.stored_protos import stored_protos
from onward.trainer.onnx_graph.initializers import stored_tensors
from onward.trainer.onnx_import.lowering.integer_storage import store_as
from onward.trainer.onnx_import.ops.cast import is_packed
from onward.trainer.onnx_import.roles.role_tables import MOVES
from onward.trainer.onnx_import.roles.roles import Role
from onward.trainer.onnx_import.roles.scaled_integers import (
    Axes,
    Readers,
    ScaledIntegers,
    Use,
    is_code,
    makes_floats,
    whole,
)
from onward.trainer.onnx_import.scaled_values import (
    ScaleLayout,
    broadcast_scale,
    dequantize,
    integer_bounds,
    quantized_values,
    scale_axis,
)
from onward.trainer.onnx_import.tracing.tracing import Tracer
from onward.trainer.onnx_import.tracing.values import Value

INTEGERS = (torch.int8, torch.uint8, torch.int16, torch.uint16, torch.int32)


@dataclass(frozen=True)
class QuantizedWeight:
    """Integers that are stored in a file, and what they mean."""

    integers: torch.Tensor
    scale: torch.Tensor
    zero: torch.Tensor | None
    layout: ScaleLayout
    parameters: frozenset[str]
    """Names of the stored scales, and of the zero point."""
    scale_name: str = ""
    """The name of the scale, if it is one stored tensor."""
    only_scales: frozenset[str] = frozenset()
    """The names among them whose operators do not show what they are: they are read by Mul and Sub, and nothing else
    reads them."""

    @property
    def bounds(self) -> tuple[int, int]:
        """Return the smallest and the greatest integer of the type."""
        return integer_bounds(self.integers.dtype)

    def dequantized(self) -> torch.Tensor:
        """Return scale (q - zero), in fp32 and in the shape of the integers."""
        return dequantize(self.integers, self.scale, self.zero, self.layout)

    def quantized(self, weight: torch.Tensor) -> torch.Tensor:
        """Return the integers nearest to weight / scale + zero; those of the file where the weight has not changed.

        weight: of the shape of the integers.
        """
        before = self.dequantized()
        weight = weight.detach().cpu()
        # fp32 represents integers up to 2^24
        wide = torch.float64 if self.integers.dtype == torch.int32 else self.scale.dtype
        # the same function as in training, so that the file holds what the module computed with
        nearest = quantized_values(weight.to(wide), self.scale.to(wide), self.zero, self.layout, self.bounds)
        # an unchanged weight keeps its integer: the division could else round to a neighbour
        return torch.where(weight == before, self.integers.long(), nearest.long()).to(self.integers.dtype)

    def steps_from(self, weight: torch.Tensor) -> torch.Tensor:
        """Return how far the integers are from a weight in units of the scale, in fp64; none beyond their range.

        Weight and result have the shape of the integers.
        """
        zero = 0.0 if self.zero is None else broadcast_scale(self.zero, weight, self.layout).double()
        exact = weight.detach().cpu().double() / broadcast_scale(self.scale, weight, self.layout).double() + zero
        return (exact.clamp(*self.bounds) - self.integers.double()).abs()

    def traced(self, tracer: Tracer, weight: Value, scale: Value = None) -> Value:
        """Return the parameter `weight`, quantized, as a value of the type that the file stores.

        scale: where it is not that of the file.
        """
        scale = self.scale if scale is None else scale
        levels = tracer.call(quantized_values, weight, scale, self.zero, self.layout, self.bounds)
        return tracer.call(store_as, levels, self.integers.dtype, self.scale.dtype)


def quantized_weights(graph: onnx.GraphProto, stored: Mapping[str, torch.Tensor]) -> dict[str, QuantizedWeight]:
    """Return the stored integers of the main graph that can be trained. stored: as the file stores them."""
    # all nodes that read a value, those of inner graphs included
    readers = Readers(graph)
    scaled = ScaledIntegers(readers, stored)

    def uses(value: str, weight: torch.Tensor, axes: Axes) -> Iterator[Use | None]:
        """Yield how each reader of a value dequantizes it. axes: where the axes of the weight are in the value."""
        # where a reader cannot be seen, nothing is known of the scale
        if value in readers.unknown:
            yield None
        for _, node, position in readers.of(value):
            # a node that moves integers keeps their meaning: its readers decide
            if node.op_type in MOVES and position == 0 and len(node.output) == 1:
                yield from uses(node.output[0], weight, axes.after(node))
            # integers that are cast and scaled by Mul and Sub, in place of a DequantizeLinear
            elif makes_floats(node) and is_code(weight):
                yield from scaled.uses(node.output[0], weight, axes)
            else:
                yield _use(node, position, weight, stored, moved=axes != whole(weight))

    weights = {}
    for name, tensor in stored.items():
        if _is_integer(tensor) and tensor.numel():
            # one way alone: nodes that disagree on the scale, or read the integers themselves, leave no float to train
            ways = set(uses(name, tensor, whole(tensor)))
            if len(ways) == 1 and (use := ways.pop()) is not None and _can_scale(use, stored):
                weights[name] = _weight(tensor, use, stored)
    return {
        name: replace(weight, only_scales=frozenset(filter(scaled.only_scales, weight.parameters)))
        for name, weight in weights.items()
    }


def roles_of_quantized(found: Mapping[str, Role], quantized: Mapping[str, QuantizedWeight]) -> dict[str, Role]:
    """Return the roles, in which integers whose scale is trained itself (by model.train) are frozen."""

    def role_of(name: str, role: Role) -> Role:
        if name not in quantized or role.kind != "trained":
            return role
        # integers are rounded with a scale that does not change
        for scale in quantized[name].parameters:
            if scale in found and found[scale].kind == "trained":
                return Role("frozen", f"stored as integers, whose scale {scale} is trained")
        return role

    return {name: role_of(name, role) for name, role in found.items()}


def scales_of(quantized: Mapping[str, QuantizedWeight]) -> dict[str, str]:
    """Return the stored tensors that are scales or zero points and nothing else, with the integers that they scale.

    Without those of DequantizeLinear and the like, which the analysis of roles knows by their operators.
    """
    return {scale: name for name, weight in quantized.items() for scale in weight.only_scales}


def with_dequantized(graph: onnx.GraphProto, stored: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the stored tensors, dequantized where they are integers that can be trained."""
    return dict(stored) | {name: weight.dequantized() for name, weight in quantized_weights(graph, stored).items()}


def stored_as_integers(
    graph: onnx.GraphProto, weights: Mapping[str, torch.Tensor], base: Path | None
) -> dict[str, torch.Tensor]:
    """Return the weights, those as integers that the graph stores as integers. base: directory of external data.

    weights: initializer name -> trained value; where scales have changed, with these. Raises ConfigError where the
    nodes of the graph disagree on the scale.
    """
    integers = {name for name in integer_names(graph) & weights.keys() if weights[name].is_floating_point()}
    if not integers:
        return dict(weights)
    # scales may have been trained or recalibrated: the integers are rounded with the new ones
    others = {name: weight.detach().cpu() for name, weight in weights.items() if name not in integers}
    quantized = quantized_weights(graph, stored_tensors(graph, base) | others)
    # nodes outside of the trained part were not looked at before, and may disagree
    if lost := sorted(integers - quantized.keys()):
        raise ConfigError(
            f"{lost[0]!r} is stored as integers that nodes outside of the trained part read with another scale: it "
            f"cannot be written back; freeze it with model.freeze = [{lost[0]!r}]"
        )
    return {name: quantized[name].quantized(w) if name in integers else w for name, w in weights.items()}


def integer_names(graph: onnx.GraphProto) -> set[str]:
    """Return the names of stored tensors of integer types."""
    return {name for name, proto in stored_protos(graph) if DTYPES.get(proto.data_type) in INTEGERS}


def _is_integer(tensor: torch.Tensor | None) -> bool:
    return tensor is not None and tensor.dtype in INTEGERS and not is_packed(tensor)


# -- what the operators read


def _use(
    node: onnx.NodeProto, position: int, weight: torch.Tensor, stored: Mapping[str, torch.Tensor], *, moved: bool
) -> Use | None:
    """Return how an operand is dequantized; None if it is no weight, or if its scale is computed in the graph."""
    # absent optional operands at the end are empty names, so that every position can be read
    operands = [*node.input, *[""] * 9]
    # the operand that was asked for, of the weights that the operator may have
    operand_use = next((use for at, use in _weights_of(node, weight.ndim, operands) if at == position), None)
    if operand_use is None or (operand_use.zero and operand_use.zero not in stored):
        return None
    if not _can_scale(operand_use, stored):
        return None
    scales = [stored[name] for name in operand_use.scales]
    # a single number belongs to no axis, wherever the axes of the weight are by then
    if all(scale.numel() == 1 for scale in scales):
        return replace(operand_use, axis=0, block=0)
    if moved or operand_use.block:
        return None if moved else operand_use
    # matrices of scales (one for each row of each product of a batch) have no axis
    if operand_use.axis >= weight.ndim:
        return None
    # one scale for all, or one for each index of the axis: anything else does not fit the weight
    length = weight.shape[operand_use.axis]
    fits = all(scale.numel() == 1 or scale.shape == (length,) for scale in scales)
    return operand_use if fits else None


def _can_scale(use: Use, stored: Mapping[str, torch.Tensor]) -> bool:
    """Return whether the scales are stored in fp32 and are nowhere 0, as some tools give channels that are all zero."""
    for name in use.scales:
        scale = stored.get(name)
        if scale is None or scale.dtype != torch.float32 or not bool(scale.all()):
            return False
    return True


def _weights_of(node: onnx.NodeProto, ndim: int, name: list[str]) -> Iterator[tuple[int, Use]]:
    """Yield (position, how it is dequantized) of the operands of a node that may be weights. ndim: of the weight."""
    # operands in the order of ONNX and of onnxruntime: each weight with its own scale and zero point
    attributes = attributes_of(node)
    operator = node.op_type
    if operator == "DequantizeLinear":
        # of a tensor with fewer axes the default axis 1 does not exist
        axis = scale_axis(attributes.get("axis", 1), ndim)
        yield 0, Use((name[1],), name[2], axis, attributes.get("block_size", 0))
    elif operator == "QLinearConv":
        yield 3, Use((name[4],), name[5], 0)
        # the bias counts in units of the scales of input and weight, with the zero point 0
        yield 8, Use((name[1], name[4]), "", 0)
    # scales of the left operand are for its rows, of the right one for its columns
    elif operator == "QLinearMatMul":
        yield 0, Use((name[1],), name[2], max(ndim - 2, 0))
        yield 3, Use((name[4],), name[5], max(ndim - 1, 0))
    # with another alpha the bias would count in other units than both scales
    elif operator == "QGemm" and attributes.get("alpha", 1.0) == 1.0:
        yield 3, Use((name[4],), name[5], 0 if attributes.get("transB", 0) else 1)
        yield 6, Use((name[1], name[4]), "", max(ndim - 1, 0))
    elif operator == "MatMulIntegerToFloat":
        yield 1, Use((name[3],), name[5], max(ndim - 1, 0))
    elif operator == "DynamicQuantizeMatMul":
        yield 1, Use((name[2],), name[3], max(ndim - 1, 0))
    # the packed projection of query, key and value, with a scale for each of its columns
    elif operator == "QAttention":
        yield 1, Use((name[4],), name[7], 1)
    elif operator == "QLinearWhere":
        yield 1, Use((name[2],), name[3], 0)
        yield 4, Use((name[5],), name[6], 0)
    elif operator in ("QLinearAdd", "QLinearMul"):
        yield 0, Use((name[1],), name[2], 0)
        yield 3, Use((name[4],), name[5], 0)


def _weight(integers: torch.Tensor, use: Use, stored: Mapping[str, torch.Tensor]) -> QuantizedWeight:
    # a bias counts in the product of two scales
    scale = torch.ones(())
    for name in use.scales:
        # a product of one scale for all and one for each index has those of the latter
        factor = stored[name].reshape(()) if stored[name].numel() == 1 else stored[name]
        scale = scale * factor
    zero = stored[use.zero] if use.zero else None
    names = frozenset(filter(None, (*use.scales, use.zero)))
    single = use.scales[0] if len(use.scales) == 1 else ""
    return QuantizedWeight(integers, scale, zero, (use.axis, use.block), names, single)
