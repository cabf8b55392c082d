"""Add dropout where exporters remove it: on embeddings, residual branches and attention weights (`graph.dropout`).

    before   Gather(wte) + Gather(wpe) ------------- block ... x ---- linear ------------- add
    after    Gather(wte) + Gather(wpe) - Dropout --- block ... x ---- linear - Dropout --- add

Results in evaluation stay the same bit for bit, and the written file has no such node.
"""

from __future__ import annotations

from operator import attrgetter
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

from onward.trainer.onnx_import.ops.contributed.attention import grouped_attention
from onward.trainer.onnx_import.ops.gather import gather_rows
from onward.trainer.onnx_import.ops.norm import Dropout
from onward.trainer.onnx_import.passes.fused_attention import Attention
from onward.trainer.onnx_import.passes.rewriter import is_call

VIEWS = ("reshape", "view", "permute", "transpose", "flatten")


def add_dropout(module: fx.GraphModule, ratio: float) -> list[str]:
    """Add dropout to a graph in place; return a description of each place.

    Places are: the result of an embedding, after positions are added and a norm if the graph has them; each linear
    layer whose result is added to a value that it was computed from; the weights of fused attention. Where there is a
    Dropout already it is kept.
    """
    if ratio == 0:
        return []
    places = [
        *_drop_embeddings(module, ratio),
        *_drop_residual_branches(module, ratio),
        *_drop_attention_weights(module, ratio),
    ]
    module.graph.lint()
    module.recompile()
    return places


def _drop_embeddings(module: fx.GraphModule, ratio: float) -> list[str]:
    embeddings: dict[fx.Node, list[str]] = {}
    nodes: list[Any] = list(module.graph.nodes)
    for node in nodes:
        # positions computed from the length alone select rows too, but they are added to an embedding, which is found
        # by itself
        if is_call(node, gather_rows) and _is_weight(module, node.args[0]) and reads_input(node.args[1]):
            embeddings.setdefault(_with_positions(module, node), []).append(str(node.args[0].target))
        # a vision transformer has no embedding of ids: dropout goes where positions are added to the patches
        elif _adds_positions(module, node) and not embeddings:
            embeddings[node] = [str(arg.target) for arg in node.args if _is_weight(module, arg)]
    return [
        f"the embedding of {', '.join(dict.fromkeys(names))}"
        for node, names in embeddings.items()
        if _add_after(module, node, ratio)
    ]


def _with_positions(module: fx.GraphModule, node: fx.Node) -> fx.Node:
    """Return the sum of an embedding and positions, after a norm if one follows directly."""
    # as in GPT-2 and BERT: dropout is on the sum of all embeddings, not on each
    while len(node.users) == 1 and is_call(user := next(iter(node.users)), torch.add) and not _is_residual(user):
        node = user
    # a norm behind the embeddings is part of them: dropout follows it, as in BERT
    users = list(node.users)
    return users[0] if len(users) == 1 and is_call(users[0], F.layer_norm, F.rms_norm) else node


def _adds_positions(module: fx.GraphModule, node: Any) -> bool:
    """Return whether a node adds a learned table with a row for each position, as vision transformers do."""
    if not is_call(node, torch.add) or node.meta.get("rank") != 3:
        return False
    tables = [module.get_parameter(str(arg.target)) for arg in node.args if _is_weight(module, arg)]
    return any(table.ndim >= 2 and table.shape[-2] > 1 for table in tables)


def _drop_residual_branches(module: fx.GraphModule, ratio: float) -> list[str]:
    places = []
    for node in list(module.graph.nodes):
        if not is_call(node, torch.add):
            continue
        # a residual connection: one operand of the addition is computed from the other one
        for residual, branch in (node.args, node.args[::-1]):
            layer = _layer(branch)
            if layer is None or not _depends(branch, residual):
                continue
            if _add_after(module, branch, ratio):
                places.append(f"the residual branch of {_weight_name(module, layer)}")
            break
    return places


def _layer(branch: Any) -> fx.Node | None:
    """Return the linear layer whose result a value is, possibly reshaped; else None."""
    while is_call(branch, *VIEWS):
        branch = branch.args[0]
    return branch if isinstance(branch, fx.Node) and is_call(branch, F.linear, torch.matmul, torch.addmm) else None


def _weight_name(module: fx.GraphModule, layer: Any) -> str:
    """Return the path of a layer's matrix, or the name of the node if the matrix is computed."""
    for operand in layer.all_input_nodes:
        source = operand.all_input_nodes[0] if operand.target in ("t", torch.t) else operand
        if _is_weight(module, source) and source.meta.get("rank", 2) > 1:
            return str(source.target)
    return str(layer.name)


def _is_residual(node: Any) -> bool:
    first, second = node.args[:2]
    return _depends(first, second) or _depends(second, first)


def _depends(value: object, source: object) -> bool:
    """Return whether a value is computed from another one."""
    if not isinstance(value, fx.Node) or not isinstance(source, fx.Node) or source.op == "get_attr":
        return False
    seen = set()
    waiting = [value]
    while waiting:
        node = waiting.pop()
        if node is source:
            return value is not source
        # fx nodes compare by their position: nodes before the source cannot depend on it
        if node not in seen and node > source:
            seen.add(node)
            waiting += node.all_input_nodes
    return False


def _drop_attention_weights(module: fx.GraphModule, ratio: float) -> list[str]:
    places = []
    for node in list(module.graph.nodes):
        # a function would drop weights in evaluation as well; a module follows eval()
        if is_call(node, F.scaled_dot_product_attention, grouped_attention) and not node.kwargs.get("dropout_p"):
            node = _as_module(module, node)
        if node.op != "call_module":
            continue
        attention = module.get_submodule(str(node.target))
        if isinstance(attention, Attention) and attention.dropout == 0:
            attention.dropout = ratio
            places.append(f"the weights of {node.target}")
    return places


def _as_module(module: fx.GraphModule, node: fx.Node) -> fx.Node:
    """Replace an attention call by an Attention module, which follows train() and eval().

    Calls with other operands than the module has are returned unchanged.
    """
    known = {"attn_mask", "is_causal", "scale", "enable_gqa"}
    if len(node.args) != 3 or not set(node.kwargs) <= known or node.kwargs.get("scale") is None:
        return node
    # not the dropout itself: the caller sets it, as it does for attention that was a module before
    attention = Attention(
        scale=node.kwargs["scale"],  # type: ignore[arg-type]
        causal=bool(node.kwargs.get("is_causal")),
        dropout=0.0,
        grouped=bool(node.kwargs.get("enable_gqa")),
    )
    mask = node.kwargs.get("attn_mask")
    with module.graph.inserting_before(node):
        new = module.graph.call_module(_attach(module, "attention", attention), (*node.args, *([mask] if mask else [])))
    new.meta.update(node.meta)
    node.replace_all_uses_with(new)
    module.graph.erase_node(node)
    return new


def _add_after(module: fx.GraphModule, node: fx.Node, ratio: float) -> bool:
    """Add dropout after a node; return False if there is one already."""
    if any(
        user.op == "call_module" and isinstance(module.get_submodule(str(user.target)), Dropout) for user in node.users
    ):
        return False
    name = _attach(module, "dropout", Dropout(ratio).train(module.training))
    with module.graph.inserting_after(node):
        dropped = module.graph.call_module(name, (node,))
    # partitioning reads the ONNX names and shapes of a value from its meta data
    dropped.meta.update(node.meta)
    # all readers but the dropout itself, which was just made a reader
    node.replace_all_uses_with(dropped, delete_user_cb=lambda user: user is not dropped)
    return True


def _attach(module: fx.GraphModule, name: str, child: nn.Module) -> str:
    number = 0
    while hasattr(module, f"{name}_{number}"):
        number += 1
    module.add_module(f"{name}_{number}", child)
    return f"{name}_{number}"


def _is_weight(module: fx.GraphModule, value: object) -> bool:
    if not isinstance(value, fx.Node) or value.op != "get_attr":
        return False
    return isinstance(attrgetter(str(value.target))(module), nn.Parameter)


def reads_input(value: object) -> bool:
    """Return whether a value is computed from the elements of an input, not only from its shape."""
    seen = set()
    waiting = [value]
    while waiting:
        node = waiting.pop()
        if not isinstance(node, fx.Node) or node in seen or is_call(node, "size"):
            continue
        if node.op == "placeholder":
            return True
        seen.add(node)
        waiting += node.all_input_nodes
    return False
