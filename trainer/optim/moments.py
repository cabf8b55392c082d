"""Keep the moments of the update rules in fp32 or bf16; compute with them in fp32.

    for batch in segments(optimizer, group, gradients):
        with in_fp32(batch, seed=seed, step=group["updates"]) as moments:
            ...                                         # change both in place; they are rounded on leaving

bf16 halves the memory of the moments. They are rounded stochastically: up or down, to the nearer one more often, so
that the expected value is exact. Rounding to nearest loses every change below 1/512 of a value: a second moment that
decays by 1/1000 per step would stop at a quarter of its limit.

The random bits do not come from a generator. They are a hash of (seed, step, name, position of the element in the full
weight). So there is no state to save, a repeated step gets the same bits, copies of a weight stay equal, and every
layout rounds with the same bits.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from onward.trainer.distributed.weights import Placement, Weight

CHUNK = {"cpu": 1 << 16, "cuda": 1 << 22}
"""Elements that are updated together when there are temporary fp32 copies: as many as the cache of a core holds; on a
GPU enough to keep it busy."""
MIXING = ((16, 0x7FEB352D), (15, 0x846CA68B), (16, 1))
"""(shift, odd multiplier) of each round of a hash of 32 bits: https://github.com/skeeto/hash-prospector, lowbias32.
A hash of 32 bits, because vector units multiply eight 32-bit integers at once and no 64-bit ones."""


Group = dict[str, Any]
"""torch's parameter group: `params`, `lr`; and our `settings` (a WeightSettings), the `weights` that belong to
`params`, their `numbers` in the order given to build_optimizer, and `updates`: how often they have been updated. It is
their `step` in the state as a number of the host, which would wait for the GPU to read that one."""


# -- storage


@dataclass(frozen=True)
class Segment:
    """Consecutive elements of a weight, with their gradients and moments."""

    weight: Tensor
    gradient: Tensor
    moments: tuple[Tensor, ...]
    """At most two."""
    step: Tensor
    """Updates of the weight, 0-dimensional."""
    of: Weight
    start: int
    """Position of the first element in this rank's part of the weight."""


def count_step(optimizer: torch.optim.Optimizer, group: Group) -> list[dict[str, Tensor]]:
    """Count a step of the group's weights, and return the state of each."""
    states = [optimizer.state[weight] for weight in group["params"]]
    if states:
        # one call for all weights: a loop would start one kernel for each
        torch._foreach_add_([state["step"] for state in states], 1.0)
        group["updates"] += 1
    return states


def segments(optimizer: torch.optim.Optimizer, group: Group, gradients: Sequence[Tensor]) -> Iterator[list[Segment]]:
    """Count a step of the group's weights, and yield all their elements in lists of about CHUNK elements.

    A weight is split at multiples of CHUNK of its own elements, so that all copies of it are split equally. Weights and
    gradients must be contiguous.
    """
    states = count_step(optimizer, group)
    batch: list[Segment] = []
    size = 0
    for of, gradient, state in zip(group["weights"], gradients, states, strict=True):
        moments = tuple(tensor for field, tensor in state.items() if field != "step")
        full = Segment(of.tensor.detach(), gradient, moments, state["step"], of, 0)
        for segment in _split(full):
            length = segment.weight.numel()
            # the batch is closed before it grows beyond the cache; a segment alone is never larger than CHUNK
            if size + length > CHUNK[gradient.device.type] and batch:
                yield batch
                batch = []
                size = 0
            if length:
                batch.append(segment)
                size += length
    if batch:
        yield batch


def _split(whole: Segment) -> Iterator[Segment]:
    """Yield the segments of a weight."""
    # the starts are multiples of CHUNK, whatever other weights share the batch: equal copies get equal segments
    length = CHUNK[whole.weight.device.type]
    weight, gradient, *moments = (x.view(-1) for x in (whole.weight, whole.gradient, *whole.moments))
    for start in range(0, len(weight), length):
        held = slice(start, start + length)
        yield Segment(weight[held], gradient[held], tuple(m[held] for m in moments), whole.step, whole.of, start)


@contextmanager
def in_fp32(batch: Sequence[Segment], *, seed: int, step: int) -> Iterator[list[list[Tensor]]]:
    """Yield each moment of all segments in fp32, to be changed in place; on leaving they are rounded and stored.

    seed, step: what the random bits of the rounding depend on, beside the position.
    """
    # from moments by segment to segments by moment
    stored = [list(moment) for moment in zip(*(segment.moments for segment in batch), strict=True)]
    # nothing to convert and nothing to round: the optimizer changes the stored moments themselves
    if stored[0][0].dtype != torch.bfloat16:
        yield stored
        return
    sizes = [moment.numel() for moment in stored[0]]
    # one allocation, and one hash of the positions, for all segments of the batch
    full = torch.empty(len(stored), sum(sizes), device=stored[0][0].device)
    converted = [list(torch.split(moment, sizes)) for moment in full]
    for moment, kept in zip(converted, stored, strict=True):
        torch._foreach_copy_(moment, kept)
    yield converted
    positions = torch.empty_like(full[0], dtype=torch.int32)
    for segment, out in zip(batch, torch.split(positions, sizes), strict=True):
        put_positions(out, segment.of.placement, segment.start, hash_offset(seed, step, segment.of.name))
    # there are two random numbers for each position, for two moments at most
    for values, random in zip(full, noise(positions), strict=False):
        round_(values, random)
    for moment, kept in zip(converted, stored, strict=True):
        torch._foreach_copy_(kept, moment)


# -- rounding


def hash_offset(seed: int, step: int, name: str) -> int:
    """Return the 32-bit number that is added to a position before it is hashed."""
    return int.from_bytes(hashlib.blake2b(f"{seed} {step} {name}".encode(), digest_size=4).digest(), "little")


def put_positions(out: Tensor, placement: Placement, start: int, first: int) -> None:
    """Fill `out`, int32 [n], with `first` + the positions in the full weight of the part's elements from `start` on.

    Positions are row-major, of the part and of the full weight, modulo 2^32.
    """
    stop = start + out.numel()
    if not placement.shape or (len(placement.intervals[0]) == 1 and placement.local_shape[1:] == placement.shape[1:]):
        rows = placement.intervals[0][0][0] if placement.shape else 0  # full rows: contiguous
        torch.arange(out.numel(), out=out)
        out += _signed(first + rows * math.prod(placement.shape[1:]) + start)
        return
    # a part with gaps: each element's index along every dimension, from the last one, which varies fastest, to the
    # first
    local = torch.arange(start, stop, device=out.device)
    place = torch.full_like(local, first)
    stride = 1
    for length, intervals in reversed(list(zip(placement.shape, placement.intervals, strict=True))):
        # the intervals follow each other in the local tensor: `indices` maps a local index to one in the full weight
        indices = torch.cat([torch.arange(low, high, device=out.device) for low, high in intervals])
        place += indices[local % len(indices)] * stride
        local //= len(indices)
        stride *= length
    out.copy_(place)


def noise(positions: Tensor) -> tuple[Tensor, Tensor]:
    """Return two random integers below 2^16 for each position: int32 [n] each; the positions are overwritten."""
    shifted = torch.empty_like(positions)
    for shift, odd in MIXING:
        torch.bitwise_right_shift(positions, shift, out=shifted)
        shifted &= (1 << (32 - shift)) - 1  # torch shifts arithmetically, so clear the sign bits
        positions ^= shifted
        positions *= _signed(odd)
    # the hash has 32 bits and a rounding needs 16: two moments share one hash
    torch.bitwise_right_shift(positions, 16, out=shifted)
    shifted &= 0xFFFF
    positions &= 0xFFFF
    return positions, shifted


def round_(values: Tensor, random: Tensor) -> None:
    """Round fp32 values [n] in place to bf16 values. random: from `noise`, int32 [n].

    fp32     s eeeeeeee mmmmmmm | mmmmmmmmmmmmmmmm        bf16 keeps the bits left of |
    random                    + | rrrrrrrrrrrrrrrr        carries into the kept bits with the right probability
    """
    bits = values.view(torch.int32)
    bits += random
    # clears the 16 bits that bf16 does not have, so the copy to bf16 rounds nothing
    bits &= -0x10000


def _signed(number: int) -> int:
    """Return the int32 that equals `number` modulo 2^32."""
    return (number + (1 << 31)) % (1 << 32) - (1 << 31)
