"""Copies of one weight: exporters store a tied embedding a second time, often transposed. They are found again."""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from torch import fx, nn

from onward.trainer.onnx_graph.index import UNTIED
from onward.trainer.onnx_import.roles import Role
from onward.trainer.onnx_import.tensor_contents import is_distinctive

Copies = dict[str, tuple[str, bool]]
"""Name of a copy -> the weight it is a copy of, and whether it is its transpose."""

NUM_SAMPLES = 16


def find_copies(weights: Mapping[str, torch.Tensor], roles: Mapping[str, Role]) -> Copies:
    """The trained matrices (and tensors of more dimensions) that are copies of another one, bit by bit.

    A transpose is a copy whatever it is called. A tensor of the same layout is one only if an embedding is
    among the two and their names differ by more than numbers: equal layers of a fresh model (torch's
    TransformerEncoder begins with such) are equal by initialisation and must not be tied.
    """
    trained = [
        name
        for name, role in roles.items()
        if role.kind == "trained" and weights[name].ndim >= 2 and UNTIED not in name  # it was set apart on purpose
    ]
    looked_up = {name for name in trained if roles[name].operator.startswith("Gather")}
    seen: dict[tuple[object, ...], list[tuple[str, bool]]] = {}
    copies: Copies = {}
    for name in sorted(trained, key=lambda name: name not in looked_up):  # the embedding is the original
        tensor = weights[name]
        candidates = seen.get(_key(tensor), ())
        found = next((of for of in candidates if _is_copy(name, of, weights, looked_up)), None)
        if found is not None:
            copies[name] = found
            continue
        if is_distinctive(tensor):
            seen.setdefault(_key(tensor), []).append((name, False))
            if tensor.ndim == 2:
                seen.setdefault(_key(tensor.t()), []).append((name, True))
    return copies


def _key(tensor: torch.Tensor) -> tuple[object, ...]:
    """Type, shape and a few values: what copies have in common, and hardly any others."""
    places = [(torch.arange(NUM_SAMPLES) * (7919 + 104 * dim)) % length for dim, length in enumerate(tensor.shape)]
    return tensor.dtype, tuple(tensor.shape), bytes(tensor[tuple(places)].numpy().tobytes()) if tensor.numel() else b""


def _is_copy(name: str, of: tuple[str, bool], weights: Mapping[str, torch.Tensor], looked_up: set[str]) -> bool:
    original, transposed = of
    if not transposed and (original not in looked_up or _without_numbers(name) == _without_numbers(original)):
        return False
    return torch.equal(weights[name], weights[original].t() if transposed else weights[original])


def _without_numbers(name: str) -> str:
    return re.sub(r"\d+", "#", name)


def tie_copies(graph: fx.Graph, root: nn.Module, paths: Mapping[str, str], copies: Copies) -> None:
    """Let whatever reads a copy read its original, and take the copy off the module. paths: name -> path on `root`."""
    reads = {str(node.target): node for node in graph.nodes if node.op == "get_attr"}
    order = {node: place for place, node in enumerate(graph.nodes)}
    for name, (original, transposed) in copies.items():
        copy, read = reads[paths[name]], reads[paths[original]]
        if transposed:
            with graph.inserting_after(max(copy, read, key=order.__getitem__)):
                read = graph.call_function(torch.t, (read,))
            read.meta["rank"] = 2
        copy.replace_all_uses_with(read)
        graph.erase_node(copy)
        owner, _, leaf = paths[name].rpartition(".")
        delattr(root.get_submodule(owner), leaf)


def roles_of_copies(roles: Mapping[str, Role], copies: Copies) -> dict[str, Role]:
    """The roles, a copy's saying of what it is one."""

    def told(name: str, role: Role) -> Role:
        if name not in copies:
            return role
        original, transposed = copies[name]
        return Role("trained", f"a {'transposed ' if transposed else ''}copy of {original}, trained as one with it")

    return {name: told(name, role) for name, role in roles.items()}
