"""The committed files of other exporters (tests/support/foreign), with what is known of each: `FILES`.

    file = FILES["tf2onnx-cnn"]
    model, inputs = onnx.load(file.path), file.feed(batch=3)     # numpy arrays by name
    file.trained                                                 # stored tensors that the framework trains

How they were written and how `trained` was measured: tests/support/foreign/record.py.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import helper

FOLDER = Path(__file__).resolve().parent / "foreign"
Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True)
class ForeignFile:
    """One file and its entry in EXPORTER.json."""

    exporter: str
    path: Path
    architecture: str
    inputs: Mapping[str, Mapping[str, Any]]
    """Input -> {"shape": lengths behind the batch dimension, and for integers "below": the first one too large}."""
    trained: frozenset[str]
    """Stored tensors that depend on variables which the framework trains."""
    buffers: frozenset[str]
    """Stored tensors that depend on other variables, such as running statistics, and on no trained one."""
    versions: Mapping[str, str]

    def feed(self, batch: int, seed: int = 0) -> dict[str, Array]:
        """Return random inputs by name, in the order of the file."""
        random = np.random.default_rng(100 * seed + batch)
        found: dict[str, Array] = {}
        graph = onnx.load(self.path).graph
        stored = {tensor.name for tensor in graph.initializer}
        for value in (value for value in graph.input if value.name not in stored):
            what = self.inputs[value.name]
            shape = (batch, *what["shape"])
            kind = helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)
            numbers = random.integers(0, what["below"], shape) if "below" in what else random.normal(0, 1, shape)
            found[value.name] = numbers.astype(kind)
        return found


def _read() -> dict[str, ForeignFile]:
    found = {}
    for record in sorted(FOLDER.glob("*.json")):
        content = json.loads(record.read_text(encoding="utf-8"))
        exporter, versions = content["exporter"], content["versions"]
        for name, what in content["files"].items():
            key = f"{exporter}-{name}"
            found[key] = ForeignFile(
                exporter,
                FOLDER / f"{key}.onnx",
                what["architecture"],
                what["inputs"],
                frozenset(what["trained"]),
                frozenset(what["buffers"]),
                versions,
            )
    return found


FILES = _read()
"""EXPORTER-NAME -> file."""
