"""Say which operator a node is and how it is named, and find the functions of a model."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase

import onnx

from onward.trainer.onnx_graph.files.index import domain_of

FunctionKey = tuple[str, str, str]
"""(domain, name, overload) of a function that a model defines itself."""


def is_operator(node: onnx.NodeProto | None, *operators: str) -> bool:
    """Return whether there is a node, and it is of one of these operators of ONNX's own domain."""
    return node is not None and node.op_type in operators and domain_of(node) == ""


def name_of(node: onnx.NodeProto) -> str:
    """Return the name of a node; if it has none, that of its first output."""
    return node.name or next(filter(None, node.output), "")


def matches_any(name: str, patterns: Iterable[str]) -> bool:
    """Return whether a name matches one of these globs."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def functions_of(model: onnx.ModelProto) -> dict[FunctionKey, onnx.FunctionProto]:
    """Return the functions that a model defines."""
    return {(function.domain, function.name, function.overload): function for function in model.functions}
