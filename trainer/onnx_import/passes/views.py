"""Replace several slices of one tensor by a single split or unbind, whose backward concatenates the gradients once.

    x[0:a], x[a:b], x[b:n]       ->  split(x, [a, b - a, n - b])
    x[0], x[1], ... x[n - 1]     ->  unbind(x)                      also of slices of length 1 that are squeezed

Without it, the backward of each slice makes a tensor of zeros as large as x.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from onward.trainer.onnx_import.ops.gather import strided
from onward.trainer.onnx_import.passes.rewriter import Rewriter, is_call

Parts = list[tuple[int, int, fx.Node]]
"""(start, end, node) of each part."""


def fuse_slices(r: Rewriter) -> int:
    """Split every tensor at most once along a dimension; return how many splits replaced several slices."""
    count = 0
    # split before unbind, which also matches what a split has left: parts of length 1 that are squeezed
    for function, parts_of in ((torch.split, _slice_parts), (torch.unbind, _row_parts)):
        nodes: list[Any] = list(r.graph.nodes)
        for x in nodes:
            # erased with a part of an earlier split
            if x._erased or r.rank(x) <= 0:
                continue
            for axis, length in enumerate(r.static(x)):
                if length is None:
                    continue
                parts = sorted(parts_of(x, axis, length), key=lambda part: part[0])
                if _cover_dimension(parts, length):
                    _split_once(r, x, axis, function, parts)
                    count += 1
    return count


def _slice_parts(x: fx.Node, axis: int, length: int) -> Parts:
    """Return the parts that are slices of step 1."""
    slices: list[Any] = [user for user in x.users if is_call(user, strided)]
    parts = []
    for user in slices:
        _, user_axis, start, end, step = user.args
        if user_axis != axis:
            continue
        # one slice with a dynamic bound or a step leaves elements that no part would cover
        if not (isinstance(start, int) and isinstance(end, int)) or step != 1:
            return []
        parts.append((*slice(start, end).indices(length)[:2], user))
    return parts


def _row_parts(x: fx.Node, axis: int, length: int) -> Parts:
    """Return the parts without the dimension: selected, or split into length 1 and squeezed."""
    users: list[Any] = list(x.users)
    selects = [user for user in users if is_call(user, torch.select)]
    selected = [user for user in selects if user.args[1] == axis]
    if selected:
        if not all(isinstance(user.args[2], int) for user in selected):
            return []
        places = [user.args[2] % length for user in selected]
        return [(place, place + 1, user) for place, user in zip(places, selected, strict=True)]
    splits = [user for user in users if is_call(user, torch.split)]
    single: list[Any] = [split for split in splits if list(split.args[1:]) == [[1] * length, axis]]
    pieces: list[Any] = [piece for split in single[:1] for piece in split.users]
    squeezed: list[Any] = [next(iter(piece.users)) for piece in pieces if len(piece.users) == 1]
    if len(squeezed) != len(pieces) or not all(is_call(node, torch.squeeze) for node in squeezed):
        return []
    if any(node.args[1] not in (axis, [axis]) for node in squeezed):
        return []
    return [(piece.args[1], piece.args[1] + 1, node) for piece, node in zip(pieces, squeezed, strict=True)]


def _cover_dimension(parts: Parts, length: int) -> bool:
    """Return whether two or more parts, none of them empty, cover the dimension without overlap."""
    # sorted by their starts: each begins where the one before ends
    ends = [0, *(end for _, end, _ in parts)]
    starts = [start for start, _, _ in parts]
    return len(set(ends)) == len(ends) > 2 and starts == ends[:-1] and ends[-1] == length


def _split_once(r: Rewriter, x: fx.Node, axis: int, function: Any, parts: Parts) -> None:
    lengths = [end - start for start, end, _ in parts]
    how = (lengths, axis) if function is torch.split else (axis,)
    # directly after x, or the inputs, so that it precedes every part wherever that is in the graph
    with r.graph.inserting_after(max([x, *r.graph.find_nodes(op="placeholder")])):
        all_parts = r.graph.call_function(function, (x, *how))
    for i, (_, _, part) in enumerate(parts):
        # in the place of the part, so that it precedes the readers of the part
        with r.graph.inserting_before(part):
            new = r.graph.call_function(operator.getitem, (all_parts, i))
        new.meta.update(part.meta)
        part.replace_all_uses_with(new)
        r.remove(part)
