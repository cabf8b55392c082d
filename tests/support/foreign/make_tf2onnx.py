"""Write tf2onnx-*.onnx: functions of TensorFlow 2 converted by tf2onnx.

python -m venv env && env/bin/pip install tensorflow-cpu==2.21.0 keras==3.15.1 tf2onnx==1.17.0
env/bin/python tests/support/foreign/make_tf2onnx.py
"""

from __future__ import annotations

import functools
import os
from pathlib import Path

os.environ["KERAS_BACKEND"] = "tensorflow"

import keras
import keras_models
import tensorflow as tf
import tf2onnx
from record import Changed, Written, write_files

OPSET = 15


def convert(model: keras.Model, path: Path) -> None:
    """Convert the model as a function of TensorFlow."""
    signature = [tf.TensorSpec((None, *model.input_shape[1:]), model.input.dtype, name=model.input.name)]
    function = tf.function(lambda x: model(x, training=False), input_signature=signature)
    tf2onnx.convert.from_function(function, input_signature=signature, opset=OPSET, output_path=str(path))


def export(name: str, path: Path, changed: Changed) -> None:
    """Write one of the models."""
    keras_models.with_changed(name, changed, lambda model: convert(model, path))


if __name__ == "__main__":
    files = [
        Written(name, architecture, inputs, functools.partial(export, name))
        for name, (architecture, inputs, _) in keras_models.MODELS.items()
    ]
    write_files("tf2onnx", ("tf2onnx", "tensorflow-cpu", "keras", "onnx"), files)
