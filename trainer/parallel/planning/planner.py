"""`onward plan`: how the ranks divide a model, and what each holds and sends, estimated without starting ranks.

    import ─► tensor parallelism ─► cuts ─► recomputation ─► dry run of each stage ─► Plan
              (all by the code that training uses, on weights without data)

With `parallel.sizes = "auto"` this is done for every division data x tensor x pipeline of the ranks. For each, the
simplest configuration that fits into memory is found: more micro-batches, then ZeRO, then recomputation. The division
with the shortest step among them becomes the plan.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from onward.trainer.config.rules.rank_rules import sizes_beside_auto
from onward.trainer.config.run_config import RunConfig
from onward.trainer.config.sections.model import ModelConfig
from onward.trainer.config.sections.ranks import LaunchConfig, ParallelConfig
from onward.trainer.config.sections.training import OptimizerConfig, TrainConfig
from onward.trainer.data.schema.signature import Signature, read_training_signature
from onward.trainer.distributed.arithmetic import AMPERE, capability_of, resolve_precision
from onward.trainer.distributed.preflight import free_memory
from onward.trainer.errors import ConfigError, UnsupportedModel, reason_of
from onward.trainer.model.choose_fixed_batch import choose_fixed_batch
from onward.trainer.model.first_output_units import with_first_units
from onward.trainer.model.layer_scales import layer_scales, number_layers
from onward.trainer.model.trainable import open_with_teacher
from onward.trainer.onnx_import.imported_graph import ImportedGraph
from onward.trainer.optim.weight_settings import settings_of
from onward.trainer.parallel.layout import drop_data
from onward.trainer.parallel.matrices import find_matrices
from onward.trainer.parallel.planning.cluster import PROGRESS, THIS_MACHINE, Cluster
from onward.trainer.parallel.planning.device_model import CONTEXT_BYTES, Device, planned_device, reserve
from onward.trainer.parallel.planning.estimate_layouts import Arithmetic, Estimator
from onward.trainer.parallel.planning.gpus import has_bf16
from onward.trainer.parallel.planning.layout_estimate import Estimate
from onward.trainer.parallel.planning.plan_record import Plan, PlannedRate
from onward.trainer.quantities import gib

AXES = ("data", "tensor", "pipeline")

log = logging.getLogger(__name__)

SLACK = 0.95
"""A number of micro-batches is tried unless a twentieth less than what it should take would not fit either."""


def plan(
    config: RunConfig,
    module: ImportedGraph | None = None,
    cluster: Cluster = THIS_MACHINE,
    signature: Signature | None = None,
) -> Plan:
    """Return how a run is divided; with `parallel.sizes = "auto"`, the division with the shortest step that fits.

    module: the module of `open_with_teacher`, which must not be used afterwards; None = the model is loaded. cluster:
    what is planned for; without a GPU's name for the devices of this machine. signature: that of the trained part, None
    = the file is read for it. Reads the first rows of the data. Raises ConfigError when the graph cannot be divided as
    configured or nothing fits into memory, UnsupportedModel when its shapes depend on data.
    """
    device = torch.device("cuda" if config.launch.device != "cpu" and torch.cuda.is_available() else "cpu")
    # on this machine's CPU the GPU of a cluster only decides which types there are
    capability = (AMPERE if has_bf16(cluster.gpu) else (7, 0)) if cluster.gpu else capability_of(device)
    config = config.model_copy(update={"precision": resolve_precision(config.precision, capability)})
    if config.model.fixed_batch == "auto":  # `onward plan`; a rehearsal has chosen it
        config, _ = choose_fixed_batch(config, signature)
    config = with_first_units(config, signature)
    module = module or open_with_teacher(config, by_parts=True).module
    signature = signature or read_training_signature(config.model)
    rates = _rates(module, config.optimizer)
    # `auto` copies the graph many times, and only the shapes of its weights are used
    drop_data(module.modules())
    estimator = Estimator(module, device, cluster, signature)
    # `auto` tries every division, and an error of one does not end the search
    if config.parallel.sizes == "auto":
        return _choose(estimator, config, device, cluster).model_copy(update={"rates": rates})
    try:
        return estimator.estimate(config).record().model_copy(update={"rates": rates})
    except (RuntimeError, ValueError, IndexError) as error:  # those of torch, for shapes that do not fit
        raise UnsupportedModel(
            f"a micro-batch of {config.micro_batch_size} rows does not run on made-up data, or the loss does not fit "
            f"its results: {reason_of(error)}; `onward run` tries it on the first rows of the data and "
            "names the node"
        ) from error


def refuse_absent_gpu(launch: LaunchConfig, cluster: Cluster) -> None:
    """Raise ConfigError where a GPU is to be planned for that this machine does not have, and no name is given."""
    if launch.device == "cuda" and not cluster.gpu and not torch.cuda.is_available():
        raise ConfigError(
            "launch.device is 'cuda', and torch finds no GPU on this machine, so its rates and its memory are not "
            "known; `onward plan --device NAME`, such as H100, plans for one that is elsewhere"
        )


def _rates(module: ImportedGraph, optimizer: OptimizerConfig) -> tuple[PlannedRate, ...]:
    """Return the layer and the learning rate of each trained weight; () without `optimizer.layer_decay`."""
    scales = layer_scales(module, optimizer.layer_decay)
    if not scales:
        return ()
    matrices = find_matrices(module) if optimizer.name == "muon" else {}
    found = []
    for name, layer in number_layers(module).items():
        settings = settings_of(optimizer, name, outputs=matrices.get(name)).scaled(scales[name])
        rate = optimizer.learning_rate * settings.learning_rate_scale
        found.append(PlannedRate(weight=name, layer=layer, learning_rate=rate))
    return tuple(found)


# -- parallel.sizes = "auto"


def _choose(estimator: Estimator, config: RunConfig, device: torch.device, cluster: Cluster) -> Plan:
    """Return the plan with the shortest step of all divisions of the ranks that fit into memory."""
    num_ranks = config.launch.num_ranks
    # without a limit of the configuration: what is free on this machine
    planned = planned_device(cluster, device, config.precision.compute)
    limit = int(config.parallel.memory_gib * 2**30) or planned.memory_bytes
    if not cluster.gpu and not config.parallel.memory_gib:
        limit = _memory_of_a_rank(config.launch, device)
    if problems := list(sizes_beside_auto(config.parallel)):
        raise ConfigError(problems)
    fitting: list[Estimate] = []
    considered: list[str] = []
    skipped: list[tuple[str, float]] = []
    possible = divisions(num_ranks)
    for number, sizes in enumerate(possible):
        name = " x ".join(f"{axis} {sizes[axis]}" for axis in AXES)
        log.info("%s%d of %d divisions: %s", PROGRESS, number + 1, len(possible), name)
        divided = _with(config, parallel=sizes)
        try:
            # nothing is skipped before something fits
            counts = _micro_batch_counts(divided.model, divided.train, divided.parallel, estimator.signature)
            rows = config.train.global_batch_size
            least_s = _least_s(estimator.whole, counts, rows, divided.parallel, planned)
            if least_s > min(map(Estimate.step_s, fitting), default=math.inf):
                skipped.append((name, least_s))
            elif slower := _slower_by_tensor(fitting, divided.parallel):
                considered.append(f"{name}: not estimated, since {slower}")
            else:
                fitting.append(_first_that_fits(estimator, divided, counts, planned, limit))
        except ConfigError as error:
            considered.append(f"{name}: {error}")
    if not fitting:
        kept = _kept_free(config.parallel, planned, limit)
        raise ConfigError(
            [
                f"no division of {num_ranks} ranks fits into {gib(limit)} a rank{kept}; "
                "take more ranks, a smaller train.global_batch_size, or raise parallel.memory_gib",
                *considered,
            ]
        )
    # of equal times the first one, which has the fewest stages (see `divisions`)
    best = min(fitting, key=Estimate.step_s)
    for estimate in fitting:
        if estimate is not best:
            times = estimate.step_s() / best.step_s()
            considered.append(f"{estimate.name}: {gib(estimate.peak_bytes)}, a step takes {times:.2f} times as long")
    for name, least_s in skipped:
        considered.append(
            f"{name}: a step takes at least {least_s / best.step_s():.2f} times as long, without messages"
        )
    # estimated again, because the other estimates may have been made for a higher ZeRO stage
    chosen = _with(best.config, parallel={"memory_gib": config.parallel.memory_gib or limit / 2**30})
    return estimator.estimate(chosen).record(limit=limit, considered=considered)


def _first_that_fits(
    estimator: Estimator, config: RunConfig, counts: Sequence[int], device: Device, limit: int
) -> Estimate:
    """Return the simplest configuration of these sizes that fits: with more micro-batches, ZeRO, recomputation.

    counts: the numbers of micro-batches. Raises ConfigError where none does.
    """
    parallel = config.parallel
    # ZeRO replaces the reducer, so it does not go with Adasum, MPI or compression, nor with split backward passes
    may_shard = (parallel.reduction, parallel.transport, parallel.compression) == ("sum", "torch", "none")
    may_shard = may_shard and not parallel.order.splits_backward and parallel.data > 1
    zero_stages = range(parallel.zero, 4) if may_shard else range(1)
    estimates: dict[int, Estimate] = {}

    def fitting(at: int) -> Estimate | None:
        # units are cut for the highest ZeRO stage, so that one dry run serves all
        sharded = _with(config, train={"gradient_accumulation_steps": counts[at]}, parallel={"zero": zero_stages[-1]})
        estimates[at] = estimator.estimate(sharded)
        stages = (estimates[at].with_zero(zero) for zero in zero_stages)
        return next((stage for stage in stages if stage.fits(limit)), None)

    # the first number fits most often; else the dry run of it says where to look
    found = fitting(0)
    if found is None and len(counts) > 1:
        at = _first_likely(counts, estimates[0], limit)
        found = fitting(at)
        while found is None and at + 1 < len(counts):
            at += 1
            found = fitting(at)
        # fewer micro-batches take less time
        while at > 1 and at - 1 not in estimates and _first_likely(counts, estimates[at], limit, SLACK) < at:
            if (fewer := fitting(at - 1)) is None:
                break
            at, found = at - 1, fewer
    if found is not None:
        return found
    estimate = estimates[len(counts) - 1].with_zero(zero_stages[-1])
    # selective recomputation saves time on GPUs only; `compressed` costs next to none, and nothing here may round
    modes = ["selective", "whole"] if device.type == "cuda" else ["whole"]
    if config.recompute.mode == "none" and not config.graph.compile:
        modes.insert(0, "compressed")
    for mode in modes:
        wanted = _with(estimate.config, recompute={"mode": mode}, parallel={"memory_gib": limit / 2**30})
        # ConfigError: recomputing all units in this mode is not enough
        with contextlib.suppress(ConfigError):
            estimate = estimator.estimate(wanted)
            if estimate.fits(limit):
                return estimate
    raise ConfigError(f"takes {gib(estimate.peak_bytes)} at least")


def _slower_by_tensor(fitting: Sequence[Estimate], parallel: ParallelConfig) -> str:
    """Return why a larger `parallel.tensor` is not worth an estimate: the two sizes before it fit, and it grew slower.

    Each doubling gives a rank twice as many rows, whose activations it sends, and divides the same arithmetic.
    """
    before = [estimate for estimate in fitting if estimate.config.parallel.pipeline == parallel.pipeline]
    if len(before) < 2 or before[-1].step_s() <= before[-2].step_s():
        return ""
    smaller, larger = (estimate.config.parallel.tensor for estimate in before[-2:])
    times = before[-1].step_s() / before[-2].step_s()
    return f"a step with tensor {larger} takes {times:.2f} times as long as one with tensor {smaller}"


def _first_likely(counts: Sequence[int], known: Estimate, limit: int, slack: float = 1.0) -> int:
    """Return the position of the first number of micro-batches that may fit, if `slack` of what it takes is counted."""
    memory = max((rank.memory for rank in known.ranks), key=lambda memory: memory.peak)
    left = limit - known.reserve(limit).total - memory.weights - memory.gradients - memory.optimizer
    # what a micro-batch takes is in proportion to its rows, but for units that ZeRO gathers
    of_all_rows = (memory.activations + memory.transient) * known.config.train.gradient_accumulation_steps
    likely = (at for at in range(1, len(counts)) if slack * of_all_rows / counts[at] <= left)
    return next(likely, len(counts) - 1)


def _least_s(
    whole: Arithmetic | None, counts: Sequence[int], rows: int, parallel: ParallelConfig, device: Device
) -> float:
    """Return a time that no step of these sizes is below: all arithmetic divided evenly, and no messages.

    whole: None = it is not known yet, and the time is 0. counts: numbers of micro-batches. rows: of all replicas.
    """
    if whole is None:
        return 0.0
    times = []
    for count in counts:
        flops = whole.flops_of_row * rows / (parallel.data * count * parallel.tensor * parallel.pipeline)
        pass_s = device.pass_s(flops, whole.num_nodes // parallel.pipeline)
        times.append(count * pass_s / (1 - parallel.order.bubble(parallel.pipeline_size(count))))
    return min(times)


def _memory_of_a_rank(launch: LaunchConfig, device: torch.device) -> int:
    """Return the bytes that one rank may use: what is free, divided by the ranks that share it."""
    if device.type == "cpu":
        # without a hostfile all ranks share this machine's memory
        return free_memory(device) // (1 if launch.hostfile else launch.num_ranks)
    # the context of this process, which to ask for the free memory has made, ends with the process
    free = min(free_memory(device) + CONTEXT_BYTES, torch.cuda.get_device_properties(device).total_memory)
    # with a hostfile each host has as many GPUs as `ranks_per_gpu` leaves its ranks
    ranks_here = 1 if launch.hostfile else launch.num_ranks
    return free // max(launch.ranks_per_gpu, math.ceil(ranks_here / torch.cuda.device_count()))


def _kept_free(parallel: ParallelConfig, device: Device, limit: int) -> str:
    kept = reserve(parallel, device.type, limit).total
    return f", of which at least {gib(kept)} are kept free for CUDA, NCCL and fragmentation" if kept else ""


def divisions(num_ranks: int) -> list[dict[str, int]]:
    """Return all sizes data x tensor x pipeline = num_ranks, few stages first."""
    found = []
    for pipeline, tensor in itertools.product(range(1, num_ranks + 1), repeat=2):
        data, rest = divmod(num_ranks, pipeline * tensor)
        if rest == 0:
            found.append({"data": data, "tensor": tensor, "pipeline": pipeline})
    return found


def _micro_batch_counts(
    model: ModelConfig, train: TrainConfig, parallel: ParallelConfig, signature: Signature | None
) -> list[int]:
    """Return numbers of micro-batches to try: first enough to fill the pipeline, then at least twice as many each time.

    Raises ConfigError when the samples of a step cannot be divided among the replicas and stages.
    """
    batch_size = train.global_batch_size
    per_replica, rest = divmod(batch_size, parallel.data)
    # with fewer micro-batches than stages some stage would be idle at any time
    possible = [count for count in range(parallel.pipeline, per_replica + 1) if per_replica % count == 0]
    is_fixed = model.keeps_batch
    if is_fixed:  # micro-batches have the rows that the file declares
        signature = signature or read_training_signature(model)
        declared = (signature.inputs[0].shape or (None,))[0] or 1
        possible = [count for count in possible if count * declared == per_replica]
    if rest or not possible:
        raise ConfigError(
            f"{batch_size} samples (train.global_batch_size) do not divide among {parallel.data} replicas with "
            f"{parallel.pipeline} or more micro-batches each"
            + (" of the rows that the file declares" if is_fixed else "")
        )
    # four times as many micro-batches as stages keep the bubble below a fifth
    wanted = 4 * parallel.pipeline if parallel.pipeline > 1 else train.gradient_accumulation_steps
    counts = [next((count for count in possible if count >= wanted), possible[-1])]
    # smaller micro-batches need less memory: each try halves them at least
    for count in possible:
        if count >= 2 * counts[-1]:
            counts.append(count)
    return counts


def _with(config: RunConfig, **sections: Mapping[str, Any]) -> RunConfig:
    changed = {name: getattr(config, name).model_copy(update=dict(values)) for name, values in sections.items()}
    return config.model_copy(update=changed)
