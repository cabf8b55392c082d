"""What Adam and LAMB remember of each weight: kept in fp32 or bf16, handed out in fp32, rounded when put back.

    for piece in pieces(optimizer, group, gradients):
        with in_fp32(piece, seed=seed) as (first, second):
            ...                                         # change both in place

bf16 halves the memory. It is rounded stochastically: up or down, more often to the nearer, so that the mean is the
number itself. Rounding to the nearest loses every change below 1/512 of a number: a second moment that decays by
1/1000 a step stops at a quarter of where it should end.

The random bits are no generator's: they are a hash of (seed, step, name, place of the element in the whole weight).
So there is nothing to save, a repeated step repeats them, copies of a weight stay equal, and every layout rounds with
the same bits.
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

from onward.trainer.config.sections import OptimizerConfig
from onward.trainer.distributed.placement import Placement
from onward.trainer.distributed.weights import Weight

CHUNK = {"cpu": 1 << 16, "cuda": 1 << 22}
"""Elements that are updated together where there are temporary copies in fp32: what a core's cache holds; on a GPU
enough to keep it busy."""
MIXING = ((16, 0x7FEB352D), (15, 0x846CA68B), (16, 1))
"""(shift, odd multiplier) of each round of a hash of 32 bits: https://github.com/skeeto/hash-prospector, lowbias32.
Of 32 bits, because processors multiply eight of those at once and none of 64."""


Group = dict[str, Any]
"""torch's parameter group: `params`, `lr`, and ours: `learning_rate_scale`, `weight_decay`; of each weight, `weights`
tells its name and place and `numbers` its number in the order given."""


# -- kept, and handed out


def make_moments(optimizer: torch.optim.Optimizer, config: OptimizerConfig) -> None:
    """Make the state before the first step, so that it can be saved and loaded at any time."""
    for group in optimizer.param_groups:
        for weight in group["params"]:
            dtype = torch.bfloat16 if config.moments == "bf16" else weight.dtype
            optimizer.state[weight] = {
                "step": torch.zeros((), device=weight.device),
                "moment_1": torch.zeros_like(weight, dtype=dtype, requires_grad=False),
                "moment_2": torch.zeros_like(weight, dtype=dtype, requires_grad=False),
            }


@dataclass(frozen=True)
class Stretch:
    """Some consecutive elements of a weight, or all, and what belongs to them."""

    weight: Tensor
    gradient: Tensor
    first: Tensor
    second: Tensor
    step: Tensor
    """0-dimensional: that of the whole weight."""
    of: Weight
    start: int
    """Its first element, in this rank's part of the weight."""


def pieces(
    optimizer: torch.optim.Optimizer, group: Group, gradients: Sequence[Tensor], *, whole: bool = False
) -> Iterator[list[Stretch]]:
    """Count the step of a group's weights, and give all that have elements, in lists of about CHUNK elements.

    A weight is cut at multiples of CHUNK of its own elements, so that copies of it are cut alike. `whole`: one list
    of whole weights. Otherwise weights and gradients must be contiguous.
    """
    states = [optimizer.state[weight] for weight in group["params"]]
    if states:
        torch._foreach_add_([state["step"] for state in states], 1.0)
    piece: list[Stretch] = []
    size = 0
    for of, gradient, state in zip(group["weights"], gradients, states, strict=True):
        all_of_it = Stretch(of.tensor.detach(), gradient, state["moment_1"], state["moment_2"], state["step"], of, 0)
        for stretch in [all_of_it] if whole else _cut(all_of_it):
            length = stretch.weight.numel()
            if size + length > CHUNK[gradient.device.type] and piece and not whole:
                yield piece
                piece, size = [], 0
            if length:
                piece.append(stretch)
                size += length
    if piece:
        yield piece


def _cut(whole: Stretch) -> Iterator[Stretch]:
    """The stretches of a whole weight."""
    length = CHUNK[whole.weight.device.type]
    weight, gradient, first, second = (x.view(-1) for x in (whole.weight, whole.gradient, whole.first, whole.second))
    for start in range(0, len(weight), length):
        held = slice(start, start + length)
        yield Stretch(weight[held], gradient[held], first[held], second[held], whole.step, whole.of, start)


@contextmanager
def in_fp32(piece: Sequence[Stretch], *, seed: int) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
    """Both moments of each stretch, to be changed in place; on leaving they are rounded to what they are kept in."""
    kept = [stretch.first for stretch in piece], [stretch.second for stretch in piece]
    if kept[0][0].dtype == torch.float32:
        yield kept
        return
    sizes = [moment.numel() for moment in kept[0]]
    both = torch.empty(2, sum(sizes), device=kept[0][0].device)
    first, second = (list(torch.split(moment, sizes)) for moment in both)
    torch._foreach_copy_(first, kept[0])
    torch._foreach_copy_(second, kept[1])
    yield first, second
    places, step = torch.empty_like(both[0], dtype=torch.int32), int(piece[0].step)
    for stretch, out in zip(piece, torch.split(places, sizes), strict=True):
        put_places(out, stretch.of.placement, stretch.start, key(seed, step, stretch.of.name))
    for moment, random in zip(both, noise(places), strict=True):
        round_(moment, random)
    torch._foreach_copy_(kept[0], first)
    torch._foreach_copy_(kept[1], second)


# -- rounding


def key(seed: int, step: int, name: str) -> int:
    """What is added to a place before it is hashed: 32 bits."""
    return int.from_bytes(hashlib.blake2b(f"{seed} {step} {name}".encode(), digest_size=4).digest(), "little")


def put_places(out: Tensor, placement: Placement, start: int, first: int) -> None:
    """Fill `out` (int32, flat) with `first` + the places in the whole weight of the part's elements from `start` on.

    Elements are counted in the order they lie in memory, of the part and of the whole; modulo 2^32.
    """
    stop = start + out.numel()
    if not placement.shape or (len(placement.intervals[0]) == 1 and placement.local_shape[1:] == placement.shape[1:]):
        rows = placement.intervals[0][0][0] if placement.shape else 0  # rows in a row: one stretch of memory
        torch.arange(out.numel(), out=out)
        out += _signed(first + rows * math.prod(placement.shape[1:]) + start)
        return
    local = torch.arange(start, stop, device=out.device)
    place, stride = torch.full_like(local, first), 1
    for length, intervals in reversed(list(zip(placement.shape, placement.intervals, strict=True))):
        indices = torch.cat([torch.arange(low, high, device=out.device) for low, high in intervals])
        place += indices[local % len(indices)] * stride
        local //= len(indices)
        stride *= length
    out.copy_(place)


def noise(places: Tensor) -> tuple[Tensor, Tensor]:
    """Two random integers below 2^16 for each place (int32, overwritten)."""
    shifted = torch.empty_like(places)
    for shift, odd in MIXING:
        torch.bitwise_right_shift(places, shift, out=shifted)
        shifted &= (1 << (32 - shift)) - 1  # torch repeats the sign when it shifts
        places ^= shifted
        places *= _signed(odd)
    torch.bitwise_right_shift(places, 16, out=shifted)
    shifted &= 0xFFFF
    places &= 0xFFFF
    return places, shifted


def round_(values: Tensor, random: Tensor) -> None:
    """Round fp32 numbers in place to ones that bf16 has exactly. `random`: of `noise`, one for each number.

    The bits are those of a magnitude: a random number below one unit of the last place kept is added, and what is
    below that unit is cut off.
    """
    bits = values.view(torch.int32)
    bits += random
    bits &= -0x10000


def _signed(number: int) -> int:
    """Modulo 2^32, as int32 has it."""
    return (number + (1 << 31)) % (1 << 32) - (1 << 31)
