"""Rules for changes of element type (Cast, CastLike, BitCast), and the rounding to types of 8 bits and fewer."""

from __future__ import annotations

import torch
from onnx import TensorProto

from onward.trainer.errors import UnsupportedNode
from onward.trainer.onnx_graph.files.element_types import HALVES, PACKED, torch_dtype
from onward.trainer.onnx_graph.files.index import PACKED_BITS, element_type_name
from onward.trainer.onnx_import.lowering.converter_table import Call, lower
from onward.trainer.onnx_import.lowering.integer_storage import before_storage
from onward.trainer.onnx_import.tracing.values import Value

INT_BITS = {target: bits for target, bits in PACKED_BITS.items() if target != TensorProto.FLOAT4E2M1}


@lower("Cast", since=(6, 9, 13, 19, 21, 23, 24, 25, 28))
def cast(c: Call, x: Value) -> Value:
    return convert(c, x, c.attr("to"))


@lower("CastLike", since=(15, 19, 21, 23, 24, 25))
def cast_like(c: Call, x: Value, like: Value) -> Value:
    return convert(c, x, c.element_type(like))


def convert(c: Call, x: Value, target: int) -> Value:
    """Convert x to an ONNX element type, by the node's attributes saturate and round_mode."""
    # both are read whatever the target: `run_rule` refuses attributes that a rule has not read
    saturate = bool(c.attr("saturate", 1))
    round_mode = c.attr("round_mode", "up")
    dtype = c.dtype(target)
    if dtype.is_floating_point and dtype.itemsize > 1:
        x = before_storage(x)
    # one torch type stores several packed types, whose values differ
    same_values = x.dtype == dtype and not is_packed(x) and target not in PACKED
    if c.element_type(x) == target or same_values:
        return x
    if target == TensorProto.FLOAT8E8M0:
        return c(to_power_of_two, x, saturate, round_mode)
    if is_float8(dtype):
        return c(to_float8, x, dtype, saturate)
    if target == TensorProto.FLOAT4E2M1:
        return mark_packed(c(to_float4, x), target)
    if target in INT_BITS:
        return mark_packed(c(to_few_bits, x, INT_BITS[target], dtype), target)
    # a value of its own where only the mark of a packed type is left off
    return c("clone", x) if x.dtype == dtype else c("to", x, dtype)


def widen_half(x: torch.Tensor, anchor: torch.Tensor) -> torch.Tensor:
    """Convert an input [...] in half precision to the type the module computes in, which is that of its anchor."""
    return x.to(anchor.dtype)


def mark_packed(x: Value, target: int) -> Value:
    """Return the value, marked as of a type of less than a byte, which torch holds in a byte."""
    x.packed = target
    return x


def is_packed(x: Value) -> bool:
    """Whether a value is marked as of a type of less than a byte."""
    return bool(getattr(x, "packed", None))


def is_float8(dtype: torch.dtype) -> bool:
    """Whether a type is one of the 8-bit floating-point types."""
    return dtype.is_floating_point and dtype.itemsize == 1


def to_float8(x: torch.Tensor, dtype: torch.dtype, saturate: bool) -> torch.Tensor:
    """Round x [...] to the nearest value; beyond the largest, saturate or give infinity (NaN in a type without one)."""
    x = x.to(torch.float32)
    greatest = torch.finfo(dtype).max
    # clamped in fp32: torch itself does not saturate in each of the types
    if saturate:
        return x.clamp(-greatest, greatest).to(dtype)
    if dtype == torch.float8_e4m3fn:  # has no infinity, and torch saturates: 464 is the largest that rounds to 448
        x = torch.where(x.abs() > 464, torch.nan, x)
    return x.to(dtype)


def to_power_of_two(x: torch.Tensor, saturate: bool, round_mode: str) -> torch.Tensor:
    """Round x [...] to float8_e8m0, which has an exponent only (2^-127 to 2^127); of negative numbers, that of |x|."""
    # out-of-range exponents are marked by -200 and 200, beyond any of fp32
    x = x.to(torch.float32).abs()
    mantissa, exponent = torch.frexp(x)  # mantissa from 0.5 to 1
    # up: to the next power of two above; nearest: from 1.5 times a power of two on
    rounds_up = mantissa > 0.5 if round_mode == "up" else mantissa >= 0.75
    exponent = exponent - 1 + (rounds_up & (round_mode != "down")).to(exponent.dtype)
    exponent = torch.where(x == 0, -200, torch.where(x.isinf(), 200, exponent))
    outside = (exponent < -127) | (exponent > 127)
    lost = x.isnan() if saturate else x.isnan() | outside
    # the exponent is stored with a bias of 127, and 255 is NaN
    bits = torch.where(lost, 255, exponent.clamp(-127, 127) + 127)
    powers: torch.Tensor = bits.to(torch.uint8).view(torch.float8_e8m0fnu)
    return powers


def to_float4(x: torch.Tensor) -> torch.Tensor:
    """Round x [...] to the nearest of 0, 0.5, 1, 1.5, 2, 3, 4, 6, with the sign; halves to the even mantissa.

    float4 has no NaN: as in the reference of ONNX's tests, it becomes -0.
    """
    size = x.to(torch.float32).abs().clamp(max=6)
    # the spacing of values is 0.5 below 2, 1 below 4, and 2 up to 6
    step = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0))
    return torch.where(x.isnan(), -0.0, torch.copysign(torch.round(size / step) * step, x))


def to_few_bits(x: torch.Tensor, bits: int, dtype: torch.dtype) -> torch.Tensor:
    """Keep the lowest bits of integers [...], each number in a byte of its own (int8 if it is signed)."""
    whole: torch.Tensor = x.to(torch.int32) & (2**bits - 1)
    # two's complement of so many bits
    if dtype.is_signed:
        whole = whole - (whole >= 2 ** (bits - 1)).to(torch.int32) * 2**bits
    return whole.to(dtype)


@lower("BitCast", since=(26,))
def bit_cast(c: Call, x: Value) -> Value:
    target = c.attr("to")
    source = c.element_type(x)
    if target in INT_BITS and source in INT_BITS:
        return mark_packed(c(to_few_bits, x, INT_BITS[target], c.dtype(target)), target)
    bits = torch_dtype(target) if target not in HALVES else HALVES[target]
    # several numbers share a byte there, so that lengths would change
    if target in PACKED or is_packed(x) or bits.itemsize != x.dtype.itemsize:
        raise UnsupportedNode(f"bits of {element_type_name(source)} as {element_type_name(target)}")
    # half precision is computed in fp32, so that the bits are read first and then widened
    seen = c("view", x, bits)
    return c("to", seen, torch.float32) if target in HALVES else seen
