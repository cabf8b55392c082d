"""Let the kernel read the shards ahead of the samples, whose order is known: it would read around each row otherwise.

shards that fit in memory     all files from their beginnings to their ends, once, beside the first steps
train.shuffle = "blocks"      the blocks of the next window, while one is trained on
small rows, shuffled          nothing ahead; of each row its pages alone, and nothing around them
all else                      as the kernel reads by itself: ahead where the rows, or their pages, follow each other

Which of them it is depends on the memory of this host; the samples do not.
"""

from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor

from onward.trainer.data.batches.sample_stream import SampleStream
from onward.trainer.data.storage.shards import Shards
from onward.trainer.run.machine.this_machine import fits_in_memory

SMALL_ROW = 64 << 10
"""Bytes. Of a larger row the kernel reads most in one go, which it does not where it reads nothing around a page."""


class ShardReadAhead:
    """Reads ahead for one replica. stream: the order of all samples, also where steps are ordered by length."""

    def __init__(self, shards: Shards, stream: SampleStream) -> None:
        self._shards = shards
        self._stream = stream
        self._thread = ThreadPoolExecutor(1, "read-ahead")
        self._ended = threading.Event()
        self._windows: set[int] = set()
        self._reading: list[Future[None]] = []
        fits = fits_in_memory(shards.size_bytes)
        self._in_windows = bool(stream.window) and not fits
        if fits:
            self._reading.append(self._thread.submit(shards.read_ahead, self._ended.is_set))
        elif not self._in_windows and stream.is_shuffled and shards.size_bytes <= SMALL_ROW * shards.num_rows:
            shards.read_nothing_around()

    def reach(self, position: int) -> None:
        """Begin to read what follows the samples at a position."""
        if not self._in_windows:
            return
        here = self._window_of(position)
        epoch, place = divmod(position, self._stream.num_rows)
        behind = position - place % self._stream.window + self._stream.window
        # the next window may be the first one of the next epoch
        following = min(behind, (epoch + 1) * self._stream.num_rows)
        for first in (position, following):
            if (window := self._window_of(first)) not in self._windows:
                self._windows.add(window)
                self._reading.append(self._thread.submit(self._read_window, first))
        self._windows = {window for window in self._windows if window >= here}

    def _window_of(self, position: int) -> int:
        """Return a number of the window of a position, which grows from one window to the next."""
        epoch, place = divmod(position, self._stream.num_rows)
        windows = -(-self._stream.num_rows // self._stream.window)
        return epoch * windows + place // self._stream.window

    def _read_window(self, position: int) -> None:
        firsts, count = self._stream.read_with(position)
        self._shards.read_ahead_of(firsts, count, self._ended.is_set)

    def wait(self) -> None:
        """Wait until what was begun is read. Raises what the reading has raised."""
        for each in self._reading:
            each.result()
        self._reading.clear()

    def close(self) -> None:
        """End the thread; what it has not read is not read."""
        self._ended.set()
        self._thread.shutdown(cancel_futures=True)
