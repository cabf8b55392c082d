"""The settings of quantization in training: [quantize]."""

from __future__ import annotations

from typing import Literal

from onward.trainer.config.section import Section


class QuantizeConfig(Section):
    """How files with QuantizeLinear and DequantizeLinear are trained."""

    scales: Literal["recalibrate", "train", "frozen"] = "recalibrate"
    """What becomes of the scales and zero points of QuantizeLinear and DequantizeLinear. `recalibrate` = those of
    computed values are the range of each micro-batch in training, and moving averages of it in evaluation and in the
    written file; those of weights grow and shrink with the weights. `train` = each scale is a parameter (LSQ), and zero
    points stay. `frozen` = as in the file: what grows beyond its range is cut off."""
