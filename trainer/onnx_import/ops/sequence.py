"""Rules for sequences and optionals: Python lists and None at import, or values inside a runtime node."""

from __future__ import annotations

import torch

from onward.trainer.onnx_import.lowering.converter_table import Call, lower
from onward.trainer.onnx_import.tracing.values import NeedsRuntimeValues, Traced, Value


def _items(sequence: Value) -> list[Value]:
    """Return the members. Raises NeedsRuntimeValues if their number is known only at run time."""
    if isinstance(sequence, Traced):
        raise NeedsRuntimeValues("a sequence is known only at run time")
    return list(sequence)


@lower("SequenceConstruct", since=(11,))
def sequence_construct(c: Call, *parts: Value) -> Value:
    return [*parts]


@lower("SequenceEmpty", since=(11,))
def sequence_empty(c: Call) -> Value:
    c.attr("dtype")
    return []


@lower("SequenceLength", since=(11,))
def sequence_length(c: Call, sequence: Value) -> Value:
    return torch.full((), len(_items(sequence)))


@lower("SequenceAt", since=(11,))
def sequence_at(c: Call, sequence: Value, position: Value) -> Value:
    return _items(sequence)[c.ints(position)[0]]


@lower("SequenceInsert", since=(11,))
def sequence_insert(c: Call, sequence: Value, x: Value, position: Value = None) -> Value:
    items = _items(sequence)
    items.insert(len(items) if position is None else c.ints(position)[0], x)
    return items


@lower("SequenceErase", since=(11,))
def sequence_erase(c: Call, sequence: Value, position: Value = None) -> Value:
    items = _items(sequence)
    del items[-1 if position is None else c.ints(position)[0]]
    return items


@lower("SplitToSequence", since=(11, 24))
def split_to_sequence(c: Call, x: Value, sizes: Value = None) -> Value:
    """Split into parts of length 1, of one length (the last may be shorter), or of a length each."""
    axis = c.axis(x, c.attr("axis", 0))
    keepdims = c.attr("keepdims", 1)
    if sizes is None:
        return [*c(torch.split, x, 1, axis)] if keepdims else [*c(torch.unbind, x, axis)]
    lengths = c.ints(sizes)
    return [*c(torch.split, x, lengths if sizes.ndim else lengths[0], axis)]


@lower("ConcatFromSequence", since=(11,))
def concat_from_sequence(c: Call, sequence: Value) -> Value:
    return c(torch.stack if c.attr("new_axis", 0) else torch.cat, _items(sequence), c.attr("axis"))


@lower("SequenceMap", since=(17,))
def sequence_map(c: Call, sequence: Value, *others: Value) -> Value:
    """Run the body for each member, with the members of other sequences at its index, and with complete tensors."""
    results = []
    for i, item in enumerate(_items(sequence)):
        # the members of another sequence are taken with those of the first, a tensor is the same for all
        along = [other[i] if isinstance(other, list | tuple) else _never_a_sequence(other) for other in others]
        results.append([c.tracer.to_tensor(value) for value in c.body("body", [item, *along])])
    return tuple([row[k] for row in results] for k in range(c.num_outputs))


def _never_a_sequence(value: Value) -> Value:
    # an unknown value may be a sequence, whose members would have to be taken one by one
    if isinstance(value, Traced) and not value.known:
        raise NeedsRuntimeValues("it may be a sequence")
    return value


@lower("Optional", since=(15, 28))
def optional(c: Call, x: Value = None) -> Value:
    c.attr("type")
    return x


@lower("OptionalGetElement", since=(15, 18, 28))
def optional_get_element(c: Call, x: Value) -> Value:
    if x is None:
        raise NeedsRuntimeValues("it takes the element of an empty optional")
    return x


@lower("OptionalHasElement", since=(15, 18, 28))
def optional_has_element(c: Call, x: Value = None) -> Value:
    if isinstance(x, Traced) and not x.known:
        raise NeedsRuntimeValues("whether it has an element is known only at run time")
    return torch.full((), x is not None)
