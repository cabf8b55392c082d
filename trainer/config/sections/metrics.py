"""The settings of what is measured and of when a run ends early: `metrics` and [stop]."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, model_validator

from onward.trainer.config.loss_rules import losses_with
from onward.trainer.config.losses import LossConfig, titles
from onward.trainer.config.metric_names import FILE_TASKS, METRICS, Task, parse, unknown
from onward.trainer.config.section import Length, LengthOrZero, NonNegativeInt, SecondsOrZero, Section, plain_word

WEIGHTS_METRICS = "evaluation"
AVERAGE_METRICS = "evaluation/average"
"""What the names of metrics begin with: of the weights, and of their moving average."""
OF_FILE = "file"
"""In front of the name of a metric that is measured of what a detector's file itself returns."""
PARAMETERS = (
    "average",
    "of_class",
    "k",
    "beta",
    "thresholds",
    "bytes_per_target",
    "data_range",
    "separator",
    "quantile",
)


class MetricConfig(Section):
    """A metric of the evaluation: a name such as "f1_macro", or a table {name = "f1", average = "macro"}."""

    name: str
    """The metric; docs/how-to/choose-metrics.md lists them."""
    output: str = ""
    """With several losses: the output of the loss that it measures; empty = of every loss that it fits."""
    average: Literal["macro", "micro", "weighted"] | None = None
    """How the values of the classes become one: their mean, one count over all classes, or their mean weighted by the
    targets of each. Not set = macro."""
    of_class: LengthOrZero | None = None
    """The class whose value it is, in place of an average."""
    k: Length | None = None
    """`top_k`: how many classes with the greatest scores count. `retrieval_accuracy`: how many of the most similar rows
    count; not set = 1."""
    beta: PositiveFloat | None = None
    """`f_beta`: how many times as important as precision recall is."""
    thresholds: Annotated[int, Field(ge=2, le=2**24)] | None = None
    """`auroc`, `average_precision`: compute the curve at so many thresholds, which takes a fixed amount of memory. Not
    set = at every score, which keeps the scores of all evaluation data."""
    bytes_per_target: PositiveFloat | None = None
    """`bits_per_byte`: the bytes of text that one target stands for on average. Not set = counted where texts are
    tokenized (`data.text.task = "causal"`), else 1, where each target is a byte."""
    data_range: PositiveFloat | None = None
    """`psnr`, `ssim`: the difference between the greatest and the least possible value."""
    separator: NonNegativeInt | None = None
    """`word_error_rate`: the label between two words, such as that of a space. Not set = each label is a word."""
    quantile: Annotated[float, Field(gt=0.0, lt=1.0)] | None = None
    """`pinball`, `coverage`: the one of `loss.quantiles` that is measured. Not set = all of them."""

    @model_validator(mode="before")
    @classmethod
    def _reads_short_names(cls, given: Any) -> Any:
        table = {"name": given} if isinstance(given, str) else given
        if not isinstance(table, Mapping) or not isinstance(name := table.get("name"), str):
            return given
        # else without case and hyphens, so that F1-Macro is read, too
        short = parse(name if parse(name)["name"] in METRICS else plain_word(name))
        if short["name"] not in METRICS:
            raise ValueError(unknown(name))
        settings = short.keys() - {"name"}
        if twice := sorted(key for key in settings if table.get(key) not in (None, short[key])):
            raise ValueError(f"{name!r} says {twice[0]} already; leave out {twice[0]} = {table[twice[0]]!r}")
        return {**table, **short}

    @model_validator(mode="after")
    def _has_its_parameters(self) -> MetricConfig:
        metric = METRICS[self.name]
        given = [name for name in PARAMETERS if getattr(self, name) is not None]
        if wrong := [name for name in given if name not in metric.parameters]:
            takes = ", ".join(metric.parameters) or "no parameters"
            raise ValueError(f"{self.name} does not take {', '.join(wrong)}; it takes {takes}")
        if missing := [name for name in metric.required if name not in given]:
            raise ValueError(f"{self.name} needs {', '.join(missing)}")
        if self.average and self.of_class is not None:
            raise ValueError(f"{self.name}: average {self.average!r} and of_class {self.of_class} exclude each other")
        return self

    @property
    def key(self) -> str:
        """What the evaluation names its value, such as "f1_macro", "top_5" or "recall_class_3"."""
        # top_k is named by its k: "top_5"
        parts = [self.name] if self.name != "top_k" else []
        parts += [f"top_{self.k}"] if self.k else []
        parts += [f"{number:g}" for number in (self.beta, self.quantile) if number]
        parts += [self.average] if self.average else []
        parts += [f"class_{self.of_class}"] if self.of_class is not None else []
        return "_".join(parts)


def is_library(metric: MetricConfig) -> bool:
    """Return whether torchmetrics computes the metric."""
    return bool(METRICS[metric.name].library)


def metrics_of(loss: LossConfig, metrics: Sequence[MetricConfig]) -> list[MetricConfig]:
    """Return the metrics that are measured of one loss."""
    if not metrics:
        return [MetricConfig(name=name) for name in loss.rule.metrics]
    of_output = [metric for metric in metrics if metric.output in ("", *loss.outputs)]
    return [metric for metric in of_output if task_of(metric, loss)]


def tasks_of(loss: LossConfig) -> tuple[Task, ...]:
    """Return what the outputs and labels of a loss are, () if that is not known."""
    return FILE_TASKS[loss.label_dtype] if loss.is_own else loss.rule.tasks


def task_of(metric: MetricConfig, loss: LossConfig) -> Task | None:
    """Return as what a metric reads the outputs and labels of a loss; None if it does not fit the loss."""
    return next((task for task in tasks_of(loss) if task in METRICS[metric.name].tasks), None)


def evaluation_names(
    losses: Sequence[LossConfig],
    metrics: Sequence[MetricConfig],
    *,
    average: str = "none",
    teacher: bool = False,
) -> list[str]:
    """Return what the evaluations of a run measure: "evaluation/loss", "evaluation/accuracy", ...

    With a moving average of the weights (`average.kind`) also the same of it: "evaluation/average/loss", ...

    Of several losses the metrics are named after their outputs: "evaluation/boxes/loss". Those of a loss that reads the
    first output without naming it are left out, because only the graph knows that name. teacher: whether one runs
    beside the model; it does not beside an exported file.
    """
    if not losses and not teacher:  # an exported file that learnt from a teacher alone
        return []
    keys = [["loss", *(each.key for each in metrics_of(loss, metrics))] for loss in losses]
    names = keys[0] if keys else ["loss"]
    if len(losses) > 1:
        titled = zip(titles(losses), keys, losses, strict=True)
        named = [(title, own) for title, own, loss in titled if "" not in loss.outputs]
        names = ["loss", *(f"{title}/{name}" for title, own in named for name in own)]
    names += ["distillation"] if teacher else []
    evaluated = (WEIGHTS_METRICS,) if average == "none" else (WEIGHTS_METRICS, AVERAGE_METRICS)
    return [f"{prefix}/{name}" for prefix in evaluated for name in names]


def names_of_file(losses: Sequence[LossConfig], metrics: Sequence[MetricConfig]) -> list[str]:
    """Return what is measured of the outputs of a detector's exported file: "evaluation/file/map", ...

    These are the metrics of the first loss of a detector with a grid; without such a loss there are none.
    """
    for title, loss in zip(titles(losses), losses, strict=True):
        if loss.rule.has_grid:
            prefix = f"{WEIGHTS_METRICS}/{title}/{OF_FILE}" if len(losses) > 1 else f"{WEIGHTS_METRICS}/{OF_FILE}"
            return [f"{prefix}/{each.key}" for each in metrics_of(loss, metrics)]
    return []


def metric_problems(losses: Sequence[LossConfig], metrics: Sequence[MetricConfig]) -> Iterable[str]:
    """Yield a sentence for each metric that fits none of the losses, or not the one that it names."""
    outputs = [output for loss in losses for output in loss.outputs]
    for each in metrics:
        if each.output and each.output not in outputs:
            read = ", ".join(repr(output) if output else "the first output" for output in outputs)
            yield f"metrics: {each.key} is of the output {each.output!r}, which no loss reads; they read {read}"
            continue
        named = [loss for loss in losses if each.output in ("", *loss.outputs)]
        measured = [loss for loss in named if task_of(each, loss)]
        yield from _parameter_problems(each, measured) if measured else [_misfit(each, named)]
    keys = [(each.key, each.output) for each in metrics]
    for key, output in dict.fromkeys(pair for pair in keys if keys.count(pair) > 1):
        yield f"metrics: {key} is named twice{f' for the output {output!r}' if output else ''}"


def read_as_logits(loss: LossConfig, metrics: Sequence[MetricConfig]) -> Iterable[str]:
    """Yield why metrics of a loss of the user's own, whose output holds probabilities, would be wrong."""
    for each in metrics_of(loss, metrics):
        # the order of the classes, by which the others go, is that of the logits
        if task_of(each, loss) == "labels" or each.name in OF_LOGITS:
            yield (
                f"metrics: {each.key} reads the output of loss.file as logits, but it holds probabilities; let the "
                "loss read the tensor before them (loss.output), or leave the metric out"
            )


OF_LOGITS = ("perplexity", "bits_per_byte", "auroc", "average_precision", "calibration_error")
"""Metrics of classes that read more of the scores than their order."""


def _misfit(metric: MetricConfig, losses: Sequence[LossConfig]) -> str:
    """Return why a metric fits none of the losses, and which metrics fit them."""
    of = " and ".join(dict.fromkeys(_described(loss) for loss in losses))
    needs = " or ".join(map(_needs, METRICS[metric.name].tasks))
    tasks = {task for loss in losses for task in tasks_of(loss)}
    fitting = [name for name, known in METRICS.items() if tasks & set(known.tasks)]
    fit = f"these fit: {', '.join(fitting)}" if fitting else "no metric fits it"
    return f"metrics: {metric.key} needs {needs}, and the loss {of} has none; {fit}"


def _described(loss: LossConfig) -> str:
    return f"'file' with loss.label_type {loss.label_dtype!r}" if loss.is_own else repr(loss.name)


def _parameter_problems(metric: MetricConfig, losses: Sequence[LossConfig]) -> Iterable[str]:
    """Yield which parameters of a metric do not fit the losses that it measures."""
    if metric.average == "micro" and metric.name in ("auroc", "average_precision"):
        yield f"metrics: {metric.key}: curves of classes have no micro average; use macro or weighted"
    for loss in losses:
        if metric.quantile and metric.quantile not in loss.quantiles:
            levels = ", ".join(f"{level:g}" for level in loss.quantiles)
            yield f"metrics: {metric.key}: loss.quantiles has no {metric.quantile:g}, but {levels}"
        if task_of(metric, loss) == "pairs" and (metric.average or metric.of_class is not None):
            yield f"metrics: {metric.key}: pairs have no classes; leave out average and of_class"


_NEEDS: Mapping[Task, str] = {
    "classes": "scores of classes",
    "labels": "scores of yes-or-no labels",
    "values": "numbers",
    "matches": "rows that belong together",
}
_OWN: Mapping[Task, str] = {"classes": "file with label_type int64", "labels": "file", "values": "file"}


def _needs(task: Task) -> str:
    """Return what a metric reads, and the losses that have it."""
    names = [*losses_with(task), *([_OWN[task]] if task in _OWN else [])]
    return f"{_NEEDS.get(task, task)} ({', '.join(names)})"


class StopConfig(Section):
    """When a run ends before its last step. It then saves a checkpoint and exports, as after the last step."""

    patience: NonNegativeInt = 0
    """End after this many evaluations in succession (see `train.evaluation_period`) without improvement of
    `checkpoint.best_metric`; 0 = never. The evaluation before the first step is the first value to improve on."""
    minimum_gain: NonNegativeFloat = 0.0
    """A value counts as an improvement if it is better than the best one by more than this."""
    target: float | None = None
    """End at the first evaluation whose value is at least as good as this. Unset = no target."""
    max_hours: SecondsOrZero = 0.0
    """End after so many hours of training over all attempts, at the end of a step; 0 = no limit. `onward resume RUN
    stop.max_hours=...` continues with a higher limit. The time after the last checkpoint of a killed attempt does not
    count."""
