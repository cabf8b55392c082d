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

ZERO_BUBBLE = "ScheduleInterleavedZeroBubble"
ONE_STAGE = ("Schedule1F1B", "ScheduleGPipe")
SEVERAL_STAGES = ("ScheduleInterleaved1F1B", "ScheduleLoopedBFS")
NEED_ONE_A_RANK = ("Schedule1F1B", ZERO_BUBBLE)
"""Classes of torch that need as many micro-batches as ranks, at least."""
NEED_EQUAL_ROUNDS = ("ScheduleInterleaved1F1B", ZERO_BUBBLE)
"""Classes of torch that need rounds of equal size."""

SPLIT_BACKWARD = (ZERO_BUBBLE,)
"""Classes of torch that compute gradients of weights apart from those of activations."""


@dataclass(frozen=True)
class PipelineSize:
    """How many ranks, stages on each of them, and micro-batches a pipeline has."""

    ranks: int
    stages_per_rank: int
    num_micro_batches: int

    @property
    def round_size(self) -> int:
        """Micro-batches of a round, about one for each rank: a rank runs a round through one of its stages, then
        through the next."""
        return self.num_micro_batches // max(1, self.num_micro_batches // self.ranks)

    @property
    def has_equal_rounds(self) -> bool:
        """Whether all rounds have the same number of micro-batches."""
        return self.num_micro_batches % max(1, self.num_micro_batches // self.ranks) == 0

    def runs(self, torch_class: str) -> bool:
        """Return whether a class of torch takes so many micro-batches."""
        if torch_class in NEED_ONE_A_RANK and self.num_micro_batches < self.ranks:
            return False
        return self.has_equal_rounds or torch_class not in NEED_EQUAL_ROUNDS


def depth_ahead(size: PipelineSize, rank: int) -> int:
    """Return as many forward passes as the first gradient needs until it reaches the rank."""
    # one pass of its own, and one for each rank behind it
    if size.stages_per_rank == 1:
        return size.ranks - rank
    # a round through each stage of the rank but its last, two passes for each rank behind this one, and the pass that
    # the first backward pass follows (Narayanan et al. 2021, interleaved schedule)
    return (size.stages_per_rank - 1) * size.round_size + 2 * (size.ranks - 1 - rank) + 1


def all_ahead(size: PipelineSize, rank: int) -> int:
    """Return the number of all forward passes."""
    return size.num_micro_batches * size.stages_per_rank


def waiting_share(size: PipelineSize) -> float:
    """Return (p - 1) / (v m + p - 1), section 2.2 of Narayanan et al."""
    waits = size.ranks - 1
    return waits / (size.stages_per_rank * size.num_micro_batches + waits)


@dataclass(frozen=True)
class PipelineSchedule:
    """One order of forward and backward passes."""

    one_stage: tuple[str, ...] = ONE_STAGE
    """The classes of torch for one stage on each rank, the schedule's own first. The others stand in for it where it
    does not take the number of micro-batches, which the end of training may make small."""
    several_stages: tuple[str, ...] = SEVERAL_STAGES
    """The same for several stages on each rank."""
    takes_several_stages: bool = False
    """Whether `parallel.stages_per_rank` may be above 1."""
    ahead: Callable[[PipelineSize, int], int] = depth_ahead
    """(size, rank) -> forward passes before the rank's first backward pass, from which memory is estimated."""
    bubble: Callable[[PipelineSize], float] = waiting_share
    """The share of a step in which a rank waits, from which time is estimated."""

    @property
    def splits_backward(self) -> bool:
        """Whether its classes split backward passes. It then runs neither with ZeRO nor compiled, and the first step
        compares the gradients with ordinary ones."""
        return self.one_stage[0] in SPLIT_BACKWARD

    def torch_classes(self, size: PipelineSize) -> list[str]:
        """Return the names of the classes of torch that run so many micro-batches, the most similar one first."""
        classes = self.one_stage if size.stages_per_rank == 1 else self.several_stages
        return [name for name in classes if size.runs(name)]


PIPELINE_SCHEDULES: Mapping[ScheduleName, PipelineSchedule] = {
    "1f1b": PipelineSchedule(),
    "gpipe": PipelineSchedule(ONE_STAGE[1:], SEVERAL_STAGES[1:], ahead=all_ahead),
    "interleaved": PipelineSchedule(takes_several_stages=True),
    # its bubble is smaller than estimated, because gradients of weights fill waiting time (Qi et al. 2023,
    # https://arxiv.org/abs/2401.10241); the chosen layout and the recorded plan depend on the estimate
    "zero_bubble": PipelineSchedule(
        (ZERO_BUBBLE, *ONE_STAGE), (ZERO_BUBBLE, *SEVERAL_STAGES), takes_several_stages=True
    ),
}
"""`parallel.schedule` -> how it runs."""
