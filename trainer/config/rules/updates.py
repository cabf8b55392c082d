"""Rules about weight updates: [train], [precision], [optimizer] and [schedule]."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from onward.trainer.config.losses import LossConfig, filled, titles
from onward.trainer.config.section import Section
from onward.trainer.config.sections.data import DataConfig
from onward.trainer.config.sections.metrics import AVERAGE_METRICS, WEIGHTS_METRICS
from onward.trainer.config.sections.model import ModelConfig
from onward.trainer.config.sections.ranks import ParallelConfig
from onward.trainer.config.sections.results import CheckpointConfig, ExportConfig
from onward.trainer.config.sections.training import (
    AverageConfig,
    OptimizerConfig,
    PrecisionConfig,
    ScheduleConfig,
    TrainConfig,
)
from onward.trainer.config.update_rules import SETTINGS, UPDATE_RULES, rules_that_take, training_files_problems


def accumulation(train: TrainConfig, parallel: ParallelConfig) -> Iterable[str]:
    share = parallel.data * train.gradient_accumulation_steps
    if train.global_batch_size % share:
        below = train.global_batch_size // share * share
        near = [size for size in (below, below + share) if size]
        yield (
            f"train.global_batch_size {train.global_batch_size} does not divide over {parallel.data} replicas x "
            f"{train.gradient_accumulation_steps} micro-batches = {share}; the nearest that do: "
            + " and ".join(map(str, near))
        )


def length(train: TrainConfig) -> Iterable[str]:
    if bool(train.num_steps) == bool(train.num_epochs):
        yield (
            f"train.num_steps is {train.num_steps} and train.num_epochs is {train.num_epochs:g}; "
            "set exactly one of them above 0"
        )


def loss_scale(precision: PrecisionConfig) -> Iterable[str]:
    if precision.loss_scale and precision.compute != "fp16":
        scale = precision.static_scale or precision.initial_scale
        yield (
            f"precision.loss_scale {scale:g} has no meaning in {precision.compute}; "
            "only fp16 gradients underflow: set precision.compute = 'fp16' or remove it"
        )


def optimizer(optimizer: OptimizerConfig) -> Iterable[str]:
    if optimizer.nesterov and not optimizer.momentum:
        yield "optimizer.nesterov needs optimizer.momentum above 0"
    name = optimizer.name
    rule = UPDATE_RULES[optimizer.name]
    for setting in SETTINGS:
        value = getattr(optimizer, setting)
        default = OptimizerConfig.model_fields[setting].default
        shown = f"{setting} {value!r}" if not isinstance(value, Section) else setting
        # a value that is the default of the section or of the rule may have been filled in
        if setting not in (*rule.takes, *rule.ignores) and value not in (default, rule.defaults.get(setting)):
            yield f"optimizer.{shown} is for {rules_that_take(setting)}, not for {name}"
    for each in optimizer.weights:
        for setting in sorted({*SETTINGS, "rule"} & each.model_dump(exclude_none=True).keys() - rule.takes_of_weight()):
            yield (
                f"optimizer.weights: {setting} {getattr(each, setting)!r} of pattern {each.pattern!r} is for "
                f"{rules_that_take(setting)}, not for {name}"
            )


def training_files(optimizer: OptimizerConfig, export: ExportConfig) -> Iterable[str]:
    if export.training:
        yield from training_files_problems(optimizer.name)


def schedule(schedule: ScheduleConfig) -> Iterable[str]:
    if schedule.floor and schedule.is_compatible:
        yield f"schedule.floor {schedule.floor:g} is not for schedule.mode {schedule.mode!r}, which ends at 0"
    if schedule.mode == "none" and schedule.warmup_ratio:
        yield f"schedule.warmup_ratio {schedule.warmup_ratio:g} has no effect with mode 'none'; use mode 'constant'"


def average(
    average: AverageConfig,
    train: TrainConfig,
    model: ModelConfig,
    data: DataConfig,
    loss: Sequence[LossConfig],
    checkpoint: CheckpointConfig,
    export: ExportConfig,
) -> Iterable[str]:
    if average.kind == "none":
        if given := average.changed("kind"):
            yield f"{' and '.join(f'average.{name}' for name in given)} needs average.kind 'ema' or 'swa'"
        if export.weights == "average":
            yield "export.weights 'average' needs average.kind 'ema' or 'swa': without it there is no average"
        return
    only = {"decay": "ema", "period": "swa"}
    for name, kind in only.items():
        if kind != average.saved_kind and name in average.changed():
            yield f"average.{name} is for {kind}, not {average.kind}; remove it"
    if train.num_steps and average.first_step(train.num_steps) > train.num_steps:
        yield (
            f"average.start {average.start:g} is after the last step, {train.num_steps}: nothing would be averaged; "
            "set it below 1 (a share of all steps), or to an earlier step"
        )
    losses = filled(model, data, loss)
    if len(losses) > 1 and "average" in titles(losses):
        yield (
            "the output 'average' of a loss and the moving average would both have the metrics evaluation/average/...; "
            "rename the output, or set average.kind = 'none'"
        )
    # the checkpoint that is best for one set of weights need not be best for the other
    of_average = checkpoint.best_metric.startswith(f"{AVERAGE_METRICS}/")
    if export.checkpoint == "best" and export.weights in (("trained",) if of_average else ("average",)):
        wanted = checkpoint.best_metric.replace(AVERAGE_METRICS, WEIGHTS_METRICS)
        wanted = wanted if of_average else wanted.replace(WEIGHTS_METRICS, AVERAGE_METRICS, 1)
        yield (
            f"export.weights {export.weights!r} exports other weights than those that checkpoint.best_metric "
            f"{checkpoint.best_metric!r} chooses; set checkpoint.best_metric = {wanted!r} or export.checkpoint = 'last'"
        )
