"""Check what onnxruntime's quantizer would do with a float model, and store its quantized weights as integers.

made for training      w (float) --- QuantizeLinear --- DequantizeLinear --- Conv
exported               w (int8) ----------------------- DequantizeLinear --- Conv       the same name
"""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase

import numpy as np
import onnx
from onnx import numpy_helper

from onward.trainer.config.sections.quantize import QuantizeConfig
from onward.trainer.onnx_graph.files.index import attributes_of, opsets_of
from onward.trainer.onnx_graph.files.model_files import stored_array
from onward.trainer.onnx_graph.files.operators import matches_any
from onward.trainer.onnx_graph.files.whole_models import MOST_BYTES

LEAST_OPSET = 13
"""From which QuantizeLinear has a scale for each channel."""


def quantizing_problems(model: onnx.ModelProto, settings: QuantizeConfig, *, size: int) -> list[str]:
    """Return why `quantize.aware` cannot insert its nodes into a model as configured. size: of its files, in bytes."""
    # imported here: it takes a second
    from onnxruntime.quantization.registry import QDQRegistry, QLinearOpsRegistry

    problems = []
    opset = opsets_of(model).get("", 0)
    if num_present := sum(node.op_type in ("QuantizeLinear", "DequantizeLinear") for node in model.graph.node):
        problems.append(
            f"quantize.aware: the file has {num_present} QuantizeLinear and DequantizeLinear nodes already, and is "
            "trained through them without this setting; set quantize.aware = false"
        )
    if opset < LEAST_OPSET:
        problems.append(
            f"quantize.aware needs opset {LEAST_OPSET} or newer, and the file has {opset}: export it again, or convert "
            f"it with onnx.version_converter.convert_version(model, {LEAST_OPSET})"
        )
    if size > MOST_BYTES:
        problems.append(f"quantize.aware: the file has {size:,} bytes; onnxruntime's quantizer writes up to 2 GB")
    known = {*QDQRegistry, *QLinearOpsRegistry}
    present = Counter(node.op_type for node in model.graph.node)
    for name in settings.op_types:
        if name not in known:
            near = difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.4) or sorted(known)
            problems.append(f"quantize.op_types: onnxruntime does not quantize {name!r}; did you mean {near[0]!r}?")
        elif name not in present:
            has = ", ".join(sorted(set(present) & known)) or "none that it quantizes"
            problems.append(f"quantize.op_types: the graph has no {name}; it has {has}")
    names = [node.name for node in model.graph.node]
    for pattern in settings.exclude:
        if not any(fnmatchcase(name, pattern) for name in names):
            near = (difflib.get_close_matches(pattern, names, n=1) or names)[0]
            problems.append(f"quantize.exclude: no node is named {pattern!r}; there is {near!r}")
    operators = settings.op_types or known
    left = [node for node in model.graph.node if node.op_type in operators]
    if not problems and not [*without(left, settings.exclude)]:
        problems.append(
            "quantize.aware: nothing would be quantized: the graph has no operator that onnxruntime quantizes, or "
            "quantize.exclude names all of them"
        )
    return problems


def without(nodes: Iterable[onnx.NodeProto], patterns: Iterable[str]) -> Iterator[onnx.NodeProto]:
    """Yield the nodes whose names match none of the patterns."""
    patterns = tuple(patterns)
    for node in nodes:
        if not matches_any(node.name, patterns):
            yield node


def output_steps(model: onnx.ModelProto) -> dict[str, float]:
    """Return output -> the scale with which it is quantized, for outputs that a DequantizeLinear computes."""
    stored = {tensor.name: tensor for tensor in model.graph.initializer}
    found = {}
    for node in model.graph.node:
        if node.op_type == "DequantizeLinear" and node.input[1] in stored:
            scale = stored_array(stored[node.input[1]])
            # with a scale for each channel there is no one step of the output
            if scale.size == 1:
                found[node.output[0]] = float(scale.reshape(()))
    return {value.name: found[value.name] for value in model.graph.output if value.name in found}


def store_integers(model: onnx.ModelProto) -> list[str]:
    """Store the weights that QuantizeLinear reads as integers, in place; return their names.

    A weight that another node reads, too, stays as it is.
    """
    graph = model.graph
    done = []
    stored = {tensor.name: tensor for tensor in graph.initializer}
    reads = Counter(name for node in graph.node for name in node.input)
    listed = {value.name for value in (*graph.input, *graph.output)}
    # a list, because the loop removes nodes from the graph
    for node in [node for node in graph.node if node.op_type == "QuantizeLinear"]:
        weight = node.input[0]
        parameters = [stored.get(name) for name in node.input[1:]]
        is_constant = weight in stored and len(parameters) == 2 and None not in parameters
        # under the weight's name others would read integers in place of floats
        is_shared = reads[weight] > 1 or weight in listed
        if not is_constant or is_shared:
            continue
        scale, zero = (numpy_helper.to_array(tensor) for tensor in parameters if tensor is not None)
        value = numpy_helper.to_array(stored[weight])
        axis = attributes_of(node).get("axis", 1)
        shape = [1] * value.ndim
        if scale.size > 1:
            shape[axis] = scale.size
        limits = np.iinfo(zero.dtype)
        # as ONNX defines QuantizeLinear: rounded half to even, then saturated
        nearest = np.rint(value / scale.reshape(shape)) + zero.reshape(shape).astype(np.float32)
        integers = np.clip(nearest, limits.min, limits.max).astype(zero.dtype)
        stored[weight].CopyFrom(numpy_helper.from_array(integers, weight))
        for reader in graph.node:
            reader.input[:] = [weight if name == node.output[0] else name for name in reader.input]
        graph.node.remove(node)
        done.append(weight)
    return done
