"""Rules about what a run leaves behind: [export] and its promotion."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from onward.trainer.config.loss_rules import LossRule
from onward.trainer.config.losses import LossConfig, filled
from onward.trainer.config.metric_names import METRICS
from onward.trainer.config.sections.data import DataConfig
from onward.trainer.config.sections.metrics import MetricConfig, evaluation_names, is_library, names_of_file
from onward.trainer.config.sections.model import ModelConfig
from onward.trainer.config.sections.results import CheckpointConfig, ExportConfig, MonitorConfig
from onward.trainer.config.sections.teacher import TeacherConfig
from onward.trainer.config.sections.training import TrainConfig
from onward.trainer.config.urls import redacted, url_of


def _needs_whole_batches(rule: LossRule) -> bool:
    """Return whether a loss has no value for a single row."""
    return rule.by_graph or rule.compares_samples


def export(model: ModelConfig, export: ExportConfig) -> Iterable[str]:
    # local files are compared where they are opened (diagnostics/config_check.py), because links may name one file
    if url_of(export.path) and url_of(export.path) == url_of(model.path):
        yield f"export.path {redacted(export.path)} is the model that is trained; choose another name"


def promotion(
    export: ExportConfig,
    checkpoint: CheckpointConfig,
    model: ModelConfig,
    data: DataConfig,
    loss: Sequence[LossConfig],
    metrics: Sequence[MetricConfig],
    teacher: TeacherConfig,
) -> Iterable[str]:
    given = export.promote_if
    losses = filled(model, data, loss)
    known = evaluation_names(losses, metrics) + names_of_file(losses, metrics)
    # the test rows are evaluated by the same metrics
    known += [f"test/{name.removeprefix('evaluation/')}" for name in known] if data.test_source else []
    if given.metric and given.metric not in known:
        yield (
            f"export.promote_if.metric: no evaluation of the exported file measures {given.metric!r}; with these "
            f"settings they measure {', '.join(known)}"
            + ("" if data.test_source else "; test/... needs data.test_source")
        )
    compares = given.when == "better" and export.alias and not given.metric
    needs_teacher = not losses or checkpoint.best_metric.endswith("/distillation")
    if compares and teacher.path and needs_teacher:
        yield (
            "export.promote_if: no evaluation of the exported file measures checkpoint.best_metric "
            f"{checkpoint.best_metric!r}, because no teacher is beside it; set export.promote_if to 'always' or 'never'"
            + (f", or export.promote_if.metric to one of {', '.join(known)}" if known else "")
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
    # the last part is the key of the metric, behind the evaluation and the output
    metric = (given.metric or checkpoint.best_metric).rpartition("/")[2]
    measured = [each for each in metrics if each.key == metric]
    # of detected objects, what is matched in each image is counted
    others = [each for each in measured if METRICS[each.name].tasks != ("objects",)]
    is_no_sum = any(is_library(each) or each.name == "retrieval_accuracy" for each in others)
    if given.confidence and is_no_sum:
        yield (
            f"export.promote_if.confidence {given.confidence:g} resamples rows, but {metric} is no sum over targets; "
            "set export.promote_if.metric to the loss or accuracy, or confidence = 0"
        )
    of_batches = [loss for loss in losses if _needs_whole_batches(loss.rule)]
    if given.confidence and of_batches:
        name = "" if of_batches[0].rule.by_graph else f"{of_batches[0].name} "
        yield (
            f"export.promote_if.confidence {given.confidence:g} needs the loss of single rows, and a loss "
            f"{name}of whole batches has none; set confidence = 0"
        )
    if not export.alias and given != type(given)():
        yield "export.promote_if has no effect without export.alias, the alias that moves"


def profile(monitor: MonitorConfig, train: TrainConfig) -> Iterable[str]:
    # with train.num_epochs the number of steps is known to the ranks, who count the rows
    if monitor.profile_steps and train.num_steps and monitor.profile_steps[1] > train.num_steps:
        first, last = monitor.profile_steps
        yield (
            f"monitor.profile_steps [{first}, {last}] goes beyond the last step of the run: train.num_steps is "
            f"{train.num_steps}"
        )
