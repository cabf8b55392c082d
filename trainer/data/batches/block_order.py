"""Shuffle rows in blocks, so that an epoch reads data larger than the memory about once: train.shuffle = "blocks".

The rows are cut into blocks of about BLOCK_BYTES, the blocks are permuted, and the rows of WINDOW_BLOCKS blocks that
follow each other are permuted together:

    12 rows, blocks of 2, windows of 3 blocks; the first block begins at row 5 in this epoch
    blocks                    5 6 | 7 8 | 9 10 | 11 0 | 1 2 | 3 4
    permuted                  9 10 | 1 2 | 5 6 || 7 8 | 3 4 | 11 0
    each window permuted       2 9 6 1 5 10    ||  4 11 7 0 8 3

So while one window is trained on, the blocks of the next one are read ahead, each in one piece. All of it is computed
from the seed, the epoch and the position.

With train.shuffle = "files" a block is a shard file: the first one begins at row 0, and a window has FILES_TOGETHER. So
an epoch needs each file once, in one piece, which is what a server of files is good at.
"""

from __future__ import annotations

import numpy as np

from onward.trainer.data.formats.finished_shards import FILES_TOGETHER
from onward.trainer.data.schema.permutation import Array, hash_key, permutation

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
