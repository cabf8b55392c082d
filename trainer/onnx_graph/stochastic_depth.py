"""Stochastic depth as exporters write it: a random mask of zeros and ones over its mean, found among plain nodes.

    x / k * floor(k + uniform)      HF Swin, Segformer, ConvNeXt
    x * (bernoulli(k) / k)          timm, torchvision.ops.StochasticDepth; F.dropout1d, 2d and 3d, too
    x / k * (uniform < k)

Written for training, without a switch: only who knows the pattern can turn it off. A mask counts if its mean
times its factor is 1 (so that leaving it out is what eval() does), and if nothing else reads it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from google.protobuf.message import EncodeError  # type: ignore[import-untyped]
from onnx import helper, numpy_helper, shape_inference

from onward.trainer.onnx_graph.external_data import is_external, load_small_tensors

DOMAIN = "onward"
OPERATOR = "StochasticDepth"
"""The node that stands for a branch while a graph is imported; no file holds it."""

RANDOM = ("RandomUniform", "RandomUniformLike", "RandomNormal", "RandomNormalLike", "Bernoulli", "Multinomial")
SMALL = 64
"""Stored tensors up to this many elements may be constants of the pattern, or shapes."""

PASSED_ON = ("Identity", "Cast", "CastLike")
RELAID = (*PASSED_ON, "Reshape", "Squeeze", "Unsqueeze", "Expand")


@dataclass(frozen=True)
class Branch:
    """One value that training drops for whole samples."""

    value: str
    """What is dropped: the result without the mask."""
    result: str
    """The masked and scaled value, an output of one node."""
    drawn: str
    """The result of the random node."""
    keep: float
    """The share that is kept."""
    whole: int
    """The mask has a number for each index of so many leading dimensions: 1 is a sample, 2 a channel of one, 0 all."""

    @property
    def kind(self) -> str:
        return "stochastic depth" if self.whole < 2 else "dropout written out"


def find_branches(model: onnx.ModelProto, base: Path | None = None) -> list[Branch]:
    """Every branch of the main graph with a mask as described above. base: of external data, for its small tensors."""
    if not any(_is(node, *RANDOM) for node in model.graph.node):
        return []
    return list(_Finder(load_small_tensors(model, base)).found())


def mark_branches(model: onnx.ModelProto, found: Iterable[Branch]) -> onnx.ModelProto:
    """The model with one node of our own in place of each branch's last; the model itself if there is none."""
    places = {branch.result: branch for branch in found}
    if not places:
        return model
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    copy.opset_import.append(helper.make_opsetid(DOMAIN, 1))
    for node in copy.graph.node:
        if node.output and (branch := places.get(node.output[0])):
            own = helper.make_node(OPERATOR, [branch.value], [branch.result], name=node.name, domain=DOMAIN)
            own.attribute.append(helper.make_attribute("keep", branch.keep))
            own.attribute.append(helper.make_attribute("whole", branch.whole))
            node.CopyFrom(own)
    return copy


def random_nodes(model: onnx.ModelProto, found: Iterable[Branch] = ()) -> list[str]:
    """The names of all nodes that draw random numbers, but for those of branches; inner graphs and functions, too."""
    drawn = {branch.drawn for branch in found}
    nodes = (*model.graph.node, *(node for function in model.functions for node in function.node))
    return [node.name or node.output[0] for node in _deep(nodes) if _is(node, *RANDOM) and not drawn & set(node.output)]


def _deep(nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.NodeProto]:
    for node in nodes:
        yield node
        for attribute in node.attribute:
            for graph in [attribute.g] if attribute.HasField("g") else attribute.graphs:
                yield from _deep(graph.node)


def _is(node: onnx.NodeProto | None, *operators: str) -> bool:
    return node is not None and node.domain in ("", "ai.onnx") and node.op_type in operators


def _attributes(node: onnx.NodeProto) -> dict[str, Any]:
    return {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}


def _read(node: onnx.NodeProto) -> list[str]:
    names = list(node.input)
    return names[:1] if _is(node, "CastLike") else names  # of the other it takes the type alone


class _Finder:
    """A graph, by who computes and who reads each value."""

    def __init__(self, model: onnx.ModelProto) -> None:
        self.graph = graph = model.graph
        self.makers = {name: node for node in graph.node for name in node.output}
        self.readers = Counter([value.name for value in graph.output])
        self.readers.update(name for node in _deep(graph.node) for name in _read(node))
        for node in _deep(graph.node):
            for attribute in node.attribute:
                for inner in [attribute.g] if attribute.HasField("g") else attribute.graphs:
                    self.readers.update(value.name for value in inner.output)
        self.stored = {tensor.name: tensor for tensor in graph.initializer}
        self.dims = _dimensions(model)

    def found(self) -> Iterator[Branch]:
        for node in self.graph.node:
            if _is(node, "Mul"):
                for side in (0, 1):
                    if branch := self._branch(node, node.input[side], node.input[1 - side]):
                        yield branch
                        break

    def _branch(self, product: onnx.NodeProto, masked: str, value: str) -> Branch | None:
        scale, mask = self._scaled(masked)
        if (drawn := self._mask(mask)) is None:
            return None
        draw, keep = drawn
        result = product.output[0]
        if not _inverse(scale, keep):
            further, unscaled = self._scaled(value, alone=False)
            if _inverse(scale * further, keep):
                value = unscaled
            elif (after := self._divided(result)) and _inverse(scale * after[1], keep):
                result = after[0]
            else:
                return None
        if (whole := self._whole(draw, value)) is None:
            return None
        return Branch(value=value, result=result, drawn=draw.output[0], keep=keep, whole=whole)

    def _whole(self, draw: onnx.NodeProto, value: str) -> int | None:
        """Branch.whole of a mask; None if it is of another shape, or longer than what it masks."""
        lengths, own = self._drawn_lengths(draw), self.dims.get(value)
        if lengths is None or own is None or len(lengths) != len(own):
            return None
        whole = len(lengths)
        while whole and lengths[whole - 1] == 1:
            whole -= 1
        fits = all(None in (a, b) or a == b != 1 for a, b in zip(lengths[:whole], own[:whole], strict=True))
        if not fits or 1 in lengths[:whole]:
            return None
        return 1 if whole == 0 and own[:1] == [1] else whole  # for a batch of one: the file cannot tell the two

    def _scaled(self, name: str, *, alone: bool = True) -> tuple[float, str]:
        """A value as a number times another value. alone: only if nothing else reads it, whatever is passed on."""
        scale = 1.0
        while node := self._maker(name, alone=alone):
            if _is(node, *PASSED_ON) and alone:
                name = node.input[0]
            elif _is(node, "Div") and (number := self._number(node.input[1])):
                scale, name = scale / number, node.input[0]
            elif _is(node, "Mul") and (number := self._number(node.input[1])) is not None:
                scale, name = scale * number, node.input[0]
            elif _is(node, "Mul") and (number := self._number(node.input[0])) is not None:
                scale, name = scale * number, node.input[1]
            else:
                break
            if not alone:  # one factor is the mask's; a further one would be the value's own
                break
        return scale, name

    def _divided(self, name: str) -> tuple[str, float] | None:
        """(result, factor) of the one node that reads a value, if that scales it."""
        readers = [node for node in self.graph.node if name in node.input]
        if self.readers[name] != 1 or len(readers) != 1 or not _is(readers[0], "Mul", "Div"):
            return None
        scale, of = self._scaled(readers[0].output[0], alone=False)
        return (readers[0].output[0], scale) if of == name else None

    def _mask(self, name: str) -> tuple[onnx.NodeProto, float] | None:
        """(random node, share of ones) of a value that is zero or one at random."""
        node, inverted = self._maker(name), False
        while _is(node, *PASSED_ON, "Not"):
            assert node is not None
            inverted ^= node.op_type == "Not"
            node = self._maker(node.input[0])
        if node is None:
            return None
        draw: onnx.NodeProto | None = node
        keep: float | None = None
        if _is(node, "Bernoulli"):
            keep = self._number(node.input[0], single=False)
        elif _is(node, "Floor") and _is(sum_ := self._maker(node.input[0]), "Add"):
            assert sum_ is not None
            draw, keep = self._against_number(sum_)
        elif _is(node, "Less", "LessOrEqual", "Greater", "GreaterOrEqual"):
            draw, keep = self._against_number(node)
            below = node.op_type.startswith("Less") == (draw is not None and self._number(node.input[1]) is not None)
            inverted ^= not below
        if draw is None or keep is None or not self._uniform(draw) or not 0 < keep < 1:
            return None
        return draw, 1 - keep if inverted else keep

    def _against_number(self, node: onnx.NodeProto) -> tuple[onnx.NodeProto | None, float | None]:
        for one, other in (node.input, reversed(node.input)):
            if (number := self._number(other)) is not None:
                return self._through_casts(one), number
        return None, None

    def _through_casts(self, name: str) -> onnx.NodeProto | None:
        node = self._maker(name)
        while _is(node, *PASSED_ON):
            assert node is not None
            node = self._maker(node.input[0])
        return node

    def _uniform(self, draw: onnx.NodeProto) -> bool:
        """Whether a node draws from [0, 1), or a Bernoulli."""
        if _is(draw, "Bernoulli"):
            return True
        own = _attributes(draw)
        return _is(draw, "RandomUniform", "RandomUniformLike") and (own.get("low", 0.0), own.get("high", 1.0)) == (0, 1)

    def _maker(self, name: str, *, alone: bool = True) -> onnx.NodeProto | None:
        """The node that computes a value, if one other reads it."""
        return self.makers.get(name) if self.readers[name] == 1 or not alone else None

    # -- constants and shapes

    def _constant(self, name: str) -> np.ndarray | None:
        if (tensor := self.stored.get(name)) is not None:
            small = not is_external(tensor) and math.prod(tensor.dims) <= SMALL
            return numpy_helper.to_array(tensor) if small else None
        node = self.makers.get(name)
        if not _is(node, "Constant"):
            return None
        assert node is not None
        [value] = _attributes(node).values()
        return numpy_helper.to_array(value) if isinstance(value, onnx.TensorProto) else np.asarray(value)

    def _number(self, name: str, *, single: bool = True) -> float | None:
        """The number in a constant of one element, or if not `single` the one that all its elements are."""
        constant, node = self._constant(name), self.makers.get(name)
        if constant is None and node is not None and _is(node, *RELAID if not single else PASSED_ON):
            return self._number(node.input[0], single=single)
        if constant is None and node is not None and _is(node, "ConstantOfShape") and not single:
            fill = _attributes(node).get("value")
            return float(numpy_helper.to_array(fill).item()) if fill is not None else 0.0
        if constant is None or constant.dtype.kind not in "fiu" or constant.size == 0 or (single and constant.size > 1):
            return None
        first = constant.reshape(-1)[0]
        return float(first) if np.all(constant == first) else None

    def _drawn_lengths(self, draw: onnx.NodeProto) -> list[int | None] | None:
        """The shape a node draws: None for a length that is not known."""
        if _is(draw, "RandomUniform"):
            return list(_attributes(draw)["shape"])
        return self._lengths(draw.input[0]) or self.dims.get(draw.output[0]) or self.dims.get(draw.input[0])

    def _lengths(self, name: str) -> list[int | None] | None:
        """A shape that is put together from single lengths, as a file's own notes on shapes need not be there."""
        if (constant := self._constant(name)) is not None:
            return list(constant.shape)
        node = self.makers.get(name)
        if node is not None and _is(node, *PASSED_ON):
            return self._lengths(node.input[0])
        if node is None or not _is(node, "ConstantOfShape", "Expand"):
            return None
        shape = node.input[-1]
        if (constant := self._constant(shape)) is not None:
            return [int(length) for length in constant.reshape(-1)]
        parts = self.makers.get(shape)
        return [self._length(part) for part in parts.input] if parts is not None and _is(parts, "Concat") else None

    def _length(self, name: str) -> int | None:
        node, constant = self.makers.get(name), self._constant(name)
        if constant is None and node is not None and _is(node, *RELAID):
            return self._length(node.input[0])
        return int(constant.item()) if constant is not None and constant.size == 1 else None


def _inverse(scale: float, keep: float) -> bool:
    rounding = 2**-8  # bfloat16; but a mask that is not scaled at all is off by 1 - keep
    return abs(scale * keep - 1) <= min(rounding, (1 - keep) / 4)


def _dimensions(model: onnx.ModelProto) -> dict[str, list[int | None]]:
    """The shape of each value of the main graph whose rank is known, by ONNX's inference on a copy without weights."""
    lean = onnx.ModelProto(ir_version=model.ir_version, opset_import=model.opset_import, functions=model.functions)
    lean.graph.name = "lean"
    lean.graph.node.extend(model.graph.node)
    lean.graph.output.extend(model.graph.output)
    lean.graph.value_info.extend(model.graph.value_info)
    stored = {tensor.name for tensor in model.graph.initializer}
    lean.graph.input.extend(value for value in model.graph.input if value.name not in stored)
    for tensor in model.graph.initializer:
        if not is_external(tensor) and math.prod(tensor.dims) <= SMALL:
            lean.graph.initializer.append(tensor)
        else:
            lean.graph.input.append(helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims))
    values = [*model.graph.value_info, *model.graph.input]
    try:
        graph = shape_inference.infer_shapes(lean, data_prop=True).graph
        values = [*graph.value_info, *graph.input, *graph.output]
    except (RuntimeError, EncodeError, shape_inference.InferenceError):  # a graph it cannot follow
        pass
    return {
        value.name: [dim.dim_value if dim.HasField("dim_value") else None for dim in value.type.tensor_type.shape.dim]
        for value in values
        if value.type.tensor_type.HasField("shape")
    }
