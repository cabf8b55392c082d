"""Build small models of the usual architectures as ONNX files with fresh weights: what the examples train.

Names are those of torchvision and Hugging Face. As reference_models.py needs, only numpy and onnx; each
gives the same bytes every time.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto

from onward.trainer.onnx_graph.examples.reference_models import layer_norm, linear
from onward.trainer.onnx_graph.node_builder import Array, GraphWriter

DETECTOR_STRIDES = (8, 16, 32)
"""Pixels from one cell to the next, of the levels of the detector."""
DISTANCE_BINS = 16
"""Logits for each distance of its boxes."""


def build_resnet18(*, num_classes: int, image_size: int, width: int = 64) -> onnx.ModelProto:
    """Build ResNet-18: `image` [batch, 3, image_size, image_size] -> `logits` [batch, num_classes].

    Its beginning is that of small images (He et al. 2016, section 4.2): a 3x3 convolution in place of the 7x7 one with
    stride 2 and the max pool. width: channels of the first of the four stages; each further one has twice as many.
    """
    g = GraphWriter("resnet18")
    x = g.input("image", ("batch", 3, image_size, image_size))
    x = g.op("Relu", _conv_norm(g, x, "conv1", "bn1", (width, 3, 3, 3)))
    channels = width
    for stage in range(4):
        for block in range(2):
            # the first block of each stage but the first one halves height and width
            stride = 2 if stage and not block else 1
            x = _residual(g, x, f"layer{stage + 1}.{block}", channels, width << stage, stride)
            channels = width << stage
    x = g.op("Flatten", g.op("GlobalAveragePool", x))
    return _with_heads(g, x, channels, {"logits": ("fc", num_classes)})


def _residual(g: GraphWriter, x: str, name: str, inputs: int, outputs: int, stride: int) -> str:
    """Add a basic block: two 3x3 convolutions, and x itself or a projection of it."""
    strides = [stride, stride]
    h = _conv_norm(g, x, f"{name}.conv1", f"{name}.bn1", (outputs, inputs, 3, 3), strides=strides)
    h = _conv_norm(g, g.op("Relu", h), f"{name}.conv2", f"{name}.bn2", (outputs, outputs, 3, 3))
    # x itself can be added only where the block keeps its shape
    if stride > 1 or inputs != outputs:
        parts = f"{name}.downsample.0", f"{name}.downsample.1"
        x = _conv_norm(g, x, *parts, (outputs, inputs, 1, 1), strides=strides)
    return g.op("Relu", g.op("Add", h, x))


def build_unet(*, num_classes: int, image_size: int, width: int = 16) -> onnx.ModelProto:
    """Build a U-Net of two levels: `image` [batch, 3, S, S] -> `logits` [batch, num_classes, S, S], S a multiple of 4.

    image - enter ----------------------- join1 - out - logits      S x S
               \\ pool                    /  up
                down1 --------- join2 ---                           S/2 x S/2
                     \\ pool   /  up
                      down2 --                                      S/4 x S/4
    """
    g = GraphWriter("unet")
    x = g.input("image", ("batch", 3, image_size, image_size))
    a = _double(g, x, "enter", 3, width)
    b = _double(g, _half(g, a), "down1", width, 2 * width)
    c = _double(g, _half(g, b), "down2", 2 * width, 4 * width)
    x = g.op("Concat", _twice(g, c, "up2", 4 * width, 2 * width), b, axis=1)
    x = _double(g, x, "join2", 4 * width, 2 * width)
    x = g.op("Concat", _twice(g, x, "up1", 2 * width, width), a, axis=1)
    x = _double(g, x, "join1", 2 * width, width)
    weight = g.weight("out.weight", g.normal(0.1, num_classes, width, 1, 1))
    bias = g.weight("out.bias", np.zeros(num_classes, np.float32))
    g.op("Conv", x, weight, bias, kernel_shape=[1, 1], outputs="logits")
    g.output("logits", ("batch", num_classes, image_size, image_size))
    return g.model()


def _double(g: GraphWriter, x: str, name: str, inputs: int, outputs: int) -> str:
    # leaky, because a Relu would leave so few channels without any gradient in regions of rare classes
    x = g.op("LeakyRelu", _conv_norm(g, x, f"{name}.0", f"{name}.1", (outputs, inputs, 3, 3)), alpha=0.1)
    return g.op("LeakyRelu", _conv_norm(g, x, f"{name}.3", f"{name}.4", (outputs, outputs, 3, 3)), alpha=0.1)


def _half(g: GraphWriter, x: str) -> str:
    return g.op("MaxPool", x, kernel_shape=[2, 2], strides=[2, 2])


def _twice(g: GraphWriter, x: str, name: str, inputs: int, outputs: int) -> str:
    """Add a transposed convolution that doubles height and width."""
    weight = g.weight(f"{name}.weight", g.normal(math.sqrt(2 / inputs), inputs, outputs, 2, 2))
    bias = g.weight(f"{name}.bias", np.zeros(outputs, np.float32))
    return g.op("ConvTranspose", x, weight, bias, kernel_shape=[2, 2], strides=[2, 2])


def build_two_heads(*, num_classes: int, image_size: int) -> onnx.ModelProto:
    """Build a convolutional network with two outputs: `image` [batch, 3, S, S] -> `kind` [batch, num_classes], `centre`
    [batch, 2]. S is a multiple of 8."""
    g = GraphWriter("two_heads")
    x = g.input("image", ("batch", 3, image_size, image_size))
    channels = 3
    for layer in range(3):
        outputs = 16 << layer
        x = g.op("Relu", _conv_norm(g, x, f"{layer}.conv", f"{layer}.bn", (outputs, channels, 3, 3)))
        x = _half(g, x)
        channels = outputs
    # flattened and not averaged: where something is must not get lost
    features = channels * (image_size // 8) ** 2
    x = g.op("Relu", _gemm(g, g.op("Flatten", x), "trunk", features, 64))
    return _with_heads(g, x, 64, {"kind": ("kind", num_classes), "centre": ("centre", 2)})


def build_detector(*, num_classes: int, image_size: int) -> onnx.ModelProto:
    """Build a detector in the form of YOLOv8: `images` [batch, 3, S, S] -> `output0` [batch, 4 + num_classes, cells].

    S is a multiple of 32. Each cell of strides 8, 16 and 32 predicts the centre and size of a box in pixels, and the
    probability of each class. The raw outputs [batch, 64 + num_classes, S / stride, S / stride], from which these are
    computed, are `raw8`, `raw16` and `raw32`: 16 logits for the distance to each side of the box, and the classes.

    images - stem - stage8 - stage16 - stage32
                      |         |         |
                    raw8      raw16     raw32    box and class branches of two convolutions each
                      \\         |        /
                       joined: softmax of distances, corners, sigmoid of classes - output0
    """
    g = GraphWriter("detector")
    x = _silu(g, g.input("images", ("batch", 3, image_size, image_size)), "stem.0", 3, 16, stride=2)
    x = _silu(g, x, "stem.1", 16, 16, stride=2)
    raw, channels = [], 16
    for stride in DETECTOR_STRIDES:
        x = _silu(g, x, f"stage{stride}.0", channels, 32, stride=2)
        x = _silu(g, x, f"stage{stride}.1", 32, 32)
        channels = 32
        # few cells have an object: at the beginning each class has a probability of 1 %, and the bins equal shares
        parts = {"box": (4 * DISTANCE_BINS, 1.0), "class": (num_classes, math.log(0.01))}
        found = [_raw_branch(g, x, f"{part}{stride}", channels, *sizes) for part, sizes in parts.items()]
        raw.append(g.op("Concat", *found, axis=1, outputs=f"raw{stride}"))
    _decoded(g, raw, num_classes, image_size)
    cells = sum((image_size // stride) ** 2 for stride in DETECTOR_STRIDES)
    g.output("output0", ("batch", 4 + num_classes, cells))
    return g.model()


def _silu(g: GraphWriter, x: str, name: str, inputs: int, outputs: int, stride: int = 1) -> str:
    shape = (outputs, inputs, 3, 3)
    x = _conv_norm(g, x, f"{name}.conv", f"{name}.bn", shape, strides=[stride, stride])
    return g.op("Mul", x, g.op("Sigmoid", x))


def _raw_branch(g: GraphWriter, x: str, name: str, inputs: int, outputs: int, bias: float) -> str:
    """Add a 3x3 convolution and one of 1x1 with a bias that begins at one number: the raw outputs of a level."""
    x = _silu(g, x, f"{name}.0", inputs, inputs)
    weight = g.weight(f"{name}.1.weight", g.normal(0.01, outputs, inputs, 1, 1))
    return g.op("Conv", x, weight, g.weight(f"{name}.1.bias", np.full(outputs, bias, np.float32)), kernel_shape=[1, 1])


def _decoded(g: GraphWriter, raw: list[str], num_classes: int, image_size: int) -> None:
    """Add what computes boxes and probabilities from raw outputs: `output0`."""
    flat = g.weight("flat", [0, 4 * DISTANCE_BINS + num_classes, -1])
    joined = g.op("Concat", *(g.op("Reshape", each, flat) for each in raw), axis=2)
    sizes = g.weight("box_and_class", [4 * DISTANCE_BINS, num_classes])
    distances, classes = "distances", "classes"
    g.op("Split", joined, sizes, axis=1, outputs=[distances, classes])
    # the mean of the numbers 0 .. 15 under the softmax of their logits, in cells
    bins = g.op("Softmax", g.op("Reshape", distances, g.weight("by_side", [0, 4, DISTANCE_BINS, -1])), axis=2)
    numbers = g.weight("bins", np.arange(DISTANCE_BINS, dtype=np.float32).reshape(1, 1, -1, 1))
    means = g.op("ReduceSum", g.op("Mul", bins, numbers), g.weight("bin_axis", [2]), keepdims=0)
    g.op("Split", means, axis=1, num_outputs=2, outputs=["left_top", "right_bottom"])
    points, strides = _cells(image_size)
    centres = g.weight("points", points)
    first = g.op("Sub", centres, "left_top")
    last = g.op("Add", centres, "right_bottom")
    centre = g.op("Mul", g.op("Add", first, last), g.weight("half", 0.5))
    boxes = g.op("Concat", centre, g.op("Sub", last, first), axis=1)
    in_pixels = g.op("Mul", boxes, g.weight("strides", strides))
    g.op("Concat", in_pixels, g.op("Sigmoid", classes), axis=1, outputs="output0")


def _cells(image_size: int) -> tuple[Array, Array]:
    """Return the centres of all cells, in cells of their level, [1, 2, cells], and their strides, [1, 1, cells]."""
    points, strides = [], []
    for stride in DETECTOR_STRIDES:
        side = image_size // stride
        y, x = np.mgrid[:side, :side] + 0.5
        points.append(np.stack([x.ravel(), y.ravel()]))
        strides.append(np.full(side * side, stride))
    return np.hstack(points)[None].astype(np.float32), np.hstack(strides)[None, None].astype(np.float32)


def build_bert(
    *,
    vocab_size: int,
    num_classes: int,
    width: int = 64,
) -> onnx.ModelProto:
    """Build a BERT classifier: `input_ids`, `attention_mask`, `token_type_ids` int64 [batch, sequence] -> `logits`
    [batch, num_classes]. `sequence` is at most 64."""
    g = GraphWriter("bert")
    ids, mask, types = (
        g.input(name, ("batch", "sequence"), TensorProto.INT64)
        for name in ("input_ids", "attention_mask", "token_type_ids")
    )
    length = g.op("Gather", g.op("Shape", ids), g.weight("one", np.array(1)), axis=0)
    positions = g.op("Range", g.weight("zero", np.array(0)), length, "one")
    x = _embedding(g, "word_embeddings", vocab_size, width, ids)
    x = g.op("Add", x, _embedding(g, "token_type_embeddings", 2, width, types))
    x = g.op("Add", x, _embedding(g, "position_embeddings", 64, width, positions))
    x = layer_norm(g, x, "bert.embeddings.LayerNorm", width)
    # [batch, 1, 1, sequence], true where the key is no padding
    kept = g.op("Unsqueeze", g.op("Cast", mask, to=TensorProto.BOOL), g.weight("head_axes", [1, 2]))
    for layer in range(2):
        name = f"bert.encoder.layer.{layer}"
        h = _self_attention(g, x, kept, f"{name}.attention", width, 4)
        x = layer_norm(g, g.op("Add", x, h), f"{name}.attention.output.LayerNorm", width)
        h = g.op("Gelu", linear(g, x, f"{name}.intermediate.dense", g.normal(0.02, width, 4 * width)))
        h = linear(g, h, f"{name}.output.dense", g.normal(0.02, 4 * width, width))
        x = layer_norm(g, g.op("Add", x, h), f"{name}.output.LayerNorm", width)
    # the token [CLS] in front of each text, by which BERT classifies
    first = g.op("Gather", x, "zero", axis=1)
    pooled = g.op("Tanh", _gemm(g, first, "bert.pooler.dense", width, width))
    return _with_heads(g, pooled, width, {"logits": ("classifier", num_classes)})


def _embedding(g: GraphWriter, name: str, rows: int, width: int, ids: str) -> str:
    return g.op("Gather", g.weight(f"bert.embeddings.{name}.weight", g.normal(0.02, rows, width)), ids)


def _self_attention(g: GraphWriter, x: str, kept: str, name: str, width: int, num_heads: int) -> str:
    """Add self-attention over all tokens that are no padding, [batch, sequence, width] to the same shape."""
    heads = g.weight("split_heads", [0, 0, num_heads, width // num_heads])

    def project(part: str, perm: list[int]) -> str:
        projected = linear(g, x, f"{name}.self.{part}", g.normal(0.02, width, width))
        return g.op("Transpose", g.op("Reshape", projected, heads), perm=perm)

    query = project("query", [0, 2, 1, 3])
    key = project("key", [0, 2, 3, 1])
    scores = g.op("Div", g.op("MatMul", query, key), g.weight("sqrt_head_width", math.sqrt(width / num_heads)))
    # the least float, and not minus infinity: a row without any kept token would become NaN
    scores = g.op("Where", kept, scores, g.weight("masked", float(np.finfo(np.float32).min)))
    mixed = g.op("MatMul", g.op("Softmax", scores, axis=-1), project("value", [0, 2, 1, 3]))
    joined = g.op("Reshape", g.op("Transpose", mixed, perm=[0, 2, 1, 3]), g.weight("join_heads", [0, 0, width]))
    return linear(g, joined, f"{name}.output.dense", g.normal(0.02, width, width))


def build_mlp(*, inputs: int, outputs: int) -> onnx.ModelProto:
    """Build a network of two hidden layers for tables: `features` [batch, inputs] -> `prediction` [batch, outputs]."""
    g = GraphWriter("mlp")
    x = g.op("Relu", _gemm(g, g.input("features", ("batch", inputs)), "fc1", inputs, 64))
    x = g.op("Relu", _gemm(g, x, "fc2", 64, 64))
    return _with_heads(g, x, 64, {"prediction": ("fc3", outputs)})


# -- layers


def _conv_norm(g: GraphWriter, x: str, conv: str, norm: str, shape: tuple[int, ...], **attributes: Any) -> str:
    """Add a convolution without bias, padded to keep the size, and a BatchNormalization."""
    weight = g.weight(f"{conv}.weight", g.kaiming_uniform(*shape))
    x = g.op("Conv", x, weight, kernel_shape=list(shape[2:]), pads=[shape[-1] // 2] * 4, **attributes)
    ones = np.ones(shape[0], np.float32)
    zeros = np.zeros(shape[0], np.float32)
    values = {"weight": ones, "bias": zeros, "running_mean": zeros, "running_var": ones}
    stored = [g.weight(f"{norm}.{part}", value) for part, value in values.items()]
    return g.op("BatchNormalization", x, *stored, epsilon=1e-5, momentum=0.9)


def _gemm(g: GraphWriter, x: str, name: str, inputs: int, outputs: int, *, result: str = "") -> str:
    weight: Array = g.normal(1 / math.sqrt(inputs), outputs, inputs)
    bias = g.weight(f"{name}.bias", np.zeros(outputs, np.float32))
    return g.op("Gemm", x, g.weight(f"{name}.weight", weight), bias, transB=1, outputs=result)


def _with_heads(g: GraphWriter, x: str, width: int, heads: dict[str, tuple[str, int]]) -> onnx.ModelProto:
    """Add a linear layer for each output, and return the model. heads: output -> name of the layer, its outputs."""
    for output, (name, size) in heads.items():
        _gemm(g, x, name, width, size, result=output)
        g.output(output, ("batch", size))
    return g.model()
