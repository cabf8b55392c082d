"""Read the entries of `parallel.cuts`, and find those that name no tensor of an ONNX file. No torch."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Iterator, Sequence

import onnx

from onward.trainer.onnx_graph.files.index import graphs_of


def names_of_cut(entry: str | Sequence[str], known: Collection[str]) -> list[str]:
    """Return the tensors that one entry of `parallel.cuts` names.

    An entry is one tensor, several, or a cut list of ONNX Runtime's `cut_group_info`: edges joined by `:`, each a
    tensor name that may be followed by `-consumer1/consumer2`.
    """
    edges = [entry] if isinstance(entry, str) else entry
    # a name in the file may itself hold a colon
    if isinstance(entry, str) and entry not in known:
        edges = entry.split(":")
    return [_tensor_of_edge(edge, known) for edge in edges]


def _tensor_of_edge(edge: str, known: Collection[str]) -> str:
    """Return the tensor without its consumers, unless a tensor of the file has the whole name, hyphen included."""
    if edge in known:
        return edge
    return edge.rpartition("-")[0] or edge


def unknown_tensors(names: Sequence[str], known: Iterable[str]) -> str:
    """Return the sentence about tensors that the graph does not compute."""
    close = difflib.get_close_matches(names[0], list(known), n=3, cutoff=0.3)
    nearest = f"; did you mean {', '.join(close)}?" if close else ""
    return f"parallel.cuts: the graph computes no tensor {', '.join(names)}{nearest}"


def unknown_cuts(model: onnx.ModelProto, cuts: Iterable[str | Sequence[str]]) -> Iterator[list[str]]:
    """Yield, for each entry, the names that are not in the file, if there are any.

    The import makes nodes with names of its own, which are Python identifiers and may be named, too.
    """
    known = tensors_of(model)
    for entry in cuts:
        if unknown := [name for name in names_of_cut(entry, known) if name not in known]:
            yield unknown


def tensors_of(model: onnx.ModelProto) -> dict[str, None]:
    """Return the names of all values of a file, in its order."""
    names: dict[str, None] = {}
    for graph in graphs_of(model.graph):
        names |= dict.fromkeys(value.name for value in (*graph.input, *graph.initializer))
        # an absent optional output has the name ""
        for node in graph.node:
            names |= dict.fromkeys(filter(None, node.output))
    return names
