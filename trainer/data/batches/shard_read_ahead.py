"""Let the kernel read the shards ahead of the samples, whose order is known: it would read around each row otherwise.

shards that fit in memory     all files from their beginnings to their ends, once, beside the first steps
train.shuffle = "blocks"      the blocks of the next window, while one is trained on
small rows, shuffled          of each row its pages alone, and nothing around them; nothing ahead but of blocks
all else                      as the kernel reads by itself: ahead where the rows, or their pages, follow each other
shards on a server            the files of this window and of the next one are fetched, and kept until it is over

Which of them it is depends on the memory of this host; the samples do not.
"""

from __future__ import annotations

import math
import threading
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial

from onward.trainer.data.batches.sample_stream import SampleStream
from onward.trainer.data.storage.shards import Shards
from onward.trainer.run.machine.this_machine import fits_in_memory

PAUSE_S = 0.5
LONGEST_PAUSE_S = 10.0
"""Until it is tried again to fetch what had no room, or no answer: twice as long each time."""
FETCHED_AT_A_TIME = 4

SMALL_ROW = 64 << 10
"""Bytes. Of a larger row the kernel reads most in one go, which it does not where it reads nothing around a page."""


class ShardReadAhead:
    """Reads ahead for one replica. stream: the order of all samples, also where steps are ordered by length.

    end: the samples of the run.
    """

    def __init__(self, shards: Shards, stream: SampleStream, end: float = math.inf) -> None:
        self._end = end
        self._shards = shards
        self._stream = stream
        self._thread = ThreadPoolExecutor(1, "read-ahead")
        self._ended = threading.Event()
        self._windows: set[int] = set()
        self._reading: list[Future[None]] = []
        fits = fits_in_memory(shards.size_bytes)
        is_worth_it = shards.is_streamed or (stream.is_shuffled and not fits)
        self._in_windows = stream.window > 0 and is_worth_it
        self._here = 0
        # window -> its files of a server, which stay on the disk until it is over
        self._fetched: dict[int, list[int]] = {}
        if shards.is_streamed:
            return
        if fits:
            self._reading.append(self._thread.submit(shards.read_ahead, self._ended.is_set))
        elif stream.is_shuffled and shards.size_bytes <= SMALL_ROW * shards.num_rows:
            shards.reads_around = False

    def reach(self, position: int) -> None:
        """Begin to read what follows the samples at a position."""
        if not self._in_windows:
            return
        here = self._window_of(position)
        if self._shards.is_streamed and here != self._here:
            # files of the window before would leave no room, also for the other ranks of this host
            self._shards.close_files()
        self._here = here
        # an error is kept for whoever waits
        ended, running = wait(self._reading, timeout=0)
        self._reading = [*running, *(each for each in ended if each.exception())]
        epoch, place = divmod(position, self._stream.num_rows)
        behind = position - place % self._stream.window + self._stream.window
        # the next window may be the first one of the next epoch
        following = min(behind, (epoch + 1) * self._stream.num_rows)
        for first in (position, following):
            if first < self._end and (window := self._window_of(first)) not in self._windows:
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
        if self._shards.is_streamed:
            self._fetch(self._window_of(position), self._shards.files_with(firsts, count))
        else:
            self._shards.read_ahead_of(firsts, count, self._ended.is_set)

    def _fetch(self, window: int, files: list[int]) -> None:
        """Fetch the files of a window and keep them, as soon as there is room, until the window is over."""
        self._fetched[window] = files
        hold = partial(self._shards.hold_ahead, is_over=self._ended.is_set)
        pause_s = PAUSE_S
        while window >= self._here and not self._ended.is_set():
            self._release(self._here)
            with ThreadPoolExecutor(FETCHED_AT_A_TIME) as threads:
                are_held = list(threads.map(hold, files))
            if all(are_held):
                return
            self._ended.wait(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    def _release(self, window: int) -> None:
        """Let the files be deleted of the windows before this one."""
        before = [each for each in self._fetched if each < window]
        passed = {file for each in before for file in self._fetched.pop(each)}
        # the last file of an epoch may be one of the first of the next
        self._shards.release_ahead(passed.difference(*self._fetched.values()))

    def wait(self) -> None:
        """Wait until what was begun is read. Raises what the reading has raised."""
        for each in self._reading:
            each.result()
        self._reading.clear()

    def close(self) -> None:
        """End the thread; what it has not read is not read."""
        self._ended.set()
        self._thread.shutdown(cancel_futures=True)
        self._release(max(self._fetched, default=0) + 1)
