"""Find the tensors that a detector computes before it chooses among its boxes, which is not a result for each row.

    features --- boxes [N, boxes, 4] ------------------+------------------- Gather --- chosen [?, 4]
            '--- scores [N, classes, boxes] --- NonMaxSuppression --- indices --'

NonMaxSuppression has no gradient, and returns as many boxes as it keeps. TopK before a Gather chooses alike.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import onnx

from onward.trainer.onnx_graph.files.index import Index, names_read

LAYERS = frozenset(("Conv", "ConvTranspose", "Gemm", "MatMul", "LSTM", "GRU", "RNN", "RoiAlign"))
"""Operators behind which a choice is a part of the network, as of two-stage detectors, and no longer its end."""
GATHERS = frozenset(("Gather", "GatherElements", "GatherND"))
KEEPS_BOXES = frozenset((
    "Cast", "Identity", "ReduceMax", "Reshape", "Sigmoid", "Slice", "Softmax", "Split", "Squeeze", "Transpose",
    "Unsqueeze",
))  # fmt: skip
"""Operators that take boxes or scores out of one tensor of both."""


@dataclass(frozen=True)
class Selection:
    """The operator that chooses, and the tensors to train in place of what it has chosen."""

    operator: str
    tensors: tuple[str, ...]

    @property
    def remedy(self) -> str:
        """What to set."""
        named = " or ".join(map(repr, self.tensors))
        which = f"the tensor{'s' if len(self.tensors) > 1 else ''} before {self.operator}"
        several = "; a [[loss]] for each of them trains both" if len(self.tensors) > 1 else ""
        return f"set model.output to {named}, {which}{several}"


def selection_before(graph: onnx.GraphProto, output: str) -> Selection | None:
    """Return the choice after which an output comes; None if there is none between it and the last layers."""
    index = Index(graph)
    seen = set[str]()
    # breadth first, so that of two choices the one nearest to the output is found
    names = [output]
    while names:
        name = names.pop(0)
        node = index.makers.get(name)
        if node is None or name in seen or node.op_type in LAYERS:
            continue
        seen.update(node.output)
        if node.op_type == "NonMaxSuppression":
            return Selection(node.op_type, _tensors(index, node.input[:2]))
        if node.op_type in GATHERS and (chosen := _chosen_by_top_k(index, node.input[1])):
            return Selection("TopK", _tensors(index, (node.input[0], chosen)))
        names += sorted(names_read(node))
    return None


def _chosen_by_top_k(index: Index, indices: str) -> str:
    """Return the scores of which TopK gives these indices; "" if it does not."""
    for name, node in _path(index, indices):
        # its outputs are the chosen scores and their indices
        if node.op_type == "TopK":
            return str(node.input[0]) if name == node.output[1] else ""
    return ""


def _tensors(index: Index, read: Sequence[str]) -> tuple[str, ...]:
    """Return the one tensor that holds both boxes and scores; else the tensors themselves, computed ones alone."""
    paths = [_kept_tensors(index, name) for name in read]
    # from the operator backwards: the nearest tensor that is on all paths
    computed = [name for name in paths[0] if name in index.makers]
    for name in computed:
        if all(name in path for path in paths):
            return (name,)
    return tuple(dict.fromkeys(name for name in read if name in index.makers))


def _kept_tensors(index: Index, name: str) -> list[str]:
    """Return a tensor and those before it that hold its boxes or scores, among others."""
    return [name, *(node.input[0] for _, node in _path(index, name) if node.op_type in KEEPS_BOXES)]


def _path(index: Index, name: str) -> Iterator[tuple[str, onnx.NodeProto]]:
    """Yield (tensor, its node) as far back as nodes keep boxes, the first other node included."""
    seen = set[str]()  # a damaged file may have a circle
    while name not in seen and (node := index.makers.get(name)) is not None:
        seen.add(name)
        yield name, node
        if node.op_type not in KEEPS_BOXES:
            return
        name = node.input[0]
