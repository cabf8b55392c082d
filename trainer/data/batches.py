"""The sample stream: from a position alone to tensors, the same for any number of ranks.

Position p = 0, 1, 2, ... of the stream is row permutation(seed, epoch)[p mod N] in epoch p // N. A step
takes the next positions, the replicas divide them, and nothing needs to be remembered but how many were
taken. So each row is taken exactly once an epoch, whatever the layout and wherever a run was resumed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from onward.trainer.config.run_config import RunConfig
from onward.trainer.data.columns import Array, Values
from onward.trainer.data.permutation import permutation
from onward.trainer.data.shards import Shards
from onward.trainer.data.signature import Use, signature_to_train, uses
from onward.trainer.errors import ConfigError


@dataclass(frozen=True)
class Batch:
    """One micro-batch of B samples on the device."""

    inputs: tuple[Tensor, ...]
    """In the graph's input order, each [B, ...]."""
    labels: Tensor | None
    """[B, ...]: int64 for cross-entropy, else fp32; None when the graph computes its own loss."""
    size: int
    """B."""
    rows: Array = field(default_factory=lambda: np.empty(0, np.int64))
    """int64 [B]: the numbers of the rows in the split."""
    is_padding: bool = False
    """Whether this is a padding micro-batch: its loss counts as zero. A replica that has one micro-batch fewer than
    another runs one, because collectives need every replica in every pass."""
    group: int = 0
    """Consecutive batches with one group number go through the pipeline together. In a pipeline they have one shape,
    and every replica uses the same group numbers, so that all ranks run the same passes in the same order."""


class Batches:
    """This replica's part of the training stream; the next step's part is prepared in the background.

    Every replica has the same number of micro-batches in each step: what divides weights among replicas gathers them
    once a pass. Memory: two steps of this replica's samples. The files are mapped, not loaded.
    """

    def __init__(
        self, shards: Shards, config: RunConfig, *, replica: int, num_replicas: int, device: torch.device
    ) -> None:
        self.num_rows = shards.num_rows
        self._collate = _Collate(shards, config, device)
        self._train = config.train
        self._micro_batch_size = config.micro_batch_size
        self._num_samples = config.total_samples(shards.num_rows)
        self._replica, self._num_replicas = replica, num_replicas
        self._alike = config.parallel.pipeline > 1
        self._worker = ThreadPoolExecutor(max_workers=1, initializer=_use, initargs=(device,))
        self._next: tuple[tuple[int, int], Future[list[Batch]]] | None = None

    def take(self, position: int, count: int) -> list[Batch]:
        """This replica's micro-batches of the `count` samples from `position` on.

        As many as `gradient_accumulation_steps`, all of one size. Where `count` is less than a whole global batch
        there are fewer, as many as the replica with most samples needs; the last may then be smaller, and is a
        padding micro-batch on a replica that has no samples left. Not collective. Raises DataError for a damaged shard.
        """
        if self._next and self._next[0] == (position, count):
            batches = self._next[1].result()
            self._next = None
        else:
            batches = self._make(position, count)
        self._prepare(position + count)
        return batches

    def example(self) -> Batch:
        """The first micro-batch of the stream, were there one replica: the same on every rank, for its shapes."""
        return self._collate(self.rows(0, self._micro_batch_size))

    def rows(self, position: int, count: int) -> Array:
        """The rows at `count` positions of the stream from `position` on: int64 [count]."""
        positions = np.arange(position, position + count)
        epochs, places = positions // self.num_rows, positions % self.num_rows
        if not self._train.shuffle:
            return places
        for epoch in np.unique(epochs).tolist():
            now = epochs == epoch
            places[now] = permutation(places[now], self.num_rows, seed=self._train.seed, epoch=epoch)
        return places

    def close(self) -> None:
        """End the background thread; what it prepared is dropped."""
        self._worker.shutdown(cancel_futures=True)

    def _prepare(self, position: int) -> None:
        count = min(self._train.global_batch_size, self._num_samples - position)
        if count > 0 and (self._next is None or self._next[0] != (position, count)):
            self._next = (position, count), self._worker.submit(self._make, position, count)

    def _make(self, position: int, count: int) -> list[Batch]:
        parts = _parts(self.rows(position, count), self._micro_batch_size, self._replica, self._num_replicas)
        if parts.full_everywhere:
            return self._collate.several(parts.rows, alike=self._alike)
        # the last by itself: on some replica it is smaller than those before it
        full = self._collate.several(parts.rows[:-1], alike=self._alike)
        return [*full, self._collate(parts.rows[-1], is_padding=parts.last_is_padding, group=1)]


def evaluation_batches(
    shards: Shards, config: RunConfig, *, replica: int, num_replicas: int, device: torch.device
) -> Iterator[Batch]:
    """This replica's part of all rows, each row on exactly one replica; parts may differ by one row.

    Every replica has the same number of batches; the last is padding on one that has no rows left. In a pipeline a
    few are made at a time, which go through it together. Not collective.
    """
    collate = _Collate(shards, config, device)
    parts = _parts(np.arange(shards.num_rows), config.evaluation_batch_size, replica, num_replicas)
    ranks = config.parallel.pipeline
    together = IN_FLIGHT * ranks if ranks > 1 else 1
    num_full = len(parts.rows) - (not parts.full_everywhere)
    for first in range(0, num_full, together):
        now = parts.rows[first : min(first + together, num_full)]
        yield from collate.several(now, alike=ranks > 1, group=first)
    for rows in parts.rows[num_full:]:
        yield collate(rows, is_padding=parts.last_is_padding, group=num_full)


IN_FLIGHT = 4
"""Evaluation batches that go through a pipeline together, for each of its ranks: 1 / (1 + IN_FLIGHT) of the time is
lost to filling and emptying it."""


@dataclass(frozen=True)
class _Parts:
    """One replica's micro-batches, as rows."""

    rows: list[Array]
    last_is_padding: bool
    """Whether the last is a padding micro-batch: this replica has no rows left for it."""
    full_everywhere: bool
    """Whether the last is of full size on every replica; all before it always are."""


def _parts(rows: Array, size: int, replica: int, num_replicas: int) -> _Parts:
    """Divide rows among the replicas, and each share into micro-batches: equally many on all of them."""
    mine = _share(rows, replica, num_replicas)
    num = -(-len(rows) // (num_replicas * size))  # as the largest share, of ceil(rows / replicas), needs
    parts = [mine[first : first + size] for first in range(0, num * size, size)]
    last_is_padding = num > 0 and not len(parts[-1])
    if last_is_padding:
        parts[-1] = rows[:1]  # any row has the right shape; its loss does not count
    return _Parts(parts, last_is_padding, len(rows) == num * size * num_replicas)


def _use(device: torch.device) -> None:
    """A thread begins on the first GPU, whatever the rank's own is."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def _share(rows: Array, replica: int, num_replicas: int) -> Array:
    """The replica's stretch of the rows; stretches differ by one row at most."""
    return rows[len(rows) * replica // num_replicas : len(rows) * (replica + 1) // num_replicas]


class _Collate:
    """Makes tensors of rows: reads, pads, stacks, casts to what the graph takes, moves to the device."""

    def __init__(self, shards: Shards, config: RunConfig, device: torch.device) -> None:
        self._shards = shards
        self._device = device
        self._uses = uses(config, signature_to_train(config.model))
        needed = {name for use in self._uses for name in use.columns}
        if missing := sorted(needed - shards.columns.keys()):
            raise ConfigError(f"the shards have no column {', '.join(missing)}, only {', '.join(shards.columns)}")
        self._labelled = config.model.loss != "output"
        fill = config.model.ignore_index if config.model.loss == "cross_entropy" else 0
        self._fill = dict.fromkeys(needed, 0.0)
        if self._labelled:
            self._fill |= dict.fromkeys(self._uses[-1].columns, fill)
        self._fill |= config.data.pad_values

    def __call__(self, rows: Array, *, is_padding: bool = False, group: int = 0) -> Batch:
        return self._batch(rows, self._shards.read(rows), {}, is_padding=is_padding, group=group)

    def several(self, parts: Sequence[Array], *, alike: bool, group: int = 0) -> list[Batch]:
        """A batch of each part; `alike`: all padded to the longest row of any."""
        columns = [self._shards.read(rows) for rows in parts]
        longest: dict[str, int] = {}
        for name in self._fill if alike else ():
            longest[name] = max((_longest(values[name]) for values in columns), default=0)
        return [self._batch(*part, longest, group=group) for part in zip(parts, columns, strict=True)]

    def _batch(
        self,
        rows: Array,
        columns: dict[str, Values],
        longest: Mapping[str, int],
        *,
        is_padding: bool = False,
        group: int,
    ) -> Batch:
        tensors = [self._tensor(use, columns, longest) for use in self._uses]
        labels = tensors.pop() if self._labelled else None
        return Batch(tuple(tensors), labels, len(rows), rows, is_padding, group)

    def _tensor(self, use: Use, columns: dict[str, Values], longest: Mapping[str, int]) -> Tensor:
        arrays = [_padded(columns[name], self._fill[name], longest.get(name, 0)) for name in use.columns]
        array = np.stack(arrays, axis=1) if use.stacked else arrays[0]
        computed = {"float16": "float32", "bfloat16": "float32"}.get(use.dtype, use.dtype)  # as the graph is imported
        tensor = torch.from_numpy(array).to(getattr(torch, computed))
        if self._device.type == "cuda":
            return tensor.pin_memory().to(self._device, non_blocking=True)
        return tensor.to(self._device)


def _longest(values: Values) -> int:
    """Of rows of varying length; 0 for arrays, which have one."""
    return 0 if isinstance(values, np.ndarray) else max(map(len, values), default=0)


def _padded(values: Values, fill: float, least: int) -> Array:
    """[B, longest]: rows of varying length, filled up at their ends, to `least` at least; arrays as they are."""
    if isinstance(values, np.ndarray):
        return values
    longest = max(_longest(values), least)
    padded = np.full((len(values), longest), fill, values[0].dtype if values else np.float32)
    for row, value in zip(padded, values, strict=True):
        row[: len(value)] = value
    return padded
