"""Write a file that computes its own loss without it: for serving, where there are no labels.

features ---- network ---- prediction ---------------- prediction
                                 `---- loss ---- loss            without: the loss, its nodes, and the labels
labels ------------------------------'
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx

from onward.trainer.errors import ExportRefused
from onward.trainer.export.measuring.onnx_runner import Array
from onward.trainer.export.model_file import ModelFile
from onward.trainer.onnx_graph.files.index import nodes_between, replace_entries
from onward.trainer.onnx_graph.files.onnxruntime_session import open_session
from onward.trainer.onnx_graph.files.whole_models import MOST_BYTES, write_whole


def write_without_loss(
    exported: ModelFile, target: Path, losses: Sequence[str], feed: Mapping[str, Array], *, most: int = MOST_BYTES
) -> None:
    """Write the file without the outputs `losses`, and without the nodes, inputs and weights that only they need.

    feed: inputs, on which the outputs that are left must have the same bits. Raises ExportRefused if they do not, or if
    nothing is left.
    """
    model = exported.with_external_data()
    graph = model.graph
    names = [value.name for value in graph.output]
    # a loss without a name is the first output
    lost = {name or names[0] for name in losses} & set(names)
    kept = [name for name in names if name not in lost]
    if not lost or not kept:
        why = (
            "it has no output with a loss of its own" if kept else "the loss is its only output; nothing would be left"
        )
        raise ExportRefused(f"{exported.path.name} cannot be written without its loss: {why}")
    nodes, needed = nodes_between(graph, kept, set())
    outputs = [value for value in graph.output if value.name in kept]
    inputs = [value for value in graph.input if value.name in needed]
    tensors = [tensor for tensor in graph.initializer if tensor.name in needed]
    sparse = [tensor for tensor in graph.sparse_initializer if tensor.values.name in needed]
    replace_entries(graph, node=nodes, output=outputs, input=inputs, initializer=tensors, sparse_initializer=sparse)
    write_whole(model, target, most=most)
    onnx.checker.check_model(str(target))
    whole = open_session(exported.path)
    part = open_session(target)
    wanted = dict(zip(names, whole.run(None, dict(feed)), strict=True))
    found = part.run(None, {value.name: feed[value.name] for value in part.get_inputs()})
    for name, value in zip(kept, found, strict=True):
        if not np.array_equal(value, wanted[name], equal_nan=value.dtype.kind == "f"):
            raise ExportRefused(f"output {name!r} is not the same without the loss")
