"""Write keras-*.onnx with Keras 3's own exporter, `model.export(path, format="onnx")`, on the TensorFlow backend.

python -m venv env && env/bin/pip install tensorflow-cpu==2.21.0 keras==3.15.1 tf2onnx==1.17.0
env/bin/python tests/support/foreign/make_keras.py
"""

from __future__ import annotations

import functools
import os
from pathlib import Path

os.environ["KERAS_BACKEND"] = "tensorflow"

import keras_models
from record import Changed, Written, write_files


def export(name: str, path: Path, changed: Changed) -> None:
    """Write one of the models."""
    keras_models.with_changed(name, changed, lambda model: model.export(path, format="onnx", verbose=False))


if __name__ == "__main__":
    files = [
        Written(name, architecture, inputs, functools.partial(export, name))
        for name, (architecture, inputs, _) in keras_models.MODELS.items()
    ]
    write_files("keras", ("keras", "tensorflow-cpu", "tf2onnx", "onnx"), files)
