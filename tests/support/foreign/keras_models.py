"""Small Keras models of the kinds people train, for make_keras.py and make_tf2onnx.py."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from keras import layers

VOCABULARY, LENGTH, WIDTH = 32, 8, 16
IMAGE: dict[str, Any] = {"image": {"shape": [8, 8, 1]}}
TOKENS: dict[str, Any] = {"tokens": {"shape": [LENGTH], "below": VOCABULARY}}
ROWS: dict[str, Any] = {"features": {"shape": [12]}}
SERIES: dict[str, Any] = {"series": {"shape": [LENGTH, 4]}}


def mlp() -> keras.Model:
    """Input scaling by variables that are not trained, then dense layers."""
    features = keras.Input((12,), name="features")
    x = layers.Dense(24, activation="relu", name="hidden")(_Scaling(name="scaling")(features))
    x = layers.Dropout(0.1, name="dropout")(x)
    return keras.Model(features, layers.Dense(4, name="logits")(x))


def normalized() -> keras.Model:
    """Input scaling by a Normalization layer, then dense layers; its statistics are no variables any more."""
    features = keras.Input((12,), name="features")
    scaling = layers.Normalization(name="scaling")
    scaling.adapt(np.random.default_rng(0).normal(2.0, 3.0, (200, 12)).astype("float32"))
    x = layers.Dense(24, activation="relu", name="hidden")(scaling(features))
    return keras.Model(features, layers.Dense(4, name="logits")(x))


def cnn() -> keras.Model:
    """Convolutions of NHWC images with BatchNormalization."""
    image = keras.Input((8, 8, 1), name="image")
    x = layers.Conv2D(8, 3, padding="same", name="conv1")(image)
    x = layers.ReLU(name="relu1")(layers.BatchNormalization(name="norm1")(x))
    x = layers.MaxPooling2D(name="pool")(x)
    x = layers.DepthwiseConv2D(3, padding="same", name="depthwise")(x)
    x = layers.BatchNormalization(name="norm2")(layers.Conv2D(12, 1, use_bias=False, name="conv2")(x))
    x = layers.GlobalAveragePooling2D(name="mean")(layers.Activation("silu", name="swish")(x))
    return keras.Model(image, layers.Dense(10, name="logits")(x))


def prenorm_cnn() -> keras.Model:
    """BatchNormalization in front of the activations, so that it cannot be folded into a convolution."""
    image = keras.Input((8, 8, 1), name="image")
    x = layers.Conv2D(8, 3, strides=2, activation="relu", name="conv1")(image)
    x = layers.ReLU(name="relu")(layers.BatchNormalization(name="norm1")(x))
    x = layers.Conv2D(8, 2, activation="tanh", name="conv2")(layers.BatchNormalization(name="norm2")(x))
    return keras.Model(image, layers.Dense(10, name="logits")(layers.Flatten(name="flat")(x)))


def transformer() -> keras.Model:
    """An encoder block with learned positions, MultiHeadAttention and LayerNormalization."""
    tokens = keras.Input((LENGTH,), dtype="int32", name="tokens")
    x = layers.Embedding(VOCABULARY, WIDTH, name="embedding")(tokens)
    x = _Positions(name="positions")(x)
    y = layers.LayerNormalization(epsilon=1e-5, name="norm1")(x)
    x = layers.Add(name="add1")([x, layers.MultiHeadAttention(2, WIDTH // 2, name="attention")(y, y)])
    y = layers.LayerNormalization(epsilon=1e-5, name="norm2")(x)
    y = layers.Dense(WIDTH, name="down")(layers.Dense(2 * WIDTH, activation=_gelu, name="up")(y))
    x = layers.GlobalAveragePooling1D(name="mean")(layers.Add(name="add2")([x, y]))
    return keras.Model(tokens, layers.Dense(4, name="logits")(x))


def _gelu(x: Any) -> Any:
    """The formula with tanh; tf2onnx does not know Erfc, with which Keras computes the other."""
    return keras.activations.gelu(x, approximate=True)


class _Scaling(layers.Layer):
    """Subtract a mean and divide by a standard deviation, as keras.layers.Normalization does.

    The exporter makes the mean and variance of that layer inputs of the file, on the TensorFlow backend.
    """

    def build(self, shape: Any) -> None:
        self.mean, self.deviation = (
            self.add_weight(shape=(1, shape[1]), initializer="ones", trainable=False, name=name)
            for name in ("mean", "deviation")
        )

    def call(self, x: Any) -> Any:
        return (x - self.mean) / self.deviation


class _Positions(layers.Layer):
    """Add a learned vector to each position."""

    def build(self, shape: Any) -> None:
        self.table = self.add_weight(shape=(shape[1], shape[2]), initializer="normal", name="table")

    def call(self, x: Any) -> Any:
        return x + self.table


def lstm() -> keras.Model:
    """A recurrent network over a series of numbers."""
    series = keras.Input((LENGTH, 4), name="series")
    x = layers.LSTM(8, name="lstm")(series)
    return keras.Model(series, layers.Dense(4, name="logits")(x))


def gru() -> keras.Model:
    """A recurrent network that reads in both directions."""
    series = keras.Input((LENGTH, 4), name="series")
    x = layers.Bidirectional(layers.GRU(6, name="gru"), name="both")(series)
    return keras.Model(series, layers.Dense(4, name="logits")(x))


def text() -> keras.Model:
    """An embedding classifier: the mean of word vectors."""
    tokens = keras.Input((LENGTH,), dtype="int32", name="tokens")
    x = layers.GlobalAveragePooling1D(name="mean")(layers.Embedding(VOCABULARY, WIDTH, name="embedding")(tokens))
    return keras.Model(tokens, layers.Dense(4, name="logits")(layers.Dense(16, activation="relu", name="hidden")(x)))


MODELS: dict[str, tuple[str, dict[str, Any], Callable[[], keras.Model]]] = {
    "mlp": ("MLP with input scaling", ROWS, mlp),
    "cnn": ("CNN with BatchNorm", IMAGE, cnn),
    "prenorm-cnn": ("CNN with BatchNorm after ReLU", IMAGE, prenorm_cnn),
    "transformer": ("transformer block with LayerNorm", TOKENS, transformer),
    "lstm": ("LSTM", SERIES, lstm),
    "gru": ("bidirectional GRU", SERIES, gru),
    "text": ("embedding classifier", TOKENS, text),
}
"""Name -> (architecture, inputs, the function that builds the model)."""
NORMALIZATION = ("MLP with input scaling", ROWS, normalized)
"""As an entry of MODELS; for the PyTorch backend."""


@functools.cache
def built(name: str) -> keras.Model:
    """Return the model with weights of which no two are equal, having been called once."""
    keras.utils.set_random_seed(0)
    model = MODELS[name][2]()
    _change(model.weights, 0.05)
    model(np.ones((2, *model.input_shape[1:]), model.input.dtype))
    return model


def with_changed(name: str, changed: str, write: Callable[[keras.Model], object]) -> None:
    """Call `write` with the model, of which the "trainable" or the "others" variables are changed meanwhile."""
    model = built(name)
    before = [variable.numpy() for variable in model.weights]
    try:
        _change({"": [], "trainable": model.trainable_weights, "others": model.non_trainable_weights}[changed], 0.1)
        write(model)
    finally:
        for variable, value in zip(model.weights, before, strict=True):
            variable.assign(value)


def _change(variables: list[Any], by: float) -> None:
    random = np.random.default_rng(len(variables))
    for variable in variables:
        if "float" in variable.dtype and "seed" not in variable.path:
            variable.assign(variable.numpy() + by * random.random(variable.shape).astype("float32"))
