"""Build the reference models as ONNX files: SqueezeNet v1.1 and GPT-2 with fresh weights.

Names, layouts and initial distributions are those of torchvision's SqueezeNet and of the published GPT-2, so that
their checkpoints can be loaded by name. Only numpy and onnx are needed; the same seed gives the same bytes.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto

from onward.trainer.errors import ConfigError
from onward.trainer.onnx_graph.node_builder import Array, GraphWriter

# -- SqueezeNet v1.1 (Iandola et al. 2016, the version with 2.4x less computation)

MAX_POOL = (2, 5, 8)
"""Positions of the 3x3 max pools of stride 2 in `features`."""

FIRE = {3: (16, 64), 4: (16, 64), 6: (32, 128), 7: (32, 128), 9: (48, 192), 10: (48, 192), 11: (64, 256), 12: (64, 256)}
"""Position in `features` -> channels of the squeeze layer, channels of each of the two expand layers."""


def build_squeezenet(
    *, num_classes: int = 1000, image_size: int = 224, channels: int = 3, dropout: float = 0.5, seed: int = 0
) -> onnx.ModelProto:
    """Build SqueezeNet v1.1: `image` [batch, channels, image_size, image_size] -> `logits` [batch, num_classes].

    Raises ConfigError when the image is smaller than 17 pixels, the least that survives the four reductions.
    """
    if image_size < 17:
        raise ConfigError(f"image_size {image_size} is below 17: nothing would be left after four reductions by 2")
    g = GraphWriter("squeezenet1_1", seed=seed)
    x = g.input("image", ("batch", channels, image_size, image_size))
    x = _conv(g, x, "features.0", g.kaiming_uniform(64, channels, 3, 3), strides=[2, 2])
    width = 64
    for position in sorted((*MAX_POOL, *FIRE)):
        if position in MAX_POOL:
            x = g.op("MaxPool", x, kernel_shape=[3, 3], strides=[2, 2], ceil_mode=1)
        else:
            squeeze, expand = FIRE[position]
            x = _fire(g, x, f"features.{position}", width=width, squeeze=squeeze, expand=expand)
            # the results of both expand layers are concatenated
            width = 2 * expand
    x = _dropout(g, x, dropout)
    x = _conv(g, x, "classifier.1", g.normal(0.01, num_classes, width, 1, 1))
    g.op("Flatten", g.op("GlobalAveragePool", x), outputs="logits")
    g.output("logits", ("batch", num_classes))
    return g.model()


def _fire(g: GraphWriter, x: str, name: str, *, width: int, squeeze: int, expand: int) -> str:
    """Add a fire module: a 1x1 convolution to few channels, then 1x1 and 3x3 convolutions side by side."""
    x = _conv(g, x, f"{name}.squeeze", g.kaiming_uniform(squeeze, width, 1, 1))
    narrow = _conv(g, x, f"{name}.expand1x1", g.kaiming_uniform(expand, squeeze, 1, 1))
    wide = _conv(g, x, f"{name}.expand3x3", g.kaiming_uniform(expand, squeeze, 3, 3), pads=[1, 1, 1, 1])
    return g.op("Concat", narrow, wide, axis=1)


def _conv(g: GraphWriter, x: str, name: str, weight: Array, **attributes: Any) -> str:
    bias = g.weight(f"{name}.bias", np.zeros(weight.shape[0], np.float32))
    kernel = list(weight.shape[2:])
    return g.op("Relu", g.op("Conv", x, g.weight(f"{name}.weight", weight), bias, kernel_shape=kernel, **attributes))


def _dropout(g: GraphWriter, x: str, ratio: float) -> str:
    """Add a Dropout node in inference form: ImportedGraph.train() enables it, and runtimes skip it."""
    return g.op("Dropout", x, g.weight(f"dropout_{ratio:g}", float(ratio))) if ratio else x


# -- GPT-2 (Radford et al. 2019)


def build_gpt2(
    *,
    vocab_size: int = 50257,
    sequence_length: int = 1024,
    num_layers: int = 12,
    num_heads: int = 12,
    width: int = 768,
    dropout: float = 0.1,
    seed: int = 0,
) -> onnx.ModelProto:
    """Build GPT-2: `input_ids` int64 [batch, sequence] -> `logits` [batch, sequence, vocab_size].

    The defaults are the 124M model. Weights are N(0, 0.02), the projections back into the residual stream scaled by
    1/sqrt(2 num_layers); the output layer is the token embedding. `sequence` is at most `sequence_length`. Raises
    ConfigError when the heads do not divide the width.
    """
    if width % num_heads:
        raise ConfigError(f"width {width} does not divide over {num_heads} heads; the remainder is {width % num_heads}")
    g = GraphWriter("gpt2", seed=seed)
    ids = g.input("input_ids", ("batch", "sequence"), TensorProto.INT64)
    words = g.weight("transformer.wte.weight", g.normal(0.02, vocab_size, width))
    places = g.weight("transformer.wpe.weight", g.normal(0.02, sequence_length, width))
    length = g.op("Gather", g.op("Shape", ids), g.weight("one", np.array(1)), axis=0)
    positions = g.op("Range", g.weight("zero", np.array(0)), length, "one")
    # [sequence, sequence], true where the key (column) is not after the query (row)
    causal = g.op(
        "GreaterOrEqual",
        g.op("Unsqueeze", positions, g.weight("last_axis", [1])),
        g.op("Unsqueeze", positions, g.weight("first_axis", [0])),
    )
    x = g.op("Add", g.op("Gather", words, ids), g.op("Gather", places, positions))
    x = _dropout(g, x, dropout)
    for layer in range(num_layers):
        name = f"transformer.h.{layer}"
        # each layer adds two branches to the residual stream
        depth = math.sqrt(2.0 * num_layers)
        h = layer_norm(g, x, f"{name}.ln_1", width)
        h = _attention(g, h, causal, f"{name}.attn", width=width, num_heads=num_heads, dropout=dropout)
        h = linear(g, h, f"{name}.attn.c_proj", g.normal(0.02 / depth, width, width))
        x = g.op("Add", x, _dropout(g, h, dropout))
        h = layer_norm(g, x, f"{name}.ln_2", width)
        h = linear(g, h, f"{name}.mlp.c_fc", g.normal(0.02, width, 4 * width))
        h = g.op("Gelu", h, approximate="tanh")
        h = linear(g, h, f"{name}.mlp.c_proj", g.normal(0.02 / depth, 4 * width, width))
        x = g.op("Add", x, _dropout(g, h, dropout))
    x = layer_norm(g, x, "transformer.ln_f", width)
    # the token embedding again, transposed: one weight with two readers
    g.op("MatMul", x, g.op("Transpose", words, perm=[1, 0]), outputs="logits")
    g.output("logits", ("batch", "sequence", vocab_size))
    return g.model()


def _attention(g: GraphWriter, x: str, causal: str, name: str, *, width: int, num_heads: int, dropout: float) -> str:
    """Add causal self-attention, [batch, sequence, width] to the same shape, without the output projection."""
    split = [f"{name}.{part}" for part in ("query", "key", "value")]
    fused = linear(g, x, f"{name}.c_attn", g.normal(0.02, width, 3 * width))
    g.op("Split", fused, outputs=split, axis=-1, num_outputs=3)
    heads = g.weight("split_heads", [0, 0, num_heads, width // num_heads])
    query, key, value = (g.op("Reshape", part, heads) for part in split)  # [batch, sequence, heads, width / heads]
    # query and value [batch, heads, sequence, width / heads], key transposed for the product
    query = g.op("Transpose", query, perm=[0, 2, 1, 3])
    key = g.op("Transpose", key, perm=[0, 2, 3, 1])
    value = g.op("Transpose", value, perm=[0, 2, 1, 3])
    scores = g.op("Div", g.op("MatMul", query, key), g.weight("sqrt_head_width", math.sqrt(width / num_heads)))
    scores = g.op("Where", causal, scores, g.weight("masked", float(np.finfo(np.float32).min)))
    weights = _dropout(g, g.op("Softmax", scores, axis=-1), dropout)
    mixed = g.op("Transpose", g.op("MatMul", weights, value), perm=[0, 2, 1, 3])
    return g.op("Reshape", mixed, g.weight("join_heads", [0, 0, width]))


def linear(g: GraphWriter, x: str, name: str, weight: Array) -> str:
    """Add x @ weight + bias, with weight stored as [in, out]."""
    product = g.op("MatMul", x, g.weight(f"{name}.weight", weight))
    return g.op("Add", product, g.weight(f"{name}.bias", np.zeros(weight.shape[1], np.float32)))


def layer_norm(g: GraphWriter, x: str, name: str, width: int) -> str:
    """Add a LayerNormalization of the last axis."""
    scale = g.weight(f"{name}.weight", np.ones(width, np.float32))
    bias = g.weight(f"{name}.bias", np.zeros(width, np.float32))
    return g.op("LayerNormalization", x, scale, bias, axis=-1, epsilon=1e-5)
