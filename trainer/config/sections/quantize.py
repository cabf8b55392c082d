"""The settings of quantization in training: [quantize]."""

from __future__ import annotations

from typing import Literal

from onward.trainer.config.section import Length, Section


class QuantizeConfig(Section):
    """How files with QuantizeLinear and DequantizeLinear are trained, and how a float model becomes one."""

    scales: Literal["recalibrate", "train", "frozen"] = "recalibrate"
    """What becomes of the scales and zero points of QuantizeLinear and DequantizeLinear, and of the scales by which Mul
    multiplies stored integers. `recalibrate` = those of computed values are the range of each micro-batch in training,
    and moving averages of it in evaluation and in the written file; those of weights grow and shrink with the weights.
    `train` = each scale is a parameter (LSQ), and zero
    points stay. `frozen` = as in the file: what grows beyond its range is cut off."""
    aware: bool = False
    """Insert these nodes into a float model before training, with onnxruntime's quantizer, calibrated on training rows.
    The exported file has 8-bit weights and runs on onnxruntime's 8-bit kernels. The settings below are for this."""
    per_channel: bool = True
    """One scale for each output channel of a weight; false = one for each weight."""
    weights: Literal["int8", "uint8"] = "int8"
    """The type of weights."""
    activations: Literal["uint8", "int8"] = "uint8"
    """The type of computed values."""
    reduce_range: bool = True
    """Keep weights within 7 bits. On x86 processors without VNNI, onnxruntime's kernels add products of 8 x 8 bits in
    16 bits, which overflow for weights of 8 bits: the file would compute something else there. False = all 8 bits, for
    processors with VNNI, ARM and GPUs."""
    op_types: tuple[str, ...] = ()
    """The operators to quantize, such as "Conv" and "MatMul"; empty = all that onnxruntime can."""
    exclude: tuple[str, ...] = ()
    """Glob patterns of the names of nodes that stay in floating point."""
    calibration_rows: Length = 256
    """Training rows from all over the data, on which the ranges of computed values are measured first."""
