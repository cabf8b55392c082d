"""Give a detector with a grid another number of classes (`model.num_classes`): its boxes and objectness stay.

    before    Conv [64, 256] -- boxes ---.                                       after
              Conv [80, 256] -- scores --+-- Concat 144 -- Reshape [N, 144, -1] -- Split [64, 80] -- ... [N, 84, cells]
              Conv [3, 256]  -- scores --+-- Concat 67  -- Reshape [N, 67, -1]  -- Split [64, 3]  -- ... [N, 7, cells]

Only the channels of classes get new weights. Behind them the lengths that contain the number of classes are changed in
the shapes of Reshape and Expand and in the sizes of Split, wherever those are stored. The shapes of all results are
then inferred, and a graph that contradicts itself is refused.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import numpy_helper

from onward.trainer.config.loss_rules import LOSS_RULES, LossRule
from onward.trainer.config.sections.model import ModelConfig
from onward.trainer.errors import ConfigError
from onward.trainer.onnx_graph.files.external_ranges import array_of
from onward.trainer.onnx_graph.files.index import Index, attributes_of, dims_of, infer_types

USUAL_ANCHORS = 3
"""Of a cell, where one tensor of a family with anchors holds all channels, as in YOLOv3 to v7."""
RARE = 0.01
"""The probability of a class before training, with which focal losses begin (arXiv:1708.02002)."""
UNKNOWN = 0
"""A length that the graph computes."""
BETWEEN = frozenset(("Cast", "Concat", "Identity", "Squeeze", "Unsqueeze"))
"""Operators that put the lengths of a shape together."""


def replace_detector_head(model: onnx.ModelProto, config: ModelConfig, *, seed: int) -> list[str]:
    """Replace the channels of classes in the layers before the raw outputs; return the problems.

    The model may then be changed in part. The same seed gives the same weights on every rank.
    """
    index = Index(model.graph)
    try:
        scores, anchors, (first, kept), old = _scores(index, config)
    except ConfigError as error:
        return list(error.problems)
    # all levels may share their layers, as in RetinaNet
    for weight in dict.fromkeys(layer.input[1] for layer in scores):
        if any(reader not in scores for reader in index.readers[weight]):
            return [f"model.num_classes: layers elsewhere use {weight!r}, whose channels are classes; set model.untie"]
    channels = slice(first, first + old)
    before = {layer.output[0]: _channels(layer, index) for layer in scores}
    types = infer_types(model)
    distinct = {layer.input[1]: (layer, number) for layer, number in zip(scores, anchors, strict=True)}
    for layer, number in distinct.values():
        _replace_channels(layer, index, number, channels, config, seed=seed)
    lengths = {name: (length, _channels(index.makers[name], index)) for name, length in before.items()}
    return _adapt(model, types, lengths, (old + kept, config.num_classes + kept))


# -- the layers


def num_classes_of(model: onnx.ModelProto, config: ModelConfig) -> int:
    """Return the number of classes of a detector with a grid. Raises ConfigError as `replace_detector_head`."""
    return _scores(Index(model.graph), config)[-1]


def _scores(index: Index, config: ModelConfig) -> tuple[list[onnx.NodeProto], list[int], tuple[int, int], int]:
    """Return of each level the layer of the scores and its anchors; the channels of an anchor in front of its classes,
    and all that are none of its classes; the number of classes."""
    rule = LOSS_RULES[config.loss]
    levels = _by_level([_layer_before(name, index) for name in config.outputs if name], rule, index)
    # where one layer has the channels of all roles, the classes stand behind some of them
    joined = len(levels[0]) == 1
    first = sum(list(rule.roles.values())[: list(rule.roles).index("scores")]) if joined else rule.background
    kept = sum(rule.roles.values()) if joined else rule.background
    scores = [level[0 if joined else list(rule.roles).index("scores")] for level in levels]
    anchors = [_anchors_of(level, rule, index) for level in levels]
    olds = {_channels(layer, index) // number - kept for layer, number in zip(scores, anchors, strict=True)}
    if len(olds) != 1 or min(olds) < 1:
        raise ConfigError(
            f"model.num_classes: the levels of the raw outputs have different numbers of classes: {sorted(olds)}"
        )
    return scores, anchors, (first, kept), olds.pop()


def _by_level(layers: Sequence[onnx.NodeProto], rule: LossRule, index: Index) -> list[Sequence[onnx.NodeProto]]:
    """Return the layers of each level: one with the channels of all roles, or one for each role."""
    # raw outputs are named level by level, in the order of the roles
    number = len(rule.roles)
    channels = {_channels(layer, index) for layer in layers}
    # those of three roles have different channels, unless each layer has all of them
    has_all_roles = len(channels) == 1 and min(channels) > sum(rule.roles.values())
    if len(layers) == 1 or (number > 2 and has_all_roles):
        return [[layer] for layer in layers]
    if len(layers) % number:
        raise ConfigError(f"loss.output names {len(layers)} tensors, which {number} for each level do not divide")
    return [layers[start : start + number] for start in range(0, len(layers), number)]


def _layer_before(name: str, index: Index) -> onnx.NodeProto:
    node = index.makers.get(name)
    if node is not None and node.op_type == "Relu":  # behind distances, as FCOS has it
        node = index.makers.get(node.input[0])
    if node is None or node.op_type != "Conv" or node.input[1] not in index.stored:
        raise ConfigError(
            f"model.num_classes: raw output {name!r} is not the result of a convolution with stored weights; name the "
            "results of the last convolutions in loss.output"
        )
    return node


def _channels(node: onnx.NodeProto, index: Index) -> int:
    return int(index.stored[node.input[1]].dims[0])


def _anchors_of(level: Sequence[onnx.NodeProto], rule: LossRule, index: Index) -> int:
    """Return the anchors of a cell of a level."""
    if len(level) == 1:
        if not rule.has_anchors:
            return 1
        if not rule.by_level or _channels(level[0], index) % USUAL_ANCHORS:
            raise ConfigError(
                "model.num_classes: one tensor holds all channels of a level, and how many anchors they are of is not "
                "known; leave model.num_classes out, and train the first classes of the file"
            )
        return USUAL_ANCHORS
    channels = dict(zip(rule.roles, (_channels(layer, index) for layer in level), strict=True))
    anchors = max(1, channels["boxes"] // rule.roles["boxes"]) if rule.has_anchors else 1
    wanted = {role: anchors * number or channels[role] for role, number in rule.roles.items()}
    # of the scores nothing is known but that all anchors have as many
    if channels != wanted or channels["scores"] % anchors:
        raise ConfigError(
            f"loss.output: the tensors of a level have the channels {channels}, but of an anchor the loss reads "
            f"{dict(rule.roles)} (0 = any); name the raw outputs of this loss, or take the loss of the file "
            "(`onward init` finds it)"
        )
    return anchors


def _replace_channels(
    node: onnx.NodeProto, index: Index, anchors: int, channels: slice, config: ModelConfig, *, seed: int
) -> None:
    """Draw the channels of classes of weight and bias, and keep the others, anchor by anchor."""
    rule = LOSS_RULES[config.loss]
    for slot, name in enumerate(node.input[1:3], start=1):
        # those of a large file may still be in it
        stored = array_of(index.stored[name], config.path.parent)
        # [anchors, channels of one anchor, ...]
        by_anchor = stored.reshape(anchors, -1, *stored.shape[1:])
        shape = (anchors, config.num_classes, *stored.shape[1:])
        bound = 1 / math.sqrt(math.prod(index.stored[node.input[1]].dims[1:]))
        drawn = np.random.default_rng([seed, zlib.crc32(name.encode())]).uniform(-bound, bound, shape)
        if slot == 2 and not rule.background:
            # so that the many cells without an object do not outweigh the others at first
            drawn = np.full(shape, -math.log((1 - RARE) / RARE))
        # boxes, objectness and the background stay
        parts = [by_anchor[:, : channels.start], drawn.astype(stored.dtype), by_anchor[:, channels.stop :]]
        values = np.concatenate(parts, 1).reshape(-1, *stored.shape[1:])
        index.stored[name].CopyFrom(numpy_helper.from_array(values, name))


# -- what follows them


def _adapt(
    model: onnx.ModelProto,
    before: Mapping[str, onnx.ValueInfoProto],
    scores: Mapping[str, tuple[int, int]],
    of_anchor: tuple[int, int],
) -> list[str]:
    """Change lengths behind the layers of scores, and forget the declared ones; return the problems.

    before: the types of all results, as they were. scores: result of a layer -> its channels, before and from now on.
    of_anchor: the channels of one anchor, likewise.
    """
    index = Index(model.graph)
    # the length of the axis with the classes in each result that has them, before and from now on
    lengths = dict(scores)
    for node in model.graph.node:
        # what depends on the classes, in topological order
        read = [lengths[name] for name in node.input if name in lengths]
        if not read or node.op_type in ("Shape", "Size"):
            continue
        old, now = read[0]
        results = list(node.output)
        if node.op_type == "Expand" and _chooses_others(node, index, lengths):
            continue
        if node.op_type in ("Reshape", "Expand"):
            old, now = _reshaped(node, index, (old, now), of_anchor)
        elif node.op_type == "Gather" and _takes_last_class(node, index, old):
            return [
                f"model.num_classes: Gather {node.name!r} takes class {old - 1} by its number, as files do that choose "
                "among the boxes of each class alone: another number of classes cannot follow; leave model.num_classes "
                "out and train the first classes of the file, or export it with as many as the data has"
            ]
        elif node.op_type in ("Div", "Mod") and _is_number(node.input[1], old, index):
            # of the number of a pair of box and class they make the number of its box and that of its class
            _store(node, 1, 0, now, index)
            continue
        elif node.op_type == "Split":
            # such as distances and classes
            sizes = _split_sizes(node, index)
            # the classes are in the last part; parts of equal length are another division
            if len(set(sizes)) > 1 and sum(sizes) == old:
                _resize_last_part(node, index, now - old)
                old, now = sizes[-1], sizes[-1] + now - old
                results = results[-1:]
        elif node.op_type == "Slice":
            # a slice in front of the classes has none of them
            start, end = (int(_array(name, index).flat[0]) for name in node.input[1:3])
            if 0 <= end < old:
                continue
            old, now = old - start, now - start
        elif node.op_type == "Concat" and len(read) < len(node.input):
            # boxes or objectness beside the classes, or all levels behind each other
            joined = _joined_length(node, before)
            old, now = joined or old, (joined or old) + now - old
        lengths.update(dict.fromkeys(results, (old, now)))
    for value in [value for value in model.graph.value_info if value.name in lengths]:
        model.graph.value_info.remove(value)
    return _declare(model, lengths)


def _takes_last_class(node: onnx.NodeProto, index: Index, length: int) -> bool:
    """Return whether a Gather takes the last entry of the axis with the classes, by a stored number."""
    axis = attributes_of(node).get("axis", 0)
    return axis != 0 and length > 1 and _array(node.input[1], index).reshape(-1).tolist() == [length - 1]


def _is_number(name: str, number: int, index: Index) -> bool:
    values = _array(name, index)
    return np.issubdtype(values.dtype, np.integer) and values.tolist() in (number, [number])


def _chooses_others(node: onnx.NodeProto, index: Index, lengths: Mapping[str, tuple[int, int]]) -> bool:
    """Return whether the result says which of other values are chosen, such as the boxes of the best scores."""
    readers = [reader for reader in index.readers[node.output[0]] if reader.op_type == "GatherElements"]
    return any(reader.input[0] not in lengths for reader in readers)


def _reshaped(
    node: onnx.NodeProto, index: Index, lengths: tuple[int, int], of_anchor: tuple[int, int]
) -> tuple[int, int]:
    """Change the entry of a shape that holds the classes; return its length before and from now on.

    Entries beside each other whose product is the old length, such as 3 anchors and 85 channels of 255, have taken its
    place. One of them changes in the ratio of the lengths. Where there are none, -1 adapts by itself: it stands for the
    anchors in [N, -1, 85, H, W], where the length of one anchor changes.
    """
    old, now = lengths
    entries = []
    for reader, slot in _stored_lengths(node, 1, index):
        stored = _array(reader.input[slot], index).flat
        entries += [(reader, slot, place, int(length)) for place, length in enumerate(stored)]
    # the shortest groups first: a single entry, then two beside each other
    for start in range(len(entries)):
        for end in range(start + 1, len(entries) + 1):
            group = entries[start:end]
            if math.prod(length for *_, length in group) != old:
                continue
            for reader, slot, place, length in sorted(group, key=lambda entry: -entry[3]):
                if length * now % old == 0:
                    _store(reader, slot, place, length * now // old, index)
                    return length, length * now // old
    own = [entry for entry in entries if entry[3] == of_anchor[0]]
    if own and any(length == -1 for *_, length in entries):
        reader, slot, place, _ = own[0]
        _store(reader, slot, place, of_anchor[1], index)
        return of_anchor
    return old, now


def _split_sizes(node: onnx.NodeProto, index: Index) -> list[int]:
    """Return the sizes of the parts, which are an attribute before opset 13; [] if they are not stored."""
    if len(node.input) > 1:
        sizes = list[int]()
        for reader, slot in _stored_lengths(node, 1, index):
            sizes += _array(reader.input[slot], index).flatten().tolist()
        return sizes
    return list(attributes_of(node).get("split", ()))


def _resize_last_part(node: onnx.NodeProto, index: Index, difference: int) -> None:
    if len(node.input) > 1:
        reader, slot = list(_stored_lengths(node, 1, index))[-1]
        last = int(_array(reader.input[slot], index).flat[-1])
        _store(reader, slot, -1, last + difference, index)
        return
    for attribute in node.attribute:
        if attribute.name == "split":
            attribute.ints[-1] += difference


def _joined_length(node: onnx.NodeProto, before: Mapping[str, onnx.ValueInfoProto]) -> int | None:
    """Return the length of the axis along which a Concat joins, as it was; None if it is not known."""
    # every Concat has it
    axis = attributes_of(node)["axis"]
    dims = dims_of(before.get(node.output[0]))
    return dims[axis] if dims else None


def _stored_lengths(node: onnx.NodeProto, slot: int, index: Index) -> Iterator[tuple[onnx.NodeProto, int]]:
    """Yield (node, which of its inputs) of the integers from which an operand with lengths is put together.

    Those that are computed, as from the shape of a result, follow by themselves; `_array` gives UNKNOWN for them.
    """
    name = node.input[slot]
    maker = index.makers.get(name)
    if name in index.stored or (maker is not None and maker.op_type == "Constant"):
        yield node, slot
    elif maker is not None and maker.op_type in BETWEEN:
        # the other operands say which axis or which entry
        for position in range(len(maker.input) if maker.op_type == "Concat" else 1):
            yield from _stored_lengths(maker, position, index)
    elif maker is not None and maker.op_type == "Where":
        # of the lengths of an expansion those that are -1 are another's
        yield from _stored_lengths(maker, 2, index)
    else:
        yield node, slot


def _array(name: str, index: Index) -> NDArray[np.int64]:
    if name in index.stored:
        return numpy_helper.to_array(index.stored[name]).copy()
    maker = index.makers.get(name)
    if maker is None or maker.op_type != "Constant":
        return np.array([UNKNOWN])
    return numpy_helper.to_array(maker.attribute[0].t).copy()


def _store(reader: onnx.NodeProto, slot: int, place: int, length: int, index: Index) -> None:
    """Change one entry of a stored operand, for this reader alone: exporters share equal constants."""
    values = _array(reader.input[slot], index)
    values.reshape(-1)[place] = length
    name = reader.input[slot]
    if len(index.readers[name]) > 1 or name not in index.stored:
        name = index.free_name(f"{name}.classes")
        reader.input[slot] = name
        index.stored[name] = index.graph.initializer.add()
    index.stored[name].CopyFrom(numpy_helper.from_array(values, name))


def _declare(model: onnx.ModelProto, lengths: Mapping[str, tuple[int, int]]) -> list[str]:
    """Correct the declared lengths of the outputs; return a problem for a graph that contradicts itself."""
    for value in model.graph.output:
        for dim in value.type.tensor_type.shape.dim if value.name in lengths else ():
            if dim.dim_value == lengths[value.name][0]:
                dim.dim_value = lengths[value.name][1]
    try:
        infer_types(model)
    except onnx.shape_inference.InferenceError as error:
        return [
            f"model.num_classes: what follows the raw outputs does not go with another number of classes: {error}; "
            "leave model.num_classes out, and train the first classes of the file"
        ]
    return []
