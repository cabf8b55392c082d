"""Write jax2onnx-*.onnx: modules of Flax NNX converted by jax2onnx.

python -m venv env && env/bin/pip install jax==0.10.2 flax==0.12.8 jax2onnx==0.17.1
env/bin/python tests/support/foreign/make_jax2onnx.py
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import onnx
from flax import nnx
from jax2onnx import to_onnx
from record import Changed, Written, write_files

VOCABULARY, LENGTH, WIDTH = 32, 8, 16


class MLP(nnx.Module):
    """Dense layers."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first, self.last = nnx.Linear(12, 24, rngs=rngs), nnx.Linear(24, 4, rngs=rngs)

    def __call__(self, features: Any) -> Any:
        return self.last(jax.nn.silu(self.first(features)))


class CNN(nnx.Module):
    """Convolutions of NHWC images with BatchNorm."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.conv1, self.conv2 = nnx.Conv(1, 8, (3, 3), rngs=rngs), nnx.Conv(8, 8, (3, 3), rngs=rngs)
        self.norm1, self.norm2 = nnx.BatchNorm(8, rngs=rngs), nnx.BatchNorm(8, rngs=rngs)
        self.head = nnx.Linear(8, 10, rngs=rngs)

    def __call__(self, image: Any) -> Any:
        x = nnx.max_pool(jax.nn.relu(self.norm1(self.conv1(image))), window_shape=(2, 2), strides=(2, 2))
        return self.head(jax.nn.relu(self.norm2(self.conv2(x))).mean((1, 2)))


class Transformer(nnx.Module):
    """An encoder block over token and position embeddings."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.tokens, self.positions = (nnx.Embed(size, WIDTH, rngs=rngs) for size in (VOCABULARY, LENGTH))
        self.norm1, self.norm2 = nnx.LayerNorm(WIDTH, rngs=rngs), nnx.LayerNorm(WIDTH, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(2, WIDTH, rngs=rngs, decode=False)
        self.up, self.down = nnx.Linear(WIDTH, 2 * WIDTH, rngs=rngs), nnx.Linear(2 * WIDTH, WIDTH, rngs=rngs)
        self.head = nnx.Linear(WIDTH, 4, rngs=rngs)

    def __call__(self, tokens: Any) -> Any:
        x = self.tokens(tokens) + self.positions(jnp.arange(LENGTH))[None]
        x = x + self.attention(self.norm1(x))
        x = x + self.down(jax.nn.gelu(self.up(self.norm2(x))))
        return self.head(x.mean(1))


class Text(nnx.Module):
    """The mean of word vectors."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.words = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
        self.hidden, self.head = nnx.Linear(WIDTH, 16, rngs=rngs), nnx.Linear(16, 4, rngs=rngs)

    def __call__(self, tokens: Any) -> Any:
        return self.head(jax.nn.relu(self.hidden(self.words(tokens).mean(1))))


class GRU(nnx.Module):
    """A recurrent network over a series of numbers."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.cell, self.head = nnx.GRUCell(4, 8, rngs=rngs), nnx.Linear(8, 4, rngs=rngs)

    def __call__(self, series: Any) -> Any:
        _, states = jax.lax.scan(self._step, jnp.zeros((series.shape[0], 8)), series.swapaxes(0, 1))
        return self.head(states.mean(0))

    def _step(self, state: Any, x: Any) -> tuple[Any, Any]:
        state, _ = self.cell(state, x)
        return state, state


TOKENS: dict[str, Any] = {"tokens": {"shape": [LENGTH], "below": VOCABULARY}}
MODELS: dict[str, tuple[str, dict[str, Any], Callable[[nnx.Rngs], nnx.Module]]] = {
    "mlp": ("MLP", {"features": {"shape": [12]}}, MLP),
    "cnn": ("CNN with BatchNorm", {"image": {"shape": [8, 8, 1]}}, CNN),
    "transformer": ("transformer block with LayerNorm", TOKENS, Transformer),
    "text": ("embedding classifier", TOKENS, Text),
    "gru": ("GRU", {"series": {"shape": [LENGTH, 4]}}, GRU),
}
"""Name -> (architecture, inputs, the module's class)."""


def export(name: str, path: Path, changed: Changed) -> None:
    """Write one of the modules."""
    _, inputs, make = MODELS[name]
    module = make(nnx.Rngs(0))
    module.eval()
    kinds = {"": (), "trainable": (nnx.Param,), "others": (nnx.BatchStat,)}[changed]
    keys = iter(jax.random.split(jax.random.key(1), 200))
    for kind, by in ((nnx.Param, 0.05), (nnx.BatchStat, 0.05), *((kind, 0.1) for kind in kinds)):
        state = nnx.state(module, kind)
        nnx.update(module, jax.tree.map(lambda x, by=by: x + by * jax.random.uniform(next(keys), x.shape), state))
    ((key, what),) = inputs.items()
    kind = jnp.int32 if "below" in what else jnp.float32
    shapes = [jax.ShapeDtypeStruct(jax.export.symbolic_shape(f"batch, {', '.join(map(str, what['shape']))}"), kind)]
    onnx.save(to_onnx(module, shapes, input_names=[key], output_names=["logits"]), path)


if __name__ == "__main__":
    files = [
        Written(name, architecture, inputs, functools.partial(export, name))
        for name, (architecture, inputs, _) in MODELS.items()
    ]
    write_files("jax2onnx", ("jax2onnx", "jax", "flax", "onnx"), files)
