"""uint16, uint32 and uint64: torch stores these types but has few operations for them.

A call with such operands is computed in int64 and cast back:

    add(uint32 a, uint32 b)    ->    to(add(to(a, int64), to(b, int64)), uint32)

uint64 values of 2^63 and more do not fit into int64. Addition, comparison for equality, bit operations and moving data
are right in two's complement arithmetic all the same (MODULO_SAFE); every other call checks that the values fit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

from onward.trainer.errors import UnsupportedNode
from onward.trainer.onnx_import.tracing.probing import TORCH_ERRORS, as_function, meta_operands
from onward.trainer.onnx_import.tracing.values import Traced, Value

if TYPE_CHECKING:
    from onward.trainer.onnx_import.tracing.tracing import Tracer

WIDE_UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)

ANY_DTYPE = ("to", "view", "size", "reshape", "permute", torch.unsqueeze, torch.squeeze, torch.zeros_like)
"""Calls that torch has for every type, and casts."""

MODULO_SAFE = (
    torch.add, torch.sub, torch.mul, torch.neg, torch.eq, torch.bitwise_and, torch.bitwise_or, torch.bitwise_xor,
    torch.bitwise_not, torch.bitwise_left_shift, torch.cat, torch.stack, torch.split, torch.flip, torch.where, "repeat",
)  # fmt: skip
"""Calls whose int64 result is right for every uint64 operand."""


def needs_int64(function: Callable[..., Any] | str, args: Any, kwargs: Any) -> bool:
    """Return whether a call has an operand of a wide unsigned type that torch cannot compute with."""
    return function not in ANY_DTYPE and any(map(_is_wide, pytree.tree_leaves((args, kwargs))))


def _is_wide(leaf: Any) -> bool:
    is_tensor = isinstance(leaf, torch.Tensor) or (isinstance(leaf, Traced) and leaf.is_tensor)
    return is_tensor and leaf.dtype in WIDE_UNSIGNED


def call_in_int64(tracer: Tracer, function: Callable[..., Any] | str, args: Any, kwargs: Any) -> Value:
    """Record a call on int64 copies of its wide operands. Results get the types that torch would give them."""

    def widen(leaf: Any) -> Any:
        if not _is_wide(leaf):
            return leaf
        if leaf.dtype == torch.uint64 and function not in MODULO_SAFE:
            return tracer.call_as_is(to_int64_if_it_fits, (leaf,), {})
        return tracer.call_as_is("to", (leaf, torch.int64), {})

    def narrow(value: Value, like: Any) -> Value:
        return tracer.call_as_is("to", (value, like.dtype), {}) if _is_wide(like) else value

    try:
        # meta tensors take the wide types; only the arithmetic is missing
        picked, named = meta_operands(0, args, kwargs)
        expected = as_function(function)(*picked, **named)
    except TORCH_ERRORS as error:
        raise UnsupportedNode(f"torch refuses it: {str(error).splitlines()[0]}") from error
    # the types of the results come from torch itself, the numbers from int64
    widened, widened_named = pytree.tree_map(widen, (args, kwargs))
    result = tracer.call_as_is(function, widened, widened_named)
    if isinstance(expected, list | tuple):
        return tuple(narrow(*pair) for pair in zip(result, expected, strict=True))
    return narrow(result, expected)


def to_int64_if_it_fits(x: torch.Tensor) -> torch.Tensor:
    """Cast uint64 [...] to int64. Raises RuntimeError for values of 2^63 and more."""
    cast = x.to(torch.int64)
    # without reading it on the host, which would wait for the device
    if cast.device.type != "meta":
        torch._assert_async((cast >= 0).all(), "uint64 values of 2^63 and more are not implemented here")
    return cast
