"""Write keras-torch-*.onnx with Keras 3's exporter on the PyTorch backend, which calls torch's exporter.

    python -m venv env && env/bin/pip install torch==2.13.0 keras==3.15.1 onnx==1.23.2 onnxscript==0.7.2
    env/bin/python tests/support/foreign/make_keras_torch.py

Keras cannot export its MultiHeadAttention this way.
"""

from __future__ import annotations

import functools
import os
import warnings
from pathlib import Path

os.environ["KERAS_BACKEND"] = "torch"

import keras_models
from record import Changed, Written, write_files

MODELS = {name: keras_models.MODELS[name] for name in ("cnn", "prenorm-cnn", "lstm", "text")}


def export(name: str, path: Path, changed: Changed) -> None:
    """Write one of the models."""
    with warnings.catch_warnings(action="ignore"):
        keras_models.with_changed(name, changed, lambda model: model.export(path, format="onnx", verbose=False))


if __name__ == "__main__":
    keras_models.MODELS["mlp"] = MODELS["mlp"] = keras_models.NORMALIZATION
    files = [
        Written(name, architecture, inputs, functools.partial(export, name))
        for name, (architecture, inputs, _) in MODELS.items()
    ]
    write_files("keras-torch", ("keras", "torch", "onnx"), files)
