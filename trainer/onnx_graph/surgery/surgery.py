"""Change an ONNX graph before training, as the settings under [model] say.

    apply_surgery(model, config.model, seed=0)       untie weights and replace the head, in place
    part = extract_subgraph(model, config.model)     the part from model.start to model.output, which is trained

    before    input ---- A ---- start ---- B ---- output ---- C ---- logits
    part                        start ---- B ---- output

Only onnx and numpy are needed, so that the configuration is checked by the code that changes the graph. Weights are
neither read nor moved: external data stays in its files.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from copy import deepcopy
from fnmatch import fnmatchcase

import onnx

from onward.trainer.config.loss_rules import LOSS_RULES
from onward.trainer.config.sections.model import ModelConfig
from onward.trainer.errors import ConfigError
from onward.trainer.onnx_graph.files.index import (
    SMALL,
    UNTIED,
    Index,
    did_you_mean,
    dims_of,
    known_types,
    nodes_between,
    part_with,
)
from onward.trainer.onnx_graph.files.operators import matches_any
from onward.trainer.onnx_graph.graph_parts import part_between
from onward.trainer.onnx_graph.outputs import is_numeric, unreadable_output, with_log_probabilities
from onward.trainer.onnx_graph.shared_parameters import Use, parameters_read
from onward.trainer.onnx_graph.surgery.new_detector_head import replace_detector_head
from onward.trainer.onnx_graph.surgery.new_head import replace_head
from onward.trainer.onnx_graph.surgery.row_layout import layout_problems

# -- what the file keeps


def apply_surgery(model: onnx.ModelProto, config: ModelConfig, *, seed: int) -> None:
    """Untie weights and replace the head in place, as `model.untie`, `model.num_classes` and `model.head` say.

    The same seed gives the same weights on every rank. Raises ConfigError with all problems at once, those of
    `extract_subgraph` and of `rows_first` included.
    """
    problems = [*layout_problems(model.graph, config), *_subgraph_problems(model, config)]
    problems += _untie(model.graph, config.untie)
    # in a graph with other problems the head would only give further ones
    if config.num_classes and not problems:
        replace = replace_detector_head if LOSS_RULES[config.loss].has_grid else replace_head
        problems += replace(model, config, seed=seed)
    if problems:
        raise ConfigError(problems)


def _untie(graph: onnx.GraphProto, patterns: Sequence[str]) -> list[str]:
    """Give every parameter that a matching weight stands for, except the first, its own copy.

    If the file says that the weight is one parameter, every node that reads it gets its own copy.
    """
    if not patterns:
        return []
    index = Index(graph)
    problems = []
    shared = {name: groups for name, found in parameters_read(graph).items() if len(groups := _groups(found)) > 1}
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in shared):
            matching = [name for name in index.stored if fnmatchcase(name, pattern)]
            if matching:
                problems.append(f"model.untie: {matching[0]!r} is read by one node only; there is nothing to untie")
            else:
                nearest = did_you_mean(pattern, shared or index.stored)
                problems.append(f"model.untie: no initializer matches {pattern!r}{nearest}")
    declared = {value.name: value for value in graph.value_info}
    for name, groups in shared.items():
        if matches_any(name, patterns):
            # the first one keeps the original and its name
            for number, uses in enumerate(groups[1:], start=1):
                copy = graph.initializer.add()
                copy.CopyFrom(index.stored[name])
                copy.name = f"{name}{UNTIED}{number}"
                for use in uses:
                    use.node.input[use.slot] = copy.name
                if name in declared:  # with what the exporter wrote about it
                    graph.value_info.add().CopyFrom(declared[name])
                    graph.value_info[-1].name = copy.name
    return problems


def _groups(found: Mapping[str, Sequence[Use]]) -> list[Sequence[Use]]:
    """Return the uses of each parameter; of each node if there is one parameter only."""
    if len(found) > 1:
        return list(found.values())
    nodes: dict[str, list[Use]] = {}
    for use in (use for uses in found.values() for use in uses):
        nodes.setdefault(next(filter(None, use.node.output), ""), []).append(use)
    return list(nodes.values())


# -- the part that is trained


def trains_subgraph(model: onnx.ModelProto, config: ModelConfig) -> bool:
    """Return whether a part of the graph is trained: by the settings, or because torch has no type for an output."""
    inner = {*config.outputs} - {"", *(value.name for value in model.graph.output)}
    return bool(inner) or bool(config.start) or not all(map(is_numeric, model.graph.output))


def extract_subgraph(model: onnx.ModelProto, config: ModelConfig) -> onnx.ModelProto:
    """Return the part of a graph that is trained: the nodes from `model.start` (or the inputs) to `model.output`.

    Returns the model itself if neither setting is an inner tensor and all outputs are numbers. The part's inputs are
    the graph's inputs that are still read, then the tensors of `model.start`; its only outputs are the tensors that the
    losses read. Raises ConfigError with all problems at once.
    """
    if problems := _subgraph_problems(model, config):
        raise ConfigError(problems)
    if not trains_subgraph(model, config):
        return model
    for name in config.outputs:
        model = with_log_probabilities(model, name)
    graph = model.graph
    types = known_types(model)
    outputs = config.named_outputs(graph.output[0].name)
    kept, needed = nodes_between(graph, outputs, set(config.start))
    part = part_with(model, kept)
    for node in part.graph.node:  # a node may compute a start tensor and another one that is still read
        for position, name in enumerate(node.output):
            if name in config.start:
                node.output[position] = f"{name}.before"
    own = [value for value in graph.input if value.name in needed]
    # an input of the graph may be named as the start of the part
    own_names = {value.name for value in own}
    starts = [start_type(model, types[name]) for name in config.start if name not in own_names]
    part.graph.input.extend([*own, *starts])
    part.graph.output.extend(types[name] for name in outputs)
    part.graph.initializer.extend(tensor for tensor in graph.initializer if tensor.name in needed)
    part.graph.sparse_initializer.extend(t for t in graph.sparse_initializer if t.values.name in needed)
    # declared types of values that the part computes: inputs and outputs have theirs already
    inside = {name for node in kept for name in node.output} - {*outputs, *config.start}
    weights = {tensor.name for tensor in part.graph.initializer}  # what the exporter wrote about them is there, too
    part.graph.value_info.extend(value for value in graph.value_info if value.name in inside | weights)
    part.graph.metadata_props.extend(graph.metadata_props)
    return part


def _subgraph_problems(model: onnx.ModelProto, config: ModelConfig) -> list[str]:
    for name in config.outputs:
        model = with_log_probabilities(model, name)
    index = Index(model.graph)
    outputs = [value.name for value in model.graph.output]
    read = config.named_outputs(outputs[0])
    computed = index.computed
    known = [*(name for name in computed if name not in outputs), *outputs]
    problems = []
    for key, names in (("model.output", filter(None, config.outputs)), ("model.start", config.start)):
        for name in names:
            if name in index.stored:
                problems.append(f"{key} {name!r} is a weight; name a tensor that is computed from the inputs")
            elif name not in known:
                problems.append(f"{key} {name!r} is not a tensor of the model{did_you_mean(name, known)}")
    # with what the file declares first: the inference of inner types takes long, and needs tensors that exist
    problems = problems or list(filter(None, [unreadable_output(model, output) for output in read]))
    if problems or not trains_subgraph(model, config):
        return problems
    _, needed = nodes_between(model.graph, read, set(config.start))
    computed_inside = index.makers.keys() - {*config.start}
    if ends := [output for output in read if output not in computed_inside]:
        return [
            f"model.output {output!r} is where the trained part begins; no node is left to train; name a later tensor"
            for output in ends
        ]
    problems += [
        f"model.start {name!r} is not on the way to {' or '.join(map(repr, read))}; leave it out"
        for name in config.start
        if name not in needed
    ]
    if not needed & {*config.start, *(value.name for value in model.graph.input if value.name not in index.stored)}:
        problems.append(f"model.output {read[0]!r} depends on none of the model's inputs")
    types = known_types(model)
    if unreadable := list(filter(None, [unreadable_output(model, output, types) for output in read])):
        return unreadable
    for name in (*config.start, *read):
        if name not in types or not types[name].type.tensor_type.elem_type:
            problems.append(
                f"the type of {name!r} is not declared in the file and cannot be inferred; begin or end elsewhere"
            )
    return problems


# -- complete the type of a tensor at which the trained part begins, where ONNX leaves lengths open that the file fixes
#
#     image [3, 320, 320] --- Resize --- Pad --- Unsqueeze --- start    ONNX [1, ?, ?, ?], onnxruntime [1, 3, 320, 320]
#
# onnxruntime folds the nodes that compute sizes when it opens a file; ONNX does not follow all of them.


def start_type(model: onnx.ModelProto, value: onnx.ValueInfoProto) -> onnx.ValueInfoProto:
    """Return the type of a start tensor with the lengths that onnxruntime knows; as it is behind nodes with weights."""
    dims = dims_of(value)
    if dims is not None and None not in dims[1:]:
        return value
    before = part_between(model, [value.name], ())
    if any(math.prod(tensor.dims) > SMALL for tensor in before.graph.initializer):
        return value
    # imported here because few files need it
    from onward.trainer.onnx_graph.files.onnxruntime_session import open_session

    try:
        shape = open_session(before).get_outputs()[0].shape
    except Exception:  # onnxruntime's errors have no common base class
        return value
    complete = deepcopy(value)
    entries = complete.type.tensor_type.shape.dim
    for place, length in enumerate(shape):
        entry = entries[place] if dims is not None else entries.add()
        if isinstance(length, int) and length > 0:
            entry.dim_value = length
    return complete if shape else value
