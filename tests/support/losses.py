"""The losses of a [model] section alone, as `RunConfig.losses` has them."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from onward.trainer.config.losses import LossConfig, filled
from onward.trainer.config.sections.data import DataConfig
from onward.trainer.config.sections.model import ModelConfig
from onward.trainer.model.losses.loss import Losses
from onward.trainer.model.metrics.evaluation_metrics import EvaluationMetrics


def loss_of(model: ModelConfig) -> LossConfig:
    """The one loss of a [model] section."""
    (loss,) = filled(model, DataConfig(source="-"), ())
    return loss


def losses_of(model: ModelConfig, output_names: Iterable[str]) -> Losses:
    """The same, over the outputs of a graph."""
    return Losses([loss_of(model)], list(output_names))


def metrics_of(model: ModelConfig, output_names: Iterable[str]) -> EvaluationMetrics:
    """The metrics of this loss, on the CPU."""
    return EvaluationMetrics(losses_of(model, output_names), device=torch.device("cpu"))
