"""The small models of graphs.py, quantized by onnxruntime with its default settings."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any

import onnx
from onnxruntime.quantization import CalibrationDataReader, QuantFormat, quantize_static

from tests.support.graphs import feed, tiny_bert, tiny_conv_net, tiny_resnet, tiny_transformer

FORMATS = {"QDQ": QuantFormat.QDQ, "QOperator": QuantFormat.QOperator}
MODELS = {each.__name__: each for each in (tiny_conv_net, tiny_resnet, tiny_bert, tiny_transformer)}


class Calibration(CalibrationDataReader):
    """Eight batches of the inputs of a model."""

    def __init__(self, model: onnx.ModelProto) -> None:
        self.batches = iter([feed(model, 8, seed=seed) for seed in range(8)])

    def get_next(self) -> Any:
        return next(self.batches, None)


@functools.cache
def quantized_bytes(name: str, form: str, per_channel: bool) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        given, made = Path(folder) / "given.onnx", Path(folder) / "made.onnx"
        onnx.save(MODELS[name](), given)
        quantize_static(given, made, Calibration(MODELS[name]()), quant_format=FORMATS[form], per_channel=per_channel)
        return made.read_bytes()


def quantized(name: str = "tiny_conv_net", form: str = "QDQ", *, per_channel: bool = True) -> onnx.ModelProto:
    """The model, quantized by onnxruntime with its default settings."""
    return onnx.ModelProto.FromString(quantized_bytes(name, form, per_channel))
