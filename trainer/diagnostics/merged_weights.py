"""Find the exported network's merged parameters, which train as one, and its separated ones, which train apart.

Exporters merge parameters of equal value: biases of zeros, scales of ones, the layers of a fresh
torch.nn.TransformerEncoder, even a scale of ones with a running variance of ones. A tensor that the author shares
(a tied embedding, a module that is called several times) is not reported as far as the file proves it.

A weight that a module uses several times is separated where an exporter folds something else into each use, such as the
BatchNormalization behind a convolution that all levels of a detector share, or the product with another weight.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping, Sequence

import onnx
import torch

from onward.trainer.onnx_graph.exporter_names import module_of_node
from onward.trainer.onnx_graph.shared_parameters import MAX_MERGED, Use, parameters_read
from onward.trainer.onnx_import.roles.roles import Role
from onward.trainer.onnx_import.roles.tensor_contents import is_distinctive

MIN_ELEMENTS = 4
"""Rows of fewer elements are not compared."""


def merged_weights(
    main: onnx.GraphProto, stored: Mapping[str, torch.Tensor], roles: Mapping[str, Role]
) -> dict[str, list[str]]:
    """Return the weights and running statistics that an exporter merged -> the parameters or nodes that they stand for.

    Where the exporter wrote which module a node belongs to, by these; elsewhere, judging by how often they are read.
    stored: name -> tensor, of any shape.
    """
    read = parameters_read(main)
    # for files in which nobody wrote which module a node belongs to
    often = _read_often(read, stored, roles)
    found = {}
    for name in _changing(stored, roles):
        parameters = read.get(name, {})
        uses = list(itertools.chain.from_iterable(parameters.values()))
        # one tensor cannot be both a scale and a variance, whoever wrote the file
        operands = {use.operand for use in uses if use.operand}
        if len(operands) > 1 or _is_merged(stored[name], parameters):
            found[name] = list(parameters)
        elif name in often and any(use.source == "nothing" for use in uses):
            found[name] = often[name]
    return found


def _is_merged(tensor: torch.Tensor, parameters: Mapping[str, list[Use]]) -> bool:
    """Return whether a tensor is several parameters by what the exporter wrote, and was not tied by the author."""
    # what the exporter wrote proves more than how often a tensor is read
    written = {name for name, uses in parameters.items() if uses[0].source != "nothing"}
    sources = {parameters[name][0].source for name in written}
    if len(written) < 2:
        return False
    # zeros and ones have no owner: equal ones are equal by chance, and the exporter merged them
    if "merge" in sources or not is_distinctive(tensor):
        return True
    # Equal random numbers: the author ties the weight, as in a head and its embedding, or copied the layers of a
    # network, whose names differ in numbers only.
    modules = {re.sub(r" \(.*", "", name) for name in written}
    # layer.0 and layer.1 become one name
    alike = {re.sub(r"\d+", "#", name) for name in modules}
    return len(alike) < len(modules) and not (sources == {"module"} and tensor.numel() > MAX_MERGED)


def _read_often(
    read: Mapping[str, Mapping[str, list[Use]]], stored: Mapping[str, torch.Tensor], roles: Mapping[str, Role]
) -> dict[str, list[str]]:
    """Return the tensors that are read more often than the layers of this network are repeated -> the nodes.

    A network may repeat whole layers, which reads its matrices as often as its vectors. So a vector is suspicious if it
    is read more often than the matrices are, and a matrix if all its elements are equal.
    """
    readers = {}
    for name, parameters in read.items():
        readers[name] = list(_nodes(itertools.chain.from_iterable(parameters.values())))
    changing = _changing(stored, roles)
    matrices = [name for name in changing if stored[name].ndim >= 2]
    # matrices of equal numbers are not trained yet, and may be merged themselves
    meaningful = {name for name in matrices if is_distinctive(stored[name])}
    # how often the layers of this network are repeated, by its matrices; not by embeddings, which a tied head reads too
    repeats = [len(readers.get(name, ())) for name in meaningful if not roles[name].operator.startswith("Gather")]
    usual = max([1, *repeats])
    suspicious = {name: readers.get(name, []) for name in changing if name not in meaningful}
    return {name: nodes for name, nodes in suspicious.items() if len(nodes) > usual}


def _changing(stored: Mapping[str, torch.Tensor], roles: Mapping[str, Role]) -> list[str]:
    """Return the stored tensors that training changes: weights, and running statistics."""
    changing = [name for name, role in roles.items() if role.kind in ("trained", "statistic")]
    return [name for name in changing if name in stored]


def _nodes(uses: Iterable[Use]) -> dict[str, None]:
    return {use.node.name or next(filter(None, use.node.output), use.node.op_type): None for use in uses}


def separated_weights(
    main: onnx.GraphProto, stored: Mapping[str, torch.Tensor], roles: Mapping[str, Role], originals: Mapping[str, str]
) -> list[list[str]]:
    """Return groups of weights that were one parameter and differ by factors of their rows or columns.

    stored: name -> tensor; those of [rows, columns, ...] are compared, with factors of [rows] or [columns].
    originals: stored tensor -> the weight that the exporter folded it from. Only tensors that the file assigns to one
    weight, or to the same operand of one module, are compared.
    """
    trained = [name for name, role in roles.items() if role.kind == "trained"]
    places: dict[object, list[str]] = {}
    read = parameters_read(main)
    for name in trained:
        # of a vector every other one is a multiple by factors of its elements
        if name not in stored or stored[name].ndim < 2:
            continue
        uses = itertools.chain.from_iterable(read.get(name, {}).values())
        written = [use for use in uses if use.source in ("module", "node name")]
        # one weight, or one operand of one module: what stands in the same place was one parameter
        for place in [originals.get(name, name), *((use.parameter, use.node.op_type, use.slot) for use in written)]:
            places.setdefault(place, []).append(name)
    found: dict[str, list[str]] = {}
    for names in places.values():
        # a tensor that is read several times at its place is there once
        first, *others = dict.fromkeys(names)
        # all are compared with the first one
        scaled = [name for name in others if _is_scaled(stored[first], stored[name])]
        if scaled:
            found.setdefault(first, [first]).extend(name for name in scaled if name not in found[first])
    return list(found.values())


def _is_scaled(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors differ, and each row, or each column, of one is a multiple of the other's."""
    if one.shape != other.shape or torch.equal(one, other):
        return False
    return any(_has_proportional_slices(one.transpose(0, dim), other.transpose(0, dim)) for dim in (0, 1))


def _has_proportional_slices(one: torch.Tensor, other: torch.Tensor) -> bool:
    # [rows, elements]; double, because the threshold is near the resolution of fp32
    rows = one.flatten(1).double()
    other_rows = other.flatten(1).double()
    if rows.shape[1] < MIN_ELEMENTS:  # two numbers may have any ratio
        return False
    # rows that are multiples of each other have the same direction, or the opposite one
    cosines = torch.nn.functional.cosine_similarity(rows, other_rows, dim=1).abs()
    # a row of zeros has no direction
    compared = (rows.abs().amax(1) > 0) & (other_rows.abs().amax(1) > 0)
    return bool(compared.any()) and bool((cosines[compared] > 1 - 1e-6).all())


def folded_products(trained: Iterable[str], folded: Mapping[str, Sequence[str]]) -> list[list[str]]:
    """Return groups of weights behind which is one parameter, of which one was folded from it and other parameters.

    trained: names of stored tensors. folded: stored tensor -> the parameters that the exporter computed it from.
    Several tensors of the same parameters are parts of one, such as query, key and value of a joint projection.
    """
    # a tensor that nothing was folded into is its own origin
    origins = {name: tuple(sorted(folded.get(name, (name,)))) for name in trained}
    found = []
    for name, parameters in origins.items():
        # tensors of exactly the same parameters are parts of one projection
        different = [other for other in origins if origins[other] != parameters]
        others = [other for other in different if not set(parameters).isdisjoint(origins[other])]
        if len(parameters) > 1 and others:
            found.append([*others, name])
    return found


def removed_biases(main: onnx.GraphProto, weights: Iterable[str]) -> list[str]:
    """Return the biases of the exported network that the file does not store, because all of their elements were 0.

    weights: the names of all weights of the exported network, by what the exporter wrote.
    """
    stored = {tensor.name for tensor in main.initializer}
    with_bias_input = [node for node in main.node if node.op_type in ("Conv", "ConvTranspose", "Gemm")]
    unbiased = [node for node in with_bias_input if not any(node.input[2:])]
    # exporters name the bias after its module, as state_dict does
    names = {f"{module}.bias" for node in unbiased if (module := module_of_node(node)) is not None}
    return [name for name in weights if name in names - stored]
