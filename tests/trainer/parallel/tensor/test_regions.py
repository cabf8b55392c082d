"""Which tensor-parallel regions are found, why others are not, and that real ranks compute what one rank does."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from onward.trainer.config.sections.model import LoraConfig
from onward.trainer.distributed.mesh import ParallelDims, make_mesh
from onward.trainer.distributed.processes import MPIContext
from onward.trainer.distributed.weights import Placement, slices
from onward.trainer.model.adapters import add_adapters
from onward.trainer.onnx_graph.node_builder import GraphWriter
from onward.trainer.onnx_import.driver import to_module
from onward.trainer.onnx_import.imported_graph import ImportedGraph, named_weights
from onward.trainer.parallel.tensor.region_dropout import RankSeeded
from onward.trainer.parallel.tensor.regions import TensorSharding, find_regions
from onward.trainer.parallel.tensor.rewrite import local_slice, shard_regions
from onward.trainer.parallel.tensor.tensor_shardings import CannotShard, NeedsFinerBlocks, Sharding
from onward.trainer.parallel.tensor.view_rules import reshaped
from tests.support import graphs, zoo
from tests.support.ranks import run_ranks

# -- graphs that the models do not have


def fused_grouped_queries() -> onnx.ModelProto:
    """One matrix for 4 heads of the query and 2 of key and value, split after the reshape to heads; with biases."""
    g = GraphWriter("fused_grouped_queries")
    x = g.input("x", ("batch", "sequence", 16))
    fused = g.op("MatMul", x, g.weight("qkv.weight", g.normal(0.25, 16, 32)))
    fused = g.op("Add", fused, g.weight("qkv.bias", g.normal(0.1, 32)))
    split = g.op("Reshape", fused, g.weight("heads", [0, 0, 8, 4]))
    parts = ["query", "key", "value"]
    g.op("Split", split, g.weight("sizes", [4, 2, 2]), outputs=parts, axis=2)
    query, key, value = (g.op("Transpose", part, perm=[0, 2, 1, 3]) for part in parts)
    wide = g.weight("wide", [1, 1, 2, 1, 1])
    key, value = (
        g.op(
            "Reshape", g.op("Expand", g.op("Unsqueeze", x, g.weight("two", [2])), wide), g.weight("all", [0, 4, -1, 4])
        )
        for x in (key, value)
    )
    scores = g.op("MatMul", query, g.op("Transpose", key, perm=[0, 1, 3, 2]))
    slopes = g.weight("slopes", np.array([0.1, 0.2, 0.3, 0.4], np.float32).reshape(1, 4, 1, 1))
    scores = g.op("Mul", scores, slopes)  # a constant of its own for each head
    mixed = g.op("Transpose", g.op("MatMul", g.op("Softmax", scores, axis=-1), value), perm=[0, 2, 1, 3])
    joined = g.op("Reshape", mixed, g.weight("joined", [0, 0, 16]))
    g.op("Gemm", g.op("Flatten", joined, axis=2), *_linear(g, "out", 16, 16), transB=1, outputs="y")
    g.output("y", ("rows", 16))
    return g.model()


def one_key_head() -> onnx.ModelProto:
    """Two heads of the query share the only one of key and value."""
    g = GraphWriter("one_key_head")
    x = g.input("x", ("batch", "sequence", 16))
    query = g.op("MatMul", x, g.weight("query.weight", g.normal(0.25, 16, 16)))
    query = g.op("Transpose", g.op("Reshape", query, g.weight("heads", [0, 0, 2, 8])), perm=[0, 2, 1, 3])
    key, value = (
        g.op("Unsqueeze", g.op("MatMul", x, g.weight(f"{part}.weight", g.normal(0.25, 16, 8))), g.weight("one", [1]))
        for part in ("key", "value")
    )
    scores = g.op("MatMul", query, g.op("Transpose", key, perm=[0, 1, 3, 2]))
    mixed = g.op("Transpose", g.op("MatMul", g.op("Softmax", scores, axis=-1), value), perm=[0, 2, 1, 3])
    joined = g.op("Reshape", mixed, g.weight("joined", [0, 0, 16]))
    g.op("MatMul", joined, g.weight("out.weight", g.normal(0.25, 16, 16)), outputs="y")
    g.output("y", ("batch", "sequence", 16))
    return g.model()


def merged_heads() -> onnx.ModelProto:
    """torch's MultiheadAttention: samples and heads are one dimension, and the sequence is before the samples."""
    g = GraphWriter("merged_heads")
    x = g.op("Transpose", g.input("x", ("batch", 5, 8)), perm=[1, 0, 2])
    heads = g.weight("heads", [5, -1, 4])
    query, key, value = (
        g.op(
            "Transpose", g.op("Reshape", g.op("MatMul", x, g.weight(name, g.normal(0.5, 8, 16))), heads), perm=[1, 0, 2]
        )
        for name in ("query", "key", "value")
    )
    scores = g.op("Softmax", g.op("MatMul", query, g.op("Transpose", key, perm=[0, 2, 1])), axis=-1)
    mixed = g.op("Transpose", g.op("MatMul", scores, value), perm=[1, 0, 2])
    joined = g.op("Reshape", mixed, g.weight("joined", [5, -1, 16]))
    return _given(g, g.op("MatMul", joined, g.weight("out", g.normal(0.3, 16, 8))), rank=3)


def parallel_block() -> onnx.ModelProto:
    """One matrix into a gated MLP whose two halves are joined with a third part before the one matrix out of it."""
    g = GraphWriter("parallel_block")
    x = g.input("x", ("batch", 8))
    g.op("Gemm", x, *_linear(g, "into", 8, 22), transB=1, outputs="wide")
    parts = ["gate", "up", "plain"]
    g.op("Split", "wide", g.weight("sizes", [7, 7, 8]), outputs=parts, axis=-1)
    gated = g.op("Mul", g.op("Sigmoid", "gate"), "up")
    joined = g.op("Concat", g.op("Relu", "plain"), g.op("Mul", gated, g.weight("scale", g.normal(1.0, 7))), axis=-1)
    g.op("Gemm", joined, *_linear(g, "out", 15, 5), transB=1, outputs="y")
    g.output("y", ("batch", 5))
    return g.model()


def channels() -> onnx.ModelProto:
    """A convolution, GroupNorm, one in groups, one for each channel with two outputs each, flattened into a Gemm."""
    g = GraphWriter("channels", opset=21)
    x = g.input("x", ("batch", 3, 4, 4))
    x = g.op("Conv", x, g.weight("a.weight", g.normal(0.3, 12, 3, 3, 3)), g.weight("a.bias", g.normal(0.3, 12)))
    norm = [g.weight(f"norm.{part}", 1 + g.normal(0.1, 12)) for part in ("scale", "bias")]
    x = g.op("Relu", g.op("GroupNormalization", x, *norm, num_groups=4))
    x = g.op(
        "Conv", x, g.weight("b.weight", g.normal(0.3, 12, 3, 1, 1)), g.weight("b.bias", g.normal(0.3, 12)), group=4
    )
    x = g.op("Conv", x, g.weight("c.weight", g.normal(0.3, 24, 1, 1, 1)), group=12)
    g.op("Gemm", g.op("Flatten", x), *_linear(g, "out", 96, 5), transB=1, outputs="y")
    g.output("y", ("batch", 5))
    return g.model()


def dropped(*, hidden: int = 15) -> onnx.ModelProto:
    """Dropout between the two layers of a region, and behind it."""
    g = GraphWriter("dropped")
    x = g.op("Gemm", g.input("x", ("batch", 8)), *_linear(g, "into", 8, hidden), transB=1)
    x = g.op("Gemm", g.op("Dropout", x), *_linear(g, "out", hidden, 64), transB=1)
    g.op("Dropout", x, outputs="y")
    g.output("y", ("batch", 64))
    return g.model()


def tied() -> onnx.ModelProto:
    """The second layer's matrix looks up the rows that go into the first, too."""
    g = GraphWriter("tied")
    table = g.weight("table", g.normal(0.5, 8, 8))
    x = g.op("Gather", table, g.input("ids", ("batch",), TensorProto.INT64))
    x = g.op("Tanh", g.op("MatMul", x, g.weight("first.weight", g.normal(0.5, 8, 8))))
    g.op("MatMul", x, table, outputs="y")
    g.output("y", ("batch", 8))
    return g.model()


def one_after_the_other() -> onnx.ModelProto:
    """Two MLPs, and nothing between them: the sum of the one is what goes into the other."""
    g = GraphWriter("one_after_the_other")
    x = g.op("Tanh", g.op("Mul", g.input("x", ("batch", 8)), g.weight("scale", g.normal(1.0, 8))))
    for name in ("first", "second"):
        x = g.op("Relu", g.op("MatMul", x, g.weight(f"{name}.up", g.normal(0.3, 8, 16))))
        x = g.op("MatMul", x, g.weight(f"{name}.down", g.normal(0.3, 16, 8)))
    return _given(g, x)


def residual_as_bias() -> onnx.ModelProto:
    """`addmm`: the product by rows adds what goes into the region."""
    g = GraphWriter("residual_as_bias")
    x = g.op("Tanh", g.op("Mul", g.input("x", ("batch", 8)), g.weight("scale", g.normal(1.0, 8))))
    h = g.op("Relu", g.op("Gemm", x, g.weight("up", g.normal(0.3, 8, 16)), g.weight("bias", g.normal(0.3, 16))))
    return _given(g, g.op("Gemm", h, g.weight("down", g.normal(0.3, 16, 8)), x))


def there_and_back() -> onnx.ModelProto:
    """One matrix by columns and, transposed, by rows."""
    g = GraphWriter("there_and_back")
    x = g.op("Tanh", g.op("Mul", g.input("x", ("batch", 8)), g.weight("scale", g.normal(1.0, 8))))
    h = g.op("Relu", g.op("MatMul", x, g.weight("matrix", g.normal(0.3, 8, 16))))
    return _given(g, g.op("MatMul", h, g.op("Transpose", "matrix", perm=[1, 0])))


def sharded_bias(*, rows: bool) -> onnx.ModelProto:
    """A product that adds the sharded value that it multiplies: along the sharded features, or row by row."""
    g = GraphWriter("sharded_bias")
    h = g.op("MatMul", g.input("x", ("batch", 8)), g.weight("up", g.normal(0.3, 8, 8)))
    if rows:
        h = g.op("Reshape", h, g.weight("heads", [-1, 4]))
    width = 4 if rows else 8
    h = g.op("Gemm", g.op("Tanh", h), g.weight("between", g.normal(0.3, width, width)), h)
    if rows:
        h = g.op("Reshape", h, g.weight("joined", [-1, 8]))
    return _given(g, g.op("MatMul", h, g.weight("down", g.normal(0.3, 8, 8))))


def shuffled(between: str) -> onnx.ModelProto:
    """ShuffleNet: interleaved channels of a convolution, followed by a call with a parameter for each channel."""
    g = GraphWriter("shuffled", opset=21)
    x = g.op("Relu", g.op("Conv", g.input("x", ("batch", 4, 4, 4)), g.weight("up", g.normal(0.5, 12, 4, 1, 1))))
    x = _interleaved(g, x, 2, 6)
    per_channel = [g.weight(name, 1 + g.normal(0.3, 12)) for name in ("scale", "bias")]
    if between == "Conv":
        x = g.op("Conv", x, g.weight("depthwise", g.normal(0.5, 12, 1, 3, 3)), group=12, pads=[1, 1, 1, 1])
    elif between == "GroupNormalization":
        x = g.op("GroupNormalization", x, *per_channel, num_groups=2)
    else:
        moving = [g.weight(name, 1 + g.normal(0.1, 12)) for name in ("mean", "variance")]
        x = g.op("BatchNormalization", x, *per_channel, *moving)
    x = _interleaved(g, x, 6, 2)
    return _given(g, g.op("Conv", x, g.weight("down", g.normal(0.3, 4, 12, 1, 1))), rank=4)


def _interleaved(g: GraphWriter, x: str, outer: int, inner: int) -> str:
    x = g.op("Reshape", x, g.weight(f"split{outer}", [0, outer, inner, 4, 4]))
    return g.op("Reshape", g.op("Transpose", x, perm=[0, 2, 1, 3, 4]), g.weight(f"joined{outer}", [0, 12, 4, 4]))


def queries_in_two_parts(*, memory: bool) -> onnx.ModelProto:
    """Four heads of the query, two before and two after the two of key and value; with `memory` those are weights."""
    g = GraphWriter("queries_in_two_parts", opset=23)
    x = g.op("Tanh", g.op("Mul", g.input("x", ("batch", 5, 8)), g.weight("mix", g.normal(1.0, 8))))
    g.op("MatMul", x, g.weight("into", g.normal(0.5, 8, 32)), outputs="wide")
    parts = ["q1", "key", "value", "q2"]
    g.op("Split", "wide", g.weight("sizes", [8, 8, 8, 8]), outputs=parts, axis=-1)
    query = g.op("Concat", "q1", "q2", axis=-1)
    if memory:
        query = g.op("Transpose", g.op("Reshape", query, g.weight("heads", [0, 0, 4, 4])), perm=[0, 2, 1, 3])
        one = g.op("Reshape", g.op("ReduceMax", x), g.weight("ones", [1, 1, 1, 1]))
        sizes = g.op("Concat", g.op("Shape", x, start=0, end=1), g.weight("rest", [1, 1, 1]), axis=0)
        zero = g.op("Expand", g.op("Sub", one, one), sizes)
        few = (g.op("Add", g.weight(name, g.normal(1.0, 1, 2, 3, 4)), zero) for name in ("keys", "values"))
        mixed = g.op("Transpose", g.op("Attention", query, *few), perm=[0, 2, 1, 3])
        mixed = g.op("Reshape", mixed, g.weight("joined", [0, 0, 16]))
        mixed = g.op("Concat", mixed, g.op("Mul", "key", "value"), axis=-1)
        return _given(g, g.op("MatMul", mixed, g.weight("out", g.normal(0.5, 24, 8))), rank=3)
    mixed = g.op("Attention", query, "key", "value", q_num_heads=4, kv_num_heads=2)
    return _given(g, g.op("MatMul", mixed, g.weight("out", g.normal(0.5, 16, 8))), rank=3)


def _given(g: GraphWriter, x: str, *, rank: int = 2) -> onnx.ModelProto:
    g.op("Identity", x, outputs="y")
    g.output("y", tuple(f"length{dim}" for dim in range(rank)))
    return g.model()


def _linear(g: GraphWriter, name: str, inputs: int, outputs: int) -> tuple[str, str]:
    return (
        g.weight(f"{name}.weight", g.normal(inputs**-0.5, outputs, inputs)),
        g.weight(f"{name}.bias", g.normal(0.1, outputs)),
    )


GRAPHS: dict[str, Callable[[], onnx.ModelProto]] = {
    **graphs.MODELS,
    **{build.__name__: build for build in (fused_grouped_queries, one_key_head, parallel_block, channels, tied)},
    **{build.__name__: build for build in (merged_heads, one_after_the_other, residual_as_bias, there_and_back)},
    "sharded bias": lambda: sharded_bias(rows=False),
    "sharded bias of rows": lambda: sharded_bias(rows=True),
    "shuffled Conv": lambda: shuffled("Conv"),
    "shuffled GroupNormalization": lambda: shuffled("GroupNormalization"),
    "shuffled BatchNormalization": lambda: shuffled("BatchNormalization"),
    "queries in two parts": lambda: queries_in_two_parts(memory=False),
    "queries in two parts of a memory": lambda: queries_in_two_parts(memory=True),
}
REPLICATED = {
    "sharded bias": "adds a sharded value",
    "sharded bias of rows": "adds a sharded value",
    "shuffled Conv": "has 12 channels, but the sharding pattern repeats every 2",
    "shuffled GroupNormalization": "has 12 channels, but the sharding pattern repeats every 2",
    "shuffled BatchNormalization": "has 12 channels, but the sharding pattern repeats every 2",
    "queries in two parts": "4 heads of the query share 2, which do not divide evenly over 2 ranks",
    "queries in two parts of a memory": "4 heads of the query share 2, which do not divide evenly over 2 ranks",
}
"""Graphs in which a rank would get other elements of one tensor than of the next -> why they are not sharded."""


def plan(name: str, size: int = 2, *, fuse: bool = True, convolutions: str = "always") -> TensorSharding:
    return find_regions(to_module(GRAPHS[name](), fuse=fuse), size, convolutions=convolutions)


def regions(found: TensorSharding) -> list[tuple[str, str, str]]:
    return [(region.kind, " ".join(region.columns), " ".join(region.rows)) for region in found.regions]


# -- the plan

LAYERS = {
    "tiny_transformer": [
        ("attention", "transformer.h.{}.attn.c_attn.weight", "transformer.h.{}.attn.c_proj.weight"),
        ("mlp", "transformer.h.{}.mlp.c_fc.weight", "transformer.h.{}.mlp.c_proj.weight"),
    ],
    "tiny_bert": [
        (
            "attention",
            "encoder.layer.{0}.query.weight encoder.layer.{0}.key.weight encoder.layer.{0}.value.weight",
            "encoder.layer.{}.output.weight",
        ),
        ("mlp", "encoder.layer.{}.up.weight", "encoder.layer.{}.down.weight"),
    ],
    "tiny_llama": [
        (
            "attention",
            "layers.{0}.q_proj.weight layers.{0}.k_proj.weight layers.{0}.v_proj.weight",
            "layers.{}.o_proj.weight",
        ),
        ("mlp", "layers.{0}.mlp.gate.weight layers.{0}.mlp.up.weight", "layers.{}.mlp.down.weight"),
    ],
}
"""The regions of each layer: kind, columns, rows."""
AT_OUTPUT = "its output reaches an output of the graph, and no row-parallel product comes before"
LAST = {"tiny_bert": [("mlp", "pooler.weight", "classifier.weight")]}
OTHERS = {
    "tiny_transformer": {"transformer.wte.weight": AT_OUTPUT},
    "tiny_bert": {},
    "tiny_llama": {"lm_head.weight": AT_OUTPUT},
}


@pytest.mark.parametrize("fuse", [True, False])
@pytest.mark.parametrize("name", LAYERS)
def test_each_layer_of_a_transformer_is_two_regions(name: str, fuse: bool) -> None:
    found = plan(name, fuse=fuse)
    expected = [tuple(part.format(layer) for part in region) for layer in range(2) for region in LAYERS[name]]
    assert regions(found) == expected + LAST.get(name, [])
    assert dict(found.replicated) == OTHERS[name]


def test_convolutions_are_sharded_in_pairs_and_skip_connections_are_replicated() -> None:
    found = plan("tiny_resnet")
    assert regions(found) == [
        ("convolutions", "layer1.0.conv1.weight", "layer1.0.conv2.weight"),
        ("convolutions", "layer2.0.conv1.weight", "layer2.0.conv2.weight"),
    ]
    assert dict(found.replicated) == {
        "conv1.weight": "layer1.0.conv2.weight, with 8 columns, follows a row-parallel product of 8 columns",
        "layer2.0.downsample.0.weight": (
            "its output is combined with that of layer2.0.conv2.weight, which is replicated"
        ),
        "classifier.weight": AT_OUTPUT,
    }


def test_convolutions_are_sharded_where_they_save_more_than_they_send() -> None:
    assert plan("tiny_resnet", convolutions="never").regions == ()
    reasons = dict(plan("tiny_resnet", convolutions="auto").replicated)
    assert reasons["layer1.0.conv1.weight"] == (
        "parallel.convolutions is auto, and sharding it with layer1.0.conv2.weight saves only 54 operations per "
        "byte sent, less than 250"
    )
    g = GraphWriter("wide")
    x = g.op("Conv", g.input("x", ("batch", 64, 8, 8)), g.weight("a", g.normal(0.1, 64, 64, 3, 3)), pads=[1] * 4)
    g.op("Conv", g.op("Relu", x), g.weight("b", g.normal(0.1, 64, 64, 3, 3)), pads=[1] * 4, outputs="y")
    g.output("y", ("batch", 64, 8, 8))
    assert regions(find_regions(to_module(g.model()), 2, convolutions="auto")) == [("convolutions", "a", "b")]


def test_heads_must_divide_evenly_over_the_ranks_and_single_features_need_not() -> None:
    found = plan("tiny_transformer", 3)
    assert [kind for kind, _, _ in regions(found)] == ["mlp", "mlp"]
    assert dict(found.replicated)["transformer.h.0.attn.c_attn.weight"] == (
        "reshape makes 2 heads of 16 each, which do not divide evenly over 3 ranks"
    )
    shapes = [part.placement((128, 32), rank, 3).local_shape for rank in range(3) for part in [Sharding(0, (128,))]]
    assert shapes == [(42, 32), (43, 32), (43, 32)]


def test_heads_of_keys_must_divide_evenly_too() -> None:
    reasons = dict(plan("tiny_llama", 4).replicated)
    assert reasons["layers.0.q_proj.weight"] == (
        "attention_0: 4 heads of the query share 2, which do not divide evenly over 4 ranks"
    )


def test_a_weight_of_which_another_node_needs_all_is_replicated() -> None:
    found = plan("tied")
    assert found.regions == ()
    assert dict(found.replicated)["first.weight"] == "table is also read by gather_rows, which needs all of it"


@pytest.mark.parametrize("name", REPLICATED)
def test_a_region_whose_tensors_would_be_sharded_differently_is_replicated(name: str) -> None:
    found = plan(name)
    assert found.regions == ()
    assert any(REPLICATED[name] in why for _, why in found.replicated), found.replicated


def test_a_weight_with_fewer_columns_than_ranks_is_replicated() -> None:
    module = to_module(graphs.tiny_mlp(hidden=3))
    assert dict(find_regions(module, 4).replicated) == {
        "fc1.weight": "its 3 columns are fewer than 4 ranks",
        "fc2.weight": "its 1 columns are fewer than 4 ranks",
    }


def test_one_rank_has_no_regions_and_the_search_changes_nothing() -> None:
    module = to_module(graphs.tiny_llama())
    code = module.code
    assert find_regions(module, 1).regions == ()
    assert find_regions(module, 2) == find_regions(module, 2)
    assert module.code == code


def test_adapters_are_sharded_with_their_weights() -> None:
    module = to_module(graphs.tiny_transformer())
    add_adapters(module, LoraConfig(weights=("*.h.*",), rank=2, alpha=4.0), seed=0)
    layer = "transformer.h.0.mlp"
    assert regions(find_regions(module, 2))[1] == (
        "mlp",
        f"{layer}.c_fc.weight {layer}.c_fc.weight.lora_b",
        f"{layer}.c_proj.weight {layer}.c_proj.weight.lora_a",
    )


@pytest.mark.parametrize("name", [name for name in GRAPHS if name != "there_and_back"])  # reads one matrix twice
def test_every_matrix_is_named_once(name: str) -> None:
    module = to_module(GRAPHS[name]())
    matrices = {module.onnx_names[path] for path, weight in module.named_parameters() if weight.ndim > 1}
    tables = {f"{name}.weight" for name in ("transformer.wpe", "embeddings.word", "embeddings.position", "embed")}
    for size in (2, 3, 8):
        found = find_regions(module, size, convolutions="always")
        named = [name for region in found.regions for name in (*region.columns, *region.rows)]
        named += [name for name, _ in found.replicated]
        assert sorted(named) == sorted(matrices - tables - {"slopes", "keys", "values"})


# -- reshapes

SIZE = 2
BATCH, LENGTH = (3, 5), (7, 11)


def shape(*lengths: int | tuple[int, int]) -> list[tuple[int, int]]:
    return [length if isinstance(length, tuple) else (length, length) for length in lengths]


@pytest.mark.parametrize(
    ("before", "sharding", "after", "found"),
    [
        (shape(BATCH, LENGTH, 64), (2, (64,), 1), shape(BATCH, LENGTH, 4, 16), (2, (4,), 1)),
        (shape(BATCH, LENGTH, 4, 16), (2, (4,), 1), shape(BATCH, LENGTH, 64), (2, (4,), 16)),
        (shape(BATCH, LENGTH, 64), (2, (4,), 16), shape(BATCH, LENGTH, 4, 2, 8), (2, (4,), 1)),
        (shape(LENGTH, BATCH, 64), (2, (64,), 1), shape(LENGTH, (12, 20), 16), (1, (4,), 1)),
        (shape(LENGTH, (12, 20), 16), (1, (4,), 1), shape(LENGTH, BATCH, 64), (2, (4,), 16)),
        (shape(BATCH, 8, 4, 4), (1, (8,), 1), shape(BATCH, 128), (1, (8,), 16)),
        (shape(BATCH, 96), (1, (32, 32, 32), 1), shape(BATCH, 3, 4, 8), (2, (4,), 1)),
        (shape(BATCH, 128), (1, (64, 32, 32), 1), shape(BATCH, 8, 16), (1, (4, 2, 2), 1)),
        (shape(BATCH, 1, 64), (2, (64,), 1), shape(BATCH, 64, 1), (1, (64,), 1)),
        (shape(BATCH, LENGTH, 64), (2, (64,), 1), shape((21, 55), 64), (1, (64,), 1)),
    ],
)  # fmt: skip
def test_a_sharding_is_followed_through_reshapes(before: Any, sharding: Any, after: Any, found: Any) -> None:
    result = reshaped(before, after, Sharding(*sharding), SIZE, "reshape")
    assert isinstance(result, Sharding)
    assert result.pattern == found


@pytest.mark.parametrize(
    ("before", "sharding", "after", "reason"),
    [
        (shape(BATCH, 48), (1, (48,), 1), shape(BATCH, 3, 16), "3 heads of 16 each, which do not divide evenly over 2"),
        (shape(BATCH, 2, LENGTH), (1, (2,), 1), shape(BATCH, (14, 22)), "with a dynamic length behind it"),
        (shape(2, BATCH), (0, (2,), 1), shape(BATCH, 2), "splits the sharded dimension across its units"),
    ],
)
def test_a_reshape_that_splits_across_the_ranks_is_refused(before: Any, sharding: Any, after: Any, reason: str) -> None:
    result = reshaped(before, after, Sharding(*sharding), SIZE, "reshape")
    assert isinstance(result, CannotShard)
    assert reason in result.reason


def test_a_fused_weight_reshaped_to_three_parts_needs_three_blocks() -> None:
    fused = Sharding(1, (96,), weight="qkv", columns_per_unit=1)
    result = reshaped(shape(BATCH, 96), shape(BATCH, 3, 4, 8), fused, SIZE, "reshape")
    assert isinstance(result, NeedsFinerBlocks)
    assert (result.weight, result.cuts) == ("qkv", {32, 64})


def test_a_rank_holds_its_units_of_every_block() -> None:
    sharding = Sharding(1, (4, 4), inner=2)  # the drawing in sharding.py
    assert sharding.intervals(0, 2) == [(0, 4), (8, 12)]
    assert sharding.intervals(1, 2) == [(4, 8), (12, 16)]
    assert (sharding.period, sharding.local_length(0, 2)) == (16, 8)


def test_a_local_slice_of_merged_heads_takes_the_same_heads_of_each_sample() -> None:
    x = torch.arange(12.0).reshape(1, 12)  # 2 samples of 3 heads of 2
    assert local_slice(x, 1, 6, [(0, 2), (4, 6)]).tolist() == [[0, 1, 4, 5, 6, 7, 10, 11]]
    assert local_slice(x, 1, 12, [(3, 5)]).tolist() == [[3, 4]]


# -- real ranks

STEPS, RATE = 3, 0.05


class Collectives(TorchDispatchMode):
    """Counts them."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += "c10d" in str(func) and "wait" not in str(func)
        return func(*args, **(kwargs or {}))


def outputs_of(module: ImportedGraph, inputs: list[Tensor]) -> list[Tensor]:
    found = module(*inputs)
    return [found] if isinstance(found, Tensor) else list(found)


def loss_of(outputs: list[Tensor]) -> Tensor:
    """The squared distance from fixed random numbers of what has a gradient."""
    total = torch.zeros(())
    for output in outputs:
        if output.requires_grad:
            target = torch.randn(output.shape, generator=torch.Generator().manual_seed(output.numel()))
            total = total + (output - target).square().mean()
    return total


def train(module: ImportedGraph, inputs: list[Tensor]) -> tuple[dict[str, Any], tuple[int, int]]:
    """Return losses, first gradients and last weights of a few steps, and the numbers of collectives of one step."""
    found: dict[str, Any] = {}
    for step in range(STEPS):
        module.zero_grad()
        with Collectives() as forward:
            loss = loss_of(outputs_of(module, inputs))
        with Collectives() as backward:
            loss.backward()
        found[f"loss {step}"] = loss.detach()
        parameters = {module.onnx_names[path]: tensor for path, tensor in module.named_parameters()}
        if step == 0:
            found |= {f"gradient {n}": p.grad.clone() for n, p in parameters.items() if p.grad is not None}
        with torch.no_grad():
            for parameter in parameters.values():
                if parameter.grad is not None:
                    parameter -= RATE * parameter.grad
    found |= {f"weight {name}": tensor.detach() for name, tensor in named_weights(module).items()}
    return found, (forward.count, backward.count)


def part_of(placement: Placement | None, whole: Tensor) -> Tensor:
    if placement is None:
        return whole
    part = whole.new_empty(placement.local_shape)
    for box, piece in placement.take(whole):
        part[slices(box)] = piece
    return part


def without_dropout(module: ImportedGraph) -> ImportedGraph:
    for child in module.modules():
        for name in ("ratio", "dropout"):
            if isinstance(getattr(child, name, None), float):
                setattr(child, name, 0.0)
        if isinstance(getattr(child, "keep", None), float):
            child.keep = 1.0
    return module.train()


def compare(whole: ImportedGraph, inputs: list[Tensor], mpi: MPIContext, group: str) -> dict[str, Any]:
    """Return the largest difference of this rank's part from one rank alone, relative to the full tensor's largest."""
    without_dropout(whole)
    divided = copy.deepcopy(whole)
    found = find_regions(divided, mpi.world_size, convolutions="always")
    placements = shard_regions(divided, found, rank=mpi.rank, group=group)
    assert placements or not found.regions
    expected, none = train(whole, inputs)
    own, counts = train(divided, inputs)
    assert none == (0, 0)
    assert own.keys() == expected.keys()
    worst, where = 0.0, ""
    for key, tensor in expected.items():
        wanted = part_of(placements.get(key.partition(" ")[2]), tensor)
        assert own[key].shape == wanted.shape, (key, own[key].shape, wanted.shape)
        # a small gradient is compared with the others of its size; one below 1e-7 is rounding alone (softmax does not
        # depend on the bias of the keys), and its rounding is that of the larger terms that cancel in it
        largest = float(tensor.abs().max())
        scale = max(largest, 1e-3) if largest > 1e-7 else 1e-2
        difference = float((own[key] - wanted).abs().max()) / scale if wanted.is_floating_point() else 0.0
        if not difference <= worst:
            worst, where = difference, key
    return {"regions": len(found.regions), "collectives": counts, "worst": worst, "where": where}


def group_of(mpi: MPIContext) -> str:
    mesh = make_mesh(mpi, ParallelDims(tensor=mpi.world_size), timeout_s=30)
    return str(mesh.get_group("tensor").group_name)


def parity(mpi: MPIContext, cases: list[list[Any]]) -> dict[str, Any]:
    group, found = group_of(mpi), {}
    for name, fuse in cases:
        model = GRAPHS[name]()
        inputs = [torch.from_numpy(array) for array in graphs.feed(model, 4).values()]
        found[f"{name} {fuse}"] = compare(to_module(model, fuse=fuse), inputs, mpi, group)
    return found | {
        "dropout": dropout(mpi, group),
        "adapters": adapters(mpi, group, "tiny_transformer", "*.h.*"),
        "adapter there and back": adapters(mpi, group, "there_and_back", "matrix"),
    }


def adapters(mpi: MPIContext, group: str, name: str, pattern: str) -> dict[str, Any]:
    model = GRAPHS[name]()
    module = to_module(model)
    made = add_adapters(module, LoraConfig(weights=(pattern,), rank=2, alpha=4.0), seed=0)
    with torch.no_grad():
        for adapter in made:
            named_weights(module)[adapter.b].normal_(generator=torch.Generator().manual_seed(0))
    for path, parameter in module.named_parameters():
        parameter.requires_grad_("lora" in path)
    return compare(module, [torch.from_numpy(array) for array in graphs.feed(model, 2).values()], mpi, group)


def dropout(mpi: MPIContext, group: str) -> dict[str, Any]:
    """Return dropout masks inside and outside of a region, of two steps; one step is repeated with the same state."""
    module = to_module(dropped()).train()
    shard_regions(module, find_regions(module, mpi.world_size), rank=mpi.rank, group=group)
    inside: list[Tensor] = []
    [drawing] = [child for child in module.modules() if isinstance(child, RankSeeded)]
    drawing.register_forward_hook(lambda _, args, result: inside.append((result == 0).sum(0)))
    torch.manual_seed(7)
    x, outputs = torch.randn(64, 8), []
    state = torch.get_rng_state()
    for _ in range(2):
        outputs.append(outputs_of(module, [x])[0])
    torch.set_rng_state(state)
    again = outputs_of(module, [x])[0]
    assert torch.equal(again, outputs[0])
    assert not torch.equal(outputs[0] == 0, outputs[1] == 0)
    module.eval()
    kept = outputs_of(module, [x])[0]
    expected = outputs_of(to_module(dropped()).eval(), [x])[0]
    assert torch.allclose(kept, expected, rtol=1e-5, atol=1e-6)
    return {"inside": inside[0].tolist(), "outputs": [output.tolist() for output in outputs]}


def check(found: list[dict[str, Any]], names: list[list[Any]]) -> None:
    for name, fuse in names:
        for rank in found:
            result = rank[f"{name} {fuse}"]
            assert result["worst"] < 1e-5, (name, fuse, result)


CASES: list[list[Any]] = [
    ["tiny_transformer", True],
    ["tiny_transformer", False],
    ["tiny_bert", False],
    ["tiny_llama", True],
    ["tiny_llama", False],
    ["tiny_resnet", True],
    ["fused_grouped_queries", True],
    ["fused_grouped_queries", False],
    ["one_key_head", True],
    ["one_key_head", False],
    ["parallel_block", True],
    ["channels", True],
    ["tied", True],
    ["merged_heads", True],
    ["merged_heads", False],
    ["one_after_the_other", True],
    ["residual_as_bias", True],
    ["there_and_back", True],
]


@pytest.mark.mpi
def test_two_ranks_compute_what_one_does_with_the_collectives_of_megatron() -> None:
    found = run_ranks(2, "tests.trainer.parallel.tensor.test_regions:parity", CASES)
    check(found, CASES)
    for name, fuse in CASES[:2] + CASES[3:5]:  # 2 layers: 2 all-reduces each way for each
        assert found[0][f"{name} {fuse}"]["collectives"] == [4, 4]
    assert found[0]["tiny_bert False"]["collectives"] == [5, 5]  # and its pooler with its classifier
    assert found[0]["tiny_resnet True"]["collectives"] == [2, 2]
    assert found[0]["tied True"]["collectives"] == [0, 0]
    assert all(found[0][f"{name} {fuse}"]["regions"] == 1 for name, fuse in (*CASES[6:12], *CASES[13:15]))
    assert max(rank[adapted]["worst"] for rank in found for adapted in ("adapters", "adapter there and back")) < 1e-5
    first, second = (rank["dropout"] for rank in found)
    assert first["outputs"] == second["outputs"]  # masks outside are the same, although 7 and 8 columns drew others
    assert len(first["inside"]) == 7
    assert len(second["inside"]) == 8
    assert first["inside"] != second["inside"][:7]


@pytest.mark.mpi
@pytest.mark.slow
@pytest.mark.parametrize("size", [3, 4])
def test_more_ranks_compute_what_one_does(size: int) -> None:
    cases = [[name, fuse] for name in GRAPHS for fuse in (True, False)]
    check(run_ranks(size, "tests.trainer.parallel.tensor.test_regions:parity", cases, timeout_s=240), cases)


def zoo_parity(mpi: MPIContext, name: str) -> dict[str, Any]:
    found, group = {}, group_of(mpi)
    for exporter in (
        exporter for exporter in ("dynamo-20", "legacy-17") if exporter in zoo.ARCHITECTURES[name].exporters
    ):
        for fuse in (True, False):
            module = to_module(zoo.export(name, exporter, folded=exporter == "legacy-17"), fuse=fuse)
            found[f"{exporter} {fuse}"] = compare(module, list(zoo.feed(name, 4).values()), mpi, group)
    return found


REGIONS = {"gpt2": 4, "bert": 5, "llama": 4, "t5": 5, "vit": 2, "transformer_classifier": 4, "mamba": 1}
"""The number of regions in real transformers, and in a state space model."""


@pytest.mark.mpi
@pytest.mark.slow
@pytest.mark.parametrize("name", zoo.ARCHITECTURES)
def test_exported_models_are_sharded_or_replicated_correctly(name: str) -> None:
    for rank in run_ranks(2, "tests.trainer.parallel.tensor.test_regions:zoo_parity", name, timeout_s=240):
        for case, result in rank.items():
            assert result["worst"] < 1e-4, (case, result)
            assert result["regions"] == REGIONS.get(name, result["regions"]), case
