"""Make random numbers that depend on the sample and the place in the tensor alone, not on what was drawn before.

    keys [B, 2]     a number for each sample (its position in the stream), and one for the whole step
    element         hash(key of its sample, number of the node, index along each axis)

A generator gives other numbers to other ranks, to micro-batches of another size and to a pass that is computed again.
These are the same on any number of ranks, in any division into micro-batches and pipeline stages, after a resume, and
when activations are recomputed; padding a row does not change its numbers, either.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence

import torch
from torch import Tensor

# the constants of splitmix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators), as signed integers
GOLDEN, FIRST, SECOND = (constant - 2**64 for constant in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def uniform(keys: Tensor, shape: Sequence[int], axis: int | None, name: str, draw: int = 0) -> Tensor:
    """Return numbers in (0, 1), fp64 of `shape`.

    keys: int64 [B, 2]. axis: that of the samples, of length m B for m of each sample one after the other; None = all
    samples share the numbers, which are those of the step. name: of the node. draw: of several of a node.
    """
    # each node has numbers of its own, whatever its place in the graph
    begin = (zlib.crc32(f"{name} {draw}".encode()) * GOLDEN) % 2**63
    if axis is None:
        lengths = list(shape)
        rows = -1
        state = keys[:1, 1].view([1] * max(len(lengths), 1))
    else:
        # the axis of m B elements becomes two, so that each of the m has an index within its sample
        lengths = [*shape[:axis], len(keys), shape[axis] // len(keys), *shape[axis + 1 :]]
        rows = axis
        state = keys[:, 0].view([-1 if place == axis else 1 for place in range(len(lengths))])
    state = _mixed(state + begin)
    for place, length in enumerate(lengths):
        if place != rows:
            index = torch.arange(length, device=keys.device)
            index = index.view([-1 if dim == place else 1 for dim in range(len(lengths))])
            # one axis after the other: equal indices on different axes give different numbers
            state = _mixed(state + (index + 1) * GOLDEN)
    # the upper 53 bits, and half of the last one, so that 0 and 1 are left out
    return ((_shifted(state, 11).double() + 0.5) * 2.0**-53).reshape(tuple(shape))


def normal(keys: Tensor, shape: Sequence[int], axis: int | None, name: str) -> Tensor:
    """Return numbers of the standard normal distribution, fp64 of `shape`, by the formula of Box and Muller."""
    radius, angle = (uniform(keys, shape, axis, name, draw) for draw in (0, 1))
    # u is above 0, so that its logarithm is finite
    return (-2 * radius.log()).sqrt() * (2 * math.pi * angle).cos()


def _mixed(x: Tensor) -> Tensor:
    # the finalizer of splitmix64; products wrap around, as of unsigned 64-bit integers
    x = (x ^ _shifted(x, 30)) * FIRST
    x = (x ^ _shifted(x, 27)) * SECOND
    return x ^ _shifted(x, 31)


def _shifted(x: Tensor, bits: int) -> Tensor:
    """Return x shifted to the right with zeros: torch repeats the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
