"""The forward and backward passes of one step, and evaluation: the micro-batches of a replica through its stages.

A pipeline of one stage is gradient accumulation: F0 B0 F1 B1 ... So micro-batches of a step and accumulation steps
are one number, and there is no other loop over them. With more stages torch's schedules decide the order, here 1f1b:

    stage 0   F0 F1 .. B0 F2 B1 F3 B2 .. B3
    stage 1   .. F0 B0 F1 B1 F2 B2 F3 B3 ..
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from onward.trainer.data.batches import Batch
from onward.trainer.distributed.processes import lost_a_peer, new_group
from onward.trainer.errors import UnsupportedModel
from onward.trainer.model.loss import Evaluation
from onward.trainer.parallel.pipeline.schedules import (
    Autocast,
    Finish,
    Scheduled,
    Shapes,
    gradients_of,
    trained,
    unchanged,
)
from onward.trainer.parallel.pipeline.stage import Stage


class BatchLoss(Protocol):
    """A loss as a sum over targets, and the number of targets (trainer/model/loss.py)."""

    def count(self, labels: Tensor | None, size: int) -> int: ...
    def __call__(self, outputs: Tensor | Sequence[Tensor], labels: Tensor | None, size: int) -> Tensor: ...


class Engine(Protocol):
    """Who collects the gradients (trainer/parallel/replicas/reducer.py, trainer/parallel/replicas/zero.py)."""

    def begin(self, num_backwards: int, num_targets: float, num_moves: int) -> None: ...


class Pipeline:
    """Runs the stages that this rank holds, together with the ranks that hold the others.

    stages: this rank's, in order; `shapes` is not asked if they are all there are. counted: whether this rank's
    losses count in the sum over the world; of the ranks that hold the last stage of one replica, one does.
    autocast: makes the context of the forward pass. group_pipeline: see `stage_group`.
    Raises ConfigError for stages that the schedule cannot run.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        loss: BatchLoss,
        *,
        schedule: str,
        shapes: Shapes,
        autocast: Autocast,
        device: torch.device,
        group_pipeline: dist.ProcessGroup,
        group_data: dist.ProcessGroup,
        counted: bool = True,
    ) -> None:
        self._stages = list(stages)
        self._loss = loss
        self._device = device
        self._group = group_data
        self._counted = counted
        self._alone = group_pipeline.size() == 1
        self._autocast = autocast
        self._unproved = False
        if not self._alone:
            self._scheduled = Scheduled(stages, schedule, shapes, autocast, device, group_pipeline)
            self._unproved = schedule == "zero_bubble"

    def run(
        self,
        micro_batches: Sequence[Batch],
        engine: Engine,
        *,
        scale: float,
        beat: Callable[[], None] = lambda: None,
    ) -> Tensor:
        """Every forward and backward pass of one step; leaves scaled gradients with `engine`.

        The gradient is that of `scale` x the mean over the targets of *all* replicas and micro-batches,
        once it is summed over the replicas. Returns this rank's share of that mean, without the scale: a scalar, 0
        unless the rank is `counted` and holds the last stage. Collective: every rank, with as many micro-batches.
        Raises UnsupportedModel for a graph that the schedule computes wrongly.
        """
        groups = [list(group) for group in _groups(micro_batches)]
        if self._unproved and self._scheduled.takes_apart(len(groups[0])):
            self._prove(groups[0], engine, beat)
        mine = sum(self._loss.count(batch.labels, batch.size) for batch in micro_batches if not batch.is_padding)
        engine.begin(len(micro_batches), mine, sum(not batch.is_padding for batch in micro_batches))
        total, counted = self._over_replicas(mine)
        share = torch.zeros((), device=self._device)

        def finish(batch: Batch, outputs: Sequence[Tensor]) -> Tensor:
            loss = self._differentiable(batch, outputs)
            counted()
            if self._counted:
                share.add_(loss.detach())
            return loss * (scale / total.clamp(min=1))

        for group in groups:
            self._through(group, finish, beat, training=not group[0].is_padding)
        counted()
        return share / total.clamp(min=1)

    @torch.no_grad()
    def evaluate(self, batches: Iterable[Batch], totals: Evaluation, beat: Callable[[], None]) -> dict[str, float]:
        """Metrics over the batches of all ranks, each sample once. Collective: every rank, with as many batches."""

        def finish(batch: Batch, outputs: Sequence[Tensor]) -> None:
            # the ranks of one tensor-parallel group all add the same numbers: a mean over them is the mean
            if not batch.is_padding:
                totals.update(outputs, batch.labels, batch.size)

        for group in _groups(batches):
            self._through(list(group), finish, beat, training=False)
        return totals.compute()

    def _through(self, batches: list[Batch], finish: Finish, beat: Callable[[], None], *, training: bool) -> None:
        for stage in self._stages:
            stage.chain.train(training)
        if self._alone:
            self._one_by_one(batches, finish, beat)
        else:
            self._scheduled.run(batches, finish, beat)

    def _one_by_one(self, batches: Iterable[Batch], finish: Finish, beat: Callable[[], None]) -> None:
        for batch in batches:
            values: tuple[Tensor, ...] = ()
            with self._autocast():
                for stage in self._stages:
                    values = stage.chain(*values, *(batch.inputs[place] for place in stage.input_positions))
            loss = finish(batch, values)
            if loss is not None:
                loss.backward()  # type: ignore[no-untyped-call]
            beat()

    def _differentiable(self, batch: Batch, outputs: Sequence[Tensor]) -> Tensor:
        loss = self._loss(outputs, batch.labels, batch.size)
        if not batch.is_padding:
            return loss
        # every gradient is 0 but there, as collectives and counts of backward passes expect; 0 x inf would be NaN
        return loss.masked_fill(torch.ones_like(loss, dtype=torch.bool), 0.0)

    def _over_replicas(self, count: int) -> tuple[Tensor, Callable[[], object]]:
        """The sum of a count over all replicas, and what to call before reading it.

        It travels while the first forward pass computes.
        """
        total = torch.tensor(float(count), device=self._device)
        if self._group.size() == 1:
            return total, lambda: None
        work = dist.all_reduce(total, group=self._group, async_op=True)
        return total, work.wait

    def _prove(self, batches: list[Batch], engine: Engine, beat: Callable[[], None]) -> None:
        """Compare every gradient that `zero_bubble` makes of these micro-batches with that of plain backward passes."""
        gradients = []
        for schedule in ("interleaved", "zero_bubble"):
            self._scheduled.schedule = schedule
            engine.begin(len(batches) + 1, 1, 0)  # never complete, so nothing is sent
            with unchanged(self._stages, self._device):
                try:
                    self._through(batches, self._differentiable, beat, training=True)
                except RuntimeError as error:
                    if schedule == "interleaved" or type(error) is not RuntimeError or lost_a_peer(error):
                        raise
                    raise UnsupportedModel(
                        f"parallel.schedule 'zero_bubble' cannot take this graph's backward pass apart ({error}); "
                        "use 'interleaved' or '1f1b'"
                    ) from error
            gradients.append(gradients_of(self._stages))
        for (name, _), plain, found in zip(trained(self._stages), *gradients, strict=True):
            off = float(torch.linalg.vector_norm(found - plain) / torch.linalg.vector_norm(plain).clamp(min=1e-30))
            if off > PARITY:
                raise UnsupportedModel(
                    f"parallel.schedule 'zero_bubble' makes a gradient of {name} that is {off:.1e} off "
                    f"({PARITY:g} is allowed); use 'interleaved' or '1f1b'"
                )
        self._unproved = False


def stage_group(mesh: DeviceMesh, *, timeout_s: float) -> dist.ProcessGroup:
    """The ranks of this one's pipeline axis, for the messages between stages.

    The mesh's own group would do but for its time-out: gloo's messages from one rank to another keep the one that
    their group was made with, 30 minutes in a mesh. Collective: every rank of the world.
    """
    groups = [new_group(column, timeout_s=timeout_s) for column in mesh.mesh.flatten(1).T.tolist()]
    (own,) = (group for group in groups if group is not None)
    return own


PARITY = 1e-3
"""Relative error of a gradient that rounding explains, in bf16 as well; wrong ones were 0.2 and more off."""


def _groups(batches: Iterable[Batch]) -> Iterator[Iterator[Batch]]:
    """Split into the batches that go through together; padding micro-batches run apart, in evaluation mode."""
    return (members for _, members in itertools.groupby(batches, key=lambda batch: (batch.group, batch.is_padding)))
