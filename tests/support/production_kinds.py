"""Small files of the kinds that published packages ship: their operators and their structure, with made-up weights.

`KINDS` names them all. Each is a graph of dynamic sizes where the packages' files have dynamic sizes, and says at which
inputs it is tried.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto

from onward.trainer.onnx_graph.node_builder import GraphWriter

Array = np.ndarray[Any, np.dtype[Any]]
Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class Kind:
    """A kind of file, and the inputs that it is tried at."""

    build: Callable[[], onnx.ModelProto]
    tried: Sequence[Shapes]
    """Of each input its shape."""
    words: int = 0
    """Integer inputs hold numbers below this."""

    def feeds(self, shapes: Shapes) -> dict[str, Array]:
        random = np.random.default_rng(7)
        types = {value.name: value.type.tensor_type.elem_type for value in self.build().graph.input}
        found: dict[str, Array] = {}
        for name, shape in shapes.items():
            if types[name] == TensorProto.INT64:
                found[name] = random.integers(1, self.words, shape)
            else:
                found[name] = random.standard_normal(shape).astype(np.float32)
        return found


# -- parts


def conv(g: GraphWriter, x: str, name: str, *shape: int, bias: bool = True, **attributes: Any) -> str:
    names = [g.weight(f"{name}.weight", g.kaiming_uniform(*shape))]
    if bias:
        names.append(g.weight(f"{name}.bias", g.normal(0.1, shape[0])))
    return g.op("Conv", x, *names, kernel_shape=list(shape[2:]), **attributes)


def batch_norm(g: GraphWriter, x: str, name: str, channels: int) -> str:
    parts = {"weight": 1 + g.normal(0.2, channels), "bias": g.normal(0.2, channels)}
    parts |= {"running_mean": g.normal(0.2, channels), "running_var": 0.5 + g.random.random(channels, np.float32)}
    return g.op("BatchNormalization", x, *(g.weight(f"{name}.{part}", value) for part, value in parts.items()))


def linear(g: GraphWriter, x: str, name: str, inputs: int, outputs: int) -> str:
    product = g.op("MatMul", x, g.weight(f"{name}.weight", g.normal(inputs**-0.5, inputs, outputs)))
    return g.op("Add", product, g.weight(f"{name}.bias", g.normal(0.1, outputs)))


def lstm(g: GraphWriter, x: str, name: str, inputs: int, hidden: int, *, directions: int = 1) -> str:
    """[length, batch, inputs] -> [length, directions, batch, hidden]."""
    weights = (
        g.weight(f"{name}.W", g.normal(inputs**-0.5, directions, 4 * hidden, inputs)),
        g.weight(f"{name}.R", g.normal(hidden**-0.5, directions, 4 * hidden, hidden)),
        g.weight(f"{name}.B", g.normal(0.1, directions, 8 * hidden)),
    )
    direction = "bidirectional" if directions == 2 else "forward"
    return g.op("LSTM", x, *weights, hidden_size=hidden, direction=direction)


def integers(g: GraphWriter, name: str, *values: int) -> str:
    return g.weight(name, np.array(values, np.int64))


def length(g: GraphWriter, x: str, axis: int) -> str:
    """A vector of one length."""
    return g.op("Shape", x, start=axis, end=axis + 1)


# -- the kinds


def text_recogniser() -> onnx.ModelProto:
    """Convolutions that halve the height to 1 and the width twice, BatchNormalization on [B, C, 1, W], an LSTM."""
    g = GraphWriter("text_recogniser", opset=17)
    x = g.input("x", ("batch", 3, 32, "width"))
    layers = ((3, 8, [2, 2]), (8, 8, [2, 1]), (8, 12, [2, 2]), (12, 12, [2, 1]))
    for number, (inputs, outputs, strides) in enumerate(layers):
        x = conv(g, x, f"conv{number}", outputs, inputs, 3, 3, bias=False, pads=[1, 1, 1, 1], strides=strides)
        x = g.op("HardSwish", batch_norm(g, x, f"norm{number}", outputs))
    x = g.op("AveragePool", x, kernel_shape=[2, 1], strides=[2, 1])
    x = batch_norm(g, conv(g, x, "neck", 12, 12, 1, 1), "neck_norm", 12)
    x = g.op("Transpose", g.op("Squeeze", x, integers(g, "two", 2)), perm=[2, 0, 1])
    x = g.op(
        "Reshape",
        g.op("Transpose", lstm(g, x, "lstm", 12, 6, directions=2), perm=[2, 0, 1, 3]),
        integers(g, "flat", 0, 0, -1),
    )
    g.op("Softmax", linear(g, x, "head", 12, 9), axis=2, outputs="y")
    g.output("y", ("batch", "steps", 9))
    return g.model()


def text_recogniser_with_positions() -> onnx.ModelProto:
    """Four layers that halve, a learned position for each column, attention scaled by the number of columns."""
    g = GraphWriter("text_recogniser_with_positions", opset=17)
    x = g.input("x", ("batch", 3, 32, "width"))
    for number, (inputs, outputs) in enumerate(((3, 8), (8, 8), (8, 8), (8, 8))):
        x = g.op("Relu", conv(g, x, f"conv{number}", outputs, inputs, 3, 3, pads=[1, 1, 1, 1], strides=[2, 2]))
    h = g.op("Transpose", g.op("ReduceMean", x, axes=[2], keepdims=0), perm=[0, 2, 1])
    columns = length(g, h, 1)
    table = g.weight("positions", g.normal(0.5, 1, 64, 8))
    zero, one = integers(g, "zero", 0), integers(g, "one", 1)
    h = g.op("Add", h, g.op("Slice", table, zero, columns, one))
    keys = g.op("Transpose", linear(g, h, "key", 8, 8), perm=[0, 2, 1])
    root = g.op("Sqrt", g.op("Cast", columns, to=TensorProto.FLOAT))
    scores = g.op("Softmax", g.op("Div", g.op("MatMul", linear(g, h, "query", 8, 8), keys), root), axis=2)
    g.op("Add", g.op("MatMul", scores, linear(g, h, "value", 8, 8)), h, outputs="y")
    g.output("y", ("batch", "columns", 8))
    return g.model()


def text_detector() -> onnx.ModelProto:
    """A pyramid of features, resized to the size of the finer one, and a map of the image's size by ConvTranspose."""
    g = GraphWriter("text_detector", opset=17)
    x = g.input("x", ("batch", 3, "height", "width"))
    fine = g.op(
        "Relu", batch_norm(g, conv(g, x, "stem", 8, 3, 3, 3, bias=False, pads=[1] * 4, strides=[2, 2]), "stem_norm", 8)
    )
    coarse = g.op("HardSwish", conv(g, fine, "down", 8, 8, 3, 3, pads=[1] * 4, strides=[2, 2]))
    size = g.op("Concat", length(g, coarse, 0), length(g, coarse, 1), length(g, fine, 2), length(g, fine, 3), axis=0)
    scaled = g.op(
        "Resize",
        coarse,
        "",
        "",
        size,
        mode="nearest",
        coordinate_transformation_mode="asymmetric",
        nearest_mode="floor",
    )
    # squeeze and excitation
    pooled = g.op("GlobalAveragePool", fine)
    gate = g.op(
        "HardSigmoid", conv(g, g.op("Relu", conv(g, pooled, "gate1", 4, 8, 1, 1)), "gate2", 8, 4, 1, 1), alpha=0.2
    )
    both = g.op("Concat", scaled, g.op("Mul", fine, gate), axis=1)
    up = g.op(
        "ConvTranspose",
        both,
        g.weight("up.weight", g.normal(0.3, 16, 1, 2, 2)),
        g.weight("up.bias", g.normal(0.1, 1)),
        kernel_shape=[2, 2],
        strides=[2, 2],
    )
    g.op("Sigmoid", up, outputs="y")
    g.output("y", ("batch", 1, "map_height", "map_width"))
    return g.model()


def wake_word() -> onnx.ModelProto:
    """Raw audio: a spectrogram by a convolution of 512 taps, mel filters, a logarithm, convolutions over time."""
    g = GraphWriter("wake_word", opset=17)
    x = g.op("Unsqueeze", g.input("audio", ("batch", "samples")), integers(g, "one", 1))
    window = np.hanning(512).astype(np.float32)
    waves = np.exp(2j * np.pi * np.arange(16)[:, None] * np.arange(512) / 512) * window
    parts = [
        g.op("Conv", x, g.weight(f"stft.{name}", value.astype(np.float32)[:, None]), strides=[160], kernel_shape=[512])
        for name, value in (("real", waves.real), ("imag", waves.imag))
    ]
    power = g.op("Add", g.op("Mul", parts[0], parts[0]), g.op("Mul", parts[1], parts[1]))
    mel = g.op("MatMul", g.weight("melspec.filters", abs(g.normal(0.3, 8, 16))), power)
    low, high = g.weight("low", np.float32(1e-6)), g.weight("high", np.float32(1e9))
    decibels = g.op("Mul", g.op("Log", g.op("Clip", mel, low, high)), g.weight("tenth", np.float32(0.1)))
    x = g.op("Unsqueeze", decibels, integers(g, "one", 1))
    x = g.op("LeakyRelu", conv(g, x, "conv1", 4, 1, 3, 3, pads=[1] * 4), alpha=0.2)
    x = g.op("MaxPool", x, kernel_shape=[2, 2], strides=[2, 2])
    x = g.op("ReduceMax", g.op("Relu", conv(g, x, "conv2", 6, 4, 3, 1, pads=[1, 0, 1, 0])), axes=[2, 3], keepdims=0)
    g.op("Sigmoid", linear(g, x, "head", 6, 1), outputs="y")
    g.output("y", ("batch", 1))
    return g.model()


def voice_activity() -> onnx.ModelProto:
    """Frames of audio, padded by reflection, a convolution as spectrogram, an LSTM over time, a mean of sigmoids."""
    g = GraphWriter("voice_activity", opset=17)
    x = g.input("audio", ("batch", "samples"))
    x = g.op("Unsqueeze", g.op("Pad", x, integers(g, "pads", 0, 32, 0, 32), mode="reflect"), integers(g, "one", 1))
    x = g.op("Abs", conv(g, x, "stft", 8, 1, 64, bias=False, strides=[32]))
    x = g.op("Relu", conv(g, x, "encoder", 8, 8, 3, pads=[1, 1]))
    hidden = lstm(g, g.op("Transpose", x, perm=[2, 0, 1]), "lstm", 8, 6)
    hidden = g.op("Transpose", g.op("Squeeze", hidden, integers(g, "one", 1)), perm=[1, 2, 0])
    x = g.op("Sigmoid", conv(g, g.op("Relu", hidden), "decoder", 1, 6, 1))
    g.op("ReduceMean", x, axes=[2], keepdims=0, outputs="y")
    g.output("y", ("batch", 1))
    return g.model()


def character_tagger() -> onnx.ModelProto:
    """An embedding of characters, a mask of the padding, a bidirectional GRU in [length, batch], a class for each."""
    g = GraphWriter("character_tagger", opset=17)
    words = g.input("characters", ("batch", "length"), TensorProto.INT64)
    x = g.op("Gather", g.weight("embedding", g.normal(1.0, 20, 8)), words)
    mask = g.op("Cast", g.op("Greater", words, integers(g, "padding", 0)), to=TensorProto.FLOAT)
    x = g.op("Mul", x, g.op("Unsqueeze", mask, integers(g, "last", -1)))
    weights = (
        g.weight("gru.W", g.normal(0.3, 2, 15, 8)),
        g.weight("gru.R", g.normal(0.3, 2, 15, 5)),
        g.weight("gru.B", g.normal(0.1, 2, 30)),
    )
    x = g.op(
        "GRU",
        g.op("Transpose", x, perm=[1, 0, 2]),
        *weights,
        hidden_size=5,
        direction="bidirectional",
        linear_before_reset=1,
    )
    x = g.op("Reshape", g.op("Transpose", x, perm=[2, 0, 1, 3]), integers(g, "flat", 0, 0, -1))
    g.op("LogSoftmax", linear(g, x, "head", 10, 4), axis=2, outputs="y")
    g.output("y", ("batch", "length", 4))
    return g.model()


def brain_waves() -> onnx.ModelProto:
    """EEG [B, 1, channels, time]: a convolution over time, one over all channels by groups, ELU, pooling over time."""
    g = GraphWriter("brain_waves", opset=17)
    x = g.input("x", ("batch", 1, 6, 64))
    x = batch_norm(g, conv(g, x, "temporal", 4, 1, 1, 16, bias=False, auto_pad="SAME_UPPER"), "norm1", 4)
    x = batch_norm(g, conv(g, x, "spatial", 8, 1, 6, 1, bias=False, group=4), "norm2", 8)
    x = g.op("AveragePool", g.op("Elu", x), kernel_shape=[1, 4], strides=[1, 4])
    x = conv(
        g, conv(g, x, "depthwise", 8, 1, 1, 8, bias=False, group=8, auto_pad="SAME_LOWER"), "pointwise", 8, 8, 1, 1
    )
    x = g.op("AveragePool", g.op("Elu", batch_norm(g, x, "norm3", 8)), kernel_shape=[1, 8], strides=[1, 8])
    head = g.weight("head.weight", g.normal(0.3, 3, 16)), g.weight("head.bias", g.normal(0.1, 3))
    g.op("Gemm", g.op("Flatten", x), *head, transB=1, outputs="y")
    g.output("y", ("batch", 3))
    return g.model()


def detector_head() -> onnx.ModelProto:
    """Two levels of boxes with anchors and a grid that is computed from the size of the map, decoded and joined."""
    g = GraphWriter("detector_head", opset=17)
    x = g.input("x", ("batch", 3, "height", "width"))
    two, half = g.weight("two", np.float32(2)), g.weight("half", np.float32(0.5))
    levels = []
    for number, inputs in enumerate((3, 8)):
        x = conv(g, x, f"conv{number}", 8, inputs, 3, 3, pads=[1] * 4, strides=[2, 2])
        x = g.op("Mul", x, g.op("Sigmoid", x))
        raw = conv(g, x, f"detect{number}", 2 * 7, 8, 1, 1)
        height, width = length(g, raw, 2), length(g, raw, 3)
        shape = g.op("Concat", integers(g, "batch_and_anchors", -1, 2, 7), height, width, axis=0)
        raw = g.op("Sigmoid", g.op("Transpose", g.op("Reshape", raw, shape), perm=[0, 1, 3, 4, 2]))
        parts = [f"part{number}.{each}" for each in ("xy", "wh", "scores")]
        g.op("Split", raw, integers(g, "parts", 2, 2, 3), axis=4, outputs=parts)
        scalars = [g.op("Squeeze", each, integers(g, "first", 0)) for each in (height, width)]
        ranges = [
            g.op("Range", g.weight("begin", np.int64(0)), each, g.weight("step", np.int64(1))) for each in scalars
        ]
        rows = g.op(
            "Expand", g.op("Unsqueeze", ranges[0], integers(g, "one", 1)), g.op("Concat", height, width, axis=0)
        )
        columns = g.op(
            "Expand", g.op("Unsqueeze", ranges[1], integers(g, "first", 0)), g.op("Concat", height, width, axis=0)
        )
        last = integers(g, "last", -1)
        grid = g.op("Concat", g.op("Unsqueeze", columns, last), g.op("Unsqueeze", rows, last), axis=2)
        stride = g.weight(f"stride{number}", np.float32(2 ** (number + 1)))
        moved = g.op("Add", g.op("Sub", g.op("Mul", parts[0], two), half), g.op("Cast", grid, to=TensorProto.FLOAT))
        anchors = g.weight(f"anchors{number}", (4 + 4 * g.random.random((1, 2, 1, 1, 2))).astype(np.float32))
        sizes = g.op("Mul", g.op("Pow", g.op("Mul", parts[1], two), two), anchors)
        boxes = g.op("Concat", g.op("Mul", moved, stride), sizes, parts[2], axis=4)
        levels.append(g.op("Reshape", boxes, integers(g, "boxes", 0, -1, 7)))
    g.op("Concat", *levels, axis=1, outputs="y")
    g.output("y", ("batch", "boxes", 7))
    return g.model()


def molecules() -> onnx.ModelProto:
    """Atoms and their neighbours [B, N, N]: messages by a product, normalised by degree, a masked mean, a number."""
    g = GraphWriter("molecules", opset=17)
    x = g.input("atoms", ("batch", "atoms_", 6))
    edges = g.op("Abs", g.input("edges", ("batch", "atoms_", "atoms_")))
    one = g.weight("one", np.float32(1))
    degree = g.op("Add", g.op("ReduceSum", edges, integers(g, "last", -1), keepdims=1), one)
    for number, inputs in enumerate((6, 8)):
        messages = g.op("Div", g.op("MatMul", edges, linear(g, x, f"message{number}", inputs, 8)), degree)
        x = g.op("Tanh", g.op("Add", messages, linear(g, x, f"own{number}", inputs, 8)))
    total = g.op("ReduceSum", x, integers(g, "middle", 1), keepdims=0)
    atoms = g.op("Cast", length(g, x, 1), to=TensorProto.FLOAT)
    x = g.op(
        "LayerNormalization",
        g.op("Div", total, atoms),
        g.weight("norm.weight", 1 + g.normal(0.2, 8)),
        g.weight("norm.bias", g.normal(0.2, 8)),
    )
    linear_ = linear(g, x, "head", 8, 1)
    g.op("Squeeze", linear_, integers(g, "last", -1), outputs="y")
    g.output("y", ("batch",))
    return g.model()


def speech_encoder() -> onnx.ModelProto:
    """Raw audio: five convolutions with stride 2 or 5, positions by a grouped convolution, attention over frames."""
    g = GraphWriter("speech_encoder", opset=17)
    x = g.op("Unsqueeze", g.input("audio", ("batch", "samples")), integers(g, "one", 1))
    for number, (inputs, kernel, stride) in enumerate(((1, 10, 5), (8, 3, 2), (8, 3, 2), (8, 2, 2), (8, 2, 2))):
        x = g.op("Softplus", conv(g, x, f"conv{number}", 8, inputs, kernel, strides=[stride]))
    x = g.op("Add", x, g.op("Tanh", conv(g, x, "positions", 8, 4, 5, pads=[2, 2], group=2)))
    h = g.op("Transpose", x, perm=[0, 2, 1])
    frames = g.op("Cast", length(g, h, 1), to=TensorProto.FLOAT)
    scores = g.op("MatMul", linear(g, h, "query", 8, 8), g.op("Transpose", linear(g, h, "key", 8, 8), perm=[0, 2, 1]))
    h = g.op("Add", h, g.op("MatMul", g.op("Softmax", scores, axis=2), linear(g, h, "value", 8, 8)))
    total = g.op("ReduceSum", h, integers(g, "one", 1), keepdims=0)
    g.op("Div", total, frames, outputs="y")
    g.output("y", ("batch", 8))
    return g.model()


def quantized_encoder() -> onnx.ModelProto:
    """int8 weights behind DequantizeLinear by channel: an embedding, two products, a mean over the words."""
    g = GraphWriter("quantized_encoder", opset=17)

    def stored(name: str, *shape: int, axis: int) -> str:
        values = g.random.integers(-100, 100, shape).astype(np.int8)
        scale = g.weight(f"{name}.scale", (0.005 + 0.01 * g.random.random(shape[axis])).astype(np.float32))
        return g.op(
            "DequantizeLinear",
            g.weight(name, values),
            scale,
            g.weight(f"{name}.zero", np.zeros(shape[axis], np.int8)),
            axis=axis,
        )

    words = g.input("words", ("batch", "length"), TensorProto.INT64)
    x = g.op("Gather", stored("embedding", 30, 8, axis=0), words)
    x = g.op("Tanh", g.op("MatMul", x, stored("hidden", 8, 16, axis=1)))
    x = g.op("MatMul", x, stored("out", 16, 8, axis=1))
    x = g.op(
        "LayerNormalization", x, g.weight("norm.weight", 1 + g.normal(0.2, 8)), g.weight("norm.bias", g.normal(0.2, 8))
    )
    g.op(
        "Gemm",
        g.op("ReduceMean", x, axes=[1], keepdims=0),
        g.weight("head.weight", g.normal(0.3, 8, 4)),
        g.weight("head.bias", g.normal(0.1, 4)),
        outputs="y",
    )
    g.output("y", ("batch", 4))
    return g.model()


WIDTHS = [{"x": (2, 3, 32, width)} for width in (32, 100, 160, 328)]
SIZES = [{"x": (2, 3, *size)} for size in ((32, 48), (64, 64), (96, 160))]
SAMPLES = [{"audio": (2, samples)} for samples in (1600, 4000, 16000)]
KINDS: Mapping[str, Kind] = {
    "text recogniser": Kind(text_recogniser, WIDTHS),
    "text recogniser with positions": Kind(text_recogniser_with_positions, WIDTHS),
    "text detector": Kind(text_detector, SIZES),
    "wake word": Kind(wake_word, SAMPLES),
    "voice activity": Kind(voice_activity, SAMPLES),
    "character tagger": Kind(character_tagger, [{"characters": (3, n)} for n in (1, 5, 40)], words=20),
    "brain waves": Kind(brain_waves, [{"x": (n, 1, 6, 64)} for n in (1, 2, 5)]),
    "detector head": Kind(detector_head, SIZES),
    "molecules": Kind(molecules, [{"atoms": (2, n, 6), "edges": (2, n, n)} for n in (1, 4, 30)]),
    "speech encoder": Kind(speech_encoder, SAMPLES),
    "quantized encoder": Kind(quantized_encoder, [{"words": (3, n)} for n in (1, 6, 40)], words=30),
}
