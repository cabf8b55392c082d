"""One stage's forward and backward passes: the micro-batches of one step, and evaluation.

A pipeline of one stage is gradient accumulation: F0 B0 F1 B1 ... So micro-batches of a step and
accumulation steps are one number, and there is no other loop over them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainer.loss import Batch, Totals


class BatchLoss(Protocol):
    """A loss as a sum over targets, and the number of targets (trainer/loss.py)."""

    def count(self, labels: Tensor | None, size: int) -> int: ...
    def __call__(self, outputs: Tensor | Sequence[Tensor], labels: Tensor | None, size: int) -> Tensor: ...


class GradientReducer(Protocol):
    """Who collects the gradients (trainer/reduce.py)."""

    def clear(self) -> None: ...
    def arm(self) -> None: ...


class Pipeline:
    """Runs one stage. `autocast`: makes the context of the forward pass; `group`: the data axis."""

    def __init__(
        self,
        module: nn.Module,
        loss: BatchLoss,
        *,
        autocast: Callable[[], AbstractContextManager[object]],
        device: torch.device,
        group: dist.ProcessGroup,
    ) -> None:
        self._module = module
        self._loss = loss
        self._autocast = autocast
        self._device = device
        self._group = group

    def run(
        self,
        micro_batches: Sequence[Batch],
        reducer: GradientReducer,
        *,
        scale: float,
        beat: Callable[[], None] = lambda: None,
    ) -> Tensor:
        """Every forward and backward pass of one step; leaves scaled gradients with `reducer`.

        The gradient is that of `scale` x the mean over the targets of *all* replicas and micro-batches,
        once it is summed over the replicas. Returns this replica's share of that mean, without the
        scale: a scalar. Collective: every rank of the data axis.
        """
        self._module.train()
        reducer.clear()
        total, counted = self._count(micro_batches)
        share = torch.zeros((), device=self._device)
        for number, batch in enumerate(micro_batches, start=1):
            with self._autocast():
                outputs = self._module(*batch.inputs)
            loss = self._loss(outputs, batch.labels, batch.size)
            counted()
            if number == len(micro_batches):
                reducer.arm()
            (loss * (scale / total.clamp(min=1))).backward()  # type: ignore[no-untyped-call]
            share += loss.detach()
            beat()
        counted()
        return share / total.clamp(min=1)

    @torch.no_grad()
    def evaluate(self, batches: Iterable[Batch], totals: Totals, beat: Callable[[], None]) -> dict[str, float]:
        """Metrics over the batches of all ranks, each sample once. Collective: every rank."""
        self._module.eval()
        for batch in batches:
            with self._autocast():
                outputs = self._module(*batch.inputs)
            totals.update(outputs, batch.labels, batch.size)
            beat()
        return totals.compute()

    def _count(self, micro_batches: Sequence[Batch]) -> tuple[Tensor, Callable[[], object]]:
        """Targets of the step over all replicas, and what to call before reading it.

        The sum travels while the first forward pass computes.
        """
        mine = sum(self._loss.count(batch.labels, batch.size) for batch in micro_batches)
        total = torch.tensor(float(mine), device=self._device)
        if self._group.size() == 1:
            return total, lambda: None
        work = dist.all_reduce(total, group=self._group, async_op=True)
        return total, work.wait
