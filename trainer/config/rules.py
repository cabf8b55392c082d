"""Cross-section rules: which settings contradict each other.

A rule is a function of the sections it reads. It yields one sentence for each contradiction: the settings, their
values, and what to change.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from onward.trainer.config.losses import (
    LossConfig,
    contradictions,
    export_problems,
    filled,
    key_of,
    setting_problems,
)
from onward.trainer.config.metric_names import has_no_direction
from onward.trainer.config.sections.data import DataConfig
from onward.trainer.config.sections.metrics import (
    MetricConfig,
    StopConfig,
    evaluation_names,
    is_library,
    metric_problems,
)
from onward.trainer.config.sections.model import GraphConfig, LoraConfig, ModelConfig
from onward.trainer.config.sections.ranks import LaunchConfig, ParallelConfig, RecomputeConfig
from onward.trainer.config.sections.results import CheckpointConfig, ExportConfig
from onward.trainer.config.sections.training import OptimizerConfig, PrecisionConfig, ScheduleConfig, TrainConfig
from onward.trainer.config.urls import redacted, url_of

Sections = Mapping[str, Any]


def _world_size(parallel: ParallelConfig, launch: LaunchConfig) -> Iterable[str]:
    if parallel.sizes == "auto" and not launch.num_ranks:
        yield "parallel = 'auto' needs the number of ranks, but launch.num_ranks is 0; set launch.num_ranks"
    needed = parallel.data * parallel.tensor * parallel.pipeline
    if parallel.sizes == "given" and launch.num_ranks not in (0, needed):
        yield (
            f"data {parallel.data} x tensor {parallel.tensor} x pipeline {parallel.pipeline} needs {needed} "
            f"ranks, but launch.num_ranks is {launch.num_ranks}; change [parallel] or launch.num_ranks (0 = as many as "
            "needed)"
        )


def _pipeline(parallel: ParallelConfig, train: TrainConfig) -> Iterable[str]:
    stages, num_micro_batches = parallel.pipeline * parallel.stages_per_rank, train.gradient_accumulation_steps
    looped = parallel.schedule in ("interleaved", "zero_bubble")
    if parallel.stages_per_rank > 1 and not looped:
        yield (
            f"parallel.stages_per_rank {parallel.stages_per_rank} needs schedule 'interleaved' or 'zero_bubble', "
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
    # torch's interleaved schedules take num // pipeline rounds, which must all have the same number of micro-batches
    num_rounds = max(1, num_micro_batches // parallel.pipeline)
    if looped and num_micro_batches >= parallel.pipeline and num_micro_batches % num_rounds:
        yield (
            f"schedule {parallel.schedule!r} cannot run {num_micro_batches} micro-batches in equal rounds on "
            f"{parallel.pipeline} ranks; set train.gradient_accumulation_steps to a multiple of {parallel.pipeline}"
        )


def _replicas(parallel: ParallelConfig) -> Iterable[str]:
    # ZeRO reduces gradients with FSDP2 in place of the reducer, which has these settings
    if parallel.zero:
        for name, value, default in (
            ("reduction", parallel.reduction, "sum"),
            ("transport", parallel.transport, "torch"),
            ("compression", parallel.compression, "none"),
            ("bucket_mib", parallel.bucket_mib, 0),
        ):
            if value != default:
                yield f"parallel.{name} {value!r} needs parallel.zero 0, not {parallel.zero}"
    elif parallel.shard:
        yield f"parallel.shard {parallel.shard} needs parallel.zero 1, 2 or 3: ZeRO 0 divides nothing"
    if parallel.adasum_ranks and parallel.reduction != "adasum":
        yield f"parallel.adasum_ranks {parallel.adasum_ranks} needs parallel.reduction 'adasum'"
    if parallel.shard and parallel.data % parallel.shard:
        yield f"parallel.shard {parallel.shard} does not divide parallel.data {parallel.data}; choose a divisor of it"


def _zero_bubble(parallel: ParallelConfig, graph: GraphConfig) -> Iterable[str]:
    # FSDP2 shards the weights, and a compiled stage has one backward pass that cannot be split
    obstacles = [f"parallel.zero {parallel.zero}"] if parallel.zero else []
    obstacles += ["graph.compile"] if graph.compile else []
    if parallel.schedule == "zero_bubble" and obstacles:
        yield (
            "parallel.schedule 'zero_bubble' splits backward passes in two and cannot be combined with "
            f"{' and '.join(obstacles)}; use '1f1b'"
        )


def _recomputation(recompute: RecomputeConfig) -> Iterable[str]:
    if recompute.units and recompute.mode == "none":
        yield f"recompute.units {list(recompute.units)} needs recompute.mode 'whole' or 'selective'"


def _device(parallel: ParallelConfig, launch: LaunchConfig) -> Iterable[str]:
    if parallel.transport == "mpi" and launch.device == "cuda":
        yield "parallel.transport 'mpi' sends gradients of CPU ranks only; on GPUs use 'torch' (NCCL)"
    if launch.ranks_per_gpu > 1 and launch.device == "cpu":
        yield f"launch.ranks_per_gpu {launch.ranks_per_gpu} is for GPUs; launch.device is 'cpu'"


def _accumulation(train: TrainConfig, parallel: ParallelConfig) -> Iterable[str]:
    share = parallel.data * train.gradient_accumulation_steps
    if train.global_batch_size % share:
        below = train.global_batch_size // share * share
        near = [size for size in (below, below + share) if size]
        yield (
            f"train.global_batch_size {train.global_batch_size} does not divide over {parallel.data} replicas x "
            f"{train.gradient_accumulation_steps} micro-batches = {share}; the nearest that do: "
            + " and ".join(map(str, near))
        )


def _length(train: TrainConfig) -> Iterable[str]:
    if bool(train.num_steps) == bool(train.num_epochs):
        yield (
            f"train.num_steps is {train.num_steps} and train.num_epochs is {train.num_epochs:g}; "
            "set exactly one of them above 0"
        )


def _loss_scale(precision: PrecisionConfig) -> Iterable[str]:
    if precision.loss_scale and precision.compute != "fp16":
        yield (
            f"precision.loss_scale {precision.loss_scale:g} has no meaning in {precision.compute}; "
            "only fp16 gradients underflow: set precision.compute = 'fp16' or remove it"
        )
    if precision.initial_scale > precision.max_scale:
        scale, most = precision.initial_scale, precision.max_scale
        yield f"precision.initial_scale {scale:g} is above precision.max_scale {most:g}"


def _optimizer(optimizer: OptimizerConfig) -> Iterable[str]:
    if optimizer.ratio_min > optimizer.ratio_max:
        yield f"optimizer.ratio_min {optimizer.ratio_min:g} is above optimizer.ratio_max {optimizer.ratio_max:g}"
    if optimizer.nesterov and not optimizer.momentum:
        yield "optimizer.nesterov needs optimizer.momentum above 0"
    if optimizer.momentum and optimizer.name != "sgd":
        yield f"optimizer.momentum {optimizer.momentum:g} is for sgd; {optimizer.name} has alpha and beta"
    if optimizer.moments != "fp32" and optimizer.name == "sgd":
        yield f"optimizer.moments {optimizer.moments!r} is for adam, adamw and lamb"
    if optimizer.weight_decay_mode == "huggingface" and optimizer.name != "adam":
        yield f"optimizer.weight_decay_mode 'huggingface' is for adam, not {optimizer.name}"


def _schedule(schedule: ScheduleConfig) -> Iterable[str]:
    if schedule.floor and schedule.shape == "compatible":
        yield f"schedule.floor {schedule.floor:g} needs schedule.shape = 'continuous'; 'compatible' ends at 0"
    if schedule.mode == "none" and schedule.warmup_ratio:
        yield f"schedule.warmup_ratio {schedule.warmup_ratio:g} has no effect with mode 'none'; use mode 'constant'"


def _timeouts(launch: LaunchConfig) -> Iterable[str]:
    if launch.collective_timeout_s >= launch.heartbeat_timeout_s:
        yield (
            f"launch.collective_timeout_s {launch.collective_timeout_s:g} must be below "
            f"launch.heartbeat_timeout_s {launch.heartbeat_timeout_s:g}, so that a rank can name the missing one"
        )


def _weights(model: ModelConfig) -> Iterable[str]:
    if not model.train:
        yield "model.train is empty: nothing would be trained; ['*'] trains every weight"


def _metrics(
    checkpoint: CheckpointConfig,
    stop: StopConfig,
    model: ModelConfig,
    data: DataConfig,
    loss: Sequence[LossConfig],
    metrics: Sequence[MetricConfig],
    train: TrainConfig,
) -> Iterable[str]:
    losses = filled(model, data, loss)
    yield from metric_problems(losses, metrics)
    known = evaluation_names(losses, metrics)
    for key, name in (("checkpoint.best_metric", checkpoint.best_metric), ("stop.metric", stop.metric)):
        if name and name not in known:
            yield f"{key}: no evaluation measures {name!r}; with these settings they measure {', '.join(known)}"
        elif has_no_direction(name) and not (key == "checkpoint.best_metric" and checkpoint.best_is != "auto"):
            yield f"{key}: of {name!r} neither the least nor the greatest value is the best; choose another metric"
    ends = [f"stop.patience {stop.patience}"] if stop.patience else []
    ends += [] if stop.target is None else [f"stop.target {stop.target:g}"]
    if ends and not train.evaluation_period:
        yield (
            f"{' and '.join(ends)} count evaluations, but train.evaluation_period is 0: there is none between the "
            "first and the last step; set train.evaluation_period"
        )
    for name in ("metric", "minimum_gain"):
        unused = (name == "minimum_gain" and not stop.patience) or not ends
        if unused and getattr(stop, name) != StopConfig.model_fields[name].default:
            yield f"stop.{name} {getattr(stop, name)!r} has no effect without stop.patience"


def _surgery(model: ModelConfig) -> Iterable[str]:
    if model.head and not model.num_classes:
        yield f"model.head {model.head!r} names the layer to replace, but model.num_classes is 0; set it"
    if twice := sorted({name for name in model.start if model.start.count(name) > 1}):
        yield f"model.start names {', '.join(twice)} more than once"


def _losses(
    model: ModelConfig,
    data: DataConfig,
    loss: Sequence[LossConfig],
    train: TrainConfig,
    parallel: ParallelConfig,
    export: ExportConfig,
) -> Iterable[str]:
    yield from contradictions(model, data, loss)
    losses = filled(model, data, loss)
    yield from setting_problems(losses)
    for place, each in enumerate(losses):
        key = key_of(losses, place, "name")
        if each.name == "info_nce" and (train.gradient_accumulation_steps > 1 or parallel.pipeline > 1):
            yield (
                f"{key} 'info_nce' compares all samples of a step at once, but train.gradient_accumulation_steps is "
                f"{train.gradient_accumulation_steps} and parallel.pipeline {parallel.pipeline}; set both to 1"
            )
        if each.name == "info_nce" and parallel.reduction == "adasum":
            yield f"{key} 'info_nce' reaches over all replicas, which Adasum does not add up; use 'sum'"
    if export.training:
        yield from export_problems(losses)
    if "without_loss" in export.variants and "output" not in [each.name for each in losses]:
        yield (
            f"export.variants 'without_loss' is for a graph that computes its own loss, but the loss is "
            f"{losses[0].name}: the exported file has no loss in it; leave the variant out"
        )
    if model.num_classes == 1 and losses and losses[0].name == "cross_entropy":
        yield "model.num_classes 1: the cross-entropy of one class is always 0; use bce_with_logits, or 2 classes"
    if len(losses) < 2:
        return
    if parallel.reduction == "adasum":
        yield (
            f"parallel.reduction 'adasum' weighs hosts by the targets of one loss, but there are {len(losses)} "
            "[[loss]]; use 'sum'"
        )


def _adapters(lora: LoraConfig, model: ModelConfig) -> Iterable[str]:
    if not lora.weights:
        for name in sorted(lora.model_fields_set - {"weights"}):
            if getattr(lora, name) != LoraConfig.model_fields[name].default:
                yield f"lora.{name} has no effect without lora.weights; name the weights that get an adapter"
    elif model.train != ModelConfig.model_fields["train"].default:
        yield (
            f"model.train {list(model.train)} and lora.weights contradict each other: with adapters the model's own "
            "weights are frozen; name those trained whole in lora.also_train"
        )


def _dropout(graph: GraphConfig) -> Iterable[str]:
    # its places are found by fused calls: linear layers, norms and attention
    if graph.dropout and not graph.fuse:
        yield f"graph.dropout {graph.dropout:g} needs graph.fuse = true: it is added to the fused graph"


def _compilation(
    graph: GraphConfig, parallel: ParallelConfig, recompute: RecomputeConfig, launch: LaunchConfig
) -> Iterable[str]:
    if not graph.compile:
        for name in ("shapes", "compile_mode", "compile_regions"):
            if getattr(graph, name) != "auto":
                yield f"graph.{name} {getattr(graph, name)!r} has no effect without graph.compile = true"
        return
    repeated = graph.compile_regions == "repeated"
    if graph.compile_mode == "reduce-overhead":
        obstacles = {
            "launch.device 'cpu'": launch.device == "cpu",
            "graph.shapes 'dynamic'": graph.shapes == "dynamic",
            "graph.compile_regions 'repeated'": repeated,
            f"parallel.pipeline {parallel.pipeline}": parallel.pipeline > 1,
            f"parallel.zero {parallel.zero}": parallel.zero > 0,
        }
        if found := [what for what, is_there in obstacles.items() if is_there]:
            yield (
                "graph.compile_mode 'reduce-overhead' captures CUDA graphs and cannot be combined with "
                f"{' and '.join(found)}; use 'default'"
            )
    # both are by unit, and a unit is a few layers already
    if repeated and (parallel.zero or recompute.mode != "none"):
        other = f"parallel.zero {parallel.zero}" if parallel.zero else f"recompute.mode {recompute.mode!r}"
        yield f"graph.compile_regions 'repeated' cannot be combined with {other}; use 'whole', which compiles each unit"


def _export(model: ModelConfig, export: ExportConfig) -> Iterable[str]:
    # local files are compared where they are opened (diagnostics/config_check.py), because links may name one file
    if url_of(export.path) and url_of(export.path) == url_of(model.path):
        yield f"export.path {redacted(export.path)} is the model that is trained; choose another name"


def _balance(data: DataConfig, train: TrainConfig) -> Iterable[str]:
    if data.balance == "length" and not train.shuffle:
        yield "data.balance 'length' reorders the shuffled samples, but train.shuffle is false; set one of the two"


def _text(data: DataConfig) -> Iterable[str]:
    text = data.text
    if text is None:
        return
    if text.packing not in ("auto", "none") and text.task not in ("causal", "masked"):
        yield f"data.text.packing {text.packing!r} is for the tasks causal and masked, not {text.task}"
    if text.stride is not None and text.task == "causal":
        yield (
            "data.text.stride: the windows of a causal model follow each other, so that each token is predicted once; "
            "leave it out"
        )
    elif text.stride is not None and text.packing not in ("auto", "none"):
        yield f"data.text.stride divides texts, which data.text.packing {text.packing!r} joins; set one of the two"
    if text.stride is not None and not isinstance(text.columns, str) and len(text.columns) > 1:
        yield (
            "data.text.stride: each window of one text of a pair would be combined with each window of the other; "
            "leave it out, so that the longer text is truncated"
        )
    if text.pad_side != "auto" and text.packing not in ("auto", "none"):
        yield f"data.text.pad_side {text.pad_side!r}: windows of data.text.packing {text.packing!r} are not padded so"
    for name in ("mask_token", "mask_probability", "whole_words"):
        value = getattr(text, name)
        if text.task != "masked" and value != type(text).model_fields[name].default:
            yield f"data.text.{name} {value!r} is for the task masked, not {text.task}"


def _promotion(
    export: ExportConfig,
    checkpoint: CheckpointConfig,
    model: ModelConfig,
    data: DataConfig,
    loss: Sequence[LossConfig],
    metrics: Sequence[MetricConfig],
) -> Iterable[str]:
    given, losses = export.promote_if, filled(model, data, loss)
    known = evaluation_names(losses, metrics)
    known += [f"test/{name.removeprefix('evaluation/')}" for name in known] if data.test_source else []
    if given.metric and given.metric not in known:
        yield (
            f"export.promote_if.metric: no evaluation of the exported file measures {given.metric!r}; with these "
            f"settings they measure {', '.join(known)}"
            + ("" if data.test_source else "; test/... needs data.test_source")
        )
    if given.when != "better":
        for name in ("metric", "margin", "confidence"):
            if getattr(given, name):
                yield (
                    f"export.promote_if.{name} {getattr(given, name)!r} has no effect with when = {given.when!r}: "
                    "nothing is compared"
                )
    if given.when == "never" and given.approval_hours:
        yield "export.promote_if.approval_hours has no effect with when = 'never': nothing is promoted"
    metric = (given.metric or checkpoint.best_metric).rpartition("/")[2]
    if given.confidence and any(
        each.key == metric and (is_library(each) or each.name == "retrieval_accuracy") for each in metrics
    ):
        yield (
            f"export.promote_if.confidence {given.confidence:g} resamples rows, but {metric} is no sum over targets; "
            "set export.promote_if.metric to the loss or accuracy, or confidence = 0"
        )
    if given.confidence and any(each.name in ("output", "info_nce") for each in losses):
        yield (
            f"export.promote_if.confidence {given.confidence:g} needs the loss of single rows, and a loss "
            f"{'of' if any(each.name == 'output' for each in losses) else 'info_nce of'} whole batches has none; set "
            "confidence = 0"
        )
    if not export.alias and given != type(given)():
        yield "export.promote_if has no effect without export.alias, the alias that moves"


def _bytes_of_a_token(data: DataConfig, metrics: Sequence[MetricConfig]) -> Iterable[str]:
    if data.text is None or data.text.task == "causal":  # whose bytes are counted while it is tokenized
        return
    why = "a masked model predicts some tokens from those around them, which is no code of the text; use perplexity"
    if data.text.task != "masked":
        why = f"the targets of data.text.task {data.text.task!r} are no text"
    for each in metrics:
        if each.name == "bits_per_byte" and each.bytes_per_target is None:
            yield f"metrics: bits_per_byte needs bytes of text: {why}, or set bytes_per_target"


CROSS_SECTION_RULES: tuple[Callable[..., Iterable[str]], ...] = (
    _world_size,
    _accumulation,
    _pipeline,
    _replicas,
    _device,
    _zero_bubble,
    _recomputation,
    _length,
    _loss_scale,
    _optimizer,
    _schedule,
    _timeouts,
    _weights,
    _metrics,
    _promotion,
    _text,
    _bytes_of_a_token,
    _surgery,
    _losses,
    _adapters,
    _dropout,
    _compilation,
    _export,
    _balance,
)
"""Each rule names the sections it reads as its parameters."""


def check_cross_section_rules(sections: Sections) -> list[str]:
    """Return one sentence for each contradiction; a rule is skipped if a section that it reads is absent."""
    problems: list[str] = []
    for rule in CROSS_SECTION_RULES:
        reads = inspect.signature(rule).parameters
        if reads.keys() <= sections.keys():
            problems += rule(**{name: sections[name] for name in reads})
    return problems
