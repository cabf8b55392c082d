"""The settings of the ranks: [parallel], [recompute] and [launch]."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import NonNegativeFloat, model_validator

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
    """Tensor parallelism: ranks that divide single layers, wherever the graph allows it."""
    pipeline: Ranks = 1
    """Pipeline parallelism: ranks that run successive stages of the graph. Its micro-batches are
    `train.gradient_accumulation_steps`."""
    memory_gib: NonNegativeFloat = 0.0
    """Memory of one rank in GiB. `sizes = "auto"` stays below it (0 = the memory that is free on the device), and
    recomputation recomputes only as many units as needed to stay below it (0 = all units)."""
    vocabulary: bool = True
    """Tensor parallelism: divide embeddings, heads and their cross-entropy by vocabulary."""
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
    reduction: Literal["sum", "adasum"] = "sum"
    """How the gradients of the replicas are combined: their mean over all samples, or Adasum between hosts (ZeRO 0
    only)."""
    adasum_ranks: NonNegativeInt = 0
    """Adasum: number of successive ranks whose gradients are summed before Adasum; 0 = the ranks of each host, 1 =
    Adasum between all ranks."""
    transport: Literal["torch", "mpi"] = "torch"
    """What sends gradients between replicas: torch's backend (NCCL, gloo), or MPI (ZeRO 0 on CPUs)."""
    compression: Literal["none", "fp16", "bf16"] = "none"
    """The type in which gradients are sent; `none` = fp32 (ZeRO 0 only)."""
    bucket_mib: NonNegativeInt = 0
    """Gradients are sent in buckets of up to so many MiB, while the backward pass still computes others; 0 = chosen for
    the link: 4 for gloo and MPI, 25 for NCCL, whose first bucket has 1 (ZeRO 0 only). The log says what was chosen."""

    @property
    def order(self) -> PipelineSchedule:
        """The schedule."""
        return PIPELINE_SCHEDULES[self.schedule]

    def pipeline_size(self, num_micro_batches: int) -> PipelineSize:
        """Return the size of the pipeline in a step of so many micro-batches."""
        return PipelineSize(self.pipeline, self.stages_per_rank, num_micro_batches)

    @model_validator(mode="before")
    @classmethod
    def _accepts_the_former_name_of_tensor(cls, settings: Any) -> Any:
        """Read `horizontal` as `tensor`: run directories, deployments and config files of earlier versions have it."""
        if not isinstance(settings, Mapping) or "horizontal" not in settings:
            return settings
        if "tensor" in settings:
            raise ValueError("horizontal is the former name of tensor; set one of the two")
        return {"tensor" if key == "horizontal" else key: value for key, value in settings.items()}


class RecomputeConfig(Section):
    """What is kept in memory for the backward pass. Gradients have the same bits, but where `stash` rounds."""

    mode: Literal["none", "whole", "selective", "compressed"] = "none"
    """What a unit keeps for its backward pass: all activations (`none`), only its inputs (`whole`), or its inputs and
    the results of matrix products (`selective`); the rest is recomputed. `compressed` recomputes nothing and keeps all
    in less memory: bits for ReLU and Clip, a byte for each result of a max pool."""
    stash: Literal["exact", "bf16", "fp8"] = "exact"
    """In mode `compressed`, how the inputs of products, convolutions and BatchNorm are kept: as they are, or rounded to
    2 bytes (`bf16`) or 1 byte (`fp8`) an element, which rounds gradients too."""
    units: tuple[str, ...] = ()
    """Glob patterns of tensors in the graph: the units that compute them are recomputed. Empty = all units, or, if
    `parallel.memory_gib` is set, as many as needed."""


class LaunchConfig(Section):
    """How the ranks are started, and what happens when one fails."""

    num_ranks: NonNegativeInt = 0
    """Processes mpirun starts; 0 = as many as [parallel] needs."""
    hostfile: Location = ""
    """An MPI hostfile; empty = this machine."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto` = one GPU per rank if the machine has any, else the CPU."""
    ranks_per_gpu: Ranks = 1
    """Ranks that share one GPU. Above 1, gloo sends their tensors through host memory, because NCCL refuses two ranks
    on one GPU: slow, for trying a layout on few GPUs."""
    rehearsal: Literal["auto", "off"] = "auto"
    """`auto` = before a new run is launched, run a few micro-batches of the first rows forward and backward on the CPU,
    and compare the untrained file with onnxruntime; what fails is refused. `off` = do not."""
    rehearsal_timeout_s: Seconds = 60.0
    """Longest time of the rehearsal once the model is open; what was not reached by then is left out and named. The
    trial of `graph.compile = "auto"` has a limit of its own."""
    threads_per_rank: NonNegativeInt = 0
    """CPU threads of one rank; 0 = the cores that the machine and its container give, each with one of its
    hyperthreads, divided by the machine's ranks. Runs are bit-identical only with the same number."""
    retries: NonNegativeInt = 2
    """How often a failed job is started again without progress: from its newest checkpoint or, without one, from step 0
    (see `checkpoint.minutes`). A checkpoint beyond all earlier ones is progress, after which the count begins again."""
    retry_delay_s: SecondsOrZero = 0.5
    """Pause before a retry; before each further retry without progress it is four times as long, up to a minute."""
    on_out_of_memory: Literal["stop", "smaller"] = "stop"
    """What follows when a rank runs out of memory. `smaller` = the next attempt has micro-batches of half the samples
    and twice `train.gradient_accumulation_steps`: the same batch, and the bits of a run that was configured so. They
    are not those of this run before, so `stop` is the default: the run ends, after one retry if it was past its first
    steps."""
    on_host_lost: Literal["wait", "fewer"] = "wait"
    """What follows when a host of the hostfile does not answer before a retry, also not after pauses of 2, 10 and 60 s.
    `wait` = the run ends. `fewer` = it goes on with fewer replicas on the hosts that answer, and the same batch; a
    later retry takes all hosts again if they answer."""
    storage_wait_s: SecondsOrZero = 600.0
    """Longest time that a run waits after a full or failed disk until a checkpoint could be written again; it then
    goes on."""
    start_timeout_s: Seconds = 180.0
    """Longest time from the start of a job to its first heartbeat, and between two heartbeats until the first step of
    an attempt is complete: while ranks import, load and assemble the model."""
    heartbeat_timeout_s: Seconds = 120.0
    """Longest time between two heartbeats after that; then the job is stopped and retried."""
    collective_timeout_s: Seconds = 100.0
    """Longest time that a rank waits for the others in a collective."""
    compile_timeout_s: Seconds = 1800.0
    """With graph.compile: longest time between two heartbeats while ranks may compile, that is until the first step of
    an attempt is complete, in a last step with fewer samples, and during evaluations. It is the longest time in a
    collective, too, because ranks compile different stages."""
    stop_grace_s: Seconds = 20.0
    """Time that a job has to save a checkpoint and exit when it is asked to stop; then it is killed."""
