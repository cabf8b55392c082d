"""What `onward plan` finds: how a run is divided, what each rank holds and sends, and why some weights stay whole.

Made by trainer/parallel/planner.py in a process of its own; read by the flow, which needs no torch for it.
"""

from __future__ import annotations

from onward.trainer.config.sections import ParallelConfig, RecomputeConfig
from onward.trainer.run.records import Record


class Memory(Record):
    """Bytes of one rank at the peak of a step, beyond what an idle rank takes."""

    weights: int
    gradients: int
    optimizer: int
    activations: int
    """Kept for the backward pass, of all micro-batches in flight."""
    transient: int
    """The largest thing that comes and goes: logits and their gradient, a gathered unit, receive buffers."""

    @property
    def peak(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.activations + self.transient


class PlannedStage(Record):
    """One stage of the pipeline."""

    stage: int
    rank: int
    """Its coordinate on the pipeline axis."""
    begins: str
    ends: str
    """The first and the last of its tensors, as the graph calls them."""
    flops: int
    """Forward and backward of one micro-batch on one rank."""
    parameters: int
    """Stored elements on one rank, after tensor-parallel division."""
    sends: int
    """Bytes to the next stage, of one micro-batch."""
    recomputed: int
    """Units of it that are computed again."""
    units: int


class PlannedRegion(Record):
    """A stretch of the graph that the tensor axis divides."""

    kind: str
    weights: tuple[str, ...]


class Traffic(Record):
    """What one rank sends through one axis in one step."""

    axis: str
    what: str
    count: int
    bytes: int


class Plan(Record):
    """How the ranks divide the work, and what it costs."""

    parallel: ParallelConfig
    """With the sizes chosen, if they were to be."""
    recompute: RecomputeConfig
    gradient_accumulation_steps: int
    micro_batch_size: int
    stages: tuple[PlannedStage, ...]
    memory: tuple[Memory, ...]
    """Of one rank of each pipeline coordinate."""
    memory_bytes: int
    """What a rank may use; 0 = not known."""
    regions: tuple[PlannedRegion, ...]
    whole: tuple[tuple[str, str], ...]
    """Weights that stay whole on the tensor axis, each with the rule that keeps it so."""
    traffic: tuple[Traffic, ...]
    bubble: float
    """The share of a step in which a rank of the pipeline waits, if all stages take equally long."""
    considered: tuple[str, ...] = ()
    """With `auto`: every other division that was weighed, and why it was not taken."""

    @property
    def num_ranks(self) -> int:
        return self.parallel.data * self.parallel.tensor * self.parallel.pipeline
