"""The record that `onward plan` makes: the layout, and what each rank holds, computes and sends.

trainer/parallel/planning/planner.py makes it in a process of its own; the flow reads it, and needs no torch for that.
"""

from __future__ import annotations

from onward.trainer.config.loading import build_config
from onward.trainer.config.run_config import RunConfig
from onward.trainer.config.sections.ranks import ParallelConfig, RecomputeConfig
from onward.trainer.parallel.planning.cluster import Cluster, Collective
from onward.trainer.run.records import Needs, Record


class Memory(Record):
    """Bytes of one rank at the peak of a step, excluding what Python and torch use when idle."""

    weights: int
    gradients: int
    optimizer: int
    activations: int
    """Kept for the backward pass, of all micro-batches in flight."""
    transient: int
    """Alive inside one pass (logits and their gradient, gathered units), and receive buffers."""

    @property
    def peak(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.activations + self.transient


class Reserve(Record):
    """Bytes of a device that are kept free for what is not the model's; all 0 on a CPU. See device.py."""

    context: int = 0
    """CUDA context and loaded kernels."""
    workspaces: int = 0
    """Of cuBLAS and cuDNN."""
    communicators: int = 0
    """NCCL's buffers."""
    fragmentation: int = 0
    """Gaps between the blocks of torch's allocator."""

    @property
    def total(self) -> int:
        return self.context + self.workspaces + self.communicators + self.fragmentation


class PlannedStage(Record):
    """One stage of the pipeline."""

    stage: int
    rank: int
    """Pipeline coordinate of the ranks that run it."""
    begins: str
    ends: str
    """The first and the last tensor that it computes, by their names in the file."""
    flops: int
    """Of the forward and the backward pass of one micro-batch on one rank."""
    parameters: int
    """Stored elements on one rank, that is, after tensor-parallel sharding."""
    sends: int
    """Bytes to the next stage for one micro-batch."""
    recomputed: int
    """Number of units that the backward pass computes again."""
    units: int
    """Number of units."""


class PlannedRegion(Record):
    """A tensor-parallel region."""

    kind: str
    weights: tuple[str, ...]


class Traffic(Record):
    """What one rank sends through one mesh axis in one step."""

    axis: str
    what: str
    count: int
    """Number of messages."""
    bytes: int
    collective: Collective = "message"
    whole: int = 0
    """Bytes of the tensors themselves: of them a rank sends the more, the more ranks there are."""
    pieces: int = 0
    """In how many pieces it is sent beside the passes; 0 = a rank waits for it."""


class PlannedRate(Record):
    """The learning rate of one weight under `optimizer.layer_decay`."""

    weight: str
    layer: int
    """From 0 at the inputs."""
    learning_rate: float
    """Before the learning-rate schedule."""


class Plan(Record):
    """How the ranks divide a model and its batches, and what that takes."""

    parallel: ParallelConfig
    """With the sizes that `auto` chose."""
    recompute: RecomputeConfig
    compute: str = "fp32"
    """The type of the products, as `precision.compute` chooses it on the machine that planned."""
    gradient_accumulation_steps: int
    micro_batch_size: int
    stages: tuple[PlannedStage, ...]
    memory: tuple[Memory, ...]
    """Of one rank of each pipeline coordinate."""
    memory_bytes: int
    """What a rank may use; 0 = unknown."""
    reserve: Reserve = Reserve()
    """What of it is kept free for what is not the model's."""
    device: str = ""
    """What the times were estimated for."""
    regions: tuple[PlannedRegion, ...]
    replicated: tuple[tuple[str, str], ...]
    """(weight, reason) for each weight that tensor parallelism leaves replicated."""
    traffic: tuple[Traffic, ...]
    bubble: float
    """The share of a step in which a pipeline rank waits, if all stages take equally long."""
    step_s: float = 0.0
    """Seconds of a step, estimated from counted FLOPs and the rates of `device`: they rank layouts against each other,
    and the real time may be several times as long. 0 = not estimated."""
    compute_s: float = 0.0
    """Of that, the passes; the rest is waiting for messages."""
    cluster: Cluster | None = None
    """The hosts that were described; None = this machine, or those of the hostfile."""
    needs: Needs | None = None
    """The sizes of a checkpoint and of the exported file; None in a plan that a rehearsal makes."""
    rates: tuple[PlannedRate, ...] = ()
    """Of each trained weight, in the order of the graph; () without `optimizer.layer_decay`."""
    considered: tuple[str, ...] = ()
    """With `auto`: every other division, and why it was not chosen."""

    @property
    def num_ranks(self) -> int:
        return self.parallel.world_size


def needs_plan(parallel: ParallelConfig, recompute: RecomputeConfig) -> bool:
    """Return whether the layout has to be planned: chosen, or tried on the graph. Data parallelism divides nothing."""
    return not may_train_unplanned(parallel, recompute) or parallel.tensor > 1


def may_train_unplanned(parallel: ParallelConfig, recompute: RecomputeConfig) -> bool:
    """Return whether a graph can be trained that has no plan, because its shapes depend on data: it is not cut."""
    divides = parallel.pipeline > 1 or parallel.zero or parallel.units
    is_cut = divides or recompute.mode in ("whole", "selective")
    return parallel.sizes == "given" and not is_cut


def with_plan(config: RunConfig, found: Plan) -> RunConfig:
    """Return the configuration with the sizes that the plan chose, if `parallel.sizes` is "auto"; else itself.

    Raises ConfigError when the chosen sizes contradict another section.
    """
    if config.parallel.sizes == "given":
        return config
    train = config.train.model_copy(update={"gradient_accumulation_steps": found.gradient_accumulation_steps})
    chosen = {"parallel": found.parallel, "recompute": found.recompute, "train": train}
    return build_config({**dict(config), **chosen})
