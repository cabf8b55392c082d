"""Order samples by length without losing their shuffle: train.shuffle = "length".

The shuffled stream (sample_stream.py) is divided into windows of WINDOW_STEPS steps. Inside a window positions are
sorted by the length of their samples and cut into steps, and the steps are shuffled. Then a step is dealt out to the
replicas:

    a window of 3 steps of 4           7 2 9 4 | 3 8 2 6 | 9 4 3 7      lengths in the shuffled stream
    sorted, cut, steps shuffled        4 6 7 7 | 8 9 9 9 | 2 2 3 3      little padding in any micro-batch
    one step over 2 replicas           replica 0: 4 7     replica 1: 6 7      nearly equal work in each micro-batch

So each window has the samples that it had, each sample is taken once per epoch, and the samples of a step depend on the
seed, the position and the lengths alone, not on the layout. Windows begin where steps begin: an epoch that begins in
the middle of a step gives it its first samples in the order of the stream.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Protocol

import numpy as np

from onward.trainer.data.schema.permutation import Array, hash_key, keyed_hash

WINDOW_STEPS = 64
"""Steps in one window. More of them would need less padding, and leave less of the shuffle."""


class Stream(Protocol):
    """The order in which samples are taken: positions of all steps, and of one step over the replicas."""

    num_rows: int

    def rows(self, positions: Array) -> Array:
        """Return the row numbers at these positions, each int64 [n]."""
        ...

    def dealt(self, positions: Array, sizes: Array) -> Array:
        """Return the positions of one step, int64 [n], in the order in which replica r takes the next sizes[r]."""
        ...


class BalancedOrder:
    """A stream of the same samples in which those of a step have similar lengths.

    lengths: of each row, int64 [rows]. step: samples in one step.
    """

    def __init__(self, stream: Stream, lengths: Array, *, step: int, seed: int) -> None:
        self.num_rows = stream.num_rows
        self._stream = stream
        self._lengths = lengths
        self._step = step
        self._seed = seed
        # a step reads one window, or two where an epoch ends
        self._window = lru_cache(maxsize=2)(self._sorted_window)

    def rows(self, positions: Array) -> Array:
        """Return the row numbers at these positions, each int64 [n]."""
        epochs, places = np.divmod(positions, self.num_rows)
        places -= -epochs * self.num_rows % self._step  # samples that complete the last step of the epoch before
        # -1: the head of an epoch, whose samples are taken in the order of the stream
        windows, inside = np.divmod(places, WINDOW_STEPS * self._step)
        found = self._stream.rows(positions)
        for epoch, window in set(zip(epochs.tolist(), windows.tolist(), strict=True)):
            if window >= 0:
                now = (epochs == epoch) & (windows == window)
                found[now] = self._window(epoch, window)[inside[now]]
        return found

    def _sorted_window(self, epoch: int, window: int) -> Array:
        """Return the rows of a window in their new order: int64 [up to WINDOW_STEPS * step]."""
        begin = epoch * self.num_rows
        # the first window begins at the first step that begins in this epoch
        first = begin + -begin % self._step + window * WINDOW_STEPS * self._step
        members = self._stream.rows(np.arange(first, min(first + WINDOW_STEPS * self._step, begin + self.num_rows)))
        members = members[np.argsort(self._lengths[members], kind="stable")]
        # only the last window of an epoch has a rest
        num, rest = divmod(len(members), self._step)
        hashes = keyed_hash(np.arange(num + 1), hash_key("balanced steps", self._seed, epoch, window))
        # the samples that fill no step come last; taken from a random place, so that they are not always the longest
        cut = int(hashes[num] % np.uint64(num + 1)) * self._step
        last = members[cut : cut + rest]
        steps = np.delete(members, slice(cut, cut + rest))
        return np.concatenate([steps.reshape(num, self._step)[np.argsort(hashes[:num])].ravel(), last])

    def dealt(self, positions: Array, sizes: Array) -> Array:
        """Return the positions of one step so that replica r, which takes the next `sizes[r]` of them, has as much work
        as the others in each of its micro-batches: sorted by length and dealt out in turn."""
        # stable, so that samples of one length have one order on every machine
        by_length = positions[np.argsort(self._lengths[self.rows(positions)], kind="stable")]
        # turns[i] is when the replica that owns place i takes it: all first turns get the shortest samples
        turns = np.concatenate([np.arange(size) for size in sizes])
        arranged = np.empty_like(positions)
        arranged[np.argsort(turns, kind="stable")] = by_length
        return arranged
