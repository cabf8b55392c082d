"""Make batches of tensors from a position in the sample stream; the same stream for any number of ranks.

Position p = 0, 1, 2, ... of the stream is row permutation(seed, epoch)[p mod N] of the data in epoch p // N, where N
is the number of rows (sample_stream.py, also for several sources). A step takes the next `global_batch_size` positions
and the replicas divide them. The only state is the number of samples taken, so each row is taken once per epoch, with
any layout and after any resume:

    positions of one step    0  1  2  3  4  5  6  7  8  9 10 11     global batch of 12, micro-batches of 2
    replica 0                0  1 | 2  3
    replica 1                            4  5 | 6  7
    replica 2                                        8  9 |10 11
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from onward.trainer.config.run_config import RunConfig
from onward.trainer.data.batches.balanced_order import BalancedOrder, Stream
from onward.trainer.data.batches.batch_computations import noise_keys, open_batch_transforms
from onward.trainer.data.batches.device_copies import DeviceCopies
from onward.trainer.data.batches.row_lengths import RowLengths, least_lengths, longest_row, padded_rows
from onward.trainer.data.batches.sample_stream import sample_stream
from onward.trainer.data.batches.shard_read_ahead import ShardReadAhead
from onward.trainer.data.batches.step_shares import check_last_samples, divide, end_of_share
from onward.trainer.data.input_columns import Feed, InputColumns
from onward.trainer.data.schema.batch_transforms import Samples
from onward.trainer.data.schema.columns import Array, Schema, Values
from onward.trainer.data.schema.fitted import Fitted
from onward.trainer.data.schema.signature import Signature
from onward.trainer.data.schema.target_counts import NO_LABELS, batch_counter, counted_targets, label_range, labels_of
from onward.trainer.data.storage.shards import Shards
from onward.trainer.errors import ConfigError
from onward.trainer.onnx_graph.surgery.stochastic_depth import NOISE

PIPELINED_EVALUATION_BATCHES = 4
"""Evaluation batches in one pass of a pipeline, per rank of it: 1 / (1 + 4) of the time is lost to its bubble."""


@dataclass(frozen=True)
class Batch:
    """One micro-batch of B samples on the device, from the loader through the pipeline to the loss."""

    inputs: tuple[Tensor, ...]
    """In the graph's input order, and behind them the keys of the graph's noise and the outputs of a teacher that were
    computed before, each [B, ...]; more rows where a graph of fixed batch needs them (`filled_to`)."""
    labels: tuple[Tensor | None, ...]
    """For each loss [B, ...]: int64 for cross-entropy, else fp32; None when the graph computes the loss. Then for each
    loss against the teacher which targets count, bool; None = all."""
    size: int
    """B."""
    num_targets: tuple[float, ...]
    """For each term of each loss the targets that enter it, counted on the host; 0 for a padding micro-batch."""
    label_ranges: tuple[tuple[int, int], ...] = (NO_LABELS,)
    """For each loss the least and the greatest class among the labels of a cross-entropy, found on the host."""
    rows: Array = field(default_factory=lambda: np.empty(0, np.int64))
    """int64 [B]: the numbers of the rows in the split."""
    is_padding: bool = False
    """Whether this is a padding micro-batch: its loss counts as zero. A replica that has one micro-batch fewer than
    another runs one, because collectives need every replica in every pass."""
    filled_to: int = 0
    """Rows of the inputs if they are more than B; the results of those beyond B do not count (`own_rows`)."""
    group: int = 0
    """Consecutive batches with one group number go through the pipeline together. In a pipeline they have one shape,
    and every replica uses the same group numbers, so that all ranks run the same passes in the same order."""
    lengths: Array = field(default_factory=lambda: np.empty((0, 0), np.int64))
    """int64 [B, inputs whose rows vary in length]: the lengths before padding; no rows for a padding micro-batch."""
    num_tokens: int = 0
    """The tokens of text in it, without padding (`RowLengths.tokens`)."""

    def own_rows(self, outputs: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return outputs without the results of rows that only fill the inputs up: [rows x m, ...] -> [B x m, ...]."""
        if not self.filled_to:
            return outputs
        has_rows = [value.ndim > 0 and len(value) % self.filled_to == 0 for value in outputs]
        pairs = zip(outputs, has_rows, strict=True)
        return [value[: len(value) // self.filled_to * self.size] if rows else value for value, rows in pairs]


class Rows(Protocol):
    """Rows of data, read by number: the shards of a split, or its first rows (first_rows.py)."""

    @property
    def columns(self) -> Schema: ...
    @property
    def pad_values(self) -> Mapping[str, float]:
        """Column that pre-processing computes -> what it pads rows of varying length with."""
        ...

    @property
    def fitted(self) -> Mapping[str, Fitted]:
        """Column -> what was found on the data for it."""
        ...

    @property
    def soft_labels(self) -> tuple[str, ...]:
        """Columns with outputs of a teacher, which are inputs of the graph that is trained."""
        ...

    def read(self, rows: Array) -> dict[str, Values]:
        """Return rows by number, int64 [n]: column -> array [n, *shape], or a list of n arrays."""
        ...


class Batches:
    """This replica's share of the training stream; the next step's batches are prepared in a background thread.

    Every replica has the same number of micro-batches in each step, because ZeRO gathers weights from all replicas in
    each pass. Memory: the samples of two steps of this replica; shard files are memory-mapped.

    signature: of the graph that is trained. Raises ConfigError for missing columns, and as `check_last_samples`.
    """

    def __init__(
        self,
        shards: Shards,
        config: RunConfig,
        signature: Signature,
        *,
        replica: int,
        num_replicas: int,
        device: torch.device,
    ) -> None:
        self._shards = shards
        self.num_rows = shards.num_rows
        samples = sample_stream(shards.sizes, shards.size_bytes, shards.rows_of_file, config.data, config.train)
        self._stream: Stream = samples
        self._collate = _Collate(shards, config, signature, device)
        if config.train.shuffle == "length":
            lengths = shards.lengths(self._collate.varying)
            self._stream = BalancedOrder(samples, lengths, step=config.train.global_batch_size, seed=config.train.seed)
        self.one_shape = self._collate.one_shape
        """Whether the inputs of all samples have one shape."""
        self.counts = self._collate.counts
        self._train = config.train
        self._micro_batch_size = config.micro_batch_size
        self._num_samples = config.train.samples_of_run(shards.num_rows)
        self._plain_from = config.data.plain_from(self._num_samples, shards.num_rows)
        check_last_samples(config.model, config.train, config.parallel, shards.num_rows)
        self._replica = replica
        self._num_replicas = num_replicas
        self._same_length = config.parallel.pipeline > 1
        # one worker: batches are made in the order of the steps
        self._worker = ThreadPoolExecutor(max_workers=1, initializer=_set_device, initargs=(device,))
        self._ahead = ShardReadAhead(shards, samples, self._num_samples)
        # (position, count) of what is prepared, and the batches
        self._next: tuple[tuple[int, int], Future[list[Batch]]] | None = None
        self.wait_s = 0.0
        """Seconds that the last `take` waited for its micro-batches."""

    def take(self, position: int, count: int) -> list[Batch]:
        """Return this replica's micro-batches of the `count` samples from `position` on.

        There are `gradient_accumulation_steps` of them, all of one size. If `count` is less than the global batch
        size there are fewer, as many as the replica with the most samples needs; the last may then be smaller, and is
        a padding micro-batch on a replica that has no samples left. Not collective. Raises DataError for a damaged
        shard.
        """
        started_at = time.perf_counter()
        # else what was prepared is of another position
        if self._next and self._next[0] == (position, count):
            batches = self._next[1].result()
            self._next = None
        else:
            batches = self._make(position, count)
        self._collate.finish(batches)
        self.wait_s = time.perf_counter() - started_at
        self._prepare(position + count)
        return batches

    def example(self) -> Batch:
        """Return the first micro-batch of a stream of one replica: the same on every rank, used for its shapes."""
        # without positions nothing random is drawn
        return self._collate.finish([self._collate(Samples(self.rows(0, self._micro_batch_size)))])[0]

    def first_lengths(self, most: int) -> Array:
        """Return the lengths of the first rows of the data, the same on every rank: int64 [rows, varying inputs]."""
        if not self.counts.places:
            return np.empty((0, 0), np.int64)
        count = min(most, self.num_rows)
        return self.counts.lengths(self._shards.read(np.arange(count)), count)

    def rows(self, position: int, count: int) -> Array:
        """Return the row numbers at `count` positions of the stream from `position` on: int64 [count]."""
        return self._stream.rows(np.arange(position, position + count))

    def close(self) -> None:
        """Stop the background threads and drop what they have prepared."""
        self._ahead.close()
        self._worker.shutdown(cancel_futures=True)

    def _prepare(self, position: int) -> None:
        # the last step takes what is left
        count = min(self._train.global_batch_size, self._num_samples - position)
        if count > 0 and (self._next is None or self._next[0] != (position, count)):
            self._next = (position, count), self._worker.submit(self._make, position, count)

    def _make(self, position: int, count: int) -> list[Batch]:
        self._ahead.reach(position)
        size = self._micro_batch_size
        num = self._num_replicas
        full = self._collate.full
        # a balanced stream deals the samples of the step out to the replicas, which needs the size of each share
        ends = [end_of_share(count, size, replica, num, full=full) for replica in range(num)]
        positions = self._stream.dealt(np.arange(position, position + count), np.diff(ends, prepend=0))
        share = divide(positions, size, self._replica, num, full=full)
        parts = [self._samples(part, position) for part in share.micro_batches]
        if share.full_everywhere:
            return self._collate.several(parts, same_length=self._same_length)
        # the last one has a group of its own, because on some replica it is smaller than those before it
        last = self._collate(parts[-1], is_padding=share.last_is_padding, group=1)
        return [*self._collate.several(parts[:-1], same_length=self._same_length), last]

    def _samples(self, positions: Array, step: int) -> Samples:
        return Samples(self._stream.rows(positions), positions, self._read, step, self._plain_from)

    def _read(self, positions: Array) -> dict[str, Values]:
        return self._shards.read(self._stream.rows(positions))


def evaluation_batches(
    shards: Shards, config: RunConfig, signature: Signature, *, replica: int, num_replicas: int, device: torch.device
) -> Iterator[Batch]:
    """Yield this replica's share of all rows; each row is on one replica, and shares differ by at most one row.

    A graph of fixed batch gets whole batches: shares differ by one batch then, and of a graph that computes its rows
    jointly the rows that do not fill the last one are left out. Every replica has the same number of batches; the last
    is padding on one that has no rows left. In a pipeline a few are made at a time, which go through it together. Not
    collective.
    """
    collate = _Collate(shards, config, signature, device)
    rows = np.arange(shards.num_rows)
    if config.model.fixed_batch == "joint":
        # a row computed beside repeated ones would have another result: incomplete batches are left out
        rows = rows[: len(rows) // config.evaluation_batch_size * config.evaluation_batch_size]
    share = divide(rows, config.evaluation_batch_size, replica, num_replicas, full=collate.full)
    num_stages = config.parallel.pipeline
    together = PIPELINED_EVALUATION_BATCHES * num_stages if num_stages > 1 else 1
    # the last micro-batch differs between replicas, and so has a group of its own
    num_full = len(share.micro_batches) - (not share.full_everywhere)
    for first in range(0, num_full, together):
        now = [Samples(rows) for rows in share.micro_batches[first : min(first + together, num_full)]]
        yield from collate.finish(collate.several(now, same_length=num_stages > 1, group=first))
    for rows in share.micro_batches[num_full:]:
        yield from collate.finish([collate(Samples(rows), is_padding=share.last_is_padding, group=num_full)])


def one_batch(rows: Rows, config: RunConfig, signature: Signature, numbers: Array, *, training: bool = False) -> Batch:
    """Return the rows of these numbers, int64 [B], as one batch on the CPU.

    training: with what is drawn in training (augmentation, mixed labels), as if the rows were taken in their own order.
    """
    samples = Samples(numbers, numbers, rows.read) if training else Samples(numbers)
    return _Collate(rows, config, signature, torch.device("cpu"))(samples)


def _set_device(device: torch.device) -> None:
    # a new thread uses the first GPU, whatever the GPU of its rank is
    if device.type == "cuda":
        torch.cuda.set_device(device)


class _Collate:
    """Make a batch of rows: read them, pad, stack, cast to the types of the graph, start the copy to the device.

    `finish` comes before the first use of a batch, in the thread that computes.
    """

    def __init__(self, shards: Rows, config: RunConfig, signature: Signature, device: torch.device) -> None:
        self._shards = shards
        self._losses = config.losses
        self._soft_losses = config.soft_losses
        self._others = (*[NOISE] * signature.draws, *shards.soft_labels)
        self._input_names = [info.name for info in signature.inputs]
        self._noise_seed = config.train.seed if signature.draws else None
        self.full = config.model.keeps_batch
        """Whether the graph takes micro-batches of one size only, so that smaller ones are filled up."""
        self._size = config.micro_batch_size
        self._copies = DeviceCopies(device)
        matched = InputColumns(config.data, config.loss, config.model, signature)
        self._feeds = matched.feeds()
        self._transforms = open_batch_transforms(config, signature, shards.fitted)
        columns = {name for feed in self._feeds for name in feed.columns}
        if missing := sorted(columns - shards.columns.keys()):
            raise ConfigError(
                f"the shards have no column {', '.join(missing)}, only {', '.join(shards.columns)}; they were made for "
                "another model: start a new run"
            )
        self._num_inputs = len(signature.inputs)
        inputs = self._feeds[: self._num_inputs]
        image = next((feed.image.size for feed in inputs if feed.image), None)
        self._count_targets = batch_counter(config.losses, image)
        read = [name for feed in inputs for name in feed.columns]
        self.varying = [name for name in read if shards.columns[name].variable]
        """The columns of inputs whose rows have lengths of their own."""
        self.one_shape = not self.varying
        # padded labels are ignored by cross-entropy, and what pre-processing computes is padded as it pads itself;
        # data.pad_values overrides the value of any column
        self._pad_values = dict.fromkeys(columns, 0.0)
        for loss in self._losses:
            if loss.has_classes:
                self._pad_values |= dict.fromkeys(loss.columns, loss.ignored)
        self._pad_values |= {**shards.pad_values, **config.data.pad_values}
        self._least = least_lengths(columns, self._losses, inputs)
        self._pad_left = {name for name, fitted in shards.fitted.items() if fitted.pad_left}
        self.counts = RowLengths(inputs, shards.columns, matched.text, shards.pad_values)

    def __call__(self, samples: Samples, *, is_padding: bool = False, group: int = 0) -> Batch:
        filled = samples
        if self.full and len(samples.rows) < self._size:
            # with samples that are there anyway, so that what a graph computes over its batch stays typical
            again = np.resize(np.arange(len(samples.rows)), self._size)
            positions = None if samples.positions is None else samples.positions[again]
            filled = replace(samples, rows=samples.rows[again], positions=positions)
        return self._batch(samples.rows, self._columns(filled), {}, is_padding=is_padding, group=group)

    def several(self, parts: Sequence[Samples], *, same_length: bool, group: int = 0) -> list[Batch]:
        """Make a batch of each part. `same_length`: pad all of them to the longest row of any."""
        columns = [self._columns(samples) for samples in parts]
        # pipeline stages receive into buffers of one shape for all micro-batches of a pass
        lengths: dict[str, int] = {}
        if same_length:
            for name in self._pad_values:
                lengths[name] = max((longest_row(values[name]) for values in columns), default=0)
        pairs = zip(parts, columns, strict=True)
        return [self._batch(samples.rows, values, lengths, group=group) for samples, values in pairs]

    def _columns(self, samples: Samples) -> dict[str, Values]:
        """Read the stored columns of the samples and compute the transforms of them."""
        values = self._shards.read(samples.rows)
        for transform in self._transforms:
            values = transform(values, samples)
        return values | {NOISE: noise_keys(samples, self._noise_seed)} if self._noise_seed is not None else values

    def finish(self, batches: list[Batch]) -> list[Batch]:
        """Let the computation wait for the copies of these batches; return them."""
        for batch in batches:
            self._copies.finish((*batch.inputs, *(each for each in batch.labels if each is not None)))
        return batches

    def _batch(
        self,
        rows: Array,
        columns: Mapping[str, Values],
        lengths: Mapping[str, int],
        *,
        is_padding: bool = False,
        group: int,
    ) -> Batch:
        tensors = [self._tensor(feed, columns, lengths) for feed in self._feeds]
        labels = labels_of(self._losses, (tensor[: len(rows)] for tensor in tensors[self._num_inputs :]))
        tensors = tensors[: self._num_inputs]
        inputs = dict(zip(self._input_names, tensors, strict=True))
        counted = [counted_targets(soft, self._losses, labels, inputs.get(soft.mask)) for soft in self._soft_losses]
        # targets are counted here and not on the device, where reading a count would wait for all computed before
        counts = [0.0] * (sum(loss.num_terms for loss in self._losses) + len(counted))
        if not is_padding:
            counts = self._count_targets(labels, len(rows))
            counts += [float(len(rows) if mask is None else mask.sum()) for mask in counted]
        # noise keys and a teacher's outputs stand behind the inputs, as the training graph has them
        others = [torch.from_numpy(np.asarray(columns[name])) for name in self._others]
        # a graph of fixed batch gets more rows than the samples are
        filled_to = len(tensors[0]) if len(tensors[0]) > len(rows) else 0
        num_counted = 0 if is_padding else len(rows)
        inputs_on_device = tuple(self._copies.start(tensor) for tensor in (*tensors, *others))
        return Batch(
            inputs=inputs_on_device,
            labels=tuple(None if target is None else self._copies.start(target) for target in (*labels, *counted)),
            size=len(rows),
            num_targets=tuple(counts),
            label_ranges=tuple(map(label_range, labels, self._losses)),
            rows=rows,
            is_padding=is_padding,
            filled_to=filled_to,
            group=group,
            lengths=self.counts.lengths(columns, num_counted),
            num_tokens=self.counts.tokens(columns, num_counted),
        )

    def _tensor(self, feed: Feed, columns: Mapping[str, Values], lengths: Mapping[str, int]) -> Tensor:
        least = {name: max(lengths.get(name, 0), self._least[name]) for name in feed.columns}
        arrays = [
            padded_rows(columns[name], self._pad_values[name], least[name], left=name in self._pad_left)
            for name in feed.columns
        ]
        array = np.stack(arrays, axis=-1) if feed.stacked else arrays[0]
        if feed.is_one_column:
            array = array.reshape(len(array), 1)
        # transforms may make probabilities of classes: mixed labels (MixUp, CutMix)
        dtype = "float32" if feed.scores is not None and array.dtype.kind == "f" else feed.tensor_dtype
        return torch.from_numpy(array).to(getattr(torch, dtype))
