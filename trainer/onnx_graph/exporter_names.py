"""Read names that exporters wrote: the module that a node was recorded in, origins of tensors, made-up names.

written by          where                                                              module
torch, dynamo       metadata name_scopes: ['', 'encoder', 'encoder.norm', 'linear_3']  encoder.norm
torch, TorchScript  the node's name: /encoder/encoder.0/norm/Mul                       encoder.0.norm
"""

from __future__ import annotations

import ast
import re

import onnx

NAME_SCOPES = "pkg.torch.onnx.name_scopes"
FOLDED_FROM = "pkg.onnxscript.optimizer.folded_from"
"""Keys of metadata: of a node, its modules; of a stored tensor, the values that it was computed from."""


def metadata(proto: onnx.ValueInfoProto | onnx.GraphProto | onnx.NodeProto) -> dict[str, str]:
    """Return the metadata of a value, a graph or a node as key -> value."""
    return {entry.key: entry.value for entry in proto.metadata_props}


def module_of_node(node: onnx.NodeProto) -> str | None:
    """Return the dotted path of the module in which a node was recorded ("": the outermost); None if it is not written.

    The TorchScript exporter numbers the calls of a module: the second call of `norm` is `norm_1`.
    """
    if scopes := list_of_names(metadata(node).get(NAME_SCOPES, "")):
        # the last one is the call itself; values that the exporter computes for itself belong to no module
        return scopes[-2] if len(scopes) > 1 and not scopes[-2].startswith("_empty") else None
    if not node.name.startswith("/"):
        return None
    path: list[str] = []
    # children of a Sequential or a ModuleList repeat the name of their parent: /blocks/blocks.0/conv1/conv1.0/Conv
    for scope in node.name[1:].split("/")[:-1]:
        if path and scope.startswith(path[-1] + "."):
            path.pop()
        path.append(scope)
    return ".".join(path)


def list_of_names(text: str) -> list[str]:
    """Return the names in the text of a Python list; none if it is not one."""
    try:
        names = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return []
    if not isinstance(names, list):
        return []
    return [name for name in names if isinstance(name, str)]


def is_exporter_name(name: str) -> bool:
    """Return whether an exporter generated the name; other names come from the author's module.

    In front of the name of a tensor of an inner graph or a function is that of its place (inner_tensors.py).
    """
    # onnx::MatMul_12, val_3, _17 and 42; what was folded or fused; the TorchScript exporter's /layer/Add_output_0
    return re.fullmatch(r"(.*/)?(onnx::\w+|val_\d+|_?\d+)|.*_(fold|fused)\w*|(.+/)?/.*_output_\d+", name) is not None
