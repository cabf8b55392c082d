"""Find how long the rows of a batch may be where an index is out of range, and name the setting of their length.

ids [8, 128], 64 positions        128 fails, 64 runs, 96 fails, ... 65 fails        data.text.max_length = 64
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from onward.trainer.config.sections.data import DataConfig
from onward.trainer.data.batches.batches import Batch
from onward.trainer.data.reading.sources import locate
from onward.trainer.rehearsal.rehearsed_graph import RehearsedGraph

OUT_OF_RANGE = "index out of range"
"""What torch says where an index is beyond a table."""


def remedy_of_length(graph: RehearsedGraph, data: DataConfig, batch: Batch, why: str) -> str:
    """Return what to set where rows are longer than a table of the graph; "" where something else is wrong.

    why: the error of the batch. Runs the graph forward on shorter rows, about log2(length) times.
    """
    indices = [values for values in batch.inputs if not values.is_floating_point()]
    length = next((values.shape[1] for values in indices if values.ndim > 1), 0)
    if OUT_OF_RANGE not in why or length < 2:
        return ""
    # bisect: rows of `runs` run (0: none is known to), rows of `fails` do not
    runs = 0
    fails = length
    while fails - runs > 1:
        middle = (runs + fails) // 2
        runs, fails = (middle, fails) if _runs(graph, batch, length, middle) else (runs, middle)
    if not runs:
        return (
            "an index is beyond a table of the graph in rows of any length: compare the ids in the data, or those of "
            "the tokenizer, with the rows of the embedding"
        )
    if data.text is not None:
        setting = f"data.text.max_length = {runs}"
    elif data.format in ("auto", "text") and locate(data.source, data).format == "text":
        setting = f"data.sequence_length = {runs}"
    else:
        return f"rows of up to {runs} run: shorten the lists in the data to {runs} numbers"
    return f"rows of up to {runs} run, and rows of {fails} are beyond a table of the model: set {setting}"


def _runs(graph: RehearsedGraph, batch: Batch, length: int, shorter: int) -> bool:
    """Return whether the graph runs with all axes of the rows' length cut off at `shorter`."""
    try:
        graph.outputs(replace(batch, inputs=tuple(_cut(each, length, shorter) for each in batch.inputs)))
    except Exception:  # torch raises errors of many types
        return False
    return True


def _cut(tensor: Tensor, length: int, shorter: int) -> Tensor:
    for axis in range(1, tensor.ndim):
        if tensor.shape[axis] == length:
            tensor = tensor.narrow(axis, 0, shorter)
    return tensor
