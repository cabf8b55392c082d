"""Find stochastic depth (and dropout) that an exporter wrote as elementary nodes.

A residual branch x is multiplied by a random mask and divided by the mask's mean k, the share of samples that is kept:

    x / k * floor(k + uniform)      Hugging Face Swin, Segformer, ConvNeXt
    x * (bernoulli(k) / k)          timm, torchvision.ops.StochasticDepth, F.dropout1d, 2d and 3d
    x / k * (uniform < k)

ONNX has no operator for it and no switch between training and inference, so these nodes are replaced while the graph is
imported:

    before                                                              after

    RandomUniformLike --- Add(k) --- Floor ---+                         x --- onward.StochasticDepth(keep=k) --- Add
                                              Mul --- Add                                                         |
    x ------------------- Div(k) -------------+        |                residual ---------------------------------+
    residual ------------------------------------------+

A mask is recognised only if its mean times its factor is 1 (then leaving it out is what eval() does in PyTorch) and if
nothing else reads it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
from google.protobuf.message import EncodeError  # type: ignore[import-untyped]
from onnx import helper, shape_inference

from onward.trainer.onnx_graph.files.external_ranges import is_external
from onward.trainer.onnx_graph.files.index import (
    attributes_of,
    dims_of,
    inner_graphs,
    nodes_inside,
    nodes_of,
    without_large_tensors,
)
from onward.trainer.onnx_graph.files.model_files import stored_array
from onward.trainer.onnx_graph.files.operators import is_operator
from onward.trainer.onnx_graph.files.stored_protos import load_small_tensors

DOMAIN = "onward"
OPERATOR = "StochasticDepth"
"""The node that replaces a mask while a graph is imported. It is never written to a file."""

RANDOM = ("RandomUniform", "RandomUniformLike", "RandomNormal", "RandomNormalLike", "Bernoulli", "Multinomial")
SMALL = 64
"""Stored tensors up to this many elements may be constants of the pattern or shapes."""

NOISE = "onward.noise"
"""The input of the trained graph, and the column of a batch, from which its random numbers are made: int64 [B, 2]."""

IDENTITIES = ("Identity", "Cast", "CastLike")
BINARY = ("Mul", "Div", "Add", "Less", "LessOrEqual", "Greater", "GreaterOrEqual")
UNARY = (
    *IDENTITIES,
    "Not",
    "Floor",
    "Bernoulli",
    "RandomUniformLike",
    "RandomNormalLike",
    "Reshape",
    "Expand",
    "Shape",
)
OPERANDS = dict.fromkeys(BINARY, 2) | dict.fromkeys(UNARY, 1)
"""Operator -> the operands that it must have at least."""
KEEPS_ELEMENTS = (*IDENTITIES, "Reshape", "Squeeze", "Unsqueeze", "Expand")


@dataclass(frozen=True)
class Branch:
    """A value that training multiplies by a random mask."""

    value: str
    """The name of the value without the mask."""
    result: str
    """The name of the masked and scaled value."""
    drawn: str
    """The output of the random node."""
    keep: float
    """The probability that an element of the mask is 1."""
    mask_dims: int
    """The number of leading dimensions in which the mask varies: 0 for one number, 1 for one per sample, 2 for one per
    channel of each sample. The attribute of the node has the same name."""

    @property
    def kind(self) -> str:
        return "stochastic depth" if self.mask_dims < 2 else "dropout written out"


def find_branches(model: onnx.ModelProto, base: Path | None = None) -> list[Branch]:
    """Return every mask of the main graph as described above. base: the directory of external data."""
    # most files have none; shape inference below takes long for a large graph
    if not any(is_operator(node, *RANDOM) for node in model.graph.node) or not _is_ordered(model.graph):
        return []
    return list(_BranchFinder(load_small_tensors(model, base)).found())


def _is_ordered(graph: onnx.GraphProto) -> bool:
    """Return whether nodes read only what is computed before them, and operators below have their operands.

    A file is searched before it is checked: of one that is not, the check says what is wrong.
    """
    computed = {"", *(value.name for value in graph.input), *(tensor.name for tensor in graph.initializer)}
    computed |= {tensor.values.name for tensor in graph.sparse_initializer}
    for node in graph.node:
        operands = len([name for name in node.input if name])
        if not computed.issuperset(node.input) or operands < OPERANDS.get(node.op_type, 0) or not node.output:
            return False
        computed.update(node.output)
    return True


def mark_branches(model: onnx.ModelProto, found: Iterable[Branch]) -> onnx.ModelProto:
    """Return a copy of the model with an OPERATOR node in place of the last node of each mask."""
    by_result = {branch.result: branch for branch in found}
    if not by_result:
        return model
    copy = deepcopy(model)
    copy.opset_import.append(helper.make_opsetid(DOMAIN, 1))
    # the nodes of the mask stay in the copy, where nothing reads them
    for node in copy.graph.node:
        if node.output and (branch := by_result.get(node.output[0])):
            marked = helper.make_node(OPERATOR, [branch.value], [branch.result], name=node.name, domain=DOMAIN)
            marked.attribute.append(helper.make_attribute("keep", branch.keep))
            marked.attribute.append(helper.make_attribute("mask_dims", branch.mask_dims))
            node.CopyFrom(marked)
    return copy


def random_nodes(model: onnx.ModelProto, found: Iterable[Branch] = ()) -> list[str]:
    """Return the names of all nodes that draw random numbers, except those of `found`; inner graphs included."""
    drawn = {branch.drawn for branch in found}
    nodes = (*model.graph.node, *(node for function in model.functions for node in function.node))
    drawing = [node for node in nodes_inside(nodes) if is_operator(node, *RANDOM)]
    others = [node for node in drawing if not drawn & set(node.output)]
    return [node.name or next(iter(node.output), node.op_type) for node in others]


def draws_noise(model: onnx.ModelProto, base: Path | None) -> bool:
    """Return whether the graph draws random numbers of its own, in training and evaluation: noise, not a dropout.

    base: the directory of external data. Without the nodes in bodies of If, Loop and Scan.
    """
    drawing = [node for node in model.graph.node if is_operator(node, *RANDOM)]
    drawn = {name for node in drawing for name in node.output}
    return bool(drawn) and bool(drawn - {branch.drawn for branch in find_branches(model, base)})


def _values_read(node: onnx.NodeProto) -> list[str]:
    names = list(node.input)
    return names[:1] if is_operator(node, "CastLike") else names  # it reads only the type of the other one


class _BranchFinder:
    """Searches a graph for masks, with the producer and the number of readers of each value."""

    def __init__(self, model: onnx.ModelProto) -> None:
        self.graph = graph = model.graph
        self.makers = {name: node for node in graph.node for name in node.output}
        # an output counts as a reader: its value must stay what it is
        self.readers = Counter([value.name for value in graph.output])
        self.readers.update(name for node in nodes_of(graph) for name in _values_read(node))
        self.readers.update(value.name for inner in inner_graphs(graph.node) for value in inner.output)
        self.stored = {tensor.name: tensor for tensor in graph.initializer}
        self.dims = _known_dims(model)

    def found(self) -> Iterator[Branch]:
        for node in self.graph.node:
            if is_operator(node, "Mul"):
                # the mask may be either operand
                for side in (0, 1):
                    if branch := self._match_product(node, node.input[side], node.input[1 - side]):
                        yield branch
                        break

    def _match_product(self, product: onnx.NodeProto, masked: str, value: str) -> Branch | None:
        scale, mask = self._factor_and_operand(masked)
        if (drawn := self._bernoulli_mask(mask)) is None:
            return None
        draw, keep = drawn
        result = product.output[0]
        # the division by k may be on the value, or after the product, instead of on the mask
        if not _is_inverse(scale, keep):
            further, unscaled = self._factor_and_operand(value, alone=False)
            if _is_inverse(scale * further, keep):
                value = unscaled
            elif (after := self._scaled_after(result)) and _is_inverse(scale * after[1], keep):
                result = after[0]
            else:
                return None
        if (mask_dims := self._num_masked_dims(draw, value)) is None:
            return None
        return Branch(value=value, result=result, drawn=draw.output[0], keep=keep, mask_dims=mask_dims)

    def _num_masked_dims(self, draw: onnx.NodeProto, value: str) -> int | None:
        """Return Branch.mask_dims of a mask; None if its shape does not broadcast to that of the value."""
        lengths = self._drawn_lengths(draw)
        own = self.dims.get(value)
        # masks of fewer dimensions are aligned at the end, so that they do not vary from sample to sample
        if lengths is None or own is None or len(lengths) != len(own):
            return None
        # the trailing dimensions of length 1 are those over which the mask is broadcast
        mask_dims = len(lengths)
        while mask_dims and lengths[mask_dims - 1] == 1:
            mask_dims -= 1
        # the mask varies in the first dimensions and is broadcast over the others
        fits = all(None in (a, b) or a == b != 1 for a, b in zip(lengths[:mask_dims], own[:mask_dims], strict=True))
        if not fits or 1 in lengths[:mask_dims]:
            return None
        return 1 if mask_dims == 0 and own[:1] == [1] else mask_dims  # with a batch of 1 the two are equal in the file

    def _factor_and_operand(self, name: str, *, alone: bool = True) -> tuple[float, str]:
        """Return (number, operand) of a value that is number * operand.

        alone: follow any number of nodes, as long as each has one reader. Otherwise follow one multiplication only.
        """
        scale = 1.0
        while node := self._maker(name, alone=alone):
            if is_operator(node, *IDENTITIES) and alone:
                name = node.input[0]
            elif is_operator(node, "Div") and (number := self._number(node.input[1])):
                scale = scale / number
                name = node.input[0]
            elif is_operator(node, "Mul") and (number := self._number(node.input[1])) is not None:
                scale = scale * number
                name = node.input[0]
            elif is_operator(node, "Mul") and (number := self._number(node.input[0])) is not None:
                scale = scale * number
                name = node.input[1]
            else:
                break
            if not alone:  # a second factor belongs to the value, not to the mask
                break
        return scale, name

    def _scaled_after(self, name: str) -> tuple[str, float] | None:
        """Return (result, factor) of the only node that reads a value, if that node multiplies it by a number."""
        readers = [node for node in self.graph.node if name in node.input]
        if self.readers[name] != 1 or len(readers) != 1 or not is_operator(readers[0], "Mul", "Div"):
            return None
        scale, of = self._factor_and_operand(readers[0].output[0], alone=False)
        return (readers[0].output[0], scale) if of == name else None

    def _bernoulli_mask(self, name: str) -> tuple[onnx.NodeProto, float] | None:
        """Return (random node, probability of 1) of a value that is 0 or 1 at random, else None."""
        node = self._maker(name)
        inverted = False
        while is_operator(node, *IDENTITIES, "Not"):
            assert node is not None
            # an even number of Not nodes is none
            inverted ^= node.op_type == "Not"
            node = self._maker(node.input[0])
        if node is None:
            return None
        draw: onnx.NodeProto | None = node
        keep: float | None = None
        if is_operator(node, "Bernoulli"):
            keep = self._number(node.input[0], single=False)
        elif is_operator(node, "Floor") and is_operator(sum_ := self._maker(node.input[0]), "Add"):
            assert sum_ is not None
            draw, keep = self._drawn_and_number(sum_)
        elif is_operator(node, "Less", "LessOrEqual", "Greater", "GreaterOrEqual"):
            draw, keep = self._drawn_and_number(node)
            # uniform < p is 1 with probability p, and so is p > uniform; the other two orders give 1 - p
            below = node.op_type.startswith("Less") == (draw is not None and self._number(node.input[1]) is not None)
            inverted ^= not below
        if draw is None or keep is None:
            return None
        # with 0 or 1 nothing is random, and the division by k is impossible or the identity
        if not self._uniform(draw) or not 0 < keep < 1:
            return None
        return draw, 1 - keep if inverted else keep

    def _drawn_and_number(self, node: onnx.NodeProto) -> tuple[onnx.NodeProto | None, float | None]:
        for drawn, other in (node.input, reversed(node.input)):
            if (number := self._number(other)) is not None:
                return self._through_casts(drawn), number
        return None, None

    def _through_casts(self, name: str) -> onnx.NodeProto | None:
        node = self._maker(name)
        while is_operator(node, *IDENTITIES):
            assert node is not None
            node = self._maker(node.input[0])
        return node

    def _uniform(self, draw: onnx.NodeProto) -> bool:
        """Return whether a node draws uniformly from [0, 1) or from a Bernoulli distribution."""
        if is_operator(draw, "Bernoulli"):
            return True
        attributes = attributes_of(draw)
        limits = attributes.get("low", 0.0), attributes.get("high", 1.0)
        return is_operator(draw, "RandomUniform", "RandomUniformLike") and limits == (0, 1)

    def _maker(self, name: str, *, alone: bool = True) -> onnx.NodeProto | None:
        """Return the node that computes a value; if `alone`, only when the value has exactly one reader."""
        return self.makers.get(name) if self.readers[name] == 1 or not alone else None

    # -- constants and shapes

    def _constant(self, name: str) -> np.ndarray | None:
        if (tensor := self.stored.get(name)) is not None:
            small = not is_external(tensor) and math.prod(tensor.dims) <= SMALL
            return stored_array(tensor) if small else None
        node = self.makers.get(name)
        if not is_operator(node, "Constant"):
            return None
        assert node is not None
        [value] = attributes_of(node).values()
        return stored_array(value) if isinstance(value, onnx.TensorProto) else np.asarray(value)

    def _number(self, name: str, *, single: bool = True) -> float | None:
        """Return the number in a constant of one element; if not `single`, that of all elements of a uniform one."""
        constant = self._constant(name)
        if constant is None:
            return self._computed_number(name, single=single)
        most = 1 if single else constant.size
        if constant.dtype.kind not in "fiu" or not 1 <= constant.size <= most:
            return None
        first = constant.reshape(-1)[0]
        return float(first) if np.all(constant == first) else None

    def _computed_number(self, name: str, *, single: bool) -> float | None:
        """Return the same of a value that nodes compute from constants alone, such as a number that is expanded."""
        node = self.makers.get(name)
        if node is None:
            return None
        if is_operator(node, *(IDENTITIES if single else KEEPS_ELEMENTS)):
            return self._number(node.input[0], single=single)
        # its shape may be that of an input: only the number in it is constant
        if is_operator(node, "ConstantOfShape") and not single:
            fill = attributes_of(node).get("value")
            return float(stored_array(fill).item()) if fill is not None else 0.0
        return None

    def _drawn_lengths(self, draw: onnx.NodeProto) -> list[int | None] | None:
        """Return the shape that a random node draws, with None for unknown lengths."""
        if is_operator(draw, "RandomUniform"):
            return list(attributes_of(draw)["shape"])
        return self._lengths(draw.input[0]) or self.dims.get(draw.output[0]) or self.dims.get(draw.input[0])

    def _lengths(self, name: str) -> list[int | None] | None:
        """Return the shape of a value that is filled or expanded to a shape built by a Concat of lengths."""
        if (constant := self._constant(name)) is not None:
            return list(constant.shape)
        node = self.makers.get(name)
        if node is not None and is_operator(node, *IDENTITIES):
            return self._lengths(node.input[0])
        if node is None or not is_operator(node, "ConstantOfShape", "Expand"):
            return None
        shape = node.input[-1]
        if (constant := self._constant(shape)) is not None:
            return [int(length) for length in constant.reshape(-1)]
        # a length that is no constant, such as that of the batch, is unknown
        parts = self.makers.get(shape)
        if parts is None or not is_operator(parts, "Concat"):
            return None
        return [self._length(part) for part in parts.input]

    def _length(self, name: str) -> int | None:
        node = self.makers.get(name)
        constant = self._constant(name)
        if constant is None and node is not None and is_operator(node, *KEEPS_ELEMENTS):
            return self._length(node.input[0])
        return int(constant.item()) if constant is not None and constant.size == 1 else None


def _is_inverse(scale: float, keep: float) -> bool:
    rounding = 2**-8  # of bfloat16; below (1 - keep) / 4, because a mask without scaling is off by 1 - keep
    return abs(scale * keep - 1) <= min(rounding, (1 - keep) / 4)


def _known_dims(model: onnx.ModelProto) -> dict[str, list[int | None]]:
    """Return the shapes of the values of the main graph, by ONNX's shape inference on a copy without large tensors."""
    lean = without_large_tensors(model)
    values = [*model.graph.value_info, *model.graph.input]
    # data_prop: shapes that the graph itself computes, as those of the masks, are followed
    try:
        graph = shape_inference.infer_shapes(lean, data_prop=True).graph
        values = [*graph.value_info, *graph.input, *graph.output]
    except (RuntimeError, EncodeError, shape_inference.InferenceError):  # then only declared shapes are known
        pass
    return {value.name: dims for value in values if (dims := dims_of(value)) is not None}
