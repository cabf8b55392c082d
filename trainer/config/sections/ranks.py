"""The settings of the ranks: [parallel], [recompute] and [launch]."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import NonNegativeFloat

from onward.trainer.config.pipeline_schedules import PIPELINE_SCHEDULES, PipelineSchedule, PipelineSize, ScheduleName
from onward.trainer.config.section import COMMON, NonNegativeInt, Ranks, Seconds, SecondsOrZero, Section
from onward.trainer.config.urls import Location


class ParallelConfig(Section):
    """How the ranks divide the work: data x tensor x pipeline = ranks. `parallel = "auto"` chooses the sizes."""

    sizes: Literal["given", "auto"] = "given"
    """`auto` = choose data, tensor, pipeline, zero, recomputation and micro-batches for `launch.num_ranks` ranks
    and `memory_gib`; `parallel = "auto"` is short for it."""
    data: Annotated[Ranks, COMMON] = 1
    """Data parallelism: replicas of the model, each with its share of every batch."""
    tensor: Ranks = 1
    """Tensor parallelism: ranks that divide single layers, wherever the graph allows it; embeddings, heads and their
    cross-entropy by vocabulary."""
    pipeline: Ranks = 1
    """Pipeline parallelism: ranks that run successive stages of the graph. Its micro-batches are
    `train.gradient_accumulation_steps`."""
    memory_gib: NonNegativeFloat = 0.0
    """Memory of one rank in GiB. `sizes = "auto"` stays below it (0 = the memory that is free on the device), and
    recomputation recomputes only as many units as needed to stay below it (0 = all units)."""
    convolutions: Literal["auto", "never", "always"] = "auto"
    """Tensor parallelism: divide pairs of convolutions by channel; `auto` = where this saves more time than its
    messages cost."""
    sequence_parallel: bool = False
    """Tensor parallelism: divide what lies between the divided layers (norms, dropout, residual sums) along the
    sequence, which `tensor` must divide. Less memory for activations; as many bytes are sent."""
    schedule: ScheduleName = "1f1b"
    """Pipeline: the order of forward and backward passes. `zero_bubble` is refused for graphs that it computes
    wrongly."""
    stages_per_rank: Ranks = 1
    """Pipeline: stages on each rank; above 1 needs `interleaved` or `zero_bubble`."""
    cuts: tuple[str | tuple[str, ...], ...] = ()
    """Pipeline: where the stages end. Each entry is one cut: the name of the tensor that crosses it, or a list of
    names; ONNX Runtime's notation `tensor-consumer1/consumer2:...` is read too. Empty = balanced by arithmetic and
    bytes."""
    zero: Literal[0, 1, 2, 3] = 0
    """ZeRO stage, what the replicas shard: 0 nothing, 1 optimizer state, 2 and gradients, 3 and weights."""
    shard: NonNegativeInt = 0
    """ZeRO inside groups of this many neighbouring replicas; the groups replicate each other (hybrid sharding). 0 = one
    group of all replicas."""
    units: NonNegativeInt = 0
    """Units that one stage is cut into, for ZeRO and recomputation; 0 = chosen from the graph."""
    reduction: Literal["sum", "adasum", "adasum_all"] = "sum"
    """How the gradients of the replicas are combined (ZeRO 0 only): their mean over all samples; Adasum between hosts,
    on which they are summed (`adasum`); or Adasum between all replicas (`adasum_all`)."""
    transport: Literal["torch", "mpi"] = "torch"
    """What sends gradients between replicas: torch's backend (NCCL, gloo), or MPI (ZeRO 0 on CPUs)."""
    compression: Literal["none", "fp16", "bf16"] = "none"
    """The type in which gradients are sent; `none` = fp32 (ZeRO 0 only)."""

    @property
    def world_size(self) -> int:
        """Ranks of the job: data x tensor x pipeline."""
        return self.data * self.tensor * self.pipeline

    @property
    def layout(self) -> str:
        """The three sizes, for messages."""
        return f"data {self.data} x tensor {self.tensor} x pipeline {self.pipeline}"

    @property
    def is_adasum(self) -> bool:
        """Whether gradients are combined by Adasum."""
        return self.reduction != "sum"

    @property
    def order(self) -> PipelineSchedule:
        """The schedule."""
        return PIPELINE_SCHEDULES[self.schedule]

    def pipeline_size(self, num_micro_batches: int) -> PipelineSize:
        """Return the size of the pipeline in a step of so many micro-batches."""
        return PipelineSize(self.pipeline, self.stages_per_rank, num_micro_batches)


class RecomputeConfig(Section):
    """What is kept in memory for the backward pass. Gradients have the same bits, but where a mode rounds."""

    mode: Literal["none", "whole", "selective", "compressed", "compressed_bf16", "compressed_fp8"] = "none"
    """What a unit keeps for its backward pass: all activations (`none`), only its inputs (`whole`), or its inputs and
    the results of matrix products (`selective`); the rest is recomputed. `compressed` recomputes nothing and keeps all
    in less memory: bits for ReLU and Clip, a byte for each result of a max pool. `compressed_bf16` and `compressed_fp8`
    also round the inputs of products, convolutions and BatchNorm to 2 bytes or 1 byte an element, which rounds
    gradients too."""
    units: tuple[str, ...] = ()
    """Glob patterns of tensors in the graph: the units that compute them are recomputed. Empty = all units, or, if
    `parallel.memory_gib` is set, as many as needed."""

    @property
    def compresses(self) -> bool:
        """Whether nothing is recomputed, and all is kept in less memory."""
        return self.mode.startswith("compressed")

    @property
    def stash(self) -> Literal["exact", "bf16", "fp8"]:
        """How inputs of products are kept."""
        kinds: dict[str, Literal["bf16", "fp8"]] = {"compressed_bf16": "bf16", "compressed_fp8": "fp8"}
        return kinds.get(self.mode, "exact")


class LaunchConfig(Section):
    """How the ranks are started, and what happens when one fails."""

    num_ranks: NonNegativeInt = 0
    """Processes that the launcher starts; 0 = as many as [parallel] needs."""
    launcher: Literal["auto", "mpirun", "slurm", "ray"] = "auto"
    """What starts the ranks: `mpirun` of Open MPI; `slurm` = srun, on the hosts of the allocation; `ray` = the Ray
    cluster of RAY_ADDRESS or of this host. `auto` = mpirun, but slurm in an allocation of Slurm that has srun and
    without a hostfile."""
    hostfile: Location = ""
    """An MPI hostfile, for mpirun; empty = this machine, or the hosts of the allocation."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto` = one GPU per rank if the machine has any, else the CPU."""
    ranks_per_gpu: Ranks = 1
    """Ranks that share one GPU. Above 1, gloo sends their tensors through host memory, because NCCL refuses two ranks
    on one GPU: slow, for trying a layout on few GPUs."""
    rehearsal: Literal["auto", "off"] = "auto"
    """`auto` = before a new run is launched, run a few micro-batches of the first rows forward and backward on the CPU,
    and compare the untrained file with onnxruntime; what fails is refused. What is not reached within a minute after
    the model was opened is left out and named. `off` = do not."""
    threads_per_rank: NonNegativeInt = 0
    """CPU threads of one rank; 0 = the cores that the machine and its container give, each with one of its
    hyperthreads, divided by the machine's ranks. Runs are bit-identical only with the same number."""
    retries: NonNegativeInt = 2
    """How often a failed job is started again without progress: from its newest checkpoint or, without one, from step 0
    (see `checkpoint.minutes`). A checkpoint beyond all earlier ones is progress, after which the count begins again.
    Before a retry after a full or failed disk a run waits up to 10 minutes until a checkpoint can be written again."""
    on_out_of_memory: Literal["stop", "smaller"] = "stop"
    """What follows when a rank runs out of memory. `smaller` = the next attempt has micro-batches of half the samples
    and twice `train.gradient_accumulation_steps`: the same batch, and the bits of a run that was configured so. They
    are not those of this run before, so `stop` is the default: the run ends, after one retry if it was past its first
    steps."""
    on_host_lost: Literal["wait", "fewer"] = "wait"
    """What follows when a host of the hostfile does not answer before a retry. `wait` = the run waits for it for
    `host_wait_s`, then ends. `fewer` = it goes on at once on the hosts that answer, with the same batch and fewer
    replicas, or another layout if one replica does not fit; a later attempt takes all hosts again if they answer."""
    host_wait_s: SecondsOrZero = 600.0
    """Longest time for which a run waits for a host that does not answer. A host may need minutes to start again."""
    start_timeout_s: Seconds = 180.0
    """Longest time from the start of a job to its first heartbeat, and between two heartbeats until the first step of
    an attempt is complete: while ranks import, load and assemble the model. With `graph.compile` at least half an hour
    between two heartbeats, also in a last step with fewer samples, in evaluations and in collectives: wherever ranks
    may compile, each another stage."""
    heartbeat_timeout_s: Seconds = 120.0
    """Longest time between two heartbeats after that; then the job is stopped and retried. A rank waits for the others
    in a collective for five sixths of it, so that it can name the missing one before."""
    stop_grace_s: Seconds = 20.0
    """Time that a job has to save a checkpoint and exit when it is asked to stop; then it is killed."""

    @property
    def collective_timeout_s(self) -> float:
        """Longest time that a rank waits for the others in a collective, while nothing is compiled."""
        return self.heartbeat_timeout_s * 5 / 6
