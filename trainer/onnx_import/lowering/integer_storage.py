"""Let gradients pass integers that were computed as floating-point numbers and only then stored as integers.

x --- levels (float) --- store_as (uint8) --- DequantizeLinear     the file: no gradient passes integers
x --- levels (float) ------------------------ DequantizeLinear     what is recorded: the same numbers

x --- levels (float) --- store_as (uint8) --- MaxPool                the file
x --- levels (float) --- MaxPool --- store_as (uint8)                what is recorded, for the operators in MOVES
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import fx

from onward.trainer.onnx_import.tracing.values import Traced, Value


def store_as(levels: torch.Tensor, dtype: torch.dtype, computed_in: torch.dtype) -> torch.Tensor:
    """Convert integers [...] that were computed in floating point to the type that they have in the file.

    computed_in: the floating-point type; `before_storage` reads it from the recorded call.
    """
    return levels.to(dtype)


def before_storage(x: Value) -> Value:
    """Return the floating-point value that `store_as` converted to x, so that gradients pass; else x itself."""
    if not isinstance(x, Traced) or x.node.target is not store_as:
        return x
    levels, _, computed_in = x.node.args
    assert isinstance(levels, fx.Node)
    first, second = (torch.empty(probe.shape, dtype=computed_in, device="meta") for probe in x.probes)  # type: ignore[arg-type]
    return Traced(x.tracer, levels, (first, second))


def move_before_storage(run: Callable[..., Value], operands: Sequence[Value]) -> Value:
    """Run the rule of an operator in MOVES on the values before storage, and store its results.

    Operands that are no results of `store_as` stay as they are. Returns NotImplemented if there are none or others of
    the integer type, which are computed as integers.
    """
    traced = [x for x in operands if isinstance(x, Traced)]
    stored = {x.dtype for x in traced if x.node.target is store_as}
    if len(stored) != 1:
        return NotImplemented
    kind = stored.pop()
    levels = [before_storage(x) for x in operands]
    computed_in = next(new.dtype for new, old in zip(levels, operands, strict=True) if new is not old)
    # all operands are moved together, so that none may stay an integer of this type
    for place, x in enumerate(levels):
        if isinstance(x, torch.Tensor) and x.dtype == kind:
            levels[place] = x.to(computed_in)  # a constant of the same type: a bound of Clip, or what Pad adds
        elif isinstance(x, Traced) and x.is_tensor and x.dtype == kind:
            return NotImplemented
    results = run(*levels)

    def store(result: Value) -> Value:
        # results of other types are no moved values, such as the indices of a MaxPool
        is_moved = isinstance(result, Traced) and result.is_tensor and result.dtype == computed_in
        return result.tracer.call(store_as, result, kind, computed_in) if is_moved else result

    return tuple(map(store, results)) if isinstance(results, tuple) else store(results)
