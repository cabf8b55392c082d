"""Let an output be in the units of its labels while the graph before it computes standardised numbers.

    before   ... Gemm ------------------------------------------------------- y     numbers around 0
    after    ... Gemm -- y.standardised -- Mul(y.label_scale) -- Add(y.label_center) -- y     such as 4201 grams

With `log` the sum goes through exp(x) - 1 as well. The nodes are those of the file that is trained and exported, so
that layouts, checkpoints, metrics and verification need nothing else; the two constants are not trained. A file that
has them already, as one that was exported with them, stays as it is.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx
from onnx import helper, numpy_helper

from onward.trainer.config.losses import LabelUnits, LossConfig
from onward.trainer.errors import ConfigError
from onward.trainer.onnx_graph.files.index import Index, inner_graphs

SCALE = ".label_scale"
CENTER = ".label_center"
"""Behind the name of an output: the names of its constants."""


def has_label_units(graph: onnx.GraphProto, output: str) -> bool:
    """Return whether the file turns standardised numbers into this output."""
    return f"{output}{SCALE}" in {tensor.name for tensor in graph.initializer}


def add_output_units(model: onnx.ModelProto, losses: Sequence[LossConfig]) -> None:
    """Put the nodes behind the outputs of losses that standardise their labels, in place.

    Raises ConfigError for an output that is none of the file's, or whose shape does not say where the elements of the
    label are, and where `loss.output_units` is not chosen yet.
    """
    problems = list[str]()
    for loss in losses:
        if not isinstance(loss.standardise_label, LabelUnits):
            continue
        name = loss.outputs[0] or model.graph.output[0].name
        if has_label_units(model.graph, name) or loss.output_units == "label":
            continue
        if loss.output_units == "auto":
            problems.append(
                "loss.output_units 'auto' is chosen by the rehearsal, which was not made; set 'standardised' for a "
                "model with fresh weights, 'label' for one whose outputs are in the units of the labels"
            )
            continue
        try:
            _add_nodes(model, name, loss.standardise_label)
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(problems)


def _add_nodes(model: onnx.ModelProto, name: str, units: LabelUnits) -> None:
    graph = model.graph
    output = next((value for value in graph.output if value.name == name), None)
    index = Index(graph)
    maker = index.makers.get(name)
    if output is None or maker is None:
        raise ConfigError(
            f"loss.standardise_label: {name!r} is no output of the file that a node computes; let the loss read an "
            f"output ({', '.join(value.name for value in graph.output)})"
        )
    # such a reader would get numbers in other units under the same name
    if any(name in node.input for inner in inner_graphs(graph.node) for node in inner.node):
        raise ConfigError(f"loss.standardise_label: output {name!r} is read inside a loop or a branch of the file")
    # other nodes that read the output go on with the numbers that the graph computes
    inside = f"{name}.standardised"
    maker.output[list(maker.output).index(name)] = inside
    for reader in index.readers.get(name, ()):
        reader.input[:] = [inside if value == name else value for value in reader.input]
    dtype = helper.tensor_dtype_to_np_dtype(output.type.tensor_type.elem_type)
    shape = _shape_of_constants(output, units)
    for ending, numbers in ((SCALE, units.scale), (CENTER, units.center)):
        graph.initializer.append(numpy_helper.from_array(np.reshape(numbers, shape).astype(dtype), f"{name}{ending}"))
    # at the end: nothing reads the results of these nodes but the caller
    scaled = f"{name}.scaled"
    summed = f"{name}.log" if units.log else name
    nodes = [
        helper.make_node("Mul", [inside, f"{name}{SCALE}"], [scaled], scaled),
        helper.make_node("Add", [scaled, f"{name}{CENTER}"], [summed], f"{name}.units"),
    ]
    if units.log:
        one = numpy_helper.from_array(np.array(1, dtype), f"{name}.one")
        raised = f"{name}.exp"
        nodes += [
            helper.make_node("Constant", [], [one.name], one.name, value=one),
            helper.make_node("Exp", [summed], [raised], raised),
            helper.make_node("Sub", [raised, one.name], [name], f"{name}.from_log"),
        ]
    graph.node.extend(nodes)


def _shape_of_constants(output: onnx.ValueInfoProto, units: LabelUnits) -> tuple[int, ...]:
    """Return the shape in which the constants reach the axis of the label's elements: [k], or [k, 1] before others."""
    number = len(units.center)
    if number == 1:
        return (1,)
    lengths = [dim.dim_value for dim in output.type.tensor_type.shape.dim]
    # axis 0 is the batch
    axis = next((axis for axis in range(1, len(lengths)) if lengths[axis] == number), None)
    if axis is None:
        raise ConfigError(
            f"loss.standardise_label: the label has {number} numbers, and output {output.name!r} declares the shape "
            f"{[length or '?' for length in lengths]}, without an axis of that length"
        )
    return (number, *(1 for _ in lengths[axis + 1 :]))
