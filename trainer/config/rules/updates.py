"""Rules about weight updates: [train], [precision], [optimizer] and [schedule]."""

from __future__ import annotations

from collections.abc import Iterable

from onward.trainer.config.sections.ranks import ParallelConfig
from onward.trainer.config.sections.training import OptimizerConfig, PrecisionConfig, ScheduleConfig, TrainConfig


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
        yield (
            f"precision.loss_scale {precision.loss_scale:g} has no meaning in {precision.compute}; "
            "only fp16 gradients underflow: set precision.compute = 'fp16' or remove it"
        )
    if precision.initial_scale > precision.max_scale:
        scale, most = precision.initial_scale, precision.max_scale
        yield f"precision.initial_scale {scale:g} is above precision.max_scale {most:g}"


def optimizer(optimizer: OptimizerConfig) -> Iterable[str]:
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


def schedule(schedule: ScheduleConfig) -> Iterable[str]:
    if schedule.floor and schedule.shape == "compatible":
        yield f"schedule.floor {schedule.floor:g} needs schedule.shape = 'continuous'; 'compatible' ends at 0"
    if schedule.mode == "none" and schedule.warmup_ratio:
        yield f"schedule.warmup_ratio {schedule.warmup_ratio:g} has no effect with mode 'none'; use mode 'constant'"
