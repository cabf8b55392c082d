"""Sum named tensors so that the sum does not depend on how ranks hold them. Needs no torch.

    S = sum over all elements of   bits(element) * m(name) * m(0, i) * m(1, j) * ...      modulo 2^64, twice

                        j                    A rank sums the box that it holds, with the multipliers of its place in
               +-----------+-------+         the full tensor. Boxes that tile the tensor add up to the same S, whatever
             i |   S(A)    | S(B)  |         the layout, so ranks exchange 16 bytes per kind of tensor and nothing else:
               +-----------+-------+
               |      S(C)         |         S = S(A) + S(B) + S(C)
               +-------------------+

Each multiplier is an odd pseudo-random number of 64 bits (SplitMix64 of the dimension and the index), so one changed
element always changes S: an odd number times a difference that is not 0 modulo 2^64 is not 0. Several changes cancel by
chance only, with a probability below 2^-50 for both sums together even where only signs flip. That finds errors of
machines; it does not resist somebody who wants to forge a sum, against whom the files have SHA-256 digests.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from onward.trainer.distributed.weights import PROJECTION, Box, checkpoint_key

Array = np.ndarray[Any, np.dtype[Any]]
Sum = tuple[int, int]
"""Two sums modulo 2^64, with independent multipliers."""

ITEM_BYTES = {
    **{"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "BOOL": 1},
    **{f"{sign}{bits}": bits // 8 for sign in "IU" for bits in (64, 32, 16, 8)},
}
"""dtype in the safetensors format -> bytes of an element."""
KINDS = ("weights", "optimizer")
"""What has a sum of its own. `optimizer`: all that is not a weight, with the moving averages."""

BLOCK = 1 << 16
"""Elements that are converted to 64 bits at once; they stay in the processor's cache."""
_MODULUS = 1 << 64
_INTEGERS = {8: np.int64, 4: np.int32, 2: np.int16, 1: np.int8}


def kind_of(name: str) -> str:
    """Return in which sum a tensor of a checkpoint counts."""
    return "weights" if name.startswith((checkpoint_key(""), PROJECTION)) else "optimizer"


class FileSums:
    """The sums of the pieces of a file, from its bytes, which come in chunks of any length."""

    def __init__(self, pieces: Iterable[tuple[str, str, Box]]) -> None:
        """pieces: (name of the tensor, dtype, box) in the order of the file, without gaps between them."""
        self.sums = dict.fromkeys(KINDS, (0, 0))
        self._pieces = [piece for piece in pieces if _num_elements(piece[2])]
        self._number, self._element = 0, 0
        """The next piece, and its next element."""

    def update(self, chunk: memoryview) -> None:
        """Add the next bytes of the file; a chunk ends between two elements."""
        while len(chunk):
            name, dtype, box = self._pieces[self._number]
            size, left = ITEM_BYTES[dtype], _num_elements(box) - self._element
            taken = min(len(chunk) // size, left)
            elements = np.frombuffer(chunk[: taken * size], _INTEGERS[size])
            found = box_sum(elements, box, start=self._element)
            self.sums[kind_of(name)] = added(self.sums[kind_of(name)], times(found, name))
            self._number, self._element = (
                (self._number + 1, 0) if taken == left else (self._number, self._element + taken)
            )
            chunk = chunk[taken * size :]


def added(one: Sum, other: Sum) -> Sum:
    """Return the sum of two sums."""
    return (one[0] + other[0]) % _MODULUS, (one[1] + other[1]) % _MODULUS


def times(tensor: Sum, name: str) -> Sum:
    """Return the sum of a tensor or a box as it counts among those of other tensors."""
    digest = hashlib.sha256(name.encode()).digest()
    odd = [int.from_bytes(digest[start : start + 8], "little") | 1 for start in (0, 8)]
    return tensor[0] * odd[0] % _MODULUS, tensor[1] * odd[1] % _MODULUS


def box_sum(elements: Array, box: Box, *, start: int = 0) -> Sum:
    """Return the sum of consecutive elements of a box, from its element `start` on.

    elements: integers of the elements' size, which have their bits; in C order.
    """
    lengths = [stop - first for first, stop in box]
    # trailing dimensions of at most BLOCK elements have one vector of multipliers, the others one number for each row
    split = len(box)
    while split and math.prod(lengths[split - 1 :]) <= BLOCK:
        split -= 1
    if split == len(box) and box:  # the last dimension alone is longer
        split -= 1
    columns, inner = math.prod(lengths[split:]), box[split:]
    total, position, end = (0, 0), start, start + len(elements)
    while position < end:
        row, column = divmod(position, columns)
        if column or end - position < columns or columns > BLOCK:  # a part of one row
            rows, width = 1, min(columns - column, end - position, BLOCK)
        else:
            rows, width = min((end - position) // columns, max(1, BLOCK // columns)), columns
        block = elements[position - start : position - start + rows * width].reshape(rows, width).astype(np.int64)
        total = added(total, _block_sum(block, _rows(box[:split], row, rows), _columns(inner, split, column, width)))
        position += rows * width
    return total


def _block_sum(block: Array, rows: Array, columns: Array) -> Sum:
    """Return both sums of a block [r, c] with multipliers [2, r] and [2, c]; integer overflow is the modulus."""
    first, second = (int(np.dot(np.dot(block, columns[k]), rows[k])) % _MODULUS for k in range(2))
    return first, second


def _rows(box: Box, start: int, count: int) -> Array:
    """Return the multipliers [2, count] of rows: the product over the leading dimensions."""
    found = np.ones((2, count), np.int64)
    if box:
        lengths = [stop - first for first, stop in box]
        for dim, index in enumerate(np.unravel_index(np.arange(start, start + count), lengths)):
            found *= _multipliers(dim, index + box[dim][0])
    return found


def _columns(box: Box, dim: int, start: int, count: int) -> Array:
    """Return the multipliers [2, count] of consecutive elements of the trailing dimensions, from `dim` on."""
    if len(box) == 1 and box[0][1] - box[0][0] > BLOCK:
        return _multipliers(dim, np.arange(box[0][0] + start, box[0][0] + start + count))
    return _all_columns(box, dim)[:, start : start + count]


@functools.lru_cache(maxsize=256)  # the weights of a model have few different shapes
def _all_columns(box: Box, dim: int) -> Array:
    found = np.ones((2, 1), np.int64)
    for number, (start, stop) in enumerate(box):
        found = (found[:, :, None] * _multipliers(dim + number, np.arange(start, stop))[:, None, :]).reshape(2, -1)
    return found


def _multipliers(dim: int, index: Array) -> Array:
    """Return two odd numbers [2, n] for each index of a dimension: SplitMix64 of it, in two independent streams."""
    stream = (np.arange(2, dtype=np.uint64) << np.uint64(62)) + (np.uint64(dim + 1) << np.uint64(48))
    x = (index.astype(np.uint64)[None, :] + stream[:, None]) * np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    odd: Array = (x ^ (x >> np.uint64(31)) | np.uint64(1)).view(np.int64)
    return odd


def _num_elements(box: Sequence[tuple[int, int]]) -> int:
    return math.prod(stop - start for start, stop in box)
