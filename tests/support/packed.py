"""Weights of few bits in blocks: the way onnxruntime's operators store them, and what they mean."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

Array = np.ndarray[Any, np.dtype[Any]]


def pack(integers: Array, bits: int) -> Array:
    """Pack the last dimension into bytes, the lowest bits first."""
    each = 8 // bits
    padding = [(0, 0)] * (integers.ndim - 1) + [(0, -integers.shape[-1] % each)]
    parts = np.pad(integers, padding).astype(np.uint16).reshape(*integers.shape[:-1], -1, each)
    return np.bitwise_or.reduce(parts << (bits * np.arange(each, dtype=np.uint16)), -1).astype(np.uint8)


def contrib_model(
    node: onnx.NodeProto,
    inputs: dict[str, tuple[int, list[int | str]]],
    stored: dict[str, Array],
    outputs: dict[str, list[int | str]],
    before: tuple[onnx.NodeProto, ...] = (),
) -> onnx.ModelProto:
    """Return a model of one node of com.microsoft. inputs: name -> element type and shape."""
    node.domain = "com.microsoft"
    graph = helper.make_graph(
        [*before, node],
        "g",
        [helper.make_tensor_value_info(name, kind, shape) for name, (kind, shape) in inputs.items()],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in outputs.items()],
        [numpy_helper.from_array(np.asarray(value), name) for name, value in stored.items()],
    )
    imports = [helper.make_opsetid("", 20), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=imports, ir_version=9)


def matmul_nbits(
    *,
    bits: int = 4,
    columns: int = 64,
    rows: int = 6,
    block: int = 16,
    zero: str = "none",
    bias: bool = False,
    groups: bool = False,
    level: int = 0,
    seed: int = 0,
) -> tuple[onnx.ModelProto, Array]:
    """Return a MatMulNBits of `x` [n, columns], and its weights [rows, columns] in float64.

    zero: "none", "packed" or "float" zero points.
    """
    rng = np.random.default_rng(seed)
    blocks = -(-columns // block)
    integers = rng.integers(0, 2**bits, (rows, blocks, block))
    scales = (rng.random((rows, blocks)) * 0.1 + 0.01).astype(np.float32)
    stored: dict[str, Array] = {"packed": pack(integers, bits), "scales": scales}
    starts = np.full((rows, blocks), 2 ** (bits - 1), np.float64)
    names = ["x", "packed", "scales", "", "", ""]
    if zero == "packed":
        starts = rng.integers(0, 2**bits, (rows, blocks))
        stored["zero"], names[3] = pack(starts, bits), "zero"
    elif zero == "float":
        stored["zero"], names[3] = (rng.random((rows, blocks)) * 2**bits).astype(np.float32), "zero"
        starts = stored["zero"].astype(np.float64)
    at = np.arange(columns) // block
    if groups:
        at = rng.permutation(at)
        stored["groups"], names[4] = at.astype(np.int32), "groups"
    if bias:
        stored["bias"], names[5] = rng.standard_normal(rows).astype(np.float32), "bias"
    attributes = {"K": columns, "N": rows, "bits": bits, "block_size": block, "accuracy_level": level}
    node = helper.make_node("MatMulNBits", names, ["y"], name="product", **attributes)
    model = contrib_model(node, {"x": (TensorProto.FLOAT, ["n", columns])}, stored, {"y": ["n", rows]})
    flat = integers.reshape(rows, -1)[:, :columns].astype(np.float64)
    return model, (flat - starts[:, at]) * scales.astype(np.float64)[:, at]


def mixture(
    *,
    bits: int = 4,
    block: int = 16,
    has_zero: bool = False,
    activation: str = "silu",
    normalizes: bool = False,
    k: int = 2,
    mixing: bool = False,
    level: int = 0,
) -> tuple[onnx.ModelProto, onnx.ModelProto, dict[str, Array]]:
    """Return QMoE of 4 experts, MoE with the same weights dequantized, and inputs of both.

    block: 0 = one scale for each row. mixing: router_weights, which MoE does not have.
    """
    rng = np.random.default_rng(0)
    experts, features, width, tokens = 4, 32, 64, 9
    inner = 2 * width if activation == "swiglu" else width
    attributes: dict[str, Any] = {"k": k, "activation_type": activation, "normalize_routing_weights": int(normalizes)}
    if activation == "swiglu":
        attributes |= {"swiglu_fusion": 1, "activation_alpha": 1.702, "activation_beta": 1.0, "swiglu_limit": 2.0}
    packed: dict[str, Array] = {}
    floats: dict[str, Array] = {}
    for name, rows, columns in (("1", inner, features), ("2", features, width)):
        integers = rng.integers(0, 2**bits, (experts, rows, columns))
        blocks = columns // block if block else 1
        scales = (rng.random((experts, rows, blocks)) * 0.02 + 0.01).astype(np.float32)
        starts = rng.integers(0, 2**bits, scales.shape) if has_zero else np.full(scales.shape, 2 ** (bits - 1))
        packed["w" + name] = pack(integers, bits)
        packed["s" + name] = scales if block else scales[..., 0]
        if has_zero:
            packed["z" + name] = pack(starts if block else starts[..., 0], bits)
        weights = (integers - starts.repeat(columns // blocks, -1)) * scales.repeat(columns // blocks, -1)
        floats["w" + name] = weights.astype(np.float32)
        packed["b" + name] = floats["b" + name] = (rng.standard_normal((experts, rows)) * 0.1).astype(np.float32)
    zeros = ["z1", "z2", ""] if has_zero else ["", "", ""]
    operands = ["x", "r", "w1", "s1", "b1", "w2", "s2", "b2", "", "", "", *zeros, *(["m"] if mixing else [])]
    own = {"expert_weight_bits": bits, "accuracy_level": level} | ({"block_size": block} if block else {})
    inputs: dict[str, tuple[int, list[int | str]]] = {
        "x": (TensorProto.FLOAT, ["n", features]),
        "r": (TensorProto.FLOAT, ["n", experts]),
        **({"m": (TensorProto.FLOAT, ["n", experts])} if mixing else {}),
    }
    values = {
        "x": rng.standard_normal((tokens, features)).astype(np.float32),
        "r": rng.standard_normal((tokens, experts)).astype(np.float32),
        **({"m": rng.random((tokens, experts)).astype(np.float32)} if mixing else {}),
    }
    ends: dict[str, list[int | str]] = {"y": ["n", features]}
    node = helper.make_node("QMoE", operands, ["y"], name="experts", **attributes, **own)
    whole = helper.make_node("MoE", ["x", "r", "w1", "b1", "w2", "b2"], ["y"], name="experts", **attributes)
    plain = {name: value for name, value in inputs.items() if name != "m"}
    return contrib_model(node, inputs, packed, ends), contrib_model(whole, plain, floats, ends), values


def two_layers(kind: str) -> onnx.ModelProto:
    """Return x [n, 64] -> W [64, 6] -> Relu -> head [6, 4] of floats; W is stored as `kind` says."""
    rng = np.random.default_rng(1)
    head = helper.make_node("Gemm", ["h", "head", "b"], ["y"])
    relu = helper.make_node("Relu", ["z"], ["h"])
    stored = {"head": rng.standard_normal((6, 4)).astype(np.float32), "b": np.zeros(4, np.float32)}
    if kind.startswith("nbits"):
        packed, _ = matmul_nbits(bits=int(kind[-1]), zero="packed", bias=True)
        [product] = packed.graph.node
        product.output[0] = "z"
        nodes, tensors = [product], list(packed.graph.initializer)
    else:
        weight, dims = "w", (64, 6)
        nodes = [helper.make_node("DequantizeLinear", ["integers", "scale"], ["w"])]
        if kind == "transposed":
            dims, weight = (6, 64), "wt"
            nodes.append(helper.make_node("Transpose", ["w"], ["wt"], perm=[1, 0]))
        gemm = kind == "gemm"
        dims = (6, 64) if gemm else dims
        nodes.append(
            helper.make_node("Gemm" if gemm else "MatMul", ["x", weight], ["z"], **({"transB": 1} if gemm else {}))
        )
        integers = rng.integers(-8, 8, dims).astype(np.int8)
        four_bits = helper.make_tensor("integers", TensorProto.INT4, dims, integers.flatten().tolist())
        scale = numpy_helper.from_array(np.float32(0.05), "scale")
        tensors = [four_bits if kind == "int4" else numpy_helper.from_array(integers, "integers"), scale]
    graph = helper.make_graph(
        [*nodes, relu, head],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 64])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 4])],
        [*tensors, *(numpy_helper.from_array(value, name) for name, value in stored.items())],
    )
    imports = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=imports, ir_version=10)
