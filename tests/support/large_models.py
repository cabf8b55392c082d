"""GPT-2 files of any size that take little memory and disk: their weights overlap in one file of random numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import onnx
from onnx import TensorProto

from onward.trainer.onnx_graph.examples import reference_models
from onward.trainer.onnx_graph.node_builder import SMALL_BYTES, Array, GraphWriter

BLOCK_BYTES = 16 << 20
STEP_BYTES = 4096
"""Each weight begins so far behind the one before it: no two are equal, which would be tied weights."""


class OverlappingWriter(GraphWriter):
    """Writes large weights as external data that overlap."""

    num_weights = 0
    largest_bytes = 0
    total_bytes = 0

    def weight(self, name: str, value: Array | Sequence[int] | float) -> str:
        array = value if isinstance(value, np.ndarray) else np.asarray(value)
        size = array.size * array.itemsize
        if size < SMALL_BYTES or isinstance(value, float):
            return super().weight(name, value)
        tensor = self._graph.initializer.add(
            name=name, data_type=TensorProto.FLOAT, dims=array.shape, data_location=TensorProto.EXTERNAL
        )
        offset = STEP_BYTES * self.num_weights
        for key, what in (("location", "weights.bin"), ("offset", str(offset)), ("length", str(size))):
            tensor.external_data.add(key=key, value=what)
        self.num_weights += 1
        self.largest_bytes = max(self.largest_bytes, size)
        self.total_bytes += size
        return name

    def normal(self, std: float, *shape: int) -> Array:
        # no memory: one number that is read many times
        return np.broadcast_to(np.float32(0), shape)

    def model(self) -> onnx.ModelProto:
        return self._model


def write_large_gpt2(path: Path, **sizes: Any) -> int:
    """Write GPT-2 whose weights overlap in one file; return the bytes that they take in memory."""
    writers = []

    def writer(*arguments: Any, **settings: Any) -> OverlappingWriter:
        writers.append(OverlappingWriter(*arguments, **settings))
        return writers[-1]

    with patch.object(reference_models, "GraphWriter", writer):
        model = reference_models.build_gpt2(**sizes)
    path.write_bytes(model.SerializeToString())
    (made,) = writers
    random = np.random.default_rng(0)
    with (path.parent / "weights.bin").open("wb") as file:
        for _ in range(math.ceil((made.largest_bytes + STEP_BYTES * made.num_weights) / BLOCK_BYTES)):
            file.write((0.02 * random.standard_normal(BLOCK_BYTES // 4, np.float32)).astype(np.float32).tobytes())
    return made.total_bytes
