"""Regions through what joins, repeats and stacks: found, with their reasons where not, and equal to one rank's results.

The graphs are the smallest ones of what models of the field do: dense blocks, prefixes, DeBERTa's attention by
distance, the key of DeepSeek's latent attention that all heads share, experts whose matrices are one tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import pytest
import torch

from onward.trainer.distributed.processes import MPIContext
from onward.trainer.onnx_graph.node_builder import GraphWriter
from onward.trainer.onnx_import.driver import to_module
from onward.trainer.parallel.matrices import find_matrices
from onward.trainer.parallel.planning.flops import count_flops
from onward.trainer.parallel.tensor.graph_analysis import GraphAnalysis
from onward.trainer.parallel.tensor.regions import TensorSharding, find_regions
from onward.trainer.parallel.tensor.rewrite import shard_regions
from tests.support import graphs
from tests.support.ranks import ROOT, run_ranks
from tests.trainer.parallel.tensor.test_regions import compare, group_of, regions

WIDTH, HEADS, EXPERTS = 8, 4, 3


def opened(*dims: int | str, name: str = "joined") -> tuple[GraphWriter, str]:
    """A graph that begins with a replicated value that has a gradient, h = tanh(x scale)."""
    g = GraphWriter(name)
    x = g.input("x", ("batch", *dims, WIDTH))
    return g, g.op("Tanh", g.op("Mul", x, g.weight("scale", g.normal(1.0, WIDTH))))


def closed(g: GraphWriter, y: str, rank: int = 2) -> onnx.ModelProto:
    g.op("Identity", y, outputs="y")
    g.output("y", tuple(f"length{dim}" for dim in range(rank)))
    return g.model()


def times(g: GraphWriter, x: str, name: str, *shape: int) -> str:
    """A product with a stored matrix, or with one for each expert or head."""
    return g.op("MatMul", x, g.weight(name, g.normal(shape[-2] ** -0.5, *shape)))


def normalised(g: GraphWriter, x: str, width: int, *parts: str) -> str:
    parts = tuple(g.weight(f"norm.{part}", 1 + g.normal(0.1, width)) for part in parts or ("scale", "bias"))
    return g.op("LayerNormalization", x, *parts, axis=-1)


def test_a_matrix_whose_parts_are_each_read_twice_is_found_at_once() -> None:
    g = GraphWriter("folded")
    x = g.input("x", ("batch", WIDTH))
    matrix = g.op("Tanh", g.weight("matrix", g.normal(1.0, WIDTH, WIDTH)))
    # a walk that follows each reading by itself would take 2^40 steps
    for _ in range(40):
        matrix = g.op("Add", g.op("Relu", matrix), g.op("Neg", matrix))
    module = to_module(closed(g, g.op("MatMul", x, matrix)))
    found = GraphAnalysis(module, module.onnx_names)
    assert [name for name, _ in found.computed_matrices()] == ["matrix"]


def joined_features(*, source: str) -> onnx.ModelProto:
    """A layer's features, joined with others: those that it reads, a product that is normalised, or another layer."""
    g, h = opened()
    if source == "product":
        h = normalised(g, times(g, h, "first", WIDTH, WIDTH), WIDTH)
    other = g.op("Sigmoid", times(g, h, "other", WIDTH, 9)) if source == "layer" else h
    joined = g.op("Concat", g.op("Relu", times(g, h, "up", WIDTH, 13)), other, axis=-1)
    return closed(g, times(g, joined, "down", 22 if source == "layer" else 21, WIDTH))


def one_feature() -> onnx.ModelProto:
    """A single feature, such as an age, joined with a layer's."""
    g, h = opened()
    age = g.op("ReduceMax", h, axes=[1], keepdims=1) if g.opset < 18 else g.op("ReduceMax", h, g.weight("one", [1]))
    return closed(g, times(g, g.op("Concat", times(g, h, "up", WIDTH, 12), age, axis=-1), "down", 13, WIDTH))


def prefix() -> onnx.ModelProto:
    """Learned positions before those of the text, and the text itself beside them: [batch, 2 + 5 + 5, 12]."""
    g, h = opened(5)
    sizes = g.op("Concat", g.op("Shape", h, start=0, end=1), g.weight("rest", [2, 12]), axis=0)
    learned = g.op("Expand", g.weight("prefix", g.normal(1.0, 1, 2, 12)), sizes)
    text = g.op("Concat", h, g.op("Slice", h, *(g.weight(f"n{n}", [n]) for n in (0, 4, 2))), axis=-1)
    joined = g.op("Concat", learned, times(g, h, "up", WIDTH, 12), text, axis=1)
    return closed(g, times(g, g.op("Relu", joined), "down", 12, WIDTH), 3)


def stacked_branches(*, replicated: bool) -> onnx.ModelProto:
    """Two branches, stacked along a new dimension and averaged; the second is a layer, or what the first reads."""
    g, h = opened()
    one, new = g.op("Relu", times(g, h, "one", WIDTH, WIDTH)), g.weight("new", [1])
    two = h if replicated else g.op("Sigmoid", times(g, h, "two", WIDTH, WIDTH))
    both = g.op("Concat", g.op("Unsqueeze", one, new), g.op("Unsqueeze", two, new), axis=1)
    return closed(g, times(g, g.op("ReduceMean", both, new, keepdims=0), "down", WIDTH, WIDTH))


def dense_block() -> onnx.ModelProto:
    """DenseNet: what a convolution reads is joined with its channels for the next one."""
    g = GraphWriter("dense_block")
    x = g.input("x", ("batch", 4, 4, 4))
    h = g.op("Tanh", g.op("Mul", x, g.weight("scale", g.normal(1.0, 4, 1, 1))))
    grown = g.op("Relu", g.op("Conv", h, g.weight("grow", g.normal(0.3, 6, 4, 3, 3)), pads=[1] * 4))
    joined = g.op("Concat", h, grown, axis=1)
    return closed(g, g.op("Conv", joined, g.weight("next", g.normal(0.3, 4, 10, 1, 1))), 4)


def heads_of(g: GraphWriter, x: str, name: str, width: int) -> str:
    """[batch, sequence, features] -> [batch, heads, sequence, width] by a stored matrix."""
    x = g.op("Reshape", times(g, x, name, WIDTH, HEADS * width), g.weight(f"heads{width}", [0, 0, HEADS, width]))
    return g.op("Transpose", x, perm=[0, 2, 1, 3])


def latent_attention() -> onnx.ModelProto:
    """DeepSeek: each key is features of its head, joined with rotary ones that all heads share."""
    g, h = opened(5)
    query, value = heads_of(g, h, "query", 8), heads_of(g, h, "value", 4)
    # a shift of all keys would change no weight of the softmax: its gradient is rounding alone
    shared = normalised(g, times(g, h, "shared", WIDTH, 4), 4, "scale")
    shared = g.op("Unsqueeze", shared, g.weight("one", [1]))
    sizes = g.op("Concat", g.op("Shape", h, start=0, end=1), g.weight("rest", [HEADS, 5, 4]), axis=0)
    key = g.op("Concat", heads_of(g, h, "key", 4), g.op("Expand", shared, sizes), axis=-1)
    scores = g.op("MatMul", query, g.op("Transpose", key, perm=[0, 1, 3, 2]))
    mixed = g.op("Transpose", g.op("MatMul", g.op("Softmax", scores, axis=-1), value), perm=[0, 2, 1, 3])
    return closed(g, times(g, g.op("Reshape", mixed, g.weight("join", [0, 0, 16])), "out", 16, WIDTH), 3)


def disentangled_attention() -> onnx.ModelProto:
    """DeBERTa: samples and heads are one dimension, for which the heads of the relative positions are repeated; each
    pair of tokens gathers the score of its distance."""
    g, h = opened(5)
    distances = g.op("Tanh", g.weight("relative", g.normal(1.0, 1, 9, WIDTH)))
    batch, merged = g.op("Shape", h, start=0, end=1), g.weight("merged", [-1, 5, 4])

    def per_sample(x: str) -> str:
        heads = g.op("Reshape", heads_of(g, x, "key", 4), g.weight("positions", [-1, 9, 4]))
        return g.op("Tile", heads, g.op("Concat", batch, g.weight("ones", [1, 1]), axis=0))

    query, key, value = (g.op("Reshape", heads_of(g, h, name, 4), merged) for name in ("query", "key", "value"))
    scores = g.op("MatMul", query, g.op("Transpose", key, perm=[0, 2, 1]))
    far = g.op("MatMul", query, g.op("Transpose", per_sample(distances), perm=[0, 2, 1]))
    table = g.weight("distance", (np.arange(5)[:, None] - np.arange(5) + 4)[None])
    rows = g.op("Mul", batch, g.weight("per_sample", [HEADS]))
    index = g.op("Expand", table, g.op("Concat", rows, g.weight("pairs", [5, 5]), axis=0))
    scores = g.op("Add", scores, g.op("GatherElements", far, index, axis=2))
    mixed = g.op("Reshape", g.op("MatMul", g.op("Softmax", scores, axis=-1), value), g.weight("apart", [-1, 4, 5, 4]))
    mixed = g.op("Reshape", g.op("Transpose", mixed, perm=[0, 2, 1, 3]), g.weight("join", [0, 0, 16]))
    return closed(g, times(g, mixed, "out", 16, WIDTH), 3)


def stacked_experts(*, transposed: bool = False, interleaved: bool = False, hidden: int = 12) -> onnx.ModelProto:
    """Every expert on every token; gate and up are one tensor [experts, inputs, 2 x hidden], with a bias for each."""
    g, h = opened(5, name="stacked_experts")
    router = g.op("Softmax", times(g, h, "router", WIDTH, EXPERTS), axis=-1)
    tokens = g.op("Unsqueeze", h, g.weight("one", [1]))  # [batch, 1, 5, width]

    def each(x: str, name: str, inputs: int, outputs: int) -> str:
        if not transposed:
            return times(g, x, name, EXPERTS, inputs, outputs)
        stored = g.weight(name, g.normal(inputs**-0.5, EXPERTS, outputs, inputs))
        return g.op("MatMul", x, g.op("Transpose", stored, perm=[0, 2, 1]))

    both = g.op("Add", each(tokens, "into", WIDTH, 2 * hidden), g.weight("bias", g.normal(0.1, EXPERTS, 1, 2 * hidden)))
    if interleaved:
        last, first, end = (g.weight(f"n{n}", [n]) for n in (3, 0, 2**62))
        starts = first, g.weight("n1", [1])
        gate, up = (g.op("Slice", both, start, end, last, g.weight("n2", [2])) for start in starts)
    else:
        halves = g.weight("halves", [hidden, hidden])
        gate = g.op("Split", both, halves, outputs=["gate", "up"], axis=-1)
        up = "up"
    mixed = each(g.op("Mul", g.op("Sigmoid", gate), up), "out", hidden, WIDTH)
    mixed = g.op("Add", mixed, g.weight("out_bias", g.normal(0.1, EXPERTS, 1, WIDTH)))
    share = g.op("Unsqueeze", g.op("Transpose", router, perm=[0, 2, 1]), g.weight("last", [3]))
    return closed(g, g.op("ReduceSum", g.op("Mul", mixed, share), g.weight("one", [1]), keepdims=0), 3)


def a_matrix_for_each_head() -> onnx.ModelProto:
    """Heads that are multiplied by a matrix of their own inside of a region, and by one for all."""
    g, h = opened(5)
    heads = g.op("Tanh", times(g, heads_of(g, h, "into", 4), "own", HEADS, 4, 6))
    heads = times(g, heads, "all", 1, 6, 4)
    joined = g.op("Reshape", g.op("Transpose", heads, perm=[0, 2, 1, 3]), g.weight("join", [0, 0, 16]))
    return closed(g, times(g, joined, "out", 16, WIDTH), 3)


def cross_attention(*, read_elsewhere: bool = False) -> onnx.ModelProto:
    """torch's MultiheadAttention between two texts: one matrix, split in the graph, for queries and for the memory."""
    g, h = opened(5)
    memory = g.op("Sigmoid", h)
    stored, sizes = g.weight("in_proj", g.normal(0.4, 48, WIDTH)), g.weight("sizes", [16, 32])
    bias = g.weight("in_bias", g.normal(0.2, 48))
    rows, biases = ["rows0", "rows1"], ["bias0", "bias1"]
    g.op("Split", stored, sizes, outputs=rows, axis=0)
    g.op("Split", bias, sizes, outputs=biases, axis=0)
    query, both = (
        g.op("Add", g.op("MatMul", x, g.op("Transpose", row, perm=[1, 0])), part)
        for x, row, part in zip((h, memory), rows, biases, strict=True)
    )

    def heads(x: str) -> str:
        return g.op("Transpose", g.op("Reshape", x, g.weight("to_heads", [0, 0, HEADS, 4])), perm=[0, 2, 1, 3])

    apart = g.op("Reshape", both, g.weight("apart", [0, 0, 2, 16]))
    key, value = (g.op("Gather", apart, g.weight(f"n{n}", np.array(n)), axis=2) for n in (0, 1))
    query, key, value = (heads(x) for x in (query, key, value))
    scores = g.op("Softmax", g.op("MatMul", query, g.op("Transpose", key, perm=[0, 1, 3, 2])), axis=-1)
    mixed = g.op("Transpose", g.op("MatMul", scores, value), perm=[0, 2, 1, 3])
    mixed = g.op("Reshape", mixed, g.weight("join", [0, 0, 16]))
    mixed = times(g, mixed, "out", 16, WIDTH)
    return closed(g, g.op("Add", mixed, g.op("ReduceMax", "rows0")) if read_elsewhere else mixed, 3)


def einsum_attention() -> onnx.ModelProto:
    """Flax: each product is an einsum, and a weight has a dimension of its own for the heads."""
    g, h = opened(5)

    def product(equation: str, x: str, name: str, *shape: int) -> str:
        return g.op("Einsum", x, g.weight(name, g.normal(0.3, *shape)), equation=equation)

    query, key, value = (product("bsd,dhk->bshk", h, name, WIDTH, HEADS, 4) for name in ("query", "key", "value"))
    query = g.op("Add", query, g.weight("bias", g.normal(0.3, HEADS, 4)))
    scores = g.op("Softmax", g.op("Einsum", query, key, equation="bqhk,bvhk->bhqv"), axis=-1)
    mixed = g.op("Einsum", scores, value, equation="bhqv,bvhk->bqhk")
    return closed(g, product("bshk,hkd->bsd", mixed, "out", HEADS, 4, WIDTH), 3)


def einsum_experts(*, transposed: bool = False) -> onnx.ModelProto:
    """Every expert on every token, each product an einsum; weights [experts, inputs, outputs], or the other way."""
    g, h = opened(5)
    router = g.op("Softmax", times(g, h, "router", WIDTH, EXPERTS), axis=-1)
    narrow, wide = (WIDTH, 12) if not transposed else (12, WIDTH)
    weights = {name: g.weight(name, g.normal(0.3, EXPERTS, narrow, wide)) for name in ("gate", "up")}
    of, back = ("edf", "efd") if not transposed else ("efd", "edf")
    gate, up = (g.op("Einsum", h, weight, equation=f"bsd,{of}->besf") for weight in weights.values())
    inside = g.op("Mul", g.op("Sigmoid", gate), up)
    mixed = g.op("Einsum", inside, g.weight("out", g.normal(0.3, EXPERTS, wide, narrow)), equation=f"besf,{back}->besd")
    return closed(g, g.op("Einsum", mixed, router, equation="besd,bse->bsd"), 3)


def upsampled(*, sizes: bool) -> onnx.ModelProto:
    """U-Net: channels are resized, joined with those of a skip connection, and convolved; by scales, or to lengths."""
    g = GraphWriter("upsampled")
    x = g.input("x", ("batch", 4, 4, 4))
    h = g.op("Tanh", g.op("Mul", x, g.weight("scale", g.normal(1.0, 4, 1, 1))))
    skip = g.op("Relu", g.op("Conv", h, g.weight("skip", g.normal(0.3, 6, 4, 1, 1))))
    low = g.op(
        "Conv", g.op("MaxPool", h, kernel_shape=[2, 2], strides=[2, 2]), g.weight("low", g.normal(0.3, 7, 4, 1, 1))
    )
    factors = g.weight("factors", np.array([1, 1, 2, 2], np.float32))
    lengths = g.op("Concat", g.op("Shape", h, start=0, end=1), g.weight("to", [7, 4, 4]), axis=0)
    high = g.op("Resize", low, "", *(["", lengths] if sizes else [factors]), mode="linear")
    return closed(g, g.op("Conv", g.op("Concat", high, skip, axis=1), g.weight("join", g.normal(0.3, 4, 13, 1, 1))), 4)


def messages() -> onnx.ModelProto:
    """A graph network: each edge reads the features of the node where it begins, of matrices and of samples."""
    g, h = opened(5)
    edges = g.weight("edges", [0, 0, 1, 3, 4, 2])
    told = g.op("Gather", g.op("Relu", times(g, h, "message", WIDTH, 12)), edges, axis=1)
    flat = g.op("Reshape", told, g.weight("flat", [-1, 12]))
    return closed(g, times(g, g.op("Gather", flat, edges, axis=0), "keep", 12, WIDTH))


def depthwise(*, then: str) -> onnx.ModelProto:
    """A depthwise convolution of a replicated value, then per channel and pointwise (MobileNet), or a norm over all
    channels of each position (ConvNeXt)."""
    g = GraphWriter("depthwise")
    x = g.input("x", ("batch", 6, 4, 4))
    h = g.op("Tanh", g.op("Mul", x, g.weight("scale", g.normal(1.0, 6, 1, 1))))
    kernel = [g.weight("depthwise", g.normal(0.3, 6, 1, 3, 3)), g.weight("bias", g.normal(0.1, 6))]
    x = g.op("Conv", h, *kernel, group=6, pads=[1] * 4)
    if then == "channels":
        x = g.op("Relu", g.op("Mul", x, g.weight("each", g.normal(1.0, 6, 1, 1))))
        return closed(g, g.op("Conv", x, g.weight("pointwise", g.normal(0.3, 8, 6, 1, 1))), 4)
    x = normalised(g, g.op("Transpose", x, perm=[0, 2, 3, 1]), 6)
    return closed(g, times(g, g.op("Relu", times(g, x, "up", 6, 24)), "down", 24, 6), 4)


def equal_biases() -> onnx.ModelProto:
    """What an exporter writes of an untrained model: biases and a norm's shift that are equal, stored once."""
    g, h = opened()
    zero = g.weight("zero", np.zeros(WIDTH, np.float32))
    for layer in range(2):
        h = g.op("LayerNormalization", h, g.weight("ones", np.ones(WIDTH, np.float32)), zero, axis=-1)
        h = g.op("Tanh", g.op("Add", times(g, h, f"up{layer}", WIDTH, WIDTH), zero))
        weight = g.weight(f"down{layer}", g.normal(0.3, WIDTH, WIDTH))
        h = g.op("Gemm", h, weight, zero)
    return closed(g, h)


def random_graph(seed: int) -> onnx.ModelProto:
    """Layers, joins, splits, sums and norms in random order, all read by the last layer."""
    draw, (g, h) = np.random.default_rng(seed), opened(name=f"random{seed}")
    values, used = [(h, WIDTH)], set[str]()

    def some(width: int = 0) -> tuple[str, int]:
        found = [value for value in values if width in (0, value[1])]
        value = found[draw.integers(len(found))]
        used.add(value[0])
        return value

    for number in range(9):
        x, width = some()
        match draw.choice(["layer", "layer", "join", "stack", "split", "add", "scale", "norm", "repeat"]):
            case "layer":
                wide = int(draw.choice([8, 12, 16]))
                values.append((g.op("Tanh", times(g, x, f"w{number}", width, wide)), wide))
            case "join":
                other, more = some()
                values.append((g.op("Concat", x, other, axis=-1), width + more))
            case "stack":
                new = g.weight("new", [1])
                both = [g.op("Unsqueeze", value, new) for value in (x, some(width)[0])]
                values.append((g.op("ReduceMean", g.op("Concat", *both, axis=1), new, keepdims=0), width))
            case "split":
                half = [g.weight(f"n{n}", [n]) for n in (0, width // 2, 1)]
                values.append((g.op("Slice", x, half[0], half[1], half[2]), width // 2))
            case "add":
                values.append((g.op("Add", x, some(width)[0]), width))
            case "scale":
                values.append((g.op("Mul", x, g.weight(f"s{number}", g.normal(1.0, width))), width))
            case "norm":
                values.append((g.op("LayerNormalization", x, g.weight(f"s{number}", g.normal(1.0, width))), width))
            case "repeat":
                values.append((g.op("Tile", x, g.weight("twice", [1, 2])), 2 * width))
    ends = [value for value in values if value[0] not in used]
    joined = g.op("Concat", *(name for name, _ in ends), axis=-1)
    return closed(g, times(g, joined, "last", sum(width for _, width in ends), WIDTH))


GRAPHS: dict[str, Callable[[], onnx.ModelProto]] = {
    "joined with its input": lambda: joined_features(source="input"),
    "joined with a product": lambda: joined_features(source="product"),
    "joined with a layer": lambda: joined_features(source="layer"),
    "prefix": prefix,
    "stacked with its input": lambda: stacked_branches(replicated=True),
    "stacked with a layer": lambda: stacked_branches(replicated=False),
    "dense block": dense_block,
    "latent attention": latent_attention,
    "disentangled attention": disentangled_attention,
    "stacked experts": stacked_experts,
    "stacked experts, transposed": lambda: stacked_experts(transposed=True),
    "stacked experts, gate and up interleaved": lambda: stacked_experts(interleaved=True),
    "cross attention": cross_attention,
    "einsum attention": einsum_attention,
    "einsum experts": einsum_experts,
    "einsum experts, transposed": lambda: einsum_experts(transposed=True),
    "upsampled": lambda: upsampled(sizes=False),
    "upsampled to lengths": lambda: upsampled(sizes=True),
    "messages": messages,
    "depthwise and pointwise": lambda: depthwise(then="channels"),
    "depthwise and a norm of all channels": lambda: depthwise(then="norm"),
    "equal biases": equal_biases,
    "a matrix for each head": a_matrix_for_each_head,
}
FOUND: dict[str, list[tuple[str, str, str]]] = {
    "joined with its input": [("mlp", "up", "down")],
    "joined with a product": [("mlp", "up", "down")],
    "joined with a layer": [("mlp", "other up", "down")],
    "prefix": [("mlp", "up", "down")],
    "stacked with its input": [("mlp", "one", "down")],
    "stacked with a layer": [("mlp", "one two", "down")],
    "dense block": [("convolutions", "grow", "next")],
    "latent attention": [("attention", "query value key", "out")],
    "disentangled attention": [("attention", "query key value", "out")],
    "stacked experts": [("mlp", "into", "out")],
    "stacked experts, transposed": [("mlp", "into", "out")],
    "stacked experts, gate and up interleaved": [("mlp", "into", "out")],
    "cross attention": [("attention", "in_proj", "out")],
    "einsum attention": [("attention", "query key value", "out")],
    "einsum experts": [("mlp", "gate up", "out")],
    "einsum experts, transposed": [("mlp", "gate up", "out")],
    "upsampled": [("convolutions", "skip low", "join")],
    "upsampled to lengths": [("convolutions", "skip low", "join")],
    "messages": [("mlp", "message", "keep")],
    "depthwise and pointwise": [("convolutions", "depthwise", "pointwise")],
    "depthwise and a norm of all channels": [("mlp", "up", "down")],
    "equal biases": [("mlp", "up0", "down0"), ("mlp", "up1", "down1")],
    "a matrix for each head": [("mlp", "into own", "out")],
}
"""Kind, column-parallel and row-parallel weights of the regions of each."""
COLLECTIVES = {name: [1, 1] for name in GRAPHS} | {
    "prefix": [1, 3],  # the text of the layer and the one beside it, the learned positions
    "stacked with its input": [1, 2],
    "latent attention": [1, 2],
    "disentangled attention": [1, 2],  # tokens and distances
    "cross attention": [1, 4],  # of both texts, and of both parts of the bias
    "upsampled": [1, 2],
    "upsampled to lengths": [1, 2],
    "equal biases": [2, 4],  # in each layer, and the gradient of the bias
    "a matrix for each head": [1, 2],  # and the gradient of the one for all heads
}
"""All-reduces forward and backward: one of the output, one for each replicated value with a gradient that is read."""


def sharding(name: str, size: int = 2) -> TensorSharding:
    return find_regions(to_module(GRAPHS[name]()), size, convolutions="always")


@pytest.mark.parametrize("name", GRAPHS)
def test_a_region_goes_on_through_what_joins_repeats_and_stacks(name: str) -> None:
    assert regions(sharding(name)) == FOUND[name]


def test_what_cannot_be_joined_is_replicated_with_the_reason() -> None:
    why = dict(find_regions(to_module(one_feature()), 2).replicated)
    assert why["up"] == (
        "cat joins 1 replicated elements, fewer than there are ranks, with others along the sharded dimension"
    )
    why = dict(find_regions(to_module(cross_attention(read_elsewhere=True)), 2).replicated)
    assert why["in_proj"] == "in_proj is also read by reduce_max, which needs all of it"
    why = dict(sharding("depthwise and a norm of all channels").replicated)
    assert why == {"depthwise": "layer_norm works along the sharded dimension (layer_norm)"}
    why = dict(find_regions(to_module(stacked_experts(hidden=1)), 3).replicated)
    assert why["into"] == "its 2 columns are fewer than 3 ranks"
    why = dict(find_regions(to_module(stacked_experts(interleaved=True, hidden=7)), 2).replicated)
    assert why["into"] == ("strided takes one of 2 elements, 0 to 14 of 14, which do not divide evenly over 2 ranks")


def test_stacked_matrices_are_no_matrices_of_muon() -> None:
    assert find_matrices(to_module(stacked_experts())) == {}


def shares(name: str) -> list[str]:
    """The share of one of two ranks, of the FLOPs of a step and of the parameters."""
    model = GRAPHS[name]()
    inputs = [torch.from_numpy(array) for array in graphs.feed(model, 4).values()]
    found = []
    for size in (1, 2):
        module = to_module(model)
        # fake tensors need no process group of that name
        shard_regions(module, find_regions(module, size, convolutions="always"), rank=0, group="none")
        found.append((count_flops(module, inputs).total, sum(each.numel() for each in module.parameters())))
    return [f"{part / whole:.2f}" for whole, part in zip(*found, strict=True)]


@pytest.mark.slow
def test_the_shares_of_the_documentation_are_those_of_the_graphs() -> None:
    page = (ROOT / "docs" / "explanation" / "parallelism.md").read_text(encoding="utf-8")
    table = page.partition("<!-- shares: begin -->")[2].partition("<!-- shares: end -->")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.strip().splitlines()[2:]]
    assert {row[0]: [row[3], row[5]] for row in rows} == {row[0]: shares(row[0]) for row in rows}
    # the two others were divided before
    assert {row[0] for row in rows} == GRAPHS.keys() - {"stacked with a layer", "a matrix for each head"}


def parity(mpi: MPIContext, names: list[str]) -> dict[str, Any]:
    group, found = group_of(mpi), {}
    for name in names:
        model = GRAPHS[name]() if name in GRAPHS else random_graph(int(name))
        inputs = [torch.from_numpy(array) for array in graphs.feed(model, 3).values()]
        found[name] = compare(to_module(model), inputs, mpi, group)
    return found


@pytest.mark.slow
@pytest.mark.mpi
def test_two_ranks_compute_what_one_does_through_what_joins_repeats_and_stacks() -> None:
    for rank in run_ranks(2, "tests.trainer.parallel.tensor.test_joined_and_stacked:parity", [*GRAPHS]):
        assert {name: each["collectives"] for name, each in rank.items()} == COLLECTIVES
        assert all(each["worst"] < 1e-5 for each in rank.values()), rank


@pytest.mark.mpi
@pytest.mark.slow
@pytest.mark.parametrize("size", [3, 4])
def test_more_ranks_compute_what_one_does_through_what_joins_repeats_and_stacks(size: int) -> None:
    for rank in run_ranks(size, "tests.trainer.parallel.tensor.test_joined_and_stacked:parity", [*GRAPHS]):
        assert all(each["worst"] < 1e-5 for each in rank.values()), rank


@pytest.mark.mpi
@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3])
def test_random_graphs_compute_on_more_ranks_what_they_do_on_one(size: int) -> None:
    seeds = [str(seed) for seed in range(150)]
    for rank in run_ranks(size, "tests.trainer.parallel.tensor.test_joined_and_stacked:parity", seeds, timeout_s=240):
        assert sum(each["regions"] for each in rank.values()) > 120
        assert all(each["worst"] < 1e-5 for each in rank.values()), max(rank.values(), key=lambda each: each["worst"])
