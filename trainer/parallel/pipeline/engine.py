"""Run one training step or one evaluation: the micro-batches of a replica through the stages of its pipeline.

With 2 stages and 4 micro-batches, schedule 1f1b orders the forward (F) and backward (B) passes like this; an empty cell
is the pipeline bubble:

    time       1   2   3   4   5   6   7   8   9   10
    stage 0    F0  F1      B0  F2  B1  F3  B2      B3     warm-up F0, steady state F1 B0 F2 B1 F3 B2, cool-down B3
    stage 1        F0  B0  F1  B1  F2  B2  F3  B3         all in the steady state

With one stage it is F0 B0 F1 B1 F2 B2 F3 B3, which is gradient accumulation. So the micro-batches of a step and its
accumulation steps are one number, and there is no other loop over them.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from onward.trainer.config.pipeline_schedules import PIPELINE_SCHEDULES, ScheduleName
from onward.trainer.data.batches.batches import Batch
from onward.trainer.distributed.failures import lost_a_peer
from onward.trainer.distributed.mesh import new_group
from onward.trainer.errors import UnsupportedModel
from onward.trainer.model.metrics.evaluation_metrics import EvaluationMetrics
from onward.trainer.model.weight_casts import casts_kept
from onward.trainer.parallel.pipeline.stage import Stage
from onward.trainer.parallel.pipeline.stage_schedules import (
    Autocast,
    OnOutputs,
    ScheduledStages,
    StagesFor,
    copy_gradients,
    restored_state,
    trained_parameters,
)

ORDINARY: ScheduleName = "interleaved"
"""Runs any number of stages with ordinary backward passes."""
GRADIENT_TOLERANCE = 1e-3
"""Relative error of a gradient that rounding explains, in bf16 too. Wrong gradients had errors of 0.2 and more."""


class BatchLosses(Protocol):
    """Losses as sums over targets (trainer/model/losses/loss.py)."""

    @property
    def counts_itself(self) -> bool: ...
    @property
    def own_divisor(self) -> Tensor | None: ...
    def __len__(self) -> int: ...
    def check_labels(self, batch: Batch, outputs: Tensor | Sequence[Tensor]) -> None: ...
    def __call__(
        self, outputs: Tensor | Sequence[Tensor], labels: Sequence[Tensor | None], size: int
    ) -> tuple[Tensor, ...]: ...
    def weighted(self, values: Sequence[Tensor], scale: float | Sequence[Tensor] = 1.0) -> Tensor: ...


class ObservedLosses:
    """Losses as others compute them; a subclass observes the computing."""

    def __init__(self, losses: BatchLosses) -> None:
        self._losses = losses

    def __len__(self) -> int:
        return len(self._losses)

    @property
    def counts_itself(self) -> bool:
        return self._losses.counts_itself

    @property
    def own_divisor(self) -> Tensor | None:
        return self._losses.own_divisor

    def check_labels(self, batch: Batch, outputs: Tensor | Sequence[Tensor]) -> None:
        """Raise DataError for labels that do not fit the outputs."""
        self._losses.check_labels(batch, outputs)

    def __call__(
        self, outputs: Tensor | Sequence[Tensor], labels: Sequence[Tensor | None], size: int
    ) -> tuple[Tensor, ...]:
        return self._losses(outputs, labels, size)

    def weighted(self, values: Sequence[Tensor], scale: float | Sequence[Tensor] = 1.0) -> Tensor:
        """Return the sum of values x weight x scale, a scalar (`Losses.weighted`)."""
        return self._losses.weighted(values, scale)


@contextlib.contextmanager
def replaced_forwards(forwards: Mapping[nn.Module, Callable[..., Any]]) -> Iterator[None]:
    """Let modules run these functions in place of their forward passes inside a block."""
    before = {module: vars(module).get("forward") for module in forwards}
    for module, forward in forwards.items():
        # on the object alone: nn.Module calls it with the hooks of the module, by which ZeRO gathers weights
        vars(module)["forward"] = forward
    try:
        yield
    finally:
        for module, replaced in before.items():
            del vars(module)["forward"]
            if replaced is not None:
                vars(module)["forward"] = replaced


class GradientReducer(Protocol):
    """What sums the gradients over the replicas (parallel/replicas/reducer.py and zero.py)."""

    def begin(self, num_backwards: int, num_targets: float, num_batchnorm_updates: int) -> None: ...


class Pipeline:
    """Run the stages of this rank, together with the ranks of the other stages.

    stages: of this rank, in order. stages_for: see `StagesFor`; unused where one rank has all stages. counts_loss:
    whether this rank's losses enter the sum over the world; of the ranks with the last stage of a replica exactly one
    does. autocast: makes the context of the forward pass. group_pipeline: from `stage_group`. Raises ConfigError for
    stages that the schedule cannot run.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        losses: BatchLosses,
        *,
        schedule: ScheduleName,
        stages_for: StagesFor,
        autocast: Autocast,
        device: torch.device,
        group_pipeline: dist.ProcessGroup,
        group_data: dist.ProcessGroup,
        counts_loss: bool = True,
    ) -> None:
        self._stages = list(stages)
        self._losses = losses
        self._device = device
        self._group = group_data
        self._counts_loss = counts_loss
        self._autocast = autocast
        self.own_divisor = torch.zeros((), dtype=torch.float64, device=device)
        """This rank's share of what the gradients and the loss of the last step are still to be divided by, of a loss
        that counts it in its forward passes (dense detectors); else 0."""
        self._is_training: bool | None = None
        """The mode of the stages' modules; None before the first pass."""
        self._scheduled: ScheduledStages | None = None
        if group_pipeline.size() > 1:
            self._scheduled = ScheduledStages(stages, schedule, stages_for, autocast, device, group_pipeline)
        self._check_gradients = self._scheduled is not None and PIPELINE_SCHEDULES[schedule].splits_backward

    def run(
        self,
        micro_batches: Sequence[Batch],
        reducer: GradientReducer,
        *,
        scale: float,
        beat: Callable[[], None] = lambda: None,
    ) -> Tensor:
        """Run every forward and backward pass of one step; leave scaled gradients with the reducer.

        Summed over the replicas, the gradient is that of `scale` x the mean loss over the targets of *all* replicas and
        micro-batches; of several losses, of the weighted sum of their means. Returns this rank's share of that without
        the scale, a scalar: 0 unless the rank counts its losses and has the last stage. Collective: every rank, each
        with the same number of micro-batches. Raises UnsupportedModel for a graph whose gradients the schedule computes
        wrongly.
        """
        passes = [list(batches) for batches in _passes(micro_batches)]
        if self._check_gradients and self._scheduled and self._scheduled.splits_backward(len(passes[0])):
            self._check_split_backward(self._scheduled, passes[0], reducer, beat)
        # padding micro-batches run their backward passes, but count neither targets nor BatchNorm updates
        real = [batch for batch in micro_batches if not batch.is_padding]
        # of each loss by itself: losses may ignore different labels
        counts = [sum(batch.num_targets[place] for batch in real) for place in range(len(self._losses))]
        if self._losses.counts_itself:  # its sum is divided once all forward passes have counted
            counts = [0.0]
        # Adasum weighs hosts by it, and takes runs of one loss only
        reducer.begin(len(micro_batches), counts[0], len(real))
        # the mean needs the number of targets everywhere: labels may be ignored, so ranks have different numbers
        totals, wait_for_totals = self._sum_over_replicas(counts)
        # on the device: reading a loss would wait for the GPU in each micro-batch
        loss_sums = torch.zeros(len(counts), device=self._device)
        self.own_divisor.zero_()

        def scaled_loss(batch: Batch, outputs: Sequence[Tensor]) -> Tensor:
            losses = self._batch_losses(batch, outputs)
            wait_for_totals()
            # tensor-parallel ranks compute the same loss, and only one of them may enter the sum over the world
            if self._counts_loss:
                for total, loss in zip(loss_sums, losses, strict=True):
                    total.add_(loss.detach())
                if self._losses.own_divisor is not None and not batch.is_padding:
                    self.own_divisor.add_(self._losses.own_divisor)
            return self._losses.weighted(losses, list(scale / _not_zero(totals)))

        with casts_kept(self._device):
            for batches in passes:
                self._run_pass(batches, scaled_loss, beat, training=not batches[0].is_padding)
        # a rank without the last stage has not waited yet
        wait_for_totals()
        return self._losses.weighted(list(loss_sums / _not_zero(totals)))

    @torch.no_grad()
    def evaluate(
        self, batches: Iterable[Batch], totals: EvaluationMetrics, beat: Callable[[], None]
    ) -> dict[str, float]:
        """Return the metrics over the batches of all ranks, each sample once.

        Collective: every rank, each with the same number of batches.
        """

        def update(batch: Batch, outputs: Sequence[Tensor]) -> None:
            # all ranks of a tensor-parallel group add the same numbers, which leaves every mean as it is
            if not batch.is_padding:
                outputs = batch.own_rows(outputs)
                self._losses.check_labels(batch, outputs)
                totals.update(outputs, batch.labels, batch.size)

        with casts_kept(self._device):
            for members in _passes(batches):
                self._run_pass(list(members), update, beat, training=False)
        return totals.compute()

    @contextlib.contextmanager
    def with_losses(self, losses: BatchLosses) -> Iterator[None]:
        """Compute other losses inside a block."""
        before = self._losses
        self._losses = losses
        try:
            yield
        finally:
            self._losses = before

    def _run_pass(
        self, batches: list[Batch], on_outputs: OnOutputs, beat: Callable[[], None], *, training: bool
    ) -> None:
        # evaluation runs between training steps, and padding micro-batches must not update running statistics
        if self._is_training != training:
            for stage in self._stages:
                stage.chain.train(training)
            self._is_training = training
        if self._scheduled:
            self._scheduled.run(batches, on_outputs, beat)
            return
        # one rank has all stages: no messages, and each micro-batch runs forward and backward before the next
        for batch in batches:
            values: tuple[Tensor, ...] = ()
            with self._autocast():
                for stage in self._stages:
                    values = stage.chain(*values, *(batch.inputs[position] for position in stage.input_positions))
            loss = on_outputs(batch, values)
            if loss is not None:
                loss.backward()  # type: ignore[no-untyped-call]
            beat()

    def _batch_losses(self, batch: Batch, outputs: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return the losses of a micro-batch as scalars to differentiate; zero for a padding micro-batch."""
        outputs = batch.own_rows(outputs)
        self._losses.check_labels(batch, outputs)
        # a loss that compares the samples of all replicas leaves those of a padding micro-batch out
        losses = self._losses(outputs, batch.labels, 0 if batch.is_padding else batch.size)
        if not batch.is_padding:
            return losses
        # Every gradient must exist and be zero, since collectives and counts of backward passes expect it. A product
        # with zero would not do: 0 x inf is NaN.
        return [loss.masked_fill(torch.ones_like(loss, dtype=torch.bool), 0.0) for loss in losses]

    def _batch_loss(self, batch: Batch, outputs: Sequence[Tensor]) -> Tensor:
        return self._losses.weighted(self._batch_losses(batch, outputs))

    def _sum_over_replicas(self, counts: Sequence[float]) -> tuple[Tensor, Callable[[], object]]:
        """Return the sums of counts over all replicas, and what to call before reading them.

        The all-reduce runs while the first forward pass computes.
        """
        # `fill_` passes the number to a kernel; a tensor made on the host would be copied, and waited for
        total = torch.empty(len(counts), device=self._device)
        for place, count in enumerate(counts):
            total[place].fill_(float(count))
        if self._group.size() == 1:
            return total, lambda: None
        # asynchronous: the first loss needs it, and the first forward pass does not
        work = dist.all_reduce(total, group=self._group, async_op=True)
        return total, work.wait

    def _check_split_backward(
        self, scheduled: ScheduledStages, batches: list[Batch], reducer: GradientReducer, beat: Callable[[], None]
    ) -> None:
        """Compare every gradient that a split backward pass computes for these micro-batches with that of an ordinary
        one: an autograd function may not allow to be split."""
        gradients = []
        wanted = scheduled.schedule
        for schedule in (ORDINARY, wanted):
            scheduled.schedule = schedule
            # one backward pass more than there will be: the reducer never sees the last one, so it sends nothing
            reducer.begin(len(batches) + 1, 1, 0)
            with restored_state(self._stages, self._device), casts_kept(self._device):
                try:
                    self._run_pass(batches, self._batch_loss, beat, training=True)
                except RuntimeError as error:
                    # a lost peer, or an error of ordinary backward passes, is not a fault of the schedule
                    if schedule == ORDINARY or type(error) is not RuntimeError or lost_a_peer(error):
                        raise
                    raise UnsupportedModel(
                        f"parallel.schedule {wanted!r} cannot split this graph's backward pass ({error}); "
                        "use 'interleaved' or '1f1b'"
                    ) from error
            gradients.append(copy_gradients(self._stages))
        for (name, _), expected, found in zip(trained_parameters(self._stages), *gradients, strict=True):
            norm = torch.linalg.vector_norm(expected).clamp(min=1e-30)
            relative_error = float(torch.linalg.vector_norm(found - expected) / norm)
            if relative_error > GRADIENT_TOLERANCE:
                raise UnsupportedModel(
                    f"parallel.schedule {wanted!r} computes a gradient of {name} with a relative error of "
                    f"{relative_error:.1e} ({GRADIENT_TOLERANCE:g} is allowed); use 'interleaved' or '1f1b'"
                )
        self._check_gradients = False


def _not_zero(counts: Tensor) -> Tensor:
    """Return counts with 1 in place of 0: a sum over no targets is 0, and so is its mean."""
    return torch.where(counts > 0, counts, 1.0)


def stage_group(mesh: DeviceMesh, *, timeout_s: float) -> dist.ProcessGroup:
    """Return the process group of this rank's pipeline axis, for the messages between stages.

    The mesh's own group has the wrong time-out: gloo's point-to-point messages keep the one that their group was made
    with, which is 30 minutes in a mesh. Collective: every rank of the world.
    """
    groups = [new_group(column, timeout_s=timeout_s) for column in mesh.mesh.flatten(1).T.tolist()]
    (own,) = (group for group in groups if group is not None)
    return own


def _passes(batches: Iterable[Batch]) -> Iterator[Iterator[Batch]]:
    """Divide batches into those that go through the pipeline together; padding ones go alone, in evaluation mode."""
    return (members for _, members in itertools.groupby(batches, key=lambda batch: (batch.group, batch.is_padding)))
