"""Divide the samples of a step, or rows to evaluate, among replicas and micro-batches."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from onward.trainer.config.sections.model import ModelConfig
from onward.trainer.config.sections.ranks import ParallelConfig
from onward.trainer.config.sections.training import TrainConfig
from onward.trainer.data.schema.columns import Array
from onward.trainer.errors import ConfigError


@dataclass(frozen=True)
class Share:
    """The samples of one replica, by micro-batch: rows or positions, int64 [B] each."""

    micro_batches: list[Array]
    last_is_padding: bool
    """Whether the last is a padding micro-batch: this replica has no samples left for it."""
    full_everywhere: bool
    """Whether the last has its full size on every replica; all before it always have."""


def divide(samples: Array, size: int, replica: int, num_replicas: int, *, full: bool = False) -> Share:
    """Divide samples among the replicas, and each share into the same number of micro-batches of `size` samples.

    samples: int64 [n], rows or positions. full: let at most one micro-batch of all replicas have fewer samples, for a
    graph that takes no other number.
    """
    # a replica's samples are a range: it begins where that of the replica before ends
    first = end_of_share(len(samples), size, replica - 1, num_replicas, full=full)
    mine = samples[first : end_of_share(len(samples), size, replica, num_replicas, full=full)]
    num = -(-len(samples) // (num_replicas * size))  # what the largest share, of ceil(n / replicas) samples, needs
    parts = [mine[first : first + size] for first in range(0, num * size, size)]
    last_is_padding = num > 0 and not len(parts[-1])
    if last_is_padding:
        # collectives need a pass of this replica, too, and a pass needs at least one sample
        parts[-1] = samples[:1]  # any sample has the right shape; its loss does not count
    return Share(parts, last_is_padding, len(samples) == num * size * num_replicas)


def end_of_share(count: int, size: int, replica: int, num_replicas: int, *, full: bool) -> int:
    """Return where the range of a replica's samples ends, and that of the next one begins."""
    # the sizes differ by one at most, also if there are fewer samples than replicas
    unit = size if full else 1
    units = -(-count // unit)
    return min(units * (replica + 1) // num_replicas * unit, count)


def micro_batch_sizes(model: ModelConfig, parallel: ParallelConfig, num_rows: int, size: int) -> list[tuple[int, bool]]:
    """Return each (rows, whether it is padding) that occurs when `num_rows` rows are divided, the greatest first."""
    full = model.keeps_batch
    sizes = set[tuple[int, bool]]()
    # only the number of rows counts, so that the rows of a run need not exist yet
    for replica in range(parallel.data):
        share = divide(np.arange(num_rows), size, replica, parallel.data, full=full)
        for number, part in enumerate(share.micro_batches, start=1):
            is_last = number == len(share.micro_batches)
            sizes.add((len(part), share.last_is_padding and is_last))
    return sorted(sizes, reverse=True)


def check_last_samples(model: ModelConfig, train: TrainConfig, parallel: ParallelConfig, num_rows: int) -> None:
    """Raise ConfigError if the last micro-batch would have to be filled up for a graph that computes its rows jointly.

    Such rows would change the results of the others. num_rows: those of the training data.
    """
    total = train.samples_of_run(num_rows)
    size = train.micro_batch_rows(parallel.data)
    if model.fixed_batch == "joint" and total % size:
        raise ConfigError(
            f"the file computes the {size} rows of its fixed batch jointly, so that no rows may be added to a smaller "
            f"one, but a run of {total} samples ends with {total % size}; in place of train.num_epochs set "
            f"train.num_steps = {max(total // train.global_batch_size, 1)}"
        )
