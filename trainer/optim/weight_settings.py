"""Decide the settings of each weight: those of [optimizer], replaced by what [[optimizer.weights]] says of its name."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from fnmatch import fnmatchcase
from typing import Any

from onward.trainer.config.sections.training import OptimizerConfig
from onward.trainer.onnx_import.quantization.quantizer_scales import LOG_FACTOR


@dataclass(frozen=True)
class WeightSettings:
    """The settings of one weight. Weights with equal settings are updated together."""

    learning_rate_scale: float
    weight_decay: float
    alpha: float
    beta: float
    epsilon: float
    bias_correction: bool
    """That of the optimizer, for all weights."""
    trust_ratio: tuple[float, float]
    momentum: float
    rule: str
    """Of Muon: "muon" or "adamw"; else ""."""

    def scaled(self, factor: float) -> WeightSettings:
        """Return the settings with another learning rate: multiplied by the factor of the weight's layer."""
        return replace(self, learning_rate_scale=self.learning_rate_scale * factor)


def settings_of(config: OptimizerConfig, name: str, *, outputs: int | None = None) -> WeightSettings:
    """Return the settings of the weight of this initializer name.

    outputs: as in Weight: not None for the matrices that Muon takes by default.
    """
    values: dict[str, Any] = {field.name: getattr(config, field.name, None) for field in fields(WeightSettings)}
    values["learning_rate_scale"] = 1.0
    values["rule"] = "" if config.name != "muon" else "adamw" if outputs is None else "muon"
    # a scale of quantization whose factor decayed to 1 would go back to that of the file
    if any(fnmatchcase(name, pattern) for pattern in (*config.no_decay, f"*{LOG_FACTOR}")):
        values["weight_decay"] = 0.0
    # in the order of the file: a later pattern has precedence over an earlier one
    for each in config.weights:
        if fnmatchcase(name, each.pattern):
            values |= each.model_dump(exclude_none=True, exclude={"pattern"})
    if values["rule"] == "adamw":
        values["learning_rate_scale"] *= config.muon.adamw_learning_rate / config.learning_rate
    return WeightSettings(**values)
