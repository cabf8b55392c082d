"""RunConfig: every setting of one run, validated, frozen and saved as `config.json`; what the ranks read."""

from __future__ import annotations

import math
from typing import Annotated

from pydantic import Field, model_validator

from onward.trainer.config.rules import broken_laws
from onward.trainer.config.sections import (
    CheckpointConfig,
    DataConfig,
    ExportConfig,
    GraphConfig,
    LaunchConfig,
    LoraConfig,
    ModelConfig,
    MonitorConfig,
    OptimizerConfig,
    ParallelConfig,
    PrecisionConfig,
    RecomputeConfig,
    ScheduleConfig,
    Section,
    TrainConfig,
)


class RunConfig(Section):
    """One run, whole: what the ranks read, and all they read."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")] = "onward"
    """The run's name in Prefect, MLflow and the run list."""
    model: ModelConfig
    data: DataConfig
    graph: GraphConfig = GraphConfig()
    lora: LoraConfig = LoraConfig()
    train: TrainConfig = TrainConfig()
    precision: PrecisionConfig = PrecisionConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    parallel: ParallelConfig = ParallelConfig()
    recompute: RecomputeConfig = RecomputeConfig()
    launch: LaunchConfig = LaunchConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    monitor: MonitorConfig = MonitorConfig()
    export: ExportConfig = ExportConfig()

    @model_validator(mode="after")
    def _obeys_the_laws(self) -> RunConfig:
        if problems := broken_laws(dict(self)):
            raise ValueError("\n".join(problems))
        return self

    @property
    def world_size(self) -> int:
        """Ranks of the job: the product of the parallel sizes."""
        return self.parallel.data * self.parallel.tensor * self.parallel.pipeline

    @property
    def micro_batch_size(self) -> int:
        """Samples one replica runs through the graph at a time."""
        return self.train.global_batch_size // (self.parallel.data * self.train.gradient_accumulation_steps)

    @property
    def evaluation_batch_size(self) -> int:
        """Samples one replica evaluates at a time."""
        return self.train.evaluation_batch_size or self.micro_batch_size

    def total_samples(self, num_rows: int) -> int:
        """Samples the run learns from, given the rows of the training data."""
        if self.train.num_steps:
            return self.train.num_steps * self.train.global_batch_size
        return round(self.train.num_epochs * num_rows)

    def num_steps(self, num_rows: int) -> int:
        """Weight updates of the run; with epochs, the last one may be smaller than a whole batch."""
        return math.ceil(self.total_samples(num_rows) / self.train.global_batch_size)
