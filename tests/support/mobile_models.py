"""The two small models that quantization is measured on, with their data: a MobileNet and a BERT."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx

from onward.trainer.onnx_graph.node_builder import GraphWriter
from tests.support.graphs import tiny_bert

Array = np.ndarray[Any, np.dtype[Any]]


def mobile_net(*, width: int = 4, seed: int = 0) -> onnx.ModelProto:
    """Depthwise and pointwise convolutions with BatchNormalization and ReLU6: `image` [batch, 1, 8, 8] -> `logits`."""
    g = GraphWriter("mobile_net", seed=seed)
    x = _convolution(g, g.input("image", ("batch", 1, 8, 8)), "stem", 1, width)
    for number, (inputs, outputs, stride) in enumerate([(1, 2, 1), (2, 2, 2), (2, 4, 1), (4, 4, 2)]):
        inputs, outputs = inputs * width, outputs * width
        x = _convolution(g, x, f"blocks.{number}.depthwise", inputs, inputs, groups=inputs, stride=stride)
        x = _convolution(g, x, f"blocks.{number}.pointwise", inputs, outputs, size=1)
    x = g.op("Flatten", g.op("GlobalAveragePool", x))
    weight, bias = (
        g.weight("head.weight", g.normal(0.1, 10, 4 * width)),
        g.weight("head.bias", np.zeros(10, np.float32)),
    )
    g.op("Gemm", x, weight, bias, transB=1, outputs="logits")
    g.output("logits", ("batch", 10))
    return g.model()


def _convolution(
    g: GraphWriter, x: str, name: str, inputs: int, outputs: int, *, size: int = 3, groups: int = 1, stride: int = 1
) -> str:
    fan_in = inputs // groups * size * size
    weight = g.weight(f"{name}.weight", g.normal((2 / fan_in) ** 0.5, outputs, inputs // groups, size, size))
    pads = [size // 2] * 4
    h = g.op("Conv", x, weight, kernel_shape=[size, size], pads=pads, strides=[stride, stride], group=groups)
    norm = [np.float32(value * np.ones(outputs)) for value in (1, 0, 0, 1)]
    names = ("weight", "bias", "running_mean", "running_var")
    parameters = [g.weight(f"{name}.norm.{each}", value) for each, value in zip(names, norm, strict=True)]
    h = g.op("BatchNormalization", h, *parameters)
    bounds = [g.weight(f"{name}.{end}", float(value)) for end, value in (("least", 0), ("greatest", 6))]
    return g.op("Clip", h, *bounds)


def digits() -> dict[str, Array]:
    """scikit-learn's handwritten digits, 8 x 8 pixels."""
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    return {"image": (pixels / 16).astype(np.float32).reshape(-1, 1, 8, 8), "label": labels.astype(np.int64)}


def bert() -> onnx.ModelProto:
    """Two layers of attention, with LayerNormalization and GELU spelled out; 3 classes."""
    return tiny_bert(vocab_size=24, num_classes=3, positions=16)


def words(rows: int = 6000, seed: int = 0) -> dict[str, Array]:
    """Texts of 6 to 16 tokens, padded; the label is which of three groups of tokens is the most frequent in a text."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(1, 24, (rows, 16))
    mask = (np.arange(16) < rng.integers(6, 17, (rows, 1))).astype(np.int64)
    ids *= mask
    counts = np.stack([((ids % 3 == group) & (mask == 1)).sum(1) for group in range(3)], 1)
    # the first token says which of the groups count double
    counts[np.arange(rows), ids[:, 0] % 3] += 2
    return {"input_ids": ids, "attention_mask": mask, "label": counts.argmax(1).astype(np.int64)}
