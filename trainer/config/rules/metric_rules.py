"""Rules about what is measured: [[loss]], [[metrics]], and the settings that name a metric."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from onward.trainer.config.distillation import cache_problems, teacher_problems
from onward.trainer.config.losses import (
    LossConfig,
    contradictions,
    export_problems,
    filled,
    key_of,
    setting_problems,
    unchosen_units,
)
from onward.trainer.config.metric_names import has_no_direction
from onward.trainer.config.sections.data import DataConfig
from onward.trainer.config.sections.metrics import MetricConfig, StopConfig, evaluation_names, metric_problems
from onward.trainer.config.sections.model import ModelConfig
from onward.trainer.config.sections.quantize import QuantizeConfig
from onward.trainer.config.sections.ranks import LaunchConfig, ParallelConfig
from onward.trainer.config.sections.results import CheckpointConfig, ExportConfig
from onward.trainer.config.sections.teacher import TeacherConfig
from onward.trainer.config.sections.training import AverageConfig, TrainConfig


def losses(
    model: ModelConfig,
    data: DataConfig,
    loss: Sequence[LossConfig],
    train: TrainConfig,
    parallel: ParallelConfig,
    export: ExportConfig,
    teacher: TeacherConfig,
    launch: LaunchConfig,
    quantize: QuantizeConfig,
) -> Iterable[str]:
    yield from contradictions(model, data, loss)
    losses = filled(model, data, loss)
    yield from setting_problems(losses)
    # the rehearsal tries which units fit the untrained output
    if launch.rehearsal == "off":
        yield from unchosen_units(losses, "launch.rehearsal is 'off'")
    if any(each.standardise_label != "none" for each in losses):
        if quantize.aware:
            yield (
                "loss.standardise_label changes what the output computes, and quantize.aware compares it with that of "
                "the float file; train the float file so, and quantize what is exported"
            )
        if teacher.path:
            yield "loss.standardise_label: the teacher's outputs are in units of their own; remove one of both"
    for place, each in enumerate(losses):
        key = key_of(losses, place, "name")
        # the samples have to be in one pass, which accumulation and a pipeline divide
        if each.rule.compares_samples and (train.gradient_accumulation_steps > 1 or parallel.pipeline > 1):
            yield (
                f"{key} {each.name!r} compares all samples of a step at once, but train.gradient_accumulation_steps is "
                f"{train.gradient_accumulation_steps} and parallel.pipeline {parallel.pipeline}; set both to 1"
            )
        if each.rule.compares_samples and parallel.is_adasum:
            yield f"{key} {each.name!r} reaches over all replicas, which Adasum does not add up; use 'sum'"
        if each.rule.own_divisor and (teacher.path or parallel.is_adasum):
            other = "teacher.path" if teacher.path else f"parallel.reduction {parallel.reduction!r}"
            yield (
                f"{key} {each.name!r} counts by what all gradients of a step are divided when it is computed, which "
                f"{other} does not allow; remove one of both"
            )
    if export.training:
        yield from export_problems(losses)
    if "without_loss" in export.variants and not any(each.rule.by_graph for each in losses):
        yield (
            f"export.variants 'without_loss' is for a graph that computes its own loss, but the loss is "
            f"{losses[0].name if losses else model.loss}: the exported file has no loss in it; leave the variant out"
        )
    if model.num_classes == 1 and losses and losses[0].rule.needs_two_scores:
        yield "model.num_classes 1: the cross-entropy of one class is always 0; use bce_with_logits, or 2 classes"
    yield from teacher_problems(teacher, model, losses)
    yield from cache_problems(teacher, data)
    if teacher.path and export.training:
        yield "export.variants 'training' is without the teacher, and would train for labels alone; leave it out"
    yield from _adasum_problems(losses, teacher, parallel)


def _adasum_problems(losses: Sequence[LossConfig], teacher: TeacherConfig, parallel: ParallelConfig) -> Iterable[str]:
    """Yield why Adasum cannot weigh hosts by the number of targets, of which it takes one."""
    if not parallel.is_adasum:
        return
    start = f"parallel.reduction {parallel.reduction!r} weighs hosts by the targets of one loss,"
    if teacher.path:
        yield f"{start} and a teacher adds one; use 'sum'"
    if len(losses) > 1:
        yield f"{start} but there are {len(losses)} [[loss]]; use 'sum'"
    elif any(each.rule.by_level for each in losses):
        yield f"{start} but {losses[0].name!r} counts images and the matches of each level; use 'sum'"


def metrics(
    checkpoint: CheckpointConfig,
    stop: StopConfig,
    model: ModelConfig,
    data: DataConfig,
    loss: Sequence[LossConfig],
    metrics: Sequence[MetricConfig],
    train: TrainConfig,
    average: AverageConfig,
    teacher: TeacherConfig,
) -> Iterable[str]:
    losses = filled(model, data, loss)
    yield from metric_problems(losses, metrics)
    known = evaluation_names(losses, metrics, average=average.kind, teacher=bool(teacher.path))
    best = checkpoint.best_metric
    if best and best not in known:
        yield (
            f"checkpoint.best_metric: no evaluation measures {best!r}; with these settings they measure "
            f"{', '.join(known)}"
        )
    elif has_no_direction(best):
        yield (
            f"checkpoint.best_metric: of {best!r} neither the least nor the greatest value is the best; choose another "
            "metric"
        )
    ends = [f"stop.patience {stop.patience}"] if stop.patience else []
    ends += [] if stop.target is None else [f"stop.target {stop.target:g}"]
    if ends and not train.evaluation_period:
        yield (
            f"{' and '.join(ends)} count evaluations, but train.evaluation_period is 0: there is none between the "
            "first and the last step; set train.evaluation_period"
        )
    if stop.minimum_gain and not stop.patience:
        yield f"stop.minimum_gain {stop.minimum_gain!r} has no effect without stop.patience"


def bytes_of_a_token(data: DataConfig, metrics: Sequence[MetricConfig]) -> Iterable[str]:
    if data.text is None or data.text.task == "causal":  # whose bytes are counted while it is tokenized
        return
    why = "a masked model predicts some tokens from those around them, which is no code of the text; use perplexity"
    if not data.text.is_masked:
        why = f"the targets of data.text.task {data.text.task!r} are no text"
    for each in metrics:
        if each.name == "bits_per_byte" and each.bytes_per_target is None:
            yield f"metrics: bits_per_byte needs bytes of text: {why}, or set bytes_per_target"
