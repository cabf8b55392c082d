"""Find the stored scales of an ONNX graph that can follow what is trained (quantizer_scales.py).

A scale follows if it is stored in fp32, is positive, and is read by QuantizeLinear and DequantizeLinear alone, on one
weight or on one computed value and what only rearranges it. That of an int32 bias follows if it is the product of the
scales of input and weight. That of a weight may be read by Mul in their place (scaled_integers.py).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import onnx
import torch
from torch import Tensor

from onward.trainer.onnx_graph.files.index import attributes_of
from onward.trainer.onnx_import.quantization.quantized_weights import QuantizedWeight, scales_of
from onward.trainer.onnx_import.quantization.quantizer_scales import (
    INTEGER_TYPES,
    LOG_FACTOR,
    QDQ,
    RANGE,
    Quantizer,
    ScaleMode,
    greatest_values,
)
from onward.trainer.onnx_import.roles.scaled_integers import Readers
from onward.trainer.onnx_import.scaled_values import integer_bounds, scale_axis

log = logging.getLogger(__name__)

# fmt: off
WITHIN_RANGE = frozenset((
    "AveragePool", "DepthToSpace", "Dropout", "Expand", "Flatten", "Gather", "GlobalAveragePool", "Identity", "MaxPool",
    "Relu", "Reshape", "Resize", "Slice", "SpaceToDepth", "Split", "Squeeze", "Tile", "Transpose", "Unsqueeze",
))
"""Operators whose results lie in the range of their first operand and 0, so that they share its scale."""
NOT_POSITIVE = "it is not a positive fp32 number"
# fmt: on


def find_quantizers(
    graph: onnx.GraphProto,
    stored: Mapping[str, Tensor],
    floats: Mapping[str, Tensor],
    mode: ScaleMode,
    quantized: Mapping[str, QuantizedWeight],
) -> tuple[Quantizer, ...]:
    """Return the scales of the main graph that can follow what is trained; none where the mode is "frozen".

    stored: tensors as the file has them; floats: the same, integers dequantized; quantized: these integers. What stays
    as it is gets a line in the log, with the reason.
    """
    if mode == "frozen":
        return ()
    quantizers, frozen = _Search(graph, stored, floats, mode).run()
    for name in scales_of(quantized):
        of = [weight for weight, each in quantized.items() if each.scale_name == name]
        # a name without integers is a zero point, which stays
        multiplied = _of_multiplied(name, {weight: quantized[weight] for weight in of}, stored, mode) if of else None
        if isinstance(multiplied, Quantizer):
            quantizers = (*quantizers, multiplied)
        elif multiplied:
            frozen[name] = multiplied
    # one line for each reason, since files have hundreds of scales
    for why in dict.fromkeys(frozen.values()):
        names = [name for name, reason in frozen.items() if reason == why]
        log.info("%d scales of quantization stay as they are, such as %s: %s", len(names), names[0], why)
    return quantizers


def _of_multiplied(
    name: str, of: Mapping[str, QuantizedWeight], stored: Mapping[str, Tensor], mode: ScaleMode
) -> Quantizer | str:
    """Return how a scale that Mul reads follows the integers that it scales, or why it does not."""
    scale = stored[name]
    if not bool((scale > 0).all() & scale.isfinite().all()):
        return NOT_POSITIVE
    if len(of) > 1:
        return f"it is that of {len(of)} stored tensors"
    [(weight, integers)] = of.items()
    if integers.layout[1]:
        return "it is that of blocks, or of several axes"
    greatest = greatest_values(integers.dequantized(), integers.layout, scale.numel()).reshape(scale.shape)
    return Quantizer(
        kind="weight", mode=mode, scale=name, zero="", state=f"{name}{LOG_FACTOR}" if mode == "train" else "",
        initial=scale, initial_zero=torch.zeros(()), bounds=integers.bounds, moves_zero=False, layout=integers.layout,
        weight=weight, greatest=greatest,
    )  # fmt: skip


class _Search:
    """Looks at each stored scale of the main graph."""

    def __init__(
        self, graph: onnx.GraphProto, stored: Mapping[str, Tensor], floats: Mapping[str, Tensor], mode: ScaleMode
    ) -> None:
        self.stored = stored
        self.floats = floats
        self.mode = mode
        self.readers = Readers(graph)

    def run(self) -> tuple[tuple[Quantizer, ...], dict[str, str]]:
        """Return the quantizers, and why the other scales stay as they are, by name."""
        quantizing = [node for node in self.readers.nodes if node.op_type in QDQ]
        names = dict.fromkeys(node.input[1] for node in quantizing if len(node.input) > 1)
        results = {name: self._quantizer(name) for name in names if name in self.stored}
        # biases last: their scales are products of those of an input and a weight, which have to follow
        plain = {name: result for name, result in results.items() if isinstance(result, Quantizer)}
        results |= {name: self._bias(name, plain) for name, result in results.items() if result == "bias"}
        quantizers = tuple(result for result in results.values() if isinstance(result, Quantizer))
        return quantizers, {name: why for name, why in results.items() if isinstance(why, str)}

    def _quantizer(self, name: str) -> Quantizer | str:
        """Return how a scale follows, "bias" for that of an int32 bias, or why it does not follow."""
        scale = self.stored[name]
        readers = list(self.readers.of(name))
        if scale.dtype != torch.float32 or not scale.numel() or not bool((scale > 0).all() & scale.isfinite().all()):
            return NOT_POSITIVE
        read_as_scale = all(node.op_type in QDQ and position == 1 for _, node, position in readers)
        if name in self.readers.unknown or not read_as_scale:
            return "other operators than QuantizeLinear and DequantizeLinear read it"
        nodes = [node for _, node, _ in readers]
        zeros = {node.input[2] if len(node.input) > 2 else "" for node in nodes}
        computed = zeros - self.stored.keys() - {""}
        if len(zeros) > 1 or computed:
            return "its nodes have several zero points, or a computed one"
        zero = zeros.pop()
        # a scale that a stored tensor is read with belongs to that tensor, else to what the graph computes
        weights = {node.input[0] for node in nodes if node.input[0] in self.stored}
        dtype = self._type(zero, nodes, weights)
        if weights and all(self.stored[weight].dtype == torch.int32 for weight in weights):
            return "bias"
        if dtype not in INTEGER_TYPES:
            return f"its integers are {str(dtype).removeprefix('torch.')}"
        common = {"scale": name, "zero": zero, "mode": self.mode, "initial": scale, "bounds": integer_bounds(dtype)}
        first = self.stored[zero] if zero else torch.zeros(())
        common["initial_zero"] = first.float()
        if weights:
            return self._of_weight(name, weights, nodes, common)
        return self._of_activation(name, zero, nodes, first, common)

    def _type(self, zero: str, nodes: list[onnx.NodeProto], weights: set[str]) -> torch.dtype:
        if zero:
            return self.stored[zero].dtype
        integers = [self.stored[weight].dtype for weight in weights if not self.stored[weight].is_floating_point()]
        if integers:
            return integers[0]
        # uint8 is ONNX's default; with `output_dtype` the nodes have no integers that are known here
        plain = all(not attributes_of(node).get("output_dtype", 0) for node in nodes)
        return torch.uint8 if plain else torch.float32

    def _of_weight(
        self, name: str, weights: set[str], nodes: list[onnx.NodeProto], common: dict[str, Any]
    ) -> Quantizer | str:
        if len(weights) > 1:
            return f"it is that of {len(weights)} stored tensors"
        weight = weights.pop()
        # QuantizeLinear reads the weight itself, DequantizeLinear often what QuantizeLinear made of it
        computed = [node.input[0] for node in nodes if node.input[0] != weight]
        others = [value for value in computed if self._source(value) != weight]
        if others or weight not in self.floats or not self.floats[weight].is_floating_point():
            return "it is that of a weight and of a computed value"
        ndim = self.floats[weight].ndim
        attributes = [attributes_of(node) for node in nodes]
        axes = {values.get("axis", 1) for values in attributes}
        if len(axes) > 1 or any(values.get("block_size", 0) for values in attributes):
            return "it is that of blocks, or of several axes"
        axis = axes.pop()
        # for a single scale the axis has no meaning, and may be outside of the tensor
        layout = (scale_axis(axis, ndim), 0)
        count = self.stored[name].numel()
        value = self.floats[weight]
        if count > 1 and (not ndim or value.shape[layout[0]] != count):
            return "it is not one number for each index of an axis"
        shape = self.stored[name].shape
        greatest = greatest_values(value.detach(), layout, count).reshape(shape)
        state = f"{name}{LOG_FACTOR}" if self.mode == "train" else ""
        return Quantizer(
            kind="weight", state=state, moves_zero=False, layout=layout, weight=weight, greatest=greatest, **common
        )

    def _of_activation(
        self, name: str, zero: str, nodes: list[onnx.NodeProto], first: Tensor, common: dict[str, Any]
    ) -> Quantizer | str:
        if self.stored[name].numel() > 1:
            return "it is one of several for a computed value"
        quantizing = [node for node in nodes if node.op_type == "QuantizeLinear"]
        if not quantizing:
            return "no QuantizeLinear has it"
        if any(self._source(node.input[0], name) != name for node in quantizing[1:]) and self.mode == "recalibrate":
            return "it is that of several values"
        # int8 with the zero point 0 is symmetric; a zero point that other scales share cannot follow this one; where
        # it is the least integer, the node may stand for a Relu that the quantizer removed, and must go on cutting off
        shared = any(node.input[1] != name for _, node, _ in self.readers.of(zero))
        symmetric = first.dtype in (torch.int8, torch.int16) and not first.any()
        cuts = float(first) == common["bounds"][0]
        stays = shared or symmetric or cuts
        moves = bool(zero) and not stays and self.mode == "recalibrate"
        state = f"{name}{LOG_FACTOR if self.mode == 'train' else RANGE}"
        return Quantizer(kind="activation", state=state, moves_zero=moves, layout=(0, 0), **common)

    def _source(self, value: str, scale: str = "") -> str:
        """Follow what only rearranges a value up to a DequantizeLinear of a scale, or to a stored tensor; its name."""
        while value not in self.stored:
            node = self.readers.maker(value)
            if node is None:
                return ""
            if node.op_type == "DequantizeLinear" and node.input[1] == scale:
                return scale
            if node.op_type not in WITHIN_RANGE and not (node.op_type in QDQ and not scale):
                return ""
            value = node.input[0]
        return value

    def _bias(self, name: str, plain: Mapping[str, Quantizer]) -> Quantizer | str:
        """Return how the scale of an int32 bias follows those of the product it is added to."""
        scale = self.stored[name]
        pairs = set[tuple[str, str]]()
        nodes = [node for _, node, _ in self.readers.of(name)]
        for node in nodes:
            for _, reader, position in self.readers.of(node.output[0]):
                # operand 2 of Conv and Gemm is the bias, operands 0 and 1 are input and weight
                pair = self._scales_of(reader) if position == 2 else ("", "")
                if not set(pair) & plain.keys():
                    return "neither that of its input nor that of its weight follows"
                first, second = (self.stored.get(scale_name, torch.zeros(())) for scale_name in pair)
                if first.numel() != 1 or second.numel() not in (1, scale.numel()):
                    return "it is not the product of the scales of input and weight"
                # some tools round the product; any other number would not follow the two
                if not torch.allclose(first.reshape(()) * second.reshape(-1), scale.reshape(-1), rtol=1e-4, atol=0):
                    return "it is not the product of the scales of input and weight"
                pairs.add(pair)
        if len(pairs) != 1 or len({node.input[0] for node in nodes}) != 1:
            return "it is that of several products, or of none"
        pair = pairs.pop()
        zero = next((node.input[2] for node in nodes if len(node.input) > 2), "")
        first_zero = self.stored[zero].float() if zero in self.stored else torch.zeros(())
        return Quantizer(
            kind="bias", mode=self.mode, scale=name, zero=zero, state="", initial=scale, initial_zero=first_zero,
            bounds=(-(2**31), 2**31 - 1), moves_zero=False, layout=(0, 0),
            weight=nodes[0].input[0], reads=pair, factors=tuple(self.stored[each] for each in pair),
        )  # fmt: skip

    def _scales_of(self, product: onnx.NodeProto) -> tuple[str, str]:
        """Return the scales of both factors of a product, "" where they are not dequantized."""
        names = []
        for value in product.input[:2]:
            node = self.readers.maker(value)
            names.append(node.input[1] if node is not None and node.op_type == "DequantizeLinear" else "")
        return names[0], names[1]
