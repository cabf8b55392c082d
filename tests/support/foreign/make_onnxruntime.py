"""Write onnxruntime-*.onnx: files of torch's exporter as onnxruntime's optimiser writes them at its extended level.

    python -m venv env && env/bin/pip install torch==2.13.0 onnx==1.23.2 onnxscript==0.7.2 onnxruntime==1.31.1
    env/bin/python tests/support/foreign/make_onnxruntime.py

The extended level fuses nodes into operators of the domain com.microsoft and folds BatchNorm into convolutions.
"""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path

import make_torch
import onnxruntime
import torch_models
from record import Changed, Written, write_files


def optimised(name: str, path: Path, changed: Changed) -> None:
    """Write what a session stores as its optimised model."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "model.onnx"
        make_torch.legacy(name, source, changed)
        options = onnxruntime.SessionOptions()
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
        options.optimized_model_filepath = str(path)
        options.log_severity_level = 3
        onnxruntime.InferenceSession(str(source), options, providers=["CPUExecutionProvider"])


if __name__ == "__main__":
    files = [
        Written(name, architecture, inputs, functools.partial(optimised, name))
        for name, (architecture, inputs, _) in torch_models.MODELS.items()
    ]
    write_files("onnxruntime", ("onnxruntime", "torch", "onnx"), files)
