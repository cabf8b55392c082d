"""Find the parameters of the exported network that a stored tensor stands for, by what the exporter wrote.

Exporters store parameters of equal value once. Which parameters they were is seen from where the tensor is read:

    stored                    read by                                                stands for
    bn.weight (ones) ----+--- BatchNormalization in module bn, as its scale          bn.weight
                         +--- the same node, as its variance                         bn.running_var
                         +--- BatchNormalization in module bn2, as its scale         bn2.weight
    a.bias (zeros) ------+--- Add in module a                                        a.bias
                         +--- Identity -> "b.bias" (torch's TorchScript exporter)    b.bias

A module that is called several times reads its tensors several times, and each of them is one parameter. If nothing is
written about a node, it counts as a layer of its own.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

import onnx

from onward.trainer.onnx_graph.exporter_names import (
    FOLDED_FROM,
    NAME_SCOPES,
    is_exporter_name,
    metadata,
    module_of_node,
)
from onward.trainer.onnx_graph.files.index import FLOAT_TYPES, Index, nodes_of

OPERANDS = {
    "BatchNormalization": {1: "weight", 2: "bias", 3: "running_mean", 4: "running_var"},
    "InstanceNormalization": {1: "weight", 2: "bias"},
    "LayerNormalization": {1: "weight", 2: "bias"},
    "GroupNormalization": {1: "weight", 2: "bias"},
    "SkipLayerNormalization": {2: "weight", 3: "bias", 4: "input bias"},
}
"""Operators that read several vectors of one length, which are different parameters."""

REARRANGING = {
    "Cast", "CastLike", "Concat", "Expand", "Gather", "Reshape", "Slice", "Split", "Squeeze", "Transpose", "Unsqueeze",
}  # fmt: skip
"""Operators of which several may read one parameter in one call of its module."""

MAX_MERGED = 1024
"""torch's dynamo exporter merges equal tensors of at most so many elements (onnx_ir.DeduplicateInitializersPass)."""


@dataclass(frozen=True, eq=False)
class Use:
    """An operand of a node that is a stored tensor."""

    node: onnx.NodeProto
    slot: int
    """Number of the operand."""
    parameter: str
    """The parameter of the network that it is; equal for all uses of one parameter."""
    module: str | None = None
    """Path of the module that reads it, if torch's dynamo exporter wrote it."""
    operand: str = ""
    """What the operand is to its node, such as "running_mean"; "" if it can be one thing only."""
    source: Literal["merge", "module", "node name", "nothing"] = "nothing"
    """What the exporter wrote: that it merged this parameter, the module, the module in the node's name, or nothing."""


def parameters_read(graph: onnx.GraphProto) -> dict[str, dict[str, list[Use]]]:
    """Return stored tensor -> parameter of the exported network -> where it is read.

    The parameter whose name the tensor has comes first, the others in the order of reading.
    """
    index = Index(graph)
    uses: dict[str, list[Use]] = defaultdict(list)
    outputs = {value.name for value in graph.output}
    modules = {prefix for name in index.stored for prefix in _prefixes(name)}
    merges = any(_named_merge(node) for node in graph.node)
    written = _Written(index, outputs, merges, modules)
    for node in nodes_of(graph):
        for slot, name in enumerate(node.input):
            if name in index.stored and node.op_type not in ("Shape", "Size"):  # these do not read its values
                uses[name] += _uses(node, slot, name, written)
    weights = {
        name: _Weight(origin, math.prod(index.stored[name].dims))
        for name, origin in _origins(graph, uses).items()
        if index.stored[name].data_type in FLOAT_TYPES
    }
    # only floats tell modules and calls apart: integers, such as shapes and axes, are read everywhere
    first_path = _first_paths(uses, weights)
    calls = _calls(uses, weights, first_path)
    parameters: dict[str, dict[str, list[Use]]] = {}
    for name, reads in uses.items():
        named = list(_numbered(reads, first_path, calls))
        # the sort is stable, and puts the parameter of the tensor's own name in front
        parameters[name] = {use.parameter: [] for use in sorted(named, key=lambda use: use.parameter != name)}
        for use in named:
            parameters[name][use.parameter].append(use)
    return parameters


@dataclass(frozen=True)
class _Weight:
    origin: str
    """The same for all tensors that were folded from one weight."""
    size: int


def _origins(graph: onnx.GraphProto, names: Iterable[str]) -> dict[str, str]:
    written = {value.name: metadata(value).get(FOLDED_FROM) for value in graph.value_info}
    return {name: written.get(name) or name for name in names}


def _named_merge(node: onnx.NodeProto) -> str:
    """Return the name of the parameter that an Identity of the TorchScript exporter stands for, else ""."""
    name = node.output[0] if node.op_type == "Identity" and re.fullmatch(r"Identity_\d+", node.name) else ""
    return "" if is_exporter_name(name) else name


@dataclass(frozen=True, eq=False)
class _Written:
    """What the whole graph says about its parameters."""

    index: Index
    outputs: set[str]
    merges: bool
    """Whether the TorchScript exporter named the parameters that it merged; another tool may have removed them."""
    modules: set[str]
    """Stored tensors, and the paths that their names begin with."""


def _uses(node: onnx.NodeProto, slot: int, name: str, written: _Written) -> Iterator[Use]:
    """Yield the uses of an operand, with the parameter that it is if one node says so; an Identity passes it on."""
    if node.op_type == "Identity" and node.output[0] not in written.outputs:
        alias = _named_merge(node)
        value = node.output[0]
        for reader in written.index.readers.get(value, ()):
            for position in (position for position, read in enumerate(reader.input) if read == value):
                for use in _uses(reader, position, name, written):
                    # a parameter of its own is untied at the Identity, which all of its readers read
                    yield replace(use, node=node, slot=slot, parameter=alias, source="merge") if alias else use
        return
    # the surest source first: a module that dynamo wrote, the tensor's own name, the node's name, the node
    operand = OPERANDS.get(node.op_type, {}).get(slot, "")
    module = module_of_node(node)
    if module is not None and NAME_SCOPES in metadata(node):
        yield Use(node, slot, "", module, operand, source="module")
    elif module is not None and written.merges and not is_exporter_name(name):
        yield Use(node, slot, name, operand=operand, source="module")
    elif module is not None:
        yield Use(node, slot, _first_call(module, written.modules), operand=operand, source="node name")
    else:
        output = next(filter(None, node.output), node.op_type)
        yield Use(node, slot, f"{output} {operand}".strip(), operand=operand)


def _first_call(module: str, modules: set[str]) -> str:
    """Return the path of a module without the numbers of calls: the second call of `norm` is `norm_1`.

    modules: the paths under which there are tensors; these are names of modules and not of calls.
    """
    path = ""
    for scope in module.split("."):
        path = f"{path}.{scope}".lstrip(".")
        if path not in modules:
            path = re.sub(r"_\d+$", "", path)
    return path


def _first_paths(uses: Mapping[str, list[Use]], weights: Mapping[str, _Weight]) -> dict[str, str]:
    """Return path of a module -> the first path of the same module: a ModuleList may contain one module twice.

    Two paths are one module if exactly the same weights are read under both, in the same places, and one of them has
    too many elements to have been merged.
    """
    reads: dict[str, set[tuple[str, str]]] = defaultdict(set)
    large: set[str] = set()
    # small weights of two modules may have been merged, because they were equal; a large one is read under two paths
    # only if both are one module
    for name, weight in weights.items():
        for use in uses[name]:
            for prefix in _prefixes(use.module or ""):
                reads[prefix].add((str(use.module)[len(prefix) :], weight.origin))
                if weight.size > MAX_MERGED:
                    large.add(prefix)
    # the shortest path first, of equal lengths the one that is read first
    first: dict[frozenset[tuple[str, str]], str] = {}
    return {
        path: first.setdefault(frozenset(weights_read), path)
        for path, weights_read in sorted(reads.items(), key=lambda item: len(item[0]))
        if path in large
    }


def _prefixes(path: str) -> Iterator[str]:
    """Yield a path and those of the modules around it, but for the outermost one: a.b.c, a.b, a."""
    while path:
        yield path
        path = path.rpartition(".")[0]


def _canonical(module: str, first_path: Mapping[str, str]) -> str:
    for prefix in _prefixes(module):
        if (path := first_path.get(prefix, prefix)) != prefix:
            return path + module[len(prefix) :]
    return module


def _calls(
    uses: Mapping[str, list[Use]], weights: Mapping[str, _Weight], first_path: Mapping[str, str]
) -> dict[str, int]:
    """Return path of a module -> how often it is called: as often as it reads the weight that it reads least often."""
    counts: dict[tuple[str, str, str], int] = defaultdict(int)
    for name, weight in weights.items():
        for use in uses[name]:
            if use.module is not None:
                counts[_canonical(use.module, first_path), weight.origin, use.operand] += 1
    # a weight that a module shares with itself is read more often than it is called: the least number is the calls
    calls: dict[str, int] = {}
    for (module, _, _), number in counts.items():
        for prefix in (*_prefixes(module), ""):
            calls[prefix] = min(number, calls.get(prefix, number))
    return calls


def _numbered(uses: list[Use], first_path: Mapping[str, str], calls: Mapping[str, int]) -> Iterator[Use]:
    """Yield the uses of one tensor, each with its parameter: module, operand and, if several are left, a number.

    A module that is called once and reads the tensor twice as the same operand has two such parameters: 1, 2. Called
    twice it reads them in the order 1, 2, 1, 2.
    """
    modules = [None if use.module is None else _canonical(use.module, first_path) for use in uses]
    places = [(module, use.operand) for module, use in zip(modules, uses, strict=True)]
    rearranged = {place for place, use in zip(places, uses, strict=True) if use.node.op_type in REARRANGING}
    seen: dict[tuple[str | None, str], int] = defaultdict(int)
    for use, module, place in zip(uses, modules, places, strict=True):
        if module is None:
            yield use
            continue
        times = places.count(place)
        times_called = calls.get(module, 1)
        # the number of parameters, if each call reads all of them; else every reading may be another one
        several = times // times_called if times % times_called == 0 else times
        if place in rearranged:
            several = 1
        # readings come call by call: in each call the parameters are counted anew
        number = f"{seen[place] % several + 1} of {several}" if several > 1 else ""
        seen[place] += 1
        label = ".".join(filter(None, (module, use.operand))) or "the outermost module"
        yield replace(use, parameter=f"{label} ({number})" if number else label)
