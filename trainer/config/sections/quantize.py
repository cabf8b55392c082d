"""The settings of quantization in training: [quantize]."""

from __future__ import annotations

from typing import Literal

from onward.trainer.config.section import Section

QuantizedTypes = Literal["u8s7", "u8s8", "u8u7", "u8u8", "s8s7", "s8s8", "s8u7", "s8u8"]
"""Of computed values, and of weights, whose last digit is the number of bits that are used."""


class QuantizeConfig(Section):
    """How files with QuantizeLinear and DequantizeLinear are trained, and how a float model becomes one."""

    scales: Literal["recalibrate", "train", "frozen"] = "recalibrate"
    """What becomes of the scales and zero points of QuantizeLinear and DequantizeLinear, and of the scales by which Mul
    multiplies stored integers. `recalibrate` = those of computed values are the range of each micro-batch in training,
    and moving averages of it in evaluation and in the written file; those of weights grow and shrink with the weights.
    `train` = each scale is a parameter (LSQ), and zero
    points stay. `frozen` = as in the file: what grows beyond its range is cut off."""
    aware: bool | QuantizedTypes = False
    """Insert these nodes into a float model before training, with onnxruntime's quantizer, calibrated on 256 training
    rows. The exported file has weights in 8 bits, with a scale for each output channel, and runs on onnxruntime's 8-bit
    kernels. A name gives the types of computed values and of weights as onnxruntime does: `u8s8` = uint8 and int8.
    `true` = `u8s7`: weights within 7 bits of int8. On x86 processors without VNNI, onnxruntime's kernels add products
    of 8 x 8 bits in 16 bits, which overflow for weights of 8 bits: the file would compute something else there. All 8
    bits are for processors with VNNI, ARM and GPUs. The settings below are for this."""
    op_types: tuple[str, ...] = ()
    """The operators to quantize, such as "Conv" and "MatMul"; empty = all that onnxruntime can."""
    exclude: tuple[str, ...] = ()
    """Glob patterns of the names of nodes that stay in floating point."""

    @property
    def types(self) -> QuantizedTypes:
        """The types of computed values and of weights."""
        return "u8s7" if isinstance(self.aware, bool) else self.aware
