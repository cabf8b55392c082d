"""Changes of element type: Cast, CastLike, BitCast, and how values are rounded to the types of 8 bits and fewer."""

from __future__ import annotations

import torch
from onnx import TensorProto
from torch import fx

from onward.trainer.errors import UnsupportedNode
from onward.trainer.onnx_graph.element_types import PACKED, element_type_name, torch_dtype
from onward.trainer.onnx_import.registry import Call, lower
from onward.trainer.onnx_import.values import Traced, Value

INT_BITS: dict[int, int] = {TensorProto.INT4: 4, TensorProto.UINT4: 4, TensorProto.INT2: 2, TensorProto.UINT2: 2}
HALVES: dict[int, torch.dtype] = {TensorProto.FLOAT16: torch.float16, TensorProto.BFLOAT16: torch.bfloat16}


@lower("Cast", since=(6, 9, 13, 19, 21, 23, 24, 25, 28))
def cast(c: Call, x: Value) -> Value:
    return convert(c, x, c.attr("to"))


@lower("CastLike", since=(15, 19, 21, 23, 24, 25))
def cast_like(c: Call, x: Value, like: Value) -> Value:
    return convert(c, x, c.element_type(like))


def convert(c: Call, x: Value, target: int) -> Value:
    """x as an ONNX element type, by the node's saturate and round_mode."""
    saturate, round_mode = bool(c.attr("saturate", 1)), c.attr("round_mode", "up")
    dtype = c.dtype(target)
    if dtype.is_floating_point and dtype.itemsize > 1:
        x = behind(c, x)
    if c.element_type(x) == target or (x.dtype == dtype and not is_small(x) and not _is_small(target)):
        return x
    if target == TensorProto.FLOAT8E8M0:
        return c(to_power_of_two, x, saturate, round_mode)
    if is_float8(dtype):
        return c(to_float8, x, dtype, saturate)
    if target == TensorProto.FLOAT4E2M1:
        return mark(c(to_float4, x), target)
    if target in INT_BITS:
        return mark(c(to_few_bits, x, INT_BITS[target], dtype), target)
    return c("clone", x) if x.dtype == dtype else c("to", x, dtype)


def stored_as(levels: torch.Tensor, dtype: torch.dtype, computed_in: torch.dtype) -> torch.Tensor:
    """Whole numbers that were computed in floating point, as the type the file says they have."""
    return levels.to(dtype)


def behind(c: Call, x: Value) -> Value:
    """What was stored as x, in floating point and with its gradient; else x itself."""
    if not isinstance(x, Traced) or x.node.target is not stored_as:
        return x
    levels, _, computed_in = x.node.args
    assert isinstance(levels, fx.Node)
    first, second = (torch.empty(probe.shape, dtype=computed_in, device="meta") for probe in x.probes)  # type: ignore[arg-type]
    return Traced(c.tracer, levels, (first, second))


def mark(x: Value, target: int) -> Value:
    """The value, known to be of a type of less than a byte."""
    x.packed = target
    return x


def is_small(x: Value) -> bool:
    """Whether a value is known to be of a type of less than a byte."""
    return bool(getattr(x, "packed", None))


def _is_small(target: int) -> bool:
    return target in PACKED


def is_float8(dtype: torch.dtype) -> bool:
    """Whether it is one of the 8-bit floating-point types."""
    return dtype.is_floating_point and dtype.itemsize == 1


def to_float8(x: torch.Tensor, dtype: torch.dtype, saturate: bool) -> torch.Tensor:
    """Rounded to the nearest; beyond the greatest it is the greatest, or what the type has in place of infinity."""
    x, greatest = x.to(torch.float32), torch.finfo(dtype).max
    if saturate:
        return x.clamp(-greatest, greatest).to(dtype)
    if dtype == torch.float8_e4m3fn:  # has no infinity, and torch saturates: 464 is what still rounds to 448
        x = torch.where(x.abs() > 464, torch.nan, x)
    return x.to(dtype)


def to_power_of_two(x: torch.Tensor, saturate: bool, round_mode: str) -> torch.Tensor:
    """float8_e8m0: an exponent alone, from 2^-127 to 2^127; of negative numbers, that of their absolute value."""
    x = x.to(torch.float32).abs()
    mantissa, exponent = torch.frexp(x)  # mantissa from 0.5 to 1
    rounds_up = mantissa > 0.5 if round_mode == "up" else mantissa >= 0.75
    exponent = exponent - 1 + (rounds_up & (round_mode != "down")).to(exponent.dtype)
    exponent = torch.where(x == 0, -200, torch.where(x.isinf(), 200, exponent))
    outside = (exponent < -127) | (exponent > 127)
    lost = x.isnan() if saturate else x.isnan() | outside
    bits = torch.where(lost, 255, exponent.clamp(-127, 127) + 127)
    found: torch.Tensor = bits.to(torch.uint8).view(torch.float8_e8m0fnu)
    return found


def to_float4(x: torch.Tensor) -> torch.Tensor:
    """The nearest of 0, 0.5, 1, 1.5, 2, 3, 4, 6, with the sign; of two as near, the one with an even mantissa.

    The type has no NaN: as in the suite's reference, it becomes -0.
    """
    size = x.to(torch.float32).abs().clamp(max=6)
    step = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0))
    return torch.where(x.isnan(), -0.0, torch.copysign(torch.round(size / step) * step, x))


def to_few_bits(x: torch.Tensor, bits: int, dtype: torch.dtype) -> torch.Tensor:
    """An integer's lowest bits, held in a byte of their own, int8 if they are a signed number."""
    whole: torch.Tensor = x.to(torch.int32) & (2**bits - 1)
    if dtype.is_signed:
        whole = whole - (whole >= 2 ** (bits - 1)).to(torch.int32) * 2**bits
    return whole.to(dtype)


@lower("BitCast", since=(26,))
def bit_cast(c: Call, x: Value) -> Value:
    target, source = c.attr("to"), c.element_type(x)
    if target in INT_BITS and source in INT_BITS:
        return mark(c(to_few_bits, x, INT_BITS[target], c.dtype(target)), target)
    bits = torch_dtype(target) if target not in HALVES else HALVES[target]
    if _is_small(target) or is_small(x) or bits.itemsize != x.dtype.itemsize:
        raise UnsupportedNode(f"bits of {element_type_name(source)} as {element_type_name(target)}")
    seen = c("view", x, bits)
    return c("to", seen, torch.float32) if target in HALVES else seen
