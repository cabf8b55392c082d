"""Run a torch call on meta tensors at the two trial sizes, without memory or arithmetic."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx.node import map_aggregate
from torch.utils import _pytree as pytree

from onward.trainer.errors import UnsupportedNode
from onward.trainer.onnx_import.tracing.probed_calls import ProbedCalls, call_key
from onward.trainer.onnx_import.tracing.values import NeedsRuntimeValues, Traced

TORCH_ERRORS = (RuntimeError, NotImplementedError, IndexError, ValueError, TypeError)
"""What torch raises for operands that it does not take."""

RETRY_LENGTHS = (1, 2, 4, 7, 12, 60, 224)


def as_function(call: Callable[..., Any] | str) -> Callable[..., Any]:
    """Return the function itself, or for a string the tensor method of that name as a function."""
    if not isinstance(call, str):
        return call

    def run(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return getattr(tensor, call)(*args, **kwargs)

    return run


def probe(function: Callable[..., Any] | str, args: Any, kwargs: Any, known: ProbedCalls) -> tuple[Any, Any]:
    """Return the results of a call of a function, or of a tensor method, at the first and at the second trial size.

    known: what equal calls gave. Raises UnsupportedNode if torch refuses the operands at every size, and
    NeedsRuntimeValues if the result depends on values, which meta tensors do not have, or if other sizes than the two
    would work.
    """
    run = as_function(function)
    key = call_key(function)
    try:
        first, second = (known.run(key, run, *meta_operands(side, args, kwargs)) for side in (0, 1))
        if isinstance(first, list | tuple) and len(first) != len(second):
            raise NeedsRuntimeValues("how many results it has depends on a dynamic dimension")
        return first, second
    except TORCH_ERRORS as error:
        reason = f"torch refuses it: {str(error).splitlines()[0] if str(error) else type(error).__name__}"
        # torch's own error for meta tensors, or lengths that only this graph's real inputs fulfil
        if _needs_values(error) or _works_at_some_size(run, args, kwargs):
            raise NeedsRuntimeValues(reason) from error
        raise UnsupportedNode(reason) from error


def meta_operands(side: int, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Return the operands of a call as meta tensors, at the first (0) or the second trial size."""

    def pick(leaf: Any) -> Any:
        if isinstance(leaf, Traced):
            return leaf.probes[side]
        # constants too: torch refuses calls that mix meta tensors with tensors of another device
        return leaf.to("meta") if isinstance(leaf, torch.Tensor) else leaf

    return map_aggregate(tuple(args), pick), map_aggregate(dict(kwargs), pick)


def _needs_values(error: Exception) -> bool:
    """Return whether torch's message says that a meta tensor lacks the values that the call reads."""
    # there is no exception class for it; the message is all that torch gives
    return "meta" in str(error).lower() and not isinstance(error, IndexError | TypeError)


def _works_at_some_size(run: Callable[..., Any], args: Any, kwargs: Any) -> bool:
    """Return whether the call works with all dynamic dimensions at one of RETRY_LENGTHS.

    A file may take only multiples of 7, for example. Then the real lengths decide when the graph runs.
    """
    traced = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Traced)]
    # with static operands alone there is no other size to try
    if not any(leaf.is_dynamic for leaf in traced):
        return False

    def works(length: int) -> bool:
        def pick(leaf: Any) -> Any:
            if not isinstance(leaf, Traced):
                return leaf.to("meta") if isinstance(leaf, torch.Tensor) else leaf
            first, second = leaf.probes
            # a number computed from a dynamic length takes part with the length itself
            if not isinstance(first, torch.Tensor):
                return first if first == second else length
            shape = [a if a == b else length for a, b in zip(first.shape, second.shape, strict=True)]
            return torch.empty(shape, dtype=first.dtype, device="meta")

        try:
            picked, named = pytree.tree_map(pick, (args, kwargs))
            with torch.no_grad():
                run(*picked, **named)
        except TORCH_ERRORS:
            return False
        return True

    return any(works(length) for length in RETRY_LENGTHS)
