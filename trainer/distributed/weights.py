"""The identity of a weight, which part of it a rank holds, and under which name a checkpoint stores it.

A weight is known by its initializer name in the ONNX file. The other names follow from it:

    "conv1.weight"                          the weight                    Weight.name
    "model/conv1.weight"                    its key in a checkpoint       Weight.checkpoint_key
    "optimizer/conv1.weight/moment_1"       its optimizer state there     optimizer_key(name, "moment_1")
    "average/conv1.weight/ema"              its moving average there      average_key(name, "ema")
    ("conv1.weight", stage 2)               the copy that stage 2 holds   Weight itself, as a dictionary key

A rank holds a part of a weight, a `Placement`: intervals along each dimension, in the order they have in memory.

    Placement((6, 4), (((0, 1), (2, 3), (4, 5)), ((0, 4),)))

               columns 0..3
    row 0      # # # #          this rank holds rows 0, 2 and 4 of a [6, 4] tensor, all columns;
    row 1      . . . .          its local tensor has the shape [3, 4]
    row 2      # # # #
    row 3      . . . .          Such placements come from a fused query-key-value weight: each tensor-parallel rank
    row 4      # # # #          holds an equal range of the rows of each of the three blocks.
    row 5      . . . .

Checkpoints store placements and know nothing else of the layout, so any layout loads what any other saved.
This module imports no torch: it is used where checkpoints are only looked at.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from onward.trainer.errors import CheckpointError

if TYPE_CHECKING:
    from torch import Tensor

Interval = tuple[int, int]
"""First index, and the one after the last."""
Box = tuple[Interval, ...]
"""One interval for each dimension."""

TEACHER = "teacher:"
"""What the names of a teacher's weights begin with. They come from its file, and are in no checkpoint."""
PROJECTION = "projection:"
"""What the names of trained tensors begin with that are between the model and a teacher. No file has them."""

NUM_NAMED = 5
"""How many tensors an error names of those that are wrong in the same way."""


class Sliceable(Protocol):
    """A tensor, an array, or a slice of a safetensors file."""

    def __getitem__(self, index: Any, /) -> Any: ...


T = TypeVar("T", bound=Sliceable)


@dataclass(frozen=True)
class Placement:
    """The part of a tensor of shape `shape` that one rank holds: the product of the intervals along each dimension."""

    shape: tuple[int, ...]
    intervals: tuple[tuple[Interval, ...], ...]

    @staticmethod
    def full(shape: Sequence[int]) -> Placement:
        """Return the placement of a rank that holds the full tensor."""
        return Placement(tuple(shape), tuple(((0, length),) for length in shape))

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Return the shape of the local tensor."""
        return tuple(sum(stop - start for start, stop in held) for held in self.intervals)

    @property
    def numel(self) -> int:
        """Return the number of elements of the local tensor."""
        return math.prod(self.local_shape)

    def of_dims(self, dims: Sequence[int]) -> Placement:
        """Return the placement of a tensor that has these dimensions of this one."""
        return Placement(tuple(self.shape[dim] for dim in dims), tuple(self.intervals[dim] for dim in dims))

    def narrow(self, dim: int, start: int, stop: int) -> Placement:
        """Return the placement of rows `start` to `stop` of the local tensor along `dim`."""
        held = []
        offset = 0
        # `offset` is where the interval begins in the local tensor: rows are counted there, and stored as rows of the
        # full one
        for first, last in self.intervals[dim]:
            # the overlap of the asked rows with this interval, counted from its beginning
            low = max(start - offset, 0)
            high = min(stop - offset, last - first)
            if low < high:
                held.append((first + low, first + high))
            offset += last - first
        return Placement(self.shape, (*self.intervals[:dim], tuple(held), *self.intervals[dim + 1 :]))

    def boxes(self) -> Iterator[tuple[Box, Box]]:
        """Yield (box in the local tensor, box in the full tensor) of each contiguous piece; none for an empty part."""
        dims = []
        for held in self.intervals:
            ends = list(itertools.accumulate(stop - start for start, stop in held))
            pairs = zip(held, ends, strict=True)
            # in the local tensor the intervals follow each other without gaps
            dims.append([((end - (stop - start), end), (start, stop)) for (start, stop), end in pairs])
        # a piece is one interval of each dimension
        for choice in itertools.product(*dims):
            yield tuple(local for local, _ in choice), tuple(box for _, box in choice)

    def take(self, full: T) -> list[tuple[Box, T]]:
        """Return (box in the local tensor, its content) of each contiguous piece, as slices of the full tensor."""
        return [(local, full[slices(box)]) for local, box in self.boxes()]


def share(length: int, rank: int, size: int) -> Interval:
    """Return the interval of rank `rank` when `size` ranks divide `length`; lengths differ by at most one."""
    return length * rank // size, length * (rank + 1) // size


def slices(box: Box) -> tuple[slice, ...]:
    """Return the box as an index into a tensor."""
    return tuple(slice(start, stop) for start, stop in box)


def overlap(one: Box, other: Box) -> Box | None:
    """Return the intersection of two boxes, or None if it is empty."""
    common = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))
    return common if all(start < stop for start, stop in common) else None


# -- weights


@dataclass(frozen=True)
class Weight:
    """A stored tensor on this rank: a parameter, frozen or not, or a running statistic.

    Equality and hash are those of (name, stage), so a weight is its own dictionary key. Interleaved pipeline stages of
    one rank may hold the same weight; each stage then has a copy. Copies start with equal bits and are updated
    equally.
    """

    name: str
    """The initializer name in the ONNX file."""
    tensor: Tensor = field(compare=False)
    """The plain local tensor, of shape `placement.local_shape`; the optimizer changes it in place. For a trained weight
    `.grad` is the gradient, summed over all ranks that hold a copy, from the reducer's `reduce` to its next `begin`."""
    placement: Placement = field(compare=False)
    trained: bool = field(compare=False)
    counted: bool = field(default=True, compare=False)
    """Whether this copy counts in sums over the weights: exactly one rank's copy of each part does."""
    retention: float = field(default=0.0, compare=False)
    """For a running statistic: the factor by which one micro-batch multiplies the old value, that is 1 - momentum of
    its BatchNormalization. 0 if that is unknown."""
    partial: bool = field(default=False, compare=False)
    """Whether each tensor-parallel rank computes a part of the gradient, of its own rows, which the reducer sums."""
    outputs: int | None = field(default=None, compare=False)
    """Of the matrix of a hidden layer that Muon takes by default: the dimension of the output features."""
    stage: int = 0
    """Index of the pipeline stage whose copy this is."""

    @property
    def checkpoint_key(self) -> str:
        """Return the key of this weight in a checkpoint."""
        return checkpoint_key(self.name)


def checkpoint_key(name: str) -> str:
    """Return the key under which a checkpoint stores the weight of this initializer name."""
    return name if name.startswith(PROJECTION) else f"model/{name}"


def optimizer_key(name: str, field: str) -> str:
    """Return the key under which a checkpoint stores a field of the optimizer state of a weight."""
    return f"optimizer/{name}/{field}"


def average_key(name: str, kind: str) -> str:
    """Return the key under which a checkpoint stores the moving average of a weight; kind: `average.saved_kind`."""
    return f"average/{name}/{kind}"


def averages_in(tensors: Mapping[str, T], kind: str) -> dict[str, T]:
    """Return the moving averages of a kind among the tensors of a checkpoint, by initializer name; no projection's."""
    # no initializer name has a NUL, so that it marks where the name stands
    before, _, after = average_key("\0", kind).partition("\0")
    averages = {}
    for key, tensor in tensors.items():
        is_average = key.startswith(before) and key.endswith(after)
        if is_average and not key.startswith(before + PROJECTION):
            averages[key.removeprefix(before).removesuffix(after)] = tensor
    return averages


def weights_in(tensors: Mapping[str, T]) -> dict[str, T]:
    """Return the weights among the tensors of a checkpoint, by initializer name."""
    prefix = checkpoint_key("")
    return {key.removeprefix(prefix): tensor for key, tensor in tensors.items() if key.startswith(prefix)}


def optimizer_state_in(tensors: Mapping[str, T]) -> dict[str, T]:
    """Return the optimizer state among the tensors of a checkpoint, by checkpoint key."""
    return {key: tensor for key, tensor in tensors.items() if key.startswith("optimizer/")}


def check_fit(
    source: str, found: Mapping[str, Sequence[int]], expected: Mapping[str, Sequence[int]], *, partial: bool = False
) -> None:
    """Raise CheckpointError unless the tensors `found` in `source` are the expected ones, by name and shape.

    The error counts and names what is missing, unexpected or of another shape. partial: allow further tensors.
    """
    problems = {"missing": sorted(expected.keys() - found.keys())}
    problems["unexpected"] = [] if partial else sorted(found.keys() - expected.keys())
    problems["of another shape"] = [
        f"{name} is {list(found[name])}, the model's is {list(expected[name])}"
        for name in sorted(expected.keys() & found.keys())
        if tuple(found[name]) != tuple(expected[name])
    ]
    if any(problems.values()):
        listed = (f"{len(names)} {kind}: {_first(names)}" for kind, names in problems.items() if names)
        raise CheckpointError(
            f"{source} is of another model or optimizer; of {len(expected)} tensors {'; '.join(listed)}; "
            "use the model and optimizer it was saved with"
        )


def _first(names: Sequence[str]) -> str:
    more = len(names) - NUM_NAMED
    return "; ".join(names[:NUM_NAMED]) + (f" and {more} more" if more > 0 else "")
