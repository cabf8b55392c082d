"""The schedules of a pipeline: one table, `PIPELINE_SCHEDULES`. Needs no torch.

With p ranks of v stages each and m micro-batches, every schedule runs some forward passes ahead (warm-up), then one
backward and one forward pass in turn, then the backward passes that are left. Sources: torch.distributed.pipelining;
Narayanan et al. 2021 (https://arxiv.org/abs/2104.04473).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

ScheduleName = Literal["1f1b", "gpipe", "interleaved", "zero_bubble"]


@dataclass(frozen=True)
class PipelineSize:
    """How many ranks, stages on each of them, and micro-batches a pipeline has."""

    ranks: int
    stages_per_rank: int
    num_micro_batches: int

    @property
    def num_rounds(self) -> int:
        """Rounds of micro-batches, about one micro-batch for each rank: a rank runs a round through one of its stages,
        then through the next."""
        return max(1, self.num_micro_batches // self.ranks)

    @property
    def round_size(self) -> int:
        """Micro-batches of a round."""
        return self.num_micro_batches // self.num_rounds

    @property
    def has_equal_rounds(self) -> bool:
        """Whether all rounds have the same number of micro-batches."""
        return self.num_micro_batches % self.num_rounds == 0


def all_ahead(size: PipelineSize, rank: int) -> int:
    """Return m x v: every forward pass comes before the first backward pass."""
    return size.num_micro_batches * size.stages_per_rank


def depth_ahead(size: PipelineSize, rank: int) -> int:
    """Return as many forward passes as the first gradient needs until it reaches the rank."""
    if size.stages_per_rank == 1:
        return size.ranks - rank
    return (size.stages_per_rank - 1) * size.round_size + 2 * (size.ranks - 1 - rank) + 1


def bubble(size: PipelineSize) -> float:
    """Return (p - 1) / (v m + p - 1), section 2.2 of Narayanan et al."""
    waits = size.ranks - 1
    return waits / (size.stages_per_rank * size.num_micro_batches + waits)


@dataclass(frozen=True)
class TorchSchedule:
    """A class of torch.distributed.pipelining, and which numbers of micro-batches it runs."""

    name: str
    needs_one_a_rank: bool = False
    """Whether there must be at least as many micro-batches as ranks."""
    needs_equal_rounds: bool = False

    def runs(self, size: PipelineSize) -> bool:
        """Return whether the class runs so many micro-batches."""
        is_enough = not self.needs_one_a_rank or size.num_micro_batches >= size.ranks
        return is_enough and (not self.needs_equal_rounds or size.has_equal_rounds)


GPIPE, LOOPED_BFS = TorchSchedule("ScheduleGPipe"), TorchSchedule("ScheduleLoopedBFS")
ONE_STAGE = (TorchSchedule("Schedule1F1B", needs_one_a_rank=True), GPIPE)
SEVERAL_STAGES = (TorchSchedule("ScheduleInterleaved1F1B", needs_equal_rounds=True), LOOPED_BFS)
ZERO_BUBBLE = TorchSchedule("ScheduleInterleavedZeroBubble", needs_one_a_rank=True, needs_equal_rounds=True)


@dataclass(frozen=True)
class PipelineSchedule:
    """One order of forward and backward passes."""

    one_stage: tuple[TorchSchedule, ...] = ONE_STAGE
    """What runs it with one stage on each rank: the first class that takes the number of micro-batches, which the end
    of training may make small."""
    several_stages: tuple[TorchSchedule, ...] = SEVERAL_STAGES
    """The same with several stages on each rank."""
    takes_several_stages: bool = False
    """Whether `parallel.stages_per_rank` may be above 1."""
    splits_backward: bool = False
    """Whether gradients of weights are computed apart from those of activations. It then runs neither with ZeRO nor
    compiled, and its first step compares the gradients with ordinary ones."""
    ahead: Callable[[PipelineSize, int], int] = depth_ahead
    """(size, rank) -> forward passes before its first backward pass, from which memory is estimated."""
    bubble: Callable[[PipelineSize], float] = bubble
    """The share of a step in which a rank waits, from which time is estimated."""

    def classes(self, size: PipelineSize) -> tuple[TorchSchedule, ...]:
        """Return the classes for so many stages on each rank, the schedule's own first."""
        return self.one_stage if size.stages_per_rank == 1 else self.several_stages

    def torch_schedule(self, size: PipelineSize) -> TorchSchedule:
        """Return the class that runs so many micro-batches."""
        return next(each for each in self.classes(size) if each.runs(size))


PIPELINE_SCHEDULES: Mapping[ScheduleName, PipelineSchedule] = {
    "1f1b": PipelineSchedule(),
    "gpipe": PipelineSchedule((GPIPE,), (LOOPED_BFS,), ahead=all_ahead),
    "interleaved": PipelineSchedule(takes_several_stages=True),
    # its bubble is smaller than estimated, because gradients of weights fill waiting time (Qi et al. 2023,
    # https://arxiv.org/abs/2401.10241); the chosen layout and the recorded plan depend on the estimate
    "zero_bubble": PipelineSchedule(
        (ZERO_BUBBLE, *ONE_STAGE), (ZERO_BUBBLE, *SEVERAL_STAGES), takes_several_stages=True, splits_backward=True
    ),
}
"""`parallel.schedule` -> how it runs."""
