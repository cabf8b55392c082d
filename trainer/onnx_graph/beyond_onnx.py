"""What onnxruntime runs although ONNX's checker refuses it: one table, with what becomes of each.

Exporters, converters and scripts that edit files write such files, and nobody notices while onnxruntime runs them.

    kept        the import needs nothing of it: the checker gets a copy without it, the written file keeps it
    put right   nothing can work with it: the model is read in the form of ONNX, and the written file has that form
    refused     the file can be read in two ways: each sentence names the part, and what to do

A file with anything else that the checker refuses is refused by onnxruntime, too.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import onnx
from onnx import TensorProto, defs, helper

from onward.trainer.onnx_graph.files.index import (
    SMALL,
    domain_of,
    inner_graphs,
    innermost_type,
    names_read,
    nodes_inside,
    opsets_of,
    replace_entries,
    without_large_tensors,
)
from onward.trainer.onnx_graph.files.whole_models import without_initializers

OWN_NORMS = ("LayerNormalization", "SimplifiedLayerNormalization")
"""Operators that onnxruntime puts in ONNX's domain, where ONNX has them in later opsets or not at all."""

VALUE_FIELDS = ("raw_data", "float_data", "int32_data", "int64_data", "double_data", "uint64_data", "string_data")
"""The fields of a tensor of which one has its values."""

Rule = Callable[[onnx.ModelProto], Iterator[str]]
"""Changes a model in place and yields what it found, as a clause."""


# -- kept: changed in the copy for the checker alone


def _graph_without_name(model: onnx.ModelProto) -> Iterator[str]:
    if not model.graph.name:
        model.graph.name = "graph"
        yield "the graph has no name"


def _values_without_type_or_shape(model: onnx.ModelProto) -> Iterator[str]:
    """Give an input or an output a type of one dimension: the checker compares neither types nor ranks."""
    # types first: an output that gets one here has its shape, too, and is named once
    for value in model.graph.output:
        if value.type.WhichOneof("value") is None:
            value.type.tensor_type.elem_type = TensorProto.FLOAT
            value.type.tensor_type.shape.dim.add()
            yield f"output {value.name!r} declares no type"
    for what, values in (("input", model.graph.input), ("output", model.graph.output)):
        for value in values:
            kind = innermost_type(value)
            if kind.HasField("tensor_type") and not kind.tensor_type.HasField("shape"):
                kind.tensor_type.shape.dim.add()
                yield f"{what} {value.name!r} declares no shape"


def _initializers_that_are_no_inputs(model: onnx.ModelProto) -> Iterator[str]:
    # from IR version 4 on an initializer need not be an input
    if model.ir_version == 3:
        inputs = {value.name for value in model.graph.input}
        missing = [tensor.name for tensor in model.graph.initializer if tensor.name not in inputs]
        model.ir_version = 4
        if missing:
            yield f"{len(missing)} initializers are not listed as inputs ({missing[0]!r}), as IR version 3 wants"


def _second_name_of_the_domain(model: onnx.ModelProto) -> Iterator[str]:
    bodies = [model.graph.node, *(function.node for function in model.functions)]
    nodes = [node for body in bodies for node in nodes_inside(body)]
    renamed = [node for node in nodes if node.domain == "ai.onnx"]
    for node in renamed:
        node.domain = ""
    # the versions of the domain, too: the checker looks them up under the same name
    for part in (model, *model.functions):
        for entry in part.opset_import:
            entry.domain = domain_of(entry)
    if renamed:
        yield f"{len(renamed)} operators are written with the domain 'ai.onnx', which is the one without a name"


def _norms_of_onnxruntime(model: onnx.ModelProto) -> Iterator[str]:
    version = opsets_of(model).get("", 0)
    unknown = [name for name in OWN_NORMS if not defs.has(name, version, "")]
    named_alike = [node for node in model.graph.node if node.op_type in unknown]
    norms = [node for node in named_alike if not domain_of(node)]
    for node in norms:
        # the checker looks only at operators of domains that ONNX defines
        node.domain = "com.microsoft"
    if norms:
        # the copy may now have operators of a domain whose version it does not give
        list(_missing_opsets(model))
        yield f"{len(norms)} norms of onnxruntime are in ONNX's domain"


def _keys_given_twice(model: onnx.ModelProto) -> Iterator[str]:
    keys = [entry.key for entry in model.metadata_props]
    if twice := sorted({key for key in keys if keys.count(key) > 1}):
        model.ClearField("metadata_props")
        yield f"metadata has {twice[0]!r} twice"


def _tensors_without_name(model: onnx.ModelProto) -> Iterator[str]:
    if sum(_leave_out(model.graph.initializer, lambda tensor: not tensor.name)):
        yield "an initializer has no name, so that nothing can read it"


KEPT: tuple[Rule, ...] = (
    _graph_without_name,
    _values_without_type_or_shape,
    _initializers_that_are_no_inputs,
    _second_name_of_the_domain,
    _norms_of_onnxruntime,
    _keys_given_twice,
    _tensors_without_name,
)


# -- put right: changed in the model that is imported and written


def _initializers_listed_twice(model: onnx.ModelProto) -> Iterator[str]:
    """Leave out later listings of the same initializer; those of other contents have been refused."""
    seen = set[str]()

    def again(tensor: TensorProto) -> bool:
        known = bool(tensor.name) and tensor.name in seen
        seen.add(tensor.name)
        return known

    if removed := sum(_leave_out(model.graph.initializer, again)):
        yield f"{removed} initializers are stored a second time, with the same values"
    seen.clear()
    stored = {tensor.name for tensor in model.graph.initializer}

    def listed(value: onnx.ValueInfoProto) -> bool:
        known = value.name in stored and value.name in seen
        seen.add(value.name)
        return known

    if removed := sum(_leave_out(model.graph.input, listed)):
        yield f"{removed} initializers are listed as inputs twice"


def _missing_opsets(model: onnx.ModelProto) -> Iterator[str]:
    """Add the version of a domain whose operators here have one version only; others have been refused."""
    for domain, operators in _not_imported(model).items():
        version = max((version for name in operators for version in _versions(domain, name)), default=1)
        model.opset_import.append(helper.make_opsetid(domain, version))
        yield f"the version of the operators of {domain!r} is not given; they have one"


def _not_imported(model: onnx.ModelProto) -> dict[str, set[str]]:
    """Return the operators of each domain of ONNX and onnxruntime for which the model gives no version."""
    given = opsets_of(model)
    found = dict[str, set[str]]()
    known = {"com.microsoft", *(domain for domain, _ in _history())}
    for node in nodes_inside(model.graph.node):
        if (domain := domain_of(node)) in known and domain not in given:
            found.setdefault(domain, set()).add(node.op_type)
    return found


@functools.cache
def _history() -> dict[tuple[str, str], tuple[int, ...]]:
    """Return the versions of every operator of ONNX's domains."""
    found = dict[tuple[str, str], tuple[int, ...]]()
    for schema in defs.get_all_schemas_with_history():
        key = schema.domain, schema.name
        found[key] = (*found.get(key, ()), schema.since_version)
    return found


def _versions(domain: str, operator: str) -> tuple[int, ...]:
    return _history().get((domain, operator), ())


def _nodes_out_of_order(model: onnx.ModelProto) -> Iterator[str]:
    """Put the nodes of the main graph into an order in which each reads what stands before it."""
    graph = model.graph
    makers: dict[str, int] = {}
    for position, node in enumerate(graph.node):
        makers.update(dict.fromkeys(filter(None, node.output), position))
    # position of a node -> those of the nodes whose results it reads
    reads = [{makers[name] for name in makers.keys() & _outer_names(node)} for node in graph.node]
    if all(before < position for position, read in enumerate(reads) for before in read):
        return
    if (order := _sorted(reads)) is None:
        return  # a circle, which the checker refuses
    replace_entries(graph, node=[graph.node[at] for at in order])
    yield "its nodes are not in an order in which each reads what stands before it"


def _outer_names(node: onnx.NodeProto) -> set[str]:
    """Return the names that a node reads, without those that are local to its inner graphs."""
    local = set[str]()
    for graph in inner_graphs([node]):
        local.update(value.name for value in (*graph.input, *graph.initializer))
        local.update(name for inner in graph.node for name in inner.output)
    # an operand of the node itself is an outer name, even if an inner graph has a value of the same name
    return set(node.input) | (names_read(node) - local)


def _sorted(reads: list[set[int]]) -> list[int] | None:
    """Return the positions in an order in which each stands behind those that it reads; None if they read in a circle.

    The order of the file is kept where it can be.
    """
    # depth first without recursion, which a graph of thousands of nodes in a row would exhaust
    order = dict[int, None]()
    waiting = list(range(len(reads)))[::-1]
    begun = set[int]()
    while waiting:
        position = waiting[-1]
        missing = [read for read in sorted(reads[position], reverse=True) if read not in order]
        if not missing:
            # a dict, because a node that several read waits several times and has one place
            order[position] = None
            waiting.pop()
        elif position in begun:
            # it waits further down already: what it reads depends on its own result
            return None
        else:
            begun.add(position)
            waiting += missing
    return list(order)


PUT_RIGHT: tuple[Rule, ...] = (_initializers_listed_twice, _missing_opsets, _nodes_out_of_order)


# -- refused: sentences with a remedy


def _initializers_of_two_contents(model: onnx.ModelProto) -> Iterator[str]:
    first: dict[str, bytes] = {}
    for tensor in repeated_initializers(model):
        content = tensor.SerializeToString(deterministic=True)
        if first.setdefault(tensor.name, content) != content:
            yield (
                f"initializer {tensor.name!r} is stored twice, differently; onnxruntime takes the last one. Remove the "
                "wrong one from graph.initializer"
            )


def repeated_initializers(model: onnx.ModelProto) -> list[TensorProto]:
    """Return the initializers of the main graph whose name another one has."""
    times = Counter(tensor.name for tensor in model.graph.initializer)
    # those without a name are no repetitions: nothing can read them (`_tensors_without_name`)
    repeated = {name for name, count in times.items() if count > 1} - {""}
    return [tensor for tensor in model.graph.initializer if tensor.name in repeated]


def _tensors_of_two_contents(model: onnx.ModelProto) -> Iterator[str]:
    for tensor in model.graph.initializer:
        given = [name for name in VALUE_FIELDS if getattr(tensor, name)]
        if len(given) > 1:
            yield (
                f"initializer {tensor.name!r} has values in {' and in '.join(given)}, of which onnxruntime reads one; "
                "clear the others (tensor.ClearField)"
            )


def _unknown_opsets(model: onnx.ModelProto) -> Iterator[str]:
    for domain, operators in _not_imported(model).items():
        if changed := sorted(name for name in operators if len(_versions(domain, name)) > 1):
            yield (
                f"the file does not give the version of the operators of {domain or 'ai.onnx'!r}, and "
                f"{', '.join(changed[:3])} changed between versions; onnxruntime takes the newest that it knows. Add "
                f"the one that it was written for: model.opset_import.append(onnx.helper.make_opsetid({domain!r}, ...))"
            )


def _functions_of_another_opset(model: onnx.ModelProto) -> Iterator[str]:
    own = opsets_of(model)
    for function in model.functions:
        for domain, version in opsets_of(function).items():
            operators = {node.op_type for node in nodes_inside(function.node) if domain_of(node) == domain}
            # an operator has the same meaning in both versions if it did not change between them
            versions = (version, own.get(domain, version))
            since = {name: {_since(domain, name, number) for number in versions} for name in operators}
            if changed := sorted(name for name, changes in since.items() if len(changes) > 1):
                yield (
                    f"function {function.name!r} is written for version {version} of {domain or 'ai.onnx'!r} and the "
                    f"model for {own[domain]}, between which {', '.join(changed[:3])} changed; onnxruntime takes the "
                    "model's. Export both at one opset, or set the function's opset_import if the model's is meant"
                )


def _since(domain: str, operator: str, version: int) -> int:
    """Return the version in which an operator last changed, as of a version of its domain; 0 if it has none."""
    return max((since for since in _versions(domain, operator) if since <= version), default=0)


def _no_ir_version(model: onnx.ModelProto) -> Iterator[str]:
    if not model.ir_version:
        yield (
            "the file does not give its IR version, and onnxruntime refuses it; set model.ir_version = "
            "onnx.helper.find_min_ir_version_for(model.opset_import)"
        )


REFUSED: tuple[Rule, ...] = (
    _initializers_of_two_contents,
    _tensors_of_two_contents,
    _unknown_opsets,
    _functions_of_another_opset,
    _no_ir_version,
)


# -- what others call


def refused(model: onnx.ModelProto) -> list[str]:
    """Return a sentence for each part of a model that can be read in two ways."""
    return [problem for rule in REFUSED for problem in rule(model)]


def put_right(model: onnx.ModelProto) -> list[str]:
    """Change a model, in which nothing is refused, where nothing could work with it; return what was changed."""
    return [clause for rule in PUT_RIGHT for clause in rule(model)]


def departures(model: onnx.ModelProto) -> list[str]:
    """Return a clause for everything in a model that onnxruntime runs and the checker refuses."""
    light = _light(model)
    changed = [f"{clause} (put right)" for clause in put_right(light)]
    return [*changed, *(clause for rule in KEPT for clause in rule(light))]


def check(model: onnx.ModelProto) -> None:
    """Run ONNX's checker on what it looks at in a model, without what onnxruntime allows.

    Neither external data nor large tensors are read. Raises onnx.checker.ValidationError.
    """
    light = _light(model)
    for rule in (*PUT_RIGHT, *KEPT):
        list(rule(light))
    onnx.checker.check_model(without_large_tensors(light))


def _light(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a copy without the values of large tensors."""
    light = without_initializers(model)
    for tensor in model.graph.initializer:
        is_small = math.prod(tensor.dims) <= SMALL
        light.graph.initializer.append(
            tensor if is_small else TensorProto(name=tensor.name, data_type=tensor.data_type, dims=tensor.dims)
        )
    return light


def _leave_out(entries: Any, is_left_out: Callable[[Any], bool]) -> list[bool]:
    """Remove entries of a repeated field in place; return for each whether it was removed."""
    left_out = [is_left_out(entry) for entry in entries]
    # from the end: the positions before a removed one stay the same
    for position in range(len(left_out))[::-1]:
        if left_out[position]:
            del entries[position]
    return left_out


def is_note_of_a_tool(name: str) -> bool:
    """Return whether an attribute of this name is one that neither ONNX's checker nor onnxruntime looks at."""
    return name.startswith("__")
