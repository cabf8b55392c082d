"""Say whether losses can be appended to a graph of some opset, and read one from an ONNX file in that opset.

    my_loss.onnx (opset 17)   output, labels -> Sub -> Mul -> ReduceMean -> loss       axes are an attribute
    for a graph of opset 20   output, labels -> Sub -> Mul -> ReduceMean -> loss       axes are an input since opset 18

Nodes stay as they are where both opsets have the same versions of their operators; else onnx's version converter adapts
them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

import onnx
from onnx import defs, helper, inliner, version_converter

from onward.trainer.errors import UnsupportedModel
from onward.trainer.onnx_graph.files.external_ranges import external_problems, load_external
from onward.trainer.onnx_graph.files.index import (
    all_tensors,
    domain_of,
    inputs_of,
    length_of,
    nodes_of,
    operator_of,
    opsets_of,
)
from onward.trainer.onnx_graph.files.model_files import read_model

Dim = TypeVar("Dim")

LEAST_OPSET = 13
"""The first opset with ReduceSum and Unsqueeze over axes that are inputs, and the current SoftmaxCrossEntropyLoss."""


def too_old(opset: int) -> str:
    """Return why no loss can be appended to a graph of an opset below `LEAST_OPSET`."""
    return (
        f"opset {opset} does not have the operators of a loss (SoftmaxCrossEntropyLoss, ReduceSum with axes as an "
        f"input), which needs {LEAST_OPSET}; convert the file first "
        f"(onnx.version_converter.convert_version(model, {LEAST_OPSET}))"
    )


def unknown_shape(output: str) -> str:
    """Return why the labels of an output without a declared shape cannot be an input."""
    return f"the file does not declare the shape of {output!r}, and so not that of its labels; declare it in the file"


def read_loss_file(path: Path, opset: int) -> onnx.ModelProto:
    """Return the loss without local functions, with all of its tensors, and in another opset.

    Its inputs are output and labels, and it has one output. Raises UnsupportedModel, with the opset and the operators,
    for a file that is no such loss, or that cannot be converted.
    """
    try:
        model = read_model(path)
        if problems := external_problems(model, path.parent):
            raise UnsupportedModel(problems)
        load_external(all_tensors(model), path.parent)
        model = inliner.inline_local_functions(model) if model.functions else model
    except Exception as error:  # of onnx, of the file system, of external data: they share no base
        raise UnsupportedModel(f"loss.file {path} cannot be read: {error}") from error
    inputs = inputs_of(model.graph)
    # the initializers that are listed as inputs would become operands of the loss
    del model.graph.input[:]
    model.graph.input.extend(inputs)
    if len(inputs) != 2 or len(model.graph.output) != 1:
        raise UnsupportedModel(
            f"loss.file {path} has {len(inputs)} inputs and {len(model.graph.output)} outputs; it must have two "
            "inputs, output and labels, and one output"
        )
    nodes = list(nodes_of(model.graph))
    if foreign := sorted({operator_of(node) for node in nodes if domain_of(node)}):
        raise UnsupportedModel(f"loss.file {path} has operators that are not ONNX's own: {', '.join(foreign)}")
    own = opsets_of(model).get("", 0)
    changed = sorted({node.op_type for node in nodes if _version(node, own) != _version(node, opset)})
    if changed:
        try:
            model = version_converter.convert_version(model, opset)
            onnx.checker.check_model(model, full_check=True)
        except Exception as error:  # the converter raises RuntimeError and its own errors, the checker further ones
            raise UnsupportedModel(
                f"loss.file {path} has opset {own}, and opset {opset} of the model has other versions of "
                f"{', '.join(changed)}, to which it cannot be converted ({str(error).splitlines()[0]}); export the "
                f"loss with opset {opset}"
            ) from error
    # nothing changed between the two opsets, or the converter has adapted the nodes
    del model.opset_import[:]
    model.opset_import.append(helper.make_opsetid("", opset))
    return model


def _version(node: onnx.NodeProto, opset: int) -> int:
    try:
        return int(defs.get_schema(node.op_type, opset, "").since_version)
    except defs.SchemaError:  # no operator of this opset
        return 0


def label_dims(path: Path, output: Sequence[Dim]) -> list[Dim | int]:
    """Return the shape of the labels that the loss of a file takes, for an output of this shape.

    A dimension of the labels is a number, or has the name of a dimension of the file's input `output`. One without a
    name is that of the output's axis of the same number. Raises UnsupportedModel for any other.
    """
    first, second = inputs_of(read_model(path).graph)
    names = [dim.dim_param for dim in first.type.tensor_type.shape.dim]
    known = {name: length for name, length in zip(names, output, strict=False) if name}
    lengths: list[Dim | int] = []
    for axis, dim in enumerate(second.type.tensor_type.shape.dim):
        if (length := length_of(dim)) is not None:
            lengths.append(length)
        elif dim.dim_param in known:
            lengths.append(known[dim.dim_param])
        # axis 0 is the batch of both, whatever the file calls it
        elif axis < len(output) and (axis == 0 or not dim.dim_param):
            lengths.append(output[axis])
        else:
            raise UnsupportedModel(
                f"loss.file {path}: the length of axis {axis} of its input {second.name!r} is not known; declare it "
                f"as a number, or with the name of a dimension of {first.name!r}"
            )
    return lengths
