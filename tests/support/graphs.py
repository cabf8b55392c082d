"""Tiny ONNX models built in code: one for each kind of graph, deterministic from a seed, trained in no time.

`MODELS` names them all; `feed` makes inputs of any batch size for any of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from onward.trainer.onnx_graph.examples.reference_models import build_gpt2
from onward.trainer.onnx_graph.node_builder import GraphWriter

Array = np.ndarray[Any, np.dtype[Any]]


def tiny_conv_net(*, num_classes: int = 4, image_size: int = 8, channels: int = 3, seed: int = 0) -> onnx.ModelProto:
    """Two convolutions, a pool, a Gemm: `image` [batch, channels, size, size] -> `logits` [batch, num_classes]."""
    g = GraphWriter("tiny_conv_net", seed=seed)
    x = g.input("image", ("batch", channels, image_size, image_size))
    x = g.op("Relu", _conv(g, x, "features.0", (8, channels, 3, 3)))
    x = g.op("MaxPool", x, kernel_shape=[2, 2], strides=[2, 2])
    x = g.op("Relu", _conv(g, x, "features.3", (8, 8, 3, 3)))
    return _classify(g, g.op("Flatten", x), 8 * (image_size // 2) ** 2, num_classes)


def with_helpers(layers: int) -> onnx.ModelProto:
    """Y = relu(x w + b) again and again, with each bias expanded to the shape of the product, as exporters write it."""
    random = np.random.default_rng(0)
    nodes, weights, x = [], [], "x"
    for n in range(layers):
        weights += [
            numpy_helper.from_array(random.normal(0, 0.2, (64, 64)).astype(np.float32), f"w{n}"),
            numpy_helper.from_array(random.normal(0, 0.2, (1,)).astype(np.float16), f"b{n}"),
            numpy_helper.from_array(np.array([64], np.int64), f"s{n}"),
        ]
        nodes += [
            helper.make_node("MatMul", [x, f"w{n}"], [f"p{n}"]),
            helper.make_node("CastLike", [f"b{n}", f"w{n}"], [f"c{n}"]),
            helper.make_node("Expand", [f"c{n}", f"s{n}"], [f"e{n}"]),
            helper.make_node("Add", [f"p{n}", f"e{n}"], [f"a{n}"]),
            helper.make_node("Relu", [f"a{n}"], [f"r{n}" if n < layers - 1 else "y"]),
        ]
        x = f"r{n}"
    graph = helper.make_graph(
        nodes,
        "helpers",
        [helper.make_tensor_value_info("x", 1, ["batch", 64])],
        [helper.make_tensor_value_info("y", 1, ["batch", 64])],
        weights,
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)


def tiny_conv_net_with_batch_norm(*, num_classes: int = 4, image_size: int = 8, seed: int = 0) -> onnx.ModelProto:
    """As `tiny_conv_net`, with a BatchNormalization (inference form) after each convolution."""
    g = GraphWriter("tiny_conv_net_with_batch_norm", seed=seed)
    x = g.input("image", ("batch", 3, image_size, image_size))
    x = g.op("Relu", _batch_norm(g, _conv(g, x, "features.0", (8, 3, 3, 3), bias=False), "features.1", 8))
    x = g.op("MaxPool", x, kernel_shape=[2, 2], strides=[2, 2])
    x = g.op("Relu", _batch_norm(g, _conv(g, x, "features.4", (8, 8, 3, 3), bias=False), "features.5", 8))
    return _classify(g, g.op("Flatten", x), 8 * (image_size // 2) ** 2, num_classes)


def tiny_resnet(*, num_classes: int = 4, seed: int = 0) -> onnx.ModelProto:
    """Stem, an identity block, a strided block with a projection, global pooling; BatchNormalization throughout."""
    g = GraphWriter("tiny_resnet", seed=seed)
    x = g.input("image", ("batch", 3, 8, 8))
    x = g.op("Relu", _batch_norm(g, _conv(g, x, "conv1", (8, 3, 3, 3), bias=False), "bn1", 8))
    x = _residual_block(g, x, "layer1.0", 8, 8)
    x = _residual_block(g, x, "layer2.0", 8, 16, strides=[2, 2])
    return _classify(g, g.op("Flatten", g.op("GlobalAveragePool", x)), 16, num_classes)


def tiny_computed_statistics(*, num_classes: int = 4, seed: int = 0) -> onnx.ModelProto:
    """BatchNormalization by running statistics, by stored ones behind arithmetic and by computed ones, in this order.

    The last one normalises each sample, which a transposition makes a channel, as exporters of Keras write it.
    """
    g = GraphWriter("tiny_computed_statistics", seed=seed, opset=15)
    x = g.input("image", ("batch", 3, 8, 8))
    x = g.op("Relu", _batch_norm(g, _conv(g, x, "conv1", (8, 3, 3, 3), bias=False), "bn1", 8))
    x = _conv(g, x, "conv2", (8, 8, 3, 3), bias=False)
    scale, bias = g.weight("bn2.weight", 1 + g.normal(0.1, 8)), g.weight("bn2.bias", g.normal(0.1, 8))
    variance = g.op("Add", g.weight("bn2.variance", np.full(8, 0.5, np.float32)), g.weight("bn2.epsilon", 0.01))
    x = g.op("BatchNormalization", x, scale, bias, g.weight("bn2.mean", g.normal(0.1, 8)), variance)
    x = g.op("Transpose", _conv(g, g.op("Relu", x), "conv3", (4, 8, 3, 3)), perm=[1, 0, 2, 3])
    mean = g.op("ReduceMean", x, axes=[0, 2, 3], keepdims=0)
    middle = g.op("Sub", x, g.op("ReduceMean", x, axes=[0, 2, 3]))
    variance = g.op("ReduceMean", g.op("Mul", middle, middle), axes=[0, 2, 3], keepdims=0)
    one, zero = (
        g.op("ConstantOfShape", g.op("Shape", mean), value=numpy_helper.from_array(np.float32([n]))) for n in (1, 0)
    )
    x = g.op("BatchNormalization", x, one, zero, mean, variance)
    x = g.op("Add", g.op("Transpose", x, perm=[1, 0, 2, 3]), g.weight("ln.bias", g.normal(0.1, 4, 1, 1)))
    return _classify(g, g.op("Flatten", g.op("MaxPool", x, kernel_shape=[2, 2], strides=[2, 2])), 64, num_classes)


def tiny_transformer(
    *, vocab_size: int = 32, sequence_length: int = 16, width: int = 32, dropout: float = 0.0, seed: int = 0
) -> onnx.ModelProto:
    """GPT-2 with 2 layers of 2 heads: `input_ids` [batch, sequence] -> `logits` [batch, sequence, vocab_size]."""
    return build_gpt2(
        vocab_size=vocab_size,
        sequence_length=sequence_length,
        num_layers=2,
        num_heads=2,
        width=width,
        dropout=dropout,
        seed=seed,
    )


def tiny_mlp(*, inputs: int = 4, outputs: int = 1, hidden: int = 16, seed: int = 0) -> onnx.ModelProto:
    """For tables: `features` [batch, inputs] -> `prediction` [batch, outputs]."""
    g = GraphWriter("tiny_mlp", seed=seed)
    x = g.op("Relu", _gemm(g, g.input("features", ("batch", inputs)), "fc1", inputs, hidden))
    _gemm(g, x, "fc2", hidden, outputs, result="prediction")
    g.output("prediction", ("batch", outputs))
    return g.model()


def residual_mlps(*hidden: int, width: int = 16, num_classes: int = 5) -> onnx.ModelProto:
    """Blocks x + relu(x a) b, one for each width inside: `x` [batch, width] -> `logits` [batch, num_classes]."""
    g = GraphWriter("residual_mlps", seed=0)
    x = g.input("x", ("batch", width))
    for number, inside in enumerate(hidden):
        h = g.op("Relu", g.op("MatMul", x, g.weight(f"{number}.a", g.normal(0.2, width, inside))))
        x = g.op("Add", x, g.op("MatMul", h, g.weight(f"{number}.b", g.normal(0.2, inside, width))))
    g.op("MatMul", x, g.weight("head", g.normal(0.2, width, num_classes)), outputs="logits")
    g.output("logits", ("batch", num_classes))
    return g.model()


def tiny_bert(
    *,
    vocab_size: int = 32,
    width: int = 16,
    num_heads: int = 2,
    num_classes: int = 3,
    positions: int = 16,
    num_types: int = 0,
    of_tokens: bool = False,
) -> onnx.ModelProto:
    """An encoder as opset 14 exporters write it: `input_ids`, `attention_mask` [batch, sequence] -> `logits`.

    Layer norm and erf-GELU are spelled out, shapes are computed in the graph, padding is masked by an addition.
    `num_types`: with an input `token_type_ids` and so many types. `of_tokens`: logits for each token.
    """
    g = GraphWriter("tiny_bert", seed=0, opset=14)
    ids = g.input("input_ids", ("batch", "sequence"), TensorProto.INT64)
    mask = g.op("Cast", g.input("attention_mask", ("batch", "sequence"), TensorProto.INT64), to=TensorProto.FLOAT)
    mask = g.op("Unsqueeze", mask, g.weight("mask_axes", [1, 2]))
    mask = g.op("Mul", g.op("Sub", g.weight("one", 1.0), mask), g.weight("masked", -10000.0))
    shape = g.op("Shape", ids)
    length = g.op("Gather", shape, g.weight("index_1", np.array(1)))
    span = g.op("Unsqueeze", length, g.weight("axes_0", [0]))
    places = g.op(
        "Slice",
        g.weight("position_ids", np.arange(positions)[None]),
        g.weight("start", [0]),
        span,
        g.weight("axes_1", [1]),
    )
    x = g.op("Gather", g.weight("embeddings.word.weight", g.normal(0.5, vocab_size, width)), ids)
    table = g.weight("embeddings.position.weight", g.normal(0.5, positions, width))
    x = g.op("Add", x, g.op("Gather", table, places))
    if num_types:
        types = g.input("token_type_ids", ("batch", "sequence"), TensorProto.INT64)
        table = g.weight("embeddings.type.weight", g.normal(0.5, num_types, width))
        x = g.op("Add", x, g.op("Gather", table, types))
    x = _spelled_layer_norm(g, x, "embeddings.LayerNorm", width)
    for layer in range(2):
        name = f"encoder.layer.{layer}"
        x = _spelled_layer_norm(
            g, g.op("Add", x, _encoder_attention(g, x, mask, name, num_heads)), f"{name}.ln1", width
        )
        h = _linear(g, _erf_gelu(g, _linear(g, x, f"{name}.up", width, 2 * width)), f"{name}.down", 2 * width, width)
        x = _spelled_layer_norm(g, g.op("Add", x, h), f"{name}.ln2", width)
    if of_tokens:
        g.op("Identity", _linear(g, x, "head", width, num_classes), outputs="logits")
        g.output("logits", ("batch", "sequence", num_classes))
        return g.model()
    first = g.op("Gather", x, g.weight("index_0", np.array(0)), axis=1)
    return _classify(g, g.op("Tanh", _gemm(g, first, "pooler", width, width)), width, num_classes)


def tiny_token_classifier(*, vocab_size: int = 32, num_classes: int = 0, width: int = 16) -> onnx.ModelProto:
    """Scores for each token from it and its neighbours: `input_ids`, `attention_mask` -> `logits` [batch, length, C].

    Without `num_classes` these are scores of tokens: a masked language model.
    """
    g = GraphWriter("tiny_token_classifier", seed=0)
    ids = g.input("input_ids", ("batch", "length"), TensorProto.INT64)
    mask = g.op("Cast", g.input("attention_mask", ("batch", "length"), TensorProto.INT64), to=TensorProto.FLOAT)
    x = g.op("Gather", g.weight("words.weight", g.normal(0.5, vocab_size, width)), ids)
    x = g.op("Mul", x, g.op("Unsqueeze", mask, g.weight("last_axis", [2])))
    h = g.op("Transpose", x, perm=[0, 2, 1])
    h = g.op("Conv", h, g.weight("neighbours.weight", g.normal(0.2, width, width, 3)), pads=[1, 1])
    x = g.op("Add", x, g.op("Transpose", g.op("Relu", h), perm=[0, 2, 1]))
    classes = num_classes or vocab_size
    g.op("MatMul", x, g.weight("head.weight", g.normal(0.2, width, classes)), outputs="logits")
    g.output("logits", ("batch", "length", classes))
    return g.model()


def tiny_llama(*, vocab_size: int = 32, width: int = 32, num_layers: int = 2) -> onnx.ModelProto:
    """A decoder as exporters write llama: `input_ids` [batch, sequence] -> `logits` [batch, sequence, vocab_size].

    4 heads of the query share 2 of key and value, positions are rotations, RMSNorm and SiLU are spelled out, the MLP
    has a gate, no layer a bias, the head a matrix of its own.
    """
    g = GraphWriter("tiny_llama", seed=0)
    ids = g.input("input_ids", ("batch", "sequence"), TensorProto.INT64)
    length = g.op("Gather", g.op("Shape", ids), g.weight("index_1", np.array(1)))
    places = g.op("Range", g.weight("index_0", np.array(0)), length, "index_1")
    rows, columns = (g.op("Unsqueeze", places, g.weight(f"axes_{axis}", [axis])) for axis in (1, 0))
    unseen = g.op("Cast", g.op("Less", rows, columns), to=TensorProto.FLOAT)
    mask = g.op("Mul", unseen, g.weight("masked", -1e9))  # [sequence, sequence]
    angles = g.op(
        "Mul", g.op("Cast", rows, to=TensorProto.FLOAT), g.op("Constant", value_floats=[1.0, 0.1, 0.01, 0.001])
    )
    angles = g.op("Concat", angles, angles, axis=-1)  # [sequence, 8], the same for all heads
    waves = g.op("Cos", angles), g.op("Sin", angles)
    x = g.op("Gather", g.weight("embed.weight", g.normal(0.5, vocab_size, width)), ids)
    for layer in range(num_layers):
        name = f"layers.{layer}"
        h = _spelled_rms_norm(g, x, f"{name}.input_norm", width)
        x = g.op("Add", x, _grouped_attention(g, h, waves, mask, name, width))
        h = _spelled_rms_norm(g, x, f"{name}.post_norm", width)
        gate, up = (_product(g, h, f"{name}.mlp.{part}", width, 2 * width) for part in ("gate", "up"))
        h = g.op("Mul", g.op("Mul", gate, g.op("Sigmoid", gate)), up)
        x = g.op("Add", x, _product(g, h, f"{name}.mlp.down", 2 * width, width))
    _product(g, _spelled_rms_norm(g, x, "norm", width), "lm_head", width, vocab_size, result="logits")
    g.output("logits", ("batch", "sequence", vocab_size))
    return g.model()


def tiny_loss_model(*, inputs: int = 4, num_classes: int = 3, seed: int = 0) -> onnx.ModelProto:
    """Computes its own loss: `features` [batch, inputs], `labels` [batch] -> scalar `loss`."""
    g = GraphWriter("tiny_loss_model", seed=seed)
    x = g.input("features", ("batch", inputs))
    labels = g.input("labels", ("batch",), TensorProto.INT64)
    x = _gemm(g, g.op("Relu", _gemm(g, x, "fc1", inputs, 8)), "fc2", 8, num_classes)
    g.op("SoftmaxCrossEntropyLoss", x, labels, outputs="loss", reduction="mean")
    g.output("loss", ())
    return g.model()


def tiny_two_outputs(*, seed: int = 0) -> onnx.ModelProto:
    """Outputs out of order: `features` [batch, 4] -> `late` [batch, 2], `early` [batch, 6], which is computed first."""
    g = GraphWriter("tiny_two_outputs", seed=seed)
    x = _gemm(g, g.input("features", ("batch", 4)), "fc", 4, 8)
    g.op("Split", x, g.weight("sizes", [6, 2]), outputs=["early", "rest"], axis=-1)
    g.op("Tanh", "rest", outputs="late")
    g.output("late", ("batch", 2))
    g.output("early", ("batch", 6))
    return g.model()


MODELS: dict[str, Callable[[], onnx.ModelProto]] = {
    build.__name__: build
    for build in (
        tiny_conv_net,
        tiny_conv_net_with_batch_norm,
        tiny_resnet,
        tiny_transformer,
        tiny_mlp,
        tiny_bert,
        tiny_llama,
        tiny_loss_model,
        tiny_two_outputs,
    )
}


def tiny_cities() -> onnx.ModelProto:
    """Embeddings of two categories, `places` int64 [batch, 2], and `age` [batch, 1] -> logits of three classes."""
    g = GraphWriter("tiny_cities")
    rows = g.op(
        "Gather", g.weight("embedding", g.normal(1.0, 8, 3)), g.input("places", ("batch", 2), TensorProto.INT64)
    )
    x = g.op("Concat", g.op("Flatten", rows), g.input("age", ("batch", 1)), axis=1)
    g.output(g.op("Gemm", x, g.weight("weight", g.normal(1.0, 7, 3)), outputs="logits"), ("batch", 3))
    return g.model()


def feed(model: onnx.ModelProto, batch: int, seed: int = 0) -> dict[str, Array]:
    """Inputs for one of these models: lengths other than the batch are 7, integers below 3, masks hold both values."""
    random = np.random.default_rng(seed)
    arrays: dict[str, Array] = {}
    for value in model.graph.input:
        dims = value.type.tensor_type.shape.dim
        shape = [dim.dim_value or {"batch": batch}.get(dim.dim_param, 7) for dim in dims]
        if value.type.tensor_type.elem_type == TensorProto.INT64:
            arrays[value.name] = random.integers(0, 2 if value.name.endswith("mask") else 3, shape)
        else:
            arrays[value.name] = random.standard_normal(shape, np.float32)
        if value.name.endswith("mask"):
            arrays[value.name][:, 0] = 1  # a row that masks everything has no defined attention
    return arrays


# -- layers


def _conv(g: GraphWriter, x: str, name: str, shape: tuple[int, ...], *, bias: bool = True, **attributes: Any) -> str:
    weights = [g.weight(f"{name}.weight", g.kaiming_uniform(*shape))]
    if bias:
        weights.append(g.weight(f"{name}.bias", g.normal(0.1, shape[0])))
    pad = shape[-1] // 2
    return g.op("Conv", x, *weights, kernel_shape=list(shape[2:]), pads=[pad] * 4, **attributes)


def _batch_norm(g: GraphWriter, x: str, name: str, channels: int) -> str:
    scale = g.weight(f"{name}.weight", 1 + g.normal(0.1, channels))
    bias = g.weight(f"{name}.bias", g.normal(0.1, channels))
    mean = g.weight(f"{name}.running_mean", g.normal(0.1, channels))
    variance = g.weight(f"{name}.running_var", 1 + np.abs(g.normal(0.1, channels)))
    return g.op("BatchNormalization", x, scale, bias, mean, variance, epsilon=1e-5, momentum=0.9)


def _residual_block(g: GraphWriter, x: str, name: str, inputs: int, outputs: int, **attributes: Any) -> str:
    h = _conv(g, x, f"{name}.conv1", (outputs, inputs, 3, 3), bias=False, **attributes)
    h = g.op("Relu", _batch_norm(g, h, f"{name}.bn1", outputs))
    h = _batch_norm(g, _conv(g, h, f"{name}.conv2", (outputs, outputs, 3, 3), bias=False), f"{name}.bn2", outputs)
    if inputs != outputs:
        x = _conv(g, x, f"{name}.downsample.0", (outputs, inputs, 1, 1), bias=False, **attributes)
        x = _batch_norm(g, x, f"{name}.downsample.1", outputs)
    return g.op("Relu", g.op("Add", h, x))


def _gemm(g: GraphWriter, x: str, name: str, inputs: int, outputs: int, *, result: str = "") -> str:
    weight = g.weight(f"{name}.weight", g.normal(1 / math.sqrt(inputs), outputs, inputs))
    bias = g.weight(f"{name}.bias", g.normal(0.1, outputs))
    return g.op("Gemm", x, weight, bias, transB=1, outputs=result)


def _classify(g: GraphWriter, x: str, width: int, num_classes: int) -> onnx.ModelProto:
    _gemm(g, x, "classifier", width, num_classes, result="logits")
    g.output("logits", ("batch", num_classes))
    return g.model()


def _linear(g: GraphWriter, x: str, name: str, inputs: int, outputs: int) -> str:
    product = g.op("MatMul", x, g.weight(f"{name}.weight", g.normal(1 / math.sqrt(inputs), inputs, outputs)))
    return g.op("Add", g.weight(f"{name}.bias", g.normal(0.1, outputs)), product)


def _encoder_attention(g: GraphWriter, x: str, mask: str, name: str, num_heads: int) -> str:
    """Attention with shapes computed from the input, as exporters before opset 18 wrote it."""
    width = 16
    shape = g.op("Shape", x)
    axes = g.weight("axes_0", [0])
    batch = g.op("Unsqueeze", g.op("Gather", shape, g.weight("index_0", np.array(0))), axes)
    length = g.op("Unsqueeze", g.op("Gather", shape, g.weight("index_1", np.array(1))), axes)
    heads, head_width = g.weight("heads", [num_heads]), g.weight("head_width", [width // num_heads])
    split = g.op("Concat", batch, length, heads, head_width, axis=0)

    def project(part: str, perm: list[int]) -> str:
        return g.op("Transpose", g.op("Reshape", _linear(g, x, f"{name}.{part}", width, width), split), perm=perm)

    scores = g.op("MatMul", project("query", [0, 2, 1, 3]), project("key", [0, 2, 3, 1]))
    scores = g.op("Add", g.op("Div", scores, g.weight("scale", math.sqrt(width / num_heads))), mask)
    mixed = g.op("MatMul", g.op("Softmax", scores, axis=-1), project("value", [0, 2, 1, 3]))
    joined = g.op("Concat", batch, length, g.weight("width", [width]), axis=0)
    mixed = g.op("Reshape", g.op("Transpose", mixed, perm=[0, 2, 1, 3]), joined)
    return _linear(g, mixed, f"{name}.output", width, width)


def _product(g: GraphWriter, x: str, name: str, inputs: int, outputs: int, *, result: str = "") -> str:
    weight = g.weight(f"{name}.weight", g.normal(1 / math.sqrt(inputs), outputs, inputs))
    return g.op("MatMul", x, g.op("Transpose", weight, perm=[1, 0]), outputs=result)


def _grouped_attention(g: GraphWriter, x: str, waves: tuple[str, str], mask: str, name: str, width: int) -> str:
    """4 heads of the query, 2 of key and value, each of which is repeated for two of the query."""
    heads, shared, head = 4, 2, width // 4

    def project(part: str, count: int) -> str:
        split = g.weight(f"split_{count}", [0, 0, count, head])
        y = _product(g, x, f"{name}.{part}_proj", width, count * head)
        return g.op("Transpose", g.op("Reshape", y, split), perm=[0, 2, 1, 3])

    def rotated(y: str) -> str:
        halves = f"{y}_first", f"{y}_second"
        g.op("Split", y, g.weight("halves", [head // 2, head // 2]), outputs=halves, axis=-1)
        turned = g.op("Concat", g.op("Neg", halves[1]), halves[0], axis=-1)
        return g.op("Add", g.op("Mul", y, waves[0]), g.op("Mul", turned, waves[1]))

    def repeated(y: str) -> str:
        wide = g.op("Expand", g.op("Unsqueeze", y, g.weight("axes_2", [2])), g.weight("twice", [1, 1, 2, 1, 1]))
        return g.op("Reshape", wide, g.weight("all_heads", [0, heads, -1, head]))

    query, key, value = rotated(project("q", heads)), rotated(project("k", shared)), project("v", shared)
    key, value = repeated(key), repeated(value)
    scores = g.op("MatMul", query, g.op("Transpose", key, perm=[0, 1, 3, 2]))
    scores = g.op("Add", g.op("Mul", scores, g.weight("scale", head**-0.5)), mask)
    mixed = g.op("Transpose", g.op("MatMul", g.op("Softmax", scores, axis=-1), value), perm=[0, 2, 1, 3])
    return _product(g, g.op("Reshape", mixed, g.weight("joined", [0, 0, width])), f"{name}.o_proj", width, width)


def _spelled_rms_norm(g: GraphWriter, x: str, name: str, width: int) -> str:
    mean = g.op("ReduceMean", g.op("Pow", x, g.weight("two", 2.0)), g.weight("last", [-1]))
    root = g.op("Sqrt", g.op("Add", mean, g.weight("epsilon", 1e-6)))
    normal = g.op("Mul", x, g.op("Reciprocal", root))
    return g.op("Mul", g.weight(f"{name}.weight", 1 + g.normal(0.1, width)), normal)


def _spelled_layer_norm(g: GraphWriter, x: str, name: str, width: int) -> str:
    centred = g.op("Sub", x, g.op("ReduceMean", x, axes=[-1]))
    variance = g.op("ReduceMean", g.op("Pow", centred, g.weight("two", 2.0)), axes=[-1])
    normal = g.op("Div", centred, g.op("Sqrt", g.op("Add", variance, g.weight("epsilon", 1e-12))))
    scale = g.weight(f"{name}.weight", 1 + g.normal(0.1, width))
    return g.op("Add", g.op("Mul", normal, scale), g.weight(f"{name}.bias", g.normal(0.1, width)))


def _erf_gelu(g: GraphWriter, x: str) -> str:
    erf = g.op("Erf", g.op("Div", x, g.weight("sqrt_2", math.sqrt(2.0))))
    half = g.op("Mul", x, g.op("Add", erf, g.weight("one", 1.0)))
    return g.op("Mul", half, g.weight("half", 0.5))


def with_learned_numbers() -> onnx.ModelProto:
    """`tiny_transformer` with parameters of one number, of shapes [1] and []: in attention, in an MLP, on a branch.

    As [1] and as []: a temperature of the scores, beta of a Swish in place of Gelu, a factor of each attention branch
    that begins at zero, and a factor of the logits.
    """
    model = tiny_transformer()
    graph, nodes = model.graph, []
    numbers = {"h.0.attn.temperature": ([], 3.5), "h.0.mlp.beta": ([1], 1.2), "h.1.mlp.beta": ([], 0.9)}
    numbers |= {"h.0.alpha": ([1], 0.0), "h.1.alpha": ([], 0.0), "logit_scale": ([], 1.5)}
    for name, (shape, value) in numbers.items():
        graph.initializer.append(numpy_helper.from_array(np.full(shape, value, np.float32), name))
    branches = {"Add_27": "h.0.alpha", "Add_54": "h.1.alpha", "logits": "logit_scale"}
    for node in graph.node:
        [result] = node.output if len(node.output) == 1 else [""]
        if node.op_type == "Gelu":
            beta = f"h.{0 if result == 'Gelu_32' else 1}.mlp.beta"
            nodes += [
                helper.make_node("Mul", [node.input[0], beta], [f"{result}.scaled"]),
                helper.make_node("Sigmoid", [f"{result}.scaled"], [f"{result}.gate"]),
                helper.make_node("Mul", [node.input[0], f"{result}.gate"], [result]),
            ]
            continue
        nodes.append(node)
        if result == "Div_20":
            node.input[1] = "h.0.attn.temperature"
        if result in branches:
            node.output[0] = f"{result}.before"
            nodes.append(helper.make_node("Mul", [f"{result}.before", branches[result]], [result]))
    copies = [onnx.NodeProto.FromString(node.SerializeToString()) for node in nodes]
    del graph.node[:]
    graph.node.extend(copies)
    return model


def tiny_decoder(*, vocab_size: int = 400, width: int = 16, positions: int = 64) -> onnx.ModelProto:
    """A decoder as exporters write it for generation: `input_ids`, `attention_mask`, `position_ids` -> `logits`.

    One layer of attention, in which a token sees those that the mask shows and whose position is not above its own.
    """
    g = GraphWriter("tiny_decoder", seed=0)
    names = ("input_ids", "attention_mask", "position_ids")
    ids, mask, places = (g.input(name, ("batch", "length"), TensorProto.INT64) for name in names)
    x = g.op("Gather", g.weight("words.weight", g.normal(0.5, vocab_size, width)), ids)
    x = g.op("Add", x, g.op("Gather", g.weight("places.weight", g.normal(0.5, positions, width)), places))
    rows, columns = (g.op("Unsqueeze", places, g.weight(f"axis_{axis}", [axis])) for axis in (2, 1))
    shown = g.op("Cast", g.op("Unsqueeze", mask, "axis_1"), to=TensorProto.BOOL)
    seen = g.op("And", g.op("LessOrEqual", columns, rows), shown)
    scores = g.op("MatMul", x, g.op("Transpose", x, perm=[0, 2, 1]))
    scores = g.op("Where", seen, scores, g.weight("low", -1e9))
    h = g.op("MatMul", g.op("Softmax", scores, axis=-1), x)
    x = g.op("Add", x, g.op("MatMul", h, g.weight("mix.weight", g.normal(0.2, width, width))))
    g.op("MatMul", x, g.weight("head.weight", g.normal(0.2, width, vocab_size)), outputs="logits")
    g.output("logits", ("batch", "length", vocab_size))
    return g.model()
