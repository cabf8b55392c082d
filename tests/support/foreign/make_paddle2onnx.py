"""Write paddle2onnx-*.onnx: layers of PaddlePaddle converted by paddle2onnx.

python -m venv env && env/bin/pip install paddlepaddle==3.3.1 paddle2onnx==2.1.0
env/bin/python tests/support/foreign/make_paddle2onnx.py
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import paddle
from paddle import Tensor, nn
from record import Changed, Written, write_files

VOCABULARY, LENGTH, WIDTH = 32, 8, 16


class MLP(nn.Layer):
    """Dense layers with BatchNorm, and fixed scaling of the inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", paddle.randn([12]))
        self.first, self.norm, self.last = nn.Linear(12, 24), nn.BatchNorm1D(24), nn.Linear(24, 4)

    def forward(self, features: Tensor) -> Tensor:
        return self.last(nn.functional.relu(self.norm(self.first(features - self.mean))))


class CNN(nn.Layer):
    """Convolutions with BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2D(1, 8, 3, padding=1, bias_attr=False), nn.BatchNorm2D(8)
        self.conv2, self.norm2 = nn.Conv2D(8, 8, 3, padding=1), nn.BatchNorm2D(8)
        self.head = nn.Linear(8, 10)

    def forward(self, image: Tensor) -> Tensor:
        x = nn.functional.max_pool2d(nn.functional.relu(self.norm1(self.conv1(image))), 2)
        return self.head(nn.functional.silu(self.norm2(self.conv2(x))).mean([2, 3]))


class Transformer(nn.Layer):
    """An encoder block over token and position embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.block = nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, 0.1, "gelu", normalize_before=True)
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(paddle.arange(LENGTH))
        return self.head(self.block(x).mean(1))


class LSTM(nn.Layer):
    """A recurrent network over a series of numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(4, 8), nn.Linear(8, 4)

    def forward(self, series: Tensor) -> Tensor:
        return self.head(self.lstm(series)[0].mean(1))


class Text(nn.Layer):
    """The mean of word vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.hidden, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, 16), nn.Linear(16, 4)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(nn.functional.relu(self.hidden(self.words(tokens).mean(1))))


TOKENS: dict[str, Any] = {"tokens": {"shape": [LENGTH], "below": VOCABULARY}}
MODELS: dict[str, tuple[str, dict[str, Any], Callable[[], nn.Layer]]] = {
    "mlp": ("MLP with input scaling", {"features": {"shape": [12]}}, MLP),
    "cnn": ("CNN with BatchNorm", {"image": {"shape": [1, 8, 8]}}, CNN),
    "transformer": ("transformer block with LayerNorm", TOKENS, Transformer),
    "lstm": ("LSTM", {"series": {"shape": [LENGTH, 4]}}, LSTM),
    "text": ("embedding classifier", TOKENS, Text),
}
"""Name -> (architecture, inputs, the layer's class)."""


def export(name: str, path: Path, changed: Changed) -> None:
    """Write one of the layers."""
    _, inputs, make = MODELS[name]
    paddle.seed(0)
    layer = make()
    layer.eval()
    with paddle.no_grad():
        parameters = [x for x in layer.parameters() if not x.stop_gradient]
        buffers = [x for x in layer.parameters() if x.stop_gradient]  # running statistics are parameters, too
        buffers += [x for key, x in layer.named_buffers() if x.shape]  # scalars have no memory yet
        for tensor in (*parameters, *buffers):
            tensor.set_value(tensor + 0.05 * paddle.rand(tensor.shape))
        for tensor in {"": [], "trainable": parameters, "others": buffers}[changed]:
            tensor.set_value(tensor + 0.1 * paddle.rand(tensor.shape))
    ((key, what),) = inputs.items()
    shape, kind = [None, *what["shape"]], "int64" if "below" in what else "float32"
    specification = [paddle.static.InputSpec(shape, kind, key)]
    paddle.onnx.export(layer, str(path.with_suffix("")), specification, opset_version=17)


if __name__ == "__main__":
    files = [
        Written(name, architecture, inputs, functools.partial(export, name))
        for name, (architecture, inputs, _) in MODELS.items()
    ]
    write_files("paddle2onnx", ("paddle2onnx", "paddlepaddle", "onnx"), files)
