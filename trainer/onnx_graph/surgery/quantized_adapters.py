"""Add low-rank adapters (LoRA) beside products with quantized weights, as nodes of the file (`lora.weights`).

The sum of such a weight and an adapter cannot be stored, since the steps between its integers are coarser. So the file
keeps the weight byte for byte, and has the adapter as nodes of its own (Dettmers et al. 2023, arXiv:2305.14314):

    before   x ------ MatMulNBits(W) --------------------------------------------- y
    after    x --+--- MatMulNBits(W) --------------------------------------- Add - y
                 `-- MatMul(W.lora_a) -- Mul(alpha / rank) -- MatMul(W.lora_b) --'

    W.lora_a [inputs, rank], W.lora_b [rank, outputs]: ordinary weights for the import, the layouts and the export

A file that has them already, as one that was exported with them, is trained further: nothing is added to it.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx
from onnx import helper, numpy_helper

from onward.trainer.config.sections.model import LoraConfig
from onward.trainer.errors import ConfigError
from onward.trainer.onnx_graph.files.index import Index, attributes_of, replace_entries
from onward.trainer.onnx_graph.files.operators import is_operator, matches_any


@dataclass(frozen=True)
class _Product:
    """A node that multiplies its first operand by a quantized weight."""

    node: onnx.NodeProto
    inputs: int
    outputs: int
    element_type: int
    """The ONNX type of the operand and the result."""


def add_quantized_adapters(model: onnx.ModelProto, config: LoraConfig, *, seed: int) -> tuple[str, ...]:
    """Add an adapter beside every product whose quantized weight matches `lora.weights`, in place.

    Returns the names of the factors. The first one is drawn like torch's Linear, the second one is zero, so that the
    graph computes the same as before; the same seed gives the same bits. Raises ConfigError for an adapter that the
    file already has and that is another one than configured.
    """
    if not config.weights:
        return ()
    index = Index(model.graph)
    factors = list[str]()
    problems = list[str]()
    added: dict[str, list[onnx.NodeProto]] = {}
    for name, product in _quantized_products(index).items():
        if not matches_any(name, config.weights):
            continue
        a = f"{name}.lora_a"
        b = f"{name}.lora_b"
        factors += (a, b)
        if a in index.stored and b in index.stored:
            problems += _other_adapter(name, index, config)
            continue
        dtype = helper.tensor_dtype_to_np_dtype(product.element_type)
        # seeded by the name, so that a factor does not depend on which others there are
        bound = 1 / math.sqrt(product.inputs)
        generator = np.random.default_rng(zlib.crc32(f"{seed} {a}".encode()))
        drawn = generator.uniform(-bound, bound, (product.inputs, config.rank))
        zeros = np.zeros((config.rank, product.outputs))
        scale = np.array(config.alpha / config.rank)
        model.graph.initializer.extend(
            numpy_helper.from_array(values.astype(dtype), of)
            for of, values in ((a, drawn), (b, zeros), (_scale_of(name), scale))
        )
        nodes = _nodes_beside(product.node, name)  # which gives the product's result another name
        added[product.node.output[0]] = nodes
    if problems:
        raise ConfigError(problems)
    if added:
        # an adapter stands behind its product, whose result it reads: the order stays topological
        all_nodes: list[onnx.NodeProto] = []
        for node in model.graph.node:
            all_nodes += (node, *added.get(next(iter(node.output), ""), ()))
        replace_entries(model.graph, node=all_nodes)
    return tuple(factors)


def _quantized_products(index: Index) -> dict[str, _Product]:
    """Return, by the name of its weight, each product with a quantized weight that no other product reads."""
    by_weight: dict[str, list[_Product]] = {}
    for node in index.graph.node:
        if (product := _product(node, index)) is not None:
            by_weight.setdefault(product[0], []).append(product[1])
    return {name: products[0] for name, products in by_weight.items() if len(products) == 1}


def _product(node: onnx.NodeProto, index: Index) -> tuple[str, _Product] | None:
    """Return the weight of a product, and the product; None for all other nodes."""
    attributes = attributes_of(node)
    if node.op_type == "MatMulNBits":
        weight, scales = node.input[1:3]
        if weight in index.stored and scales in index.stored:
            return weight, _Product(node, attributes["K"], attributes["N"], index.stored[scales].data_type)
    if not is_operator(node, "MatMul", "Gemm"):
        return None
    # an adapter is added to x @ W itself, not to a multiple of it
    if node.op_type == "Gemm" and (attributes.get("transA", 0) or attributes.get("alpha", 1.0) != 1.0):
        return None
    # the stored integers are [outputs, inputs] behind one transposition, by Gemm or by a node, and not behind two
    transposed = bool(attributes.get("transB", 0))
    maker = index.makers.get(node.input[1])
    if maker is not None and maker.op_type == "Transpose":
        transposed = not transposed
        maker = index.makers.get(maker.input[0])
    if maker is None or maker.op_type != "DequantizeLinear" or maker.input[0] not in index.stored:
        return None
    dims = index.stored[maker.input[0]].dims
    scale = index.stored.get(maker.input[1])
    if len(dims) != 2 or scale is None:
        return None
    inputs, outputs = reversed(dims) if transposed else dims
    element_type = attributes_of(maker).get("output_dtype", 0) or scale.data_type
    return maker.input[0], _Product(node, inputs, outputs, element_type)


def _nodes_beside(product: onnx.NodeProto, name: str) -> list[onnx.NodeProto]:
    """Return the nodes of an adapter; the product's own result gets another name, and the sum the one it had."""
    # the readers of the result need no change: the sum has its name
    x = product.input[0]
    y = product.output[0]
    narrow, scaled, wide, before = (f"{name}.lora_{part}" for part in ("x", "scaled", "y", "before"))
    product.output[0] = before
    return [
        helper.make_node("MatMul", [x, f"{name}.lora_a"], [narrow], narrow),
        helper.make_node("Mul", [narrow, _scale_of(name)], [scaled], scaled),
        helper.make_node("MatMul", [scaled, f"{name}.lora_b"], [wide], wide),
        helper.make_node("Add", [before, wide], [y], f"{name}.lora"),
    ]


def _scale_of(name: str) -> str:
    return f"{name}.lora_scale"


def _other_adapter(name: str, index: Index, config: LoraConfig) -> Sequence[str]:
    """Return what of the adapter in the file is not what is configured."""
    rank = index.stored[f"{name}.lora_a"].dims[-1]
    # the file has alpha / rank, in the type of the product: hence the tolerance below
    stored = index.stored.get(_scale_of(name))
    alpha = float(numpy_helper.to_array(stored)) * rank if stored is not None else config.alpha
    problems = []
    if rank != config.rank:
        problems.append(f"lora.rank {config.rank}: the file has an adapter of rank {rank} beside {name!r}; set {rank}")
    elif not math.isclose(alpha, config.alpha, rel_tol=1e-3):
        problems.append(
            f"lora.alpha {config.alpha:g}: the file has an adapter with {alpha:g} beside {name!r}; set {alpha:g}"
        )
    return problems
