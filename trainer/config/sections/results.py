"""The settings of what a run leaves behind: [checkpoint], [monitor] and [export]."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, field_validator

from onward.trainer.config.metric_names import is_greatest
from onward.trainer.config.section import NonNegativeInt, PositiveInt, SecondsOrZero, Section
from onward.trainer.config.urls import PACKAGES, Location

NO_STORES = ("aiohttp", "huggingface_hub")
"""Packages of URLs to which checkpoints are not sent: a web server takes no files, and a hub makes a commit of each."""
MOST_PROFILED_STEPS = 50
"""Most steps that are profiled."""

# of a database it may have a slash, as SQLAlchemy reads it, and be in the query
_PASSWORD = re.compile(
    r"^https?://[^/?#]*:[^/?#]*@|^(?!https?:)[^:]+://[^:/@]*:[^@]*@|[?&](?:password|passwd|pwd|sslpassword)=", re.I
)


class CheckpointConfig(Section):
    """When to save checkpoints, which to keep, and where to start from."""

    period: NonNegativeInt = 0
    """Steps between checkpoints; 0 = none by the number of steps. One is always saved after the last step, and when the
    job is asked to stop."""
    minutes: SecondsOrZero = 10.0
    """Longest time between checkpoints: one is also saved at the end of the first step that is this long after the one
    before, or after the start of the attempt, by the clock of rank 0. 0 = none by time. The weights do not depend on
    it. Beside these, one is saved whenever an evaluation is the best so far, if `export.checkpoint` is `best`."""
    keep_newest: PositiveInt = 3
    """Newest checkpoints to keep, beside the best one."""
    background: Literal["auto"] | bool = "auto"
    """Write checkpoints while training goes on, from a copy in host memory of what a rank writes. `auto` = where the
    copy takes at most half of the free memory; on a CPU with `parallel.memory_gib` training waits instead."""
    best_metric: str = "evaluation/loss"
    """The metric that decides which checkpoint is the best: by its least value, or by its greatest, as of accuracy."""
    load: Location = ""
    """A checkpoint directory to start from: weights, optimizer and position; empty = the ONNX file's weights."""
    store: Location = ""
    """A directory or a URL of an object store, such as `s3://bucket/prefix`, to which the run sends its checkpoints and
    all else that `onward resume STORE/RUN` needs on another machine; empty = none. Training never waits for it."""

    @field_validator("store")
    @classmethod
    def _can_be_a_store(cls, location: str) -> str:
        scheme, _, rest = location.partition("://")
        if rest and PACKAGES.get(scheme) in NO_STORES:
            raise ValueError(f"{scheme}:// is no store of checkpoints; name a directory, or a URL of s3, gs or az")
        if rest and not rest.strip("/").partition("/")[2]:
            raise ValueError(f"{location} is a bucket; name a prefix in it, such as {location.rstrip('/')}/onward")
        return location.rstrip("/")

    @property
    def greatest_is_best(self) -> bool:
        """Whether a larger `best_metric` is better."""
        return bool(is_greatest(self.best_metric))

    def rank_of(self, metrics: Mapping[str, float]) -> float:
        """Return a number that is smaller the better the `best_metric` among these is; NaN without it."""
        value = metrics.get(self.best_metric, math.nan)
        return -value if self.greatest_is_best else value


class MonitorConfig(Section):
    """What is recorded, and where."""

    experiment: str = "onward"
    """The MLflow experiment."""
    tracking_uri: str = ""
    """The MLflow store; empty = MLFLOW_TRACKING_URI, else Onward's own under its home directory."""
    report_to: tuple[Literal["tensorboard", "wandb"], ...] = ("tensorboard",)
    """Where else than MLflow the metrics are shown: TensorBoard files in the run directory, Weights & Biases (`wandb`:
    the package wandb and its login, or WANDB_MODE=offline; its project is `experiment`)."""
    report: bool = True
    """Write the report of the run, report.html in its directory, when its flow ends."""
    histograms: tuple[str, ...] = ()
    """Glob patterns of weights whose values and gradients are recorded as histograms, every 100 steps and at last."""
    norms: tuple[str, ...] = ()
    """Glob patterns of weights whose L2 norm and gradient norm are recorded, in the same steps."""
    profile_steps: tuple[PositiveInt, ...] = ()
    """The first and the last step to profile, such as `[20, 24]`: where their time goes, by node of the ONNX file. Each
    rank leaves a table and a trace for Perfetto in `profile/`. Empty = none. The weights do not depend on it."""
    memory_snapshot: bool = False
    """Write down what is in the memory of a GPU when it runs out: torch's record of the allocations, for
    pytorch.org/memory_viz, which costs a little time in every step. It has no effect on the CPU."""

    @field_validator("profile_steps")
    @classmethod
    def _are_first_and_last(cls, steps: tuple[int, ...]) -> tuple[int, ...]:
        if len(steps) not in (0, 2):
            raise ValueError(f"give the first and the last step, such as [20, 24], or [] for none; not {list(steps)}")
        if steps and steps[0] > steps[1]:
            raise ValueError(f"the first step {steps[0]} is after the last one, {steps[1]}")
        if steps and steps[1] - steps[0] >= MOST_PROFILED_STEPS:
            raise ValueError(
                f"{steps[1] - steps[0] + 1} steps are more than {MOST_PROFILED_STEPS}: all their events are kept in "
                "memory, and a few steps show where the time goes"
            )
        return steps

    @field_validator("tracking_uri")
    @classmethod
    def _has_no_password(cls, uri: str) -> str:
        if _PASSWORD.search(uri):
            raise ValueError(
                "a password in a setting would get into records and logs: leave the setting empty, and set "
                "MLFLOW_TRACKING_URI, or MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, in the environment"
            )
        return uri


class PromoteConfig(Section):
    """When the alias moves from the served version to the new one. Else the new version stays a candidate."""

    when: Literal["better", "always", "never"] = "better"
    """`better`: both files are evaluated on the same rows, and the new one must be better, with inputs and outputs like
    those of the served one; the first version of a name must be above `floor`. `promote_if = "always"` is short for
    this setting alone."""
    floor: Literal["baseline", "none"] = "baseline"
    """What the first version of a name must beat by the metric that decides: what can be predicted without a model, the
    most frequent class, the mean of the labels, or the last value of a series; `none` = it is served at once."""
    metric: str = ""
    """The metric that decides, such as `evaluation/accuracy`, or `test/accuracy` on the rows of `data.test_source`;
    empty = `checkpoint.best_metric`."""
    margin: NonNegativeFloat = 0.0
    """The new file must be better by more than this, in the unit of the metric."""
    confidence: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    """0.95 = the 95 % interval of the difference must lie above `margin`, by a paired bootstrap over the rows; 0 = the
    difference itself decides. For map, the loss and metrics that are sums over targets: accuracy, mae, ..."""
    approval_hours: SecondsOrZero = 0.0
    """Ask in Prefect before the alias moves, and wait so long for an answer; 0 = do not ask."""


class ExportConfig(Section):
    """Which weights are exported, and which checks the file must pass before it is registered."""

    checkpoint: Literal["best", "last"] = "best"
    """Which checkpoint's weights are exported: those of the best evaluation by `checkpoint.best_metric`, for which a
    checkpoint is saved whenever an evaluation is the best so far, or those of the last step."""
    weights: Literal["auto", "trained", "average"] = "auto"
    """Which weights of the checkpoint: the trained ones, or their moving average ([average]). `auto` = the average
    where `checkpoint.best_metric` is a metric of it."""
    path: Location = ""
    """Also copy the exported file here, to a path or a URL; empty = only the run directory keeps it. The file of an
    earlier export is replaced; any other existing file only with `overwrite`, except at a URL."""
    overwrite: bool = False
    """Whether files at `path` that no export has written, or that were changed since, are replaced."""
    strip_training: bool = True
    """Remove the nodes that only training needs: Dropout and stochastic depth. `false` keeps them, without an effect at
    inference: a Dropout stays as it is or loses its training mode, stochastic depth becomes Identity.
    BatchNormalization is written in its inference form in both cases."""
    tolerance: PositiveFloat = 1e-3
    """Largest allowed difference between onnxruntime and the trained module, relative to the output's largest value."""
    variants: tuple[
        Literal[
            "optimized",
            "fp16",
            "bf16",
            "fp16_compute",
            "int8_dynamic",
            "int8_static",
            "without_loss",
            "with_preprocessing",
            "training",
        ],
        ...,
    ] = ()
    """Further files for deployment: onnxruntime's graph optimisation (always made where the file's helper nodes cost
    more than a tenth of its time), half-precision weights (`fp16_compute`: products,
    too), 8-bit quantization (static: calibrated on evaluation data). Each is evaluated, and refused by
    `variant_tolerance`. `without_loss`: of a graph that computes its own loss, the file without loss and labels.
    `with_preprocessing`: the file behind nodes that compute its inputs of raw columns, and of the pixels of images of
    any size. `training`: the files that continue training with onnxruntime alone, without torch: model_with_loss.onnx,
    eval.onnx, training.onnx and optimizer.onnx."""
    variant_tolerance: PositiveFloat = 0.02
    """How much worse a variant may be than the exported file: in accuracy, absolute; without an accuracy, in the
    evaluation loss, relative."""
    register_as: str = ""
    """The name in MLflow's model registry; empty = that of the configuration, or of the model's file if that is
    called config."""
    alias: str = "champion"
    """The alias of the version that is served; `promote_if` decides whether it moves to the new version. Empty =
    none."""
    promote_if: PromoteConfig = PromoteConfig()
    """When the alias moves: `[export.promote_if]`; or "always" or "never"."""

    @property
    def training(self) -> bool:
        """Whether the files that continue training are written."""
        return "training" in self.variants

    @property
    def kinds(self) -> tuple[str, ...]:
        """The variants that are one file each."""
        return tuple(kind for kind in self.variants if kind != "training")

    @field_validator("promote_if", mode="before")
    @classmethod
    def _may_be_a_word(cls, given: Any) -> Any:
        return {"when": given} if isinstance(given, str) else given

    @field_validator("register_as")
    @classmethod
    def _is_a_model_name(cls, name: str) -> str:
        if taken := sorted(set(name) & set("/:'\"")):
            raise ValueError(f"a name in the model registry must not contain {' '.join(taken)}")
        return name

    @field_validator("alias")
    @classmethod
    def _is_an_alias(cls, alias: str) -> str:
        if not re.fullmatch(r"[A-Za-z0-9_-]*", alias):
            raise ValueError("an alias consists of letters, digits, _ and -")
        if re.fullmatch(r"latest|v\d+", alias, re.IGNORECASE):
            raise ValueError("`latest`, v1, v2, ... are reserved by the model registry; choose another alias")
        return alias
