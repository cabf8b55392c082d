"""Numbers computed from dynamic lengths that are equal at both trial sizes, but not at every size.

`length % 2` is 1 at lengths 7 and 11, for example. The import treats such a number as a constant and adds a call of
`check_assumption` to the graph: at other lengths the graph raises an error and never returns a wrong result.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any

from torch import fx
from torch.utils import _pytree as pytree

log = logging.getLogger(__name__)

LENGTHS = (1, 2, 3, 4, 5, 6, 8, 9, 10, 12, 15, 16, 24, 32, 49, 64, 100, 128, 224, 256, 511, 512, 1000, 1024, 4096)
"""Lengths at which `can_differ` evaluates a number again."""


def check_assumption(found: float, assumed: float, what: str) -> None:
    """Raise RuntimeError unless a number is what it was at the trial sizes."""
    if found != assumed:
        raise RuntimeError(
            f"the graph was imported for lengths at which {what} is {assumed}, but now it is {found}: it would compute "
            "something else than the file says; feed lengths like those, or fix the dimension in the file"
        )


def check_rows(found: int, declared: int, name: str) -> None:
    """Raise ValueError unless an input has as many rows as the file declares."""
    if found != declared:
        raise ValueError(
            f"the graph was imported at the batch that the file declares, so that it fits batches of {declared}, but "
            f"{name!r} has {found} rows: feed {declared} at a time, or export the file with a dynamic batch"
        )


_SAID: set[str] = set()
"""The nodes about which `check_kept` has warned."""


def check_kept(length: int, dim: int, node: str, *, is_batch: bool) -> None:
    """Raise RuntimeError if a dimension is 1 that a Squeeze without axes keeps in the graph; of the batch, warn once.

    onnxruntime drops it then, so that what follows has another rank. A batch of one row is one of many in training,
    whose results and labels have a batch.
    """
    if length != 1:
        return
    what = f"Squeeze {node!r} has no axes, and dimension {dim} of what it reads is 1 now: onnxruntime drops it, "
    if not is_batch:
        raise RuntimeError(
            f"{what}and the graph was imported for other lengths; name the axes in the file, or feed longer rows"
        )
    if node not in _SAID:
        _SAID.add(node)
        log.warning("%sthe module keeps it, because it is the batch; name the axes in the file", what)


def is_impure(node: fx.Node) -> bool:
    """Return whether dead-code elimination must keep a node although no other node reads it."""
    return node.op in ("placeholder", "output") or node.target in (check_assumption, check_rows, check_kept)


def can_differ(node: fx.Node, value: float) -> bool:
    """Return whether a number computed from lengths, `value` at both trial sizes, differs at some other lengths."""
    # a dimension is identified by its two trial lengths; unrelated dimensions have different ones
    pairs = list(dict.fromkeys(_lengths_read(node)))
    for shift in range(2):  # first all dimensions of one length, then each of another length
        for start in range(len(LENGTHS)):
            lengths = {pair: LENGTHS[(start + 7 * i * shift) % len(LENGTHS)] for i, pair in enumerate(pairs)}
            try:
                if _evaluate(node, lengths) != value:
                    return True
            except (ArithmeticError, LookupError, TypeError, ValueError):
                continue  # the model does not take such a length
    return False


def _lengths_read(node: fx.Node) -> Iterable[tuple[int, int]]:
    """Yield the pair of trial lengths, which identifies a dimension, of every length that a number depends on."""
    if node.target == "size":
        yield node.meta["probes"]
    else:
        for argument in node.all_input_nodes:
            yield from _lengths_read(argument)


def _evaluate(node: fx.Node, lengths: Mapping[tuple[int, int], int]) -> Any:
    if node.target == "size":
        return lengths[node.meta["probes"]]
    if node.op != "call_function" or not callable(node.target):
        raise TypeError(f"{node} is not made of lengths alone")
    args = pytree.tree_map(lambda leaf: _evaluate(leaf, lengths) if isinstance(leaf, fx.Node) else leaf, node.args)
    return node.target(*args)


def expression_text(node: object) -> str:
    """Return the expression that computes a number, such as "mod(size(x, 1), 2)"."""
    if not isinstance(node, fx.Node):
        return str(node)
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    if not node.args or node.op == "call_module":
        return str(node.target)
    return f"{name}({', '.join(map(expression_text, node.args))})"
