"""Find the copies that exporters store of one weight, and make them one parameter again.

Exporters store a tied embedding twice, often transposed. Without tying, the two would be trained apart:

    stored    E [vocab, width]    E_t [width, vocab] == E transposed, bit by bit

    before    ids ---- Gather(E) ---- ... ---- MatMul(E_t) ---- logits         2 parameters
    after     ids ---- Gather(E) ---- ... ---- MatMul(t(E)) --- logits         1 parameter, gradients of both summed

When the file is written, both E and E_t get the trained value.

torch's dynamo exporter stores a weight of a repeated layer once for each time that it folded it, and writes the name of
the weight that it came from beside each (exporter_records.py): such tensors are copies if they are equal.

    val_71 [in, out], folded from "layer.query.weight"   ==   val_145 [in, out], folded from "layer.query.weight"
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from torch import fx, nn

from onward.trainer.onnx_graph.files.index import UNTIED
from onward.trainer.onnx_import.roles.roles import Role
from onward.trainer.onnx_import.roles.tensor_contents import is_distinctive

Copies = dict[str, tuple[str, bool]]
"""Initializer name of a copy -> (initializer name of the original, whether the copy is its transpose)."""

NUM_SAMPLES = 16
"""Number of elements by which candidates are looked up before whole tensors are compared."""


def find_copies(weights: Mapping[str, torch.Tensor], roles: Mapping[str, Role], originals: Mapping[str, str]) -> Copies:
    """Return the trained tensors that are bitwise copies of another one.

    originals: stored tensor -> the weight that the exporter folded it from, as far as it is written. Equal tensors that
    were folded from one weight are copies. So is a transpose [n, m] of an [m, n], whatever the names. Any other tensor
    of two or more dimensions and the same layout is a copy only if one of the two is an embedding and the names differ
    by more than numbers: the layers of a fresh torch.nn.TransformerEncoder are equal because they were initialised
    alike, and must not be tied.
    """
    trained = []
    for name, role in roles.items():
        if role.kind != "trained" or UNTIED in name:  # model.untie separated these
            continue
        # a vector is a copy only where the exporter wrote that both were folded from one weight
        if weights[name].ndim >= 2 or name in originals:
            trained.append(name)
    embeddings = {name for name in trained if roles[name].operator.startswith("Gather")}
    seen: dict[tuple[object, ...], list[tuple[str, bool]]] = {}
    copies: Copies = {}
    for name in sorted(trained, key=lambda name: name not in embeddings):  # so that the embedding is the original
        tensor = weights[name]
        candidates = seen.get(_sample_key(tensor), ())
        original = next((of for of in candidates if _is_copy(name, of, weights, embeddings, originals)), None)
        # a copy does not become a candidate itself, so all copies point at one original and never at each other
        if original is not None:
            copies[name] = original
            continue
        # tensors of zeros or ones are equal by initialisation, not because they are one weight
        if is_distinctive(tensor):
            seen.setdefault(_sample_key(tensor), []).append((name, False))
            if tensor.ndim == 2:
                # looked up by the samples of its transpose, so a later tensor needs one lookup and not one comparison
                # for each earlier one
                seen.setdefault(_sample_key(tensor.t()), []).append((name, True))
    return copies


def _sample_key(tensor: torch.Tensor) -> tuple[object, ...]:
    """Return type, shape and NUM_SAMPLES elements, which are equal for copies and hardly ever for other tensors."""
    # a different stride for each dimension, so that the samples do not fall on one row or column
    places = [(torch.arange(NUM_SAMPLES) * (7919 + 104 * dim)) % length for dim, length in enumerate(tensor.shape)]
    return tensor.dtype, tuple(tensor.shape), bytes(tensor[tuple(places)].numpy().tobytes()) if tensor.numel() else b""


def _is_copy(
    name: str,
    of: tuple[str, bool],
    weights: Mapping[str, torch.Tensor],
    embeddings: set[str],
    origins: Mapping[str, str],
) -> bool:
    original, transposed = of
    same_origin = origins.get(name, name) == origins.get(original, original)
    tied_embedding = original in embeddings and _without_numbers(name) != _without_numbers(original)
    if not (same_origin or transposed or tied_embedding):
        return False
    # the samples may be equal by chance; only the whole tensors decide, and they are read for candidates alone
    return torch.equal(weights[name], weights[original].t() if transposed else weights[original])


def _without_numbers(name: str) -> str:
    return re.sub(r"\d+", "#", name)


def tie_copies(graph: fx.Graph, root: nn.Module, paths: Mapping[str, str], copies: Copies) -> None:
    """Make every reader of a copy read the original, and remove the copy from `root`.

    paths: initializer name -> path on `root`.
    """
    reads = {str(node.target): node for node in graph.nodes if node.op == "get_attr"}
    order = {node: place for place, node in enumerate(graph.nodes)}
    for name, (original, transposed) in copies.items():
        copy = reads[paths[name]]
        read = reads[paths[original]]
        if transposed:
            # after both nodes: the original must be read before it is transposed, and the copy's readers come later
            with graph.inserting_after(max(copy, read, key=order.__getitem__)):
                read = graph.call_function(torch.t, (read,))
            # passes read it, and the tracer has not seen this node
            read.meta["rank"] = 2
        copy.replace_all_uses_with(read)
        graph.erase_node(copy)
        owner, _, attribute = paths[name].rpartition(".")
        delattr(root.get_submodule(owner), attribute)


def roles_of_copies(roles: Mapping[str, Role], copies: Copies) -> dict[str, Role]:
    """Return the roles, with the original named in the reason of each copy."""

    def role_of(name: str, role: Role) -> Role:
        if name not in copies:
            return role
        original, transposed = copies[name]
        how = "transposed copy" if transposed else "copy"
        return Role("trained", f"a {how} of {original}, trained as one with it", written=role.written)

    return {name: role_of(name, role) for name, role in roles.items()}
