"""RunConfig: every setting of one run, validated, frozen and saved as `config.json`; what the ranks read."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field, ModelWrapValidatorHandler, PrivateAttr, field_validator, model_validator

from onward.trainer.config.distillation import SoftLoss, soft_losses
from onward.trainer.config.losses import LossConfig, filled, with_outputs
from onward.trainer.config.metric_names import is_greatest
from onward.trainer.config.removed_settings import as_of_now
from onward.trainer.config.rules import check_cross_section_rules
from onward.trainer.config.section import Section, table_type
from onward.trainer.config.sections.data import DataConfig
from onward.trainer.config.sections.metrics import AVERAGE_METRICS, WEIGHTS_METRICS, MetricConfig, StopConfig
from onward.trainer.config.sections.model import GraphConfig, LoraConfig, ModelConfig
from onward.trainer.config.sections.quantize import QuantizeConfig
from onward.trainer.config.sections.ranks import LaunchConfig, ParallelConfig, RecomputeConfig
from onward.trainer.config.sections.results import CheckpointConfig, ExportConfig, MonitorConfig
from onward.trainer.config.sections.teacher import TeacherConfig
from onward.trainer.config.sections.training import (
    AverageConfig,
    OptimizerConfig,
    PrecisionConfig,
    ScheduleConfig,
    TrainConfig,
)

UNNAMED = "config"
"""The name of a configuration that says nothing of its model."""
COMPILE_TIMEOUT_S = 1800.0
"""Least limit of the silence while a rank compiles: a large graph takes minutes, and more on a busy machine."""


class RunConfig(Section):
    """Every setting of one run. The ranks read this and nothing else."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")] = "onward"
    """The configuration's name, else its model's. Its runs are NAME-1, NAME-2 ... in Prefect, MLflow and lists."""
    model: ModelConfig
    data: DataConfig
    loss: tuple[LossConfig, ...] = ()
    metrics: tuple[MetricConfig, ...] = ()
    """What evaluations measure beside the loss: names such as "f1_macro", or tables with parameters. Empty = accuracy
    for cross_entropy and bce_with_logits, mae and mse for mse and l1."""
    teacher: TeacherConfig = TeacherConfig()
    graph: GraphConfig = GraphConfig()
    lora: LoraConfig = LoraConfig()
    quantize: QuantizeConfig = QuantizeConfig()
    train: TrainConfig = TrainConfig()
    precision: PrecisionConfig = PrecisionConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    average: AverageConfig = AverageConfig()
    parallel: ParallelConfig = ParallelConfig()
    recompute: RecomputeConfig = RecomputeConfig()
    launch: LaunchConfig = LaunchConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    stop: StopConfig = StopConfig()
    monitor: MonitorConfig = MonitorConfig()
    export: ExportConfig = ExportConfig()

    _left_out = PrivateAttr(default_factory=dict[str, Any])

    @model_validator(mode="wrap")
    @classmethod
    def _is_of_now(cls, settings: Any, handler: ModelWrapValidatorHandler[RunConfig]) -> RunConfig:
        """Read run directories of earlier versions; build_config refuses such settings in a configuration."""
        if not isinstance(settings, Mapping):
            return handler(settings)
        settings, left_out = as_of_now(settings)
        config = handler(settings)
        config._left_out = left_out
        return config

    @model_validator(mode="after")
    def _follows_the_cross_section_rules(self) -> RunConfig:
        if problems := check_cross_section_rules(dict(self)):
            raise ValueError("\n".join(problems))
        # a frozen section, replaced before anyone has seen it
        object.__setattr__(self, "model", with_outputs(self.model, self.losses))
        return self

    @field_validator("loss", mode="before")
    @classmethod
    def _is_one_loss_or_several(cls, given: Any) -> Any:
        return (given,) if isinstance(given, Mapping | LossConfig) else given

    @property
    def left_out(self) -> dict[str, Any]:
        """What only the earlier version that began the run computes, by `section.key`: the run must not go on."""
        return self._left_out

    @property
    def registered_name(self) -> str:
        """The name in MLflow's model registry: `export.register_as`, else that of the configuration.

        config.toml, as `onward init` calls it, would be the name of every model: then it is that of the model's file.
        """
        path = str(self.model.path)
        # what any run has made of a model.onnx is called so
        is_named = self.name != UNNAMED or path.endswith("/export/model.onnx")
        # a folder of its own says more than model.onnx
        of_file = name_of_model(path.removesuffix("/model.onnx"))
        return self.export.register_as or (self.name if is_named else of_file)

    @property
    def losses(self) -> tuple[LossConfig, ...]:
        """The losses in order, everything filled in: what code reads in place of [loss] and its short form."""
        return filled(self.model, self.data, self.loss)

    @property
    def soft_losses(self) -> tuple[SoftLoss, ...]:
        """The losses against the teacher; empty without one."""
        return soft_losses(self.teacher, self.model, self.losses)

    @property
    def world_size(self) -> int:
        """Ranks of the job: data x tensor x pipeline."""
        return self.parallel.world_size

    @property
    def compile_timeout_s(self) -> float:
        """Longest silence while a rank compiles; 0 if nothing is compiled."""
        return max(self.launch.start_timeout_s, COMPILE_TIMEOUT_S) if self.graph.compiles else 0.0

    @property
    def collective_timeout_s(self) -> float:
        """Longest time that a rank waits for the others in a collective: they may be compiling another stage."""
        return max(self.launch.collective_timeout_s, self.compile_timeout_s)

    @property
    def micro_batch_size(self) -> int:
        """Samples one replica runs through the graph at a time."""
        return self.train.micro_batch_rows(self.parallel.data)

    @property
    def evaluation_batch_size(self) -> int:
        """Samples one replica evaluates at a time."""
        return self.train.evaluation_batch_size or self.micro_batch_size

    @property
    def promote_metric(self) -> str:
        """The metric that decides whether the exported file takes the place of the served one."""
        return self.export.promote_if.metric or self._best_metric_of_file

    @property
    def promote_is_greatest(self) -> bool:
        """Whether a greater value of that metric is better."""
        return bool(is_greatest(self.promote_metric))

    @property
    def _best_metric_of_file(self) -> str:
        # the metrics of a file are named alike, whichever weights it has
        best = self.checkpoint.best_metric
        return best if self.average.kind == "none" else best.replace(AVERAGE_METRICS, WEIGHTS_METRICS, 1)

    @property
    def exports_average(self) -> bool:
        """Whether the exported weights are those of the moving average."""
        if self.export.weights == "auto":
            return self.checkpoint.best_metric != self._best_metric_of_file
        return self.export.weights == "average"


def name_of_model(path: str) -> str:
    """Return the name of a configuration that has none: that of its model's file, so that two models have two."""
    # the suffix, a version of MLflow, the query of a URL
    stem = re.split(r"[.@?]", path.rstrip("/").rpartition("/")[2])[0]
    return re.sub(r"[^A-Za-z0-9._-]+", "-", stem).strip("-._")[:100] or "onward"


SECTIONS: Mapping[str, type[Section]] = {
    name: section for name, field in RunConfig.model_fields.items() if (section := table_type(field.annotation))
}
"""Section name -> its type, in the order of the settings reference: the one list of sections."""
