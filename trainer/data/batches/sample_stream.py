"""Which row of the training data is at a position of the sample stream: shuffled, and mixed from several sources.

Source k has N_k rows and weight w_k; N is the sum of all N_k. An epoch is N positions. Of these n_k are of source k, in
proportion to w_k and rounded so that they add up to N. In epoch e the positions are permuted onto slots; the slots of
source k are a range, and a slot's place in it counts on over the epochs, again and again through its rows:

    2 sources, N_1 = 4, N_2 = 4, weights 3 and 1: N = 8, n_1 = 6, n_2 = 2

    position of epoch e        0   1   2   3   4   5   6   7
    slot = permutation         5   0   7   2   6   1   4   3
    source                     1   1   2   1   2   1   1   1
    sample of the source       5   0   1   2   0   1   4   3     + e n_k
    its row                    sample mod N_k, permuted in each pass over the source

So at any time the samples of a source were seen equally often, up to one epoch's share, and after each epoch up to one.
With one source, or where n_k = N_k, each epoch takes each row of it once. All of it is computed from the seed and the
position: no order is stored.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from onward.trainer.config.sections.data import DataConfig
from onward.trainer.config.sections.training import TrainConfig
from onward.trainer.data.formats.finished_shards import FILES_TOGETHER
from onward.trainer.data.schema.permutation import Array, hash_key, permutation
from onward.trainer.errors import ConfigError

CHUNK = 1 << 15
"""Positions whose rows are computed at once: of 4,096, numpy's calls would take as long as what they compute."""


class SampleStream:
    """The rows of the training split in the order of training.

    sizes: training rows of each source, which follow each other in the split. Without `shuffle`, an epoch takes one
    source after the other. block: shuffle blocks of so many rows; 0 = all rows. of_files: whether a
    block is a shard file. Raises ConfigError for a weight so small that an epoch has no sample of the source.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        weights: Sequence[float],
        *,
        seed: int,
        shuffle: bool,
        block: int = 0,
        of_files: bool = False,
    ) -> None:
        self.num_rows = sum(sizes)
        self._block = block
        self._of_files = of_files
        self.window = rows_of_window(block, of_files=of_files)
        """How many positions of an epoch have rows that are read together; 0 = all."""
        self._sizes = sizes
        self._seed = seed
        self.is_shuffled = shuffle
        """Whether the samples are in another order than the rows."""
        self.shares = shares(self.num_rows, weights)
        """Samples of each source in one epoch."""
        self._chunks_of_epoch = -(-self.num_rows // CHUNK)
        # a step reads one chunk or two, and transforms of its samples read others near to it
        self._chunk = lru_cache(maxsize=4)(self._rows_of_chunk)
        if 0 in self.shares:
            empty = self.shares.index(0)
            raise ConfigError(
                f"data.sources: an epoch of {self.num_rows} samples has none of source {empty + 1}, whose weight "
                f"{weights[empty]:g} is too small; raise it, or remove the source"
            )

    def rows(self, positions: Array) -> Array:
        """Return the row numbers at these positions of the stream, which are near to each other: int64 [n] each."""
        # a step may reach into the next epoch: no samples are dropped at the end of one
        epochs, places = np.divmod(positions, self.num_rows)
        chunks, inside = np.divmod(places, CHUNK)
        chunks += epochs * self._chunks_of_epoch
        rows = np.empty_like(inside)
        for number in range(chunks.min(), chunks.max() + 1):
            now = chunks == number
            rows[now] = self._chunk(number)[inside[now]]
        return rows

    def _rows_of_chunk(self, number: int) -> Array:
        """Return the rows at consecutive positions of an epoch: int64 [up to CHUNK]."""
        epoch, chunk = divmod(number, self._chunks_of_epoch)
        # the slots of each source are a range, in the order of the sources
        slots = np.arange(chunk * CHUNK, min((chunk + 1) * CHUNK, self.num_rows))
        return self._rows_at(self._permuted(slots, self.num_rows, epoch), epoch)

    def read_with(self, position: int) -> tuple[Array, int]:
        """Return the ranges of rows that are read together with the row at a position, but for a few of the rows.

        These are the blocks of its window, or their halves. Only of a stream with a window. Returns the first rows of
        the ranges, int64 [n], and how many rows each has.
        """
        epoch, place = divmod(position, self.num_rows)
        first = place - place % self.window
        # no range may reach into another block, which is somewhere else in the data
        length = self._block if self._block % 2 else self._block // 2
        slots = np.arange(first, min(first + self.window, self.num_rows), length)
        return self._rows_at(self._permuted(slots, self.num_rows, epoch, mixed=False), epoch), length

    def _permuted(self, places: Array, size: int, epoch: int | str, *, mixed: bool = True) -> Array:
        if not self.is_shuffled:
            return places
        if self._block:
            return permutation_in_blocks(
                places, size, self._block, seed=self._seed, epoch=epoch, mixed=mixed, of_files=self._of_files
            )
        return permutation(places, size, seed=self._seed, epoch=epoch)

    def _rows_at(self, slots: Array, epoch: int) -> Array:
        """Return the rows at slots of an epoch, each int64 [n]."""
        if len(self._sizes) == 1:
            return slots
        first_row = first_slot = 0
        rows = np.empty_like(slots)
        for number, (size, share) in enumerate(zip(self._sizes, self.shares, strict=True)):
            mine = (slots >= first_slot) & (slots < first_slot + share)
            # counts on over the epochs, so that a source of more rows than its share goes through all of them
            samples = epoch * share + slots[mine] - first_slot
            rows[mine] = first_row + self._rows_of(number, samples)
            first_row += size
            first_slot += share
        return rows

    def dealt(self, positions: Array, sizes: Array) -> Array:
        """Return the positions of one step, int64 [n], in the order in which the replicas take them: as they are."""
        return positions

    def _rows_of(self, number: int, samples: Array) -> Array:
        """Return the rows of one source that its samples 0, 1, 2, ... are, each int64 [n]."""
        size = self._sizes[number]
        passes = samples // size
        rows = samples % size
        # where an epoch is one pass, the permutation of its slots has shuffled the rows already
        if self.shares[number] != size:
            for each in np.unique(passes).tolist():
                now = passes == each
                # of blocks, the slots have mixed the rows of a window already
                rows[now] = self._permuted(rows[now], size, f"{each} of source {number}", mixed=False)
        return rows


def sample_stream(
    sizes: Sequence[int], size_bytes: int, rows_of_file: int, data: DataConfig, train: TrainConfig
) -> SampleStream:
    """Return the order in which a run takes its training rows, `sizes` of each source. Raises as SampleStream does.

    size_bytes: of all of them, in the shards. rows_of_file: of each shard file but the last one.
    """
    weights = [source.weight for source in data.mixture]
    of_files = takes_files_in_turn(train)
    block = rows_of_file if of_files else 0
    if train.shuffle == "blocks":
        block = rows_per_block(size_bytes, sum(sizes))
    return SampleStream(sizes, weights, seed=train.seed, shuffle=bool(train.shuffle), block=block, of_files=of_files)


def takes_files_in_turn(train: TrainConfig) -> bool:
    """Return whether an epoch needs each shard file once, beside a few others."""
    return train.shuffle is False or train.shuffle == "files"


def shares(total: int, weights: Sequence[float]) -> list[int]:
    """Divide `total` in proportion to the weights, so that the parts add up: the largest remainders are rounded up."""
    exact = [total * weight / sum(weights) for weight in weights]
    parts = [int(each) for each in exact]
    # the most negative difference is the largest remainder; of equal ones the first source gets the sample
    by_remainder = sorted(range(len(parts)), key=lambda number: parts[number] - exact[number])
    for number in by_remainder[: total - sum(parts)]:
        parts[number] += 1
    return parts


# -- shuffle rows in blocks, so that an epoch reads data larger than the memory about once: train.shuffle = "blocks"
#
# The rows are cut into blocks of about BLOCK_BYTES, the blocks are permuted, and the rows of WINDOW_BLOCKS blocks that
# follow each other are permuted together:
#
#     12 rows, blocks of 2, windows of 3 blocks; the first block begins at row 5 in this epoch
#     blocks                    5 6 | 7 8 | 9 10 | 11 0 | 1 2 | 3 4
#     permuted                  9 10 | 1 2 | 5 6 || 7 8 | 3 4 | 11 0
#     each window permuted       2 9 6 1 5 10    ||  4 11 7 0 8 3
#
# So while one window is trained on, the blocks of the next one are read ahead, each in one piece. All of it is computed
# from the seed, the epoch and the position.
#
# With train.shuffle = "files" a block is a shard file: the first one begins at row 0, and a window has FILES_TOGETHER.
# So an epoch needs each file once, in one piece, which is what a server of files is good at.

BLOCK_BYTES = 1 << 20
"""About the size of a block. A number of rows is chosen once for all, so it changes the order of samples."""
WINDOW_BLOCKS = 256
"""Blocks whose rows are mixed; two windows are in memory."""


def rows_per_block(size_bytes: int, num_rows: int) -> int:
    """Return the rows of a block: a power of two, so that a few bytes more in a file change no order."""
    row_bytes = max(1.0, size_bytes / max(1, num_rows))
    return int(2 ** max(0, round(np.log2(BLOCK_BYTES / row_bytes))))


def rows_of_window(block: int, *, of_files: bool) -> int:
    """Return how many rows are mixed. block: the rows of one; of_files: whether blocks are shard files."""
    return block * (FILES_TOGETHER if of_files else WINDOW_BLOCKS)


def permutation_in_blocks(
    positions: Array,
    size: int,
    block: int,
    *,
    seed: int,
    epoch: int | str,
    mixed: bool = True,
    of_files: bool = False,
) -> Array:
    """Return where the shuffle puts each position [n] of 0..size-1: int64 [n]. block: its rows.

    mixed: whether the rows of a window are permuted; else only the blocks are. of_files: as in `rows_of_window`.
    """
    places = positions
    window = rows_of_window(block, of_files=of_files)
    if mixed:
        places = np.empty_like(positions)
        windows = positions // window
        for number in range(windows.min(), windows.max() + 1):
            now = windows == number
            first = number * window
            places[now] = first + permutation(
                positions[now] - first, min(window, size - first), seed=seed, epoch=f"{epoch} window {number}"
            )
    blocks, inside = np.divmod(places, block)
    # rows of a window are in a few blocks, each of which is looked up; other rows may be in any
    numbers = np.arange(blocks.min(), blocks.max() + 1) if mixed else blocks
    order = np.array(numbers)
    # the rows behind the last full block come last, and are other ones in each epoch
    full = numbers < size // block
    order[full] = permutation(numbers[full], size // block, seed=seed, epoch=f"{epoch} blocks")
    rows = (order[blocks - numbers[0]] if mixed else order) * block + inside
    # a block of a file must not reach into the next one
    shift = 0 if of_files else int(hash_key("first block", seed, epoch) % np.uint64(size))
    return (rows + shift) % size
