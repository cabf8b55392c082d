"""Rules about ranks: [parallel], [launch], [recompute] and what is compiled."""

from __future__ import annotations

from collections.abc import Iterable

from onward.trainer.config.pipeline_schedules import PIPELINE_SCHEDULES
from onward.trainer.config.sections.model import GraphConfig
from onward.trainer.config.sections.ranks import LaunchConfig, ParallelConfig, RecomputeConfig
from onward.trainer.config.sections.training import TrainConfig


def world_size(parallel: ParallelConfig, launch: LaunchConfig) -> Iterable[str]:
    if parallel.sizes == "auto" and not launch.num_ranks:
        yield "parallel = 'auto' needs the number of ranks, but launch.num_ranks is 0; set launch.num_ranks"
    if parallel.sizes == "given" and launch.num_ranks not in (0, parallel.world_size):
        yield (
            f"{parallel.layout} needs {parallel.world_size} ranks, but launch.num_ranks is {launch.num_ranks}; change "
            "[parallel] or launch.num_ranks (0 = as many as needed)"
        )


def sizes_beside_auto(parallel: ParallelConfig) -> Iterable[str]:
    """Yield what is given beside `sizes = "auto"`. No rule, because the saved configuration of a run has both."""
    given = {axis: size for axis in ("data", "tensor", "pipeline") if (size := getattr(parallel, axis)) != 1}
    if parallel.sizes == "auto" and given:
        yield (
            "parallel.sizes = 'auto' chooses the sizes, but given is "
            f"{', '.join(f'parallel.{axis} = {size}' for axis, size in given.items())}; leave one of the two out"
        )


def sequence(parallel: ParallelConfig) -> Iterable[str]:
    if parallel.sequence_parallel and parallel.sizes == "given" and parallel.tensor == 1:
        yield (
            "parallel.sequence_parallel divides what lies between tensor-parallel layers over the ranks of "
            "parallel.tensor, which is 1; set parallel.tensor above 1, or sequence_parallel = false"
        )


def pipeline(parallel: ParallelConfig, train: TrainConfig) -> Iterable[str]:
    stages = parallel.pipeline * parallel.stages_per_rank
    num_micro_batches = train.gradient_accumulation_steps
    looped = parallel.order.takes_several_stages
    if parallel.stages_per_rank > 1 and not looped:
        fitting = [repr(name) for name, order in PIPELINE_SCHEDULES.items() if order.takes_several_stages]
        yield (
            f"parallel.stages_per_rank {parallel.stages_per_rank} needs schedule {' or '.join(fitting)}, "
            f"not {parallel.schedule!r}"
        )
    if parallel.stages_per_rank > 1 and parallel.pipeline == 1:
        yield f"parallel.stages_per_rank {parallel.stages_per_rank} needs parallel.pipeline above 1"
    if parallel.cuts and len(parallel.cuts) != stages - 1:
        yield f"parallel.cuts has {len(parallel.cuts)} entries, but {stages} stages have {stages - 1} cuts between them"
    if parallel.pipeline > 1 and num_micro_batches < parallel.pipeline:
        yield (
            f"a pipeline of {parallel.pipeline} ranks needs at least {parallel.pipeline} micro-batches in a step, but "
            f"train.gradient_accumulation_steps is {num_micro_batches}; {4 * parallel.pipeline} is a good value"
        )
    has_equal_rounds = parallel.pipeline_size(num_micro_batches).has_equal_rounds
    # fewer micro-batches than ranks are refused above
    if looped and num_micro_batches >= parallel.pipeline and not has_equal_rounds:
        yield (
            f"schedule {parallel.schedule!r} cannot run {num_micro_batches} micro-batches in equal rounds on "
            f"{parallel.pipeline} ranks; set train.gradient_accumulation_steps to a multiple of {parallel.pipeline}"
        )


def replicas(parallel: ParallelConfig) -> Iterable[str]:
    # ZeRO reduces gradients with FSDP2 in place of the reducer, which has these settings
    if parallel.zero:
        for name, value, default in (
            ("reduction", parallel.reduction, "sum"),
            ("transport", parallel.transport, "torch"),
            ("compression", parallel.compression, "none"),
        ):
            if value != default:
                yield f"parallel.{name} {value!r} needs parallel.zero 0, not {parallel.zero}"
    elif parallel.shard:
        yield f"parallel.shard {parallel.shard} needs parallel.zero 1, 2 or 3: ZeRO 0 divides nothing"
    # each group of the hybrid sharding has equally many replicas
    if parallel.shard and parallel.data % parallel.shard:
        yield f"parallel.shard {parallel.shard} does not divide parallel.data {parallel.data}; choose a divisor of it"


def split_backward(parallel: ParallelConfig, graph: GraphConfig) -> Iterable[str]:
    # FSDP2 shards the weights, and a compiled stage has one backward pass that cannot be split
    obstacles = [f"parallel.zero {parallel.zero}"] if parallel.zero else []
    obstacles += ["graph.compile"] if graph.compiles else []
    if parallel.order.splits_backward and obstacles:
        yield (
            f"parallel.schedule {parallel.schedule!r} splits backward passes in two and cannot be combined with "
            f"{' and '.join(obstacles)}; use '1f1b'"
        )


def recomputation(recompute: RecomputeConfig) -> Iterable[str]:
    if recompute.units and (recompute.mode == "none" or recompute.compresses):
        yield f"recompute.units {list(recompute.units)} needs recompute.mode 'whole' or 'selective'"


def device(parallel: ParallelConfig, launch: LaunchConfig) -> Iterable[str]:
    if parallel.transport == "mpi" and launch.device == "cuda":
        yield "parallel.transport 'mpi' sends gradients of CPU ranks only; on GPUs use 'torch' (NCCL)"
    if launch.ranks_per_gpu > 1 and launch.device == "cpu":
        yield f"launch.ranks_per_gpu {launch.ranks_per_gpu} is for GPUs; launch.device is 'cpu'"


def launcher(launch: LaunchConfig) -> Iterable[str]:
    if launch.hostfile and launch.launcher not in ("auto", "mpirun"):
        yield (
            f"launch.hostfile is for mpirun, and launch.launcher {launch.launcher!r} has hosts of its own; leave one "
            "of the two out"
        )


def compilation(
    graph: GraphConfig, parallel: ParallelConfig, recompute: RecomputeConfig, launch: LaunchConfig
) -> Iterable[str]:
    if not graph.compiles:  # of "auto" the rehearsal finds out what forbids compiling
        return
    if recompute.compresses:
        yield (
            f"recompute.mode {recompute.mode!r} cannot be combined with graph.compile, which chooses itself what is "
            "kept for the backward pass; use recompute.mode 'none', 'whole' or 'selective', or graph.compile = false"
        )
    if graph.compile == "reduce-overhead":
        obstacles = {
            "launch.device 'cpu'": launch.device == "cpu",
            f"parallel.pipeline {parallel.pipeline}": parallel.pipeline > 1,
            f"parallel.zero {parallel.zero}": parallel.zero > 0,
        }
        if found := [what for what, is_there in obstacles.items() if is_there]:
            yield (
                "graph.compile 'reduce-overhead' captures CUDA graphs and cannot be combined with "
                f"{' and '.join(found)}; use 'default'"
            )
    # both are by unit, and a unit is a few layers already
    if graph.compile == "repeated" and (parallel.zero or recompute.mode in ("whole", "selective")):
        other = f"parallel.zero {parallel.zero}" if parallel.zero else f"recompute.mode {recompute.mode!r}"
        yield f"graph.compile 'repeated' cannot be combined with {other}; use true, which compiles each unit"
