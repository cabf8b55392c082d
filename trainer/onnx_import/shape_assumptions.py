"""What an import takes for granted: numbers made of lengths that come out alike at both sizes, though not at all sizes.

So `length % 2` does at 7 and 11. The graph that is built is right wherever such a number is what it was; a call
of `must_be` in it sees to that, so that at other lengths there is an error and no wrong result.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import fx
from torch.utils import _pytree as pytree

LENGTHS = (1, 2, 3, 4, 5, 6, 8, 9, 10, 12, 15, 16, 24, 32, 49, 64, 100, 128, 224, 256, 511, 512, 1000, 1024, 4096)


def must_be(found: float, assumed: float, what: str) -> None:
    """Raises RuntimeError unless a number is what it was at every size the graph was imported at."""
    if found != assumed:
        raise RuntimeError(
            f"the graph was imported for lengths at which {what} is {assumed}, but now it is {found}: it would compute "
            "something else than the file says; feed lengths like those, or fix the dimension in the file"
        )


def is_kept(node: fx.Node) -> bool:
    """Whether a node stays in the graph though nobody reads it."""
    return node.op in ("placeholder", "output") or node.target is must_be


def may_differ(node: fx.Node, value: float) -> bool:
    """Whether a number made of lengths, `value` at both sizes, is another at some other lengths."""
    pairs = list(dict.fromkeys(_pairs(node)))
    for shift in range(2):  # all lengths alike, and all different
        for start in range(len(LENGTHS)):
            lengths = {pair: LENGTHS[(start + 7 * i * shift) % len(LENGTHS)] for i, pair in enumerate(pairs)}
            try:
                if _number(node, lengths) != value:
                    return True
            except (ArithmeticError, LookupError, TypeError, ValueError):
                continue  # the file takes no such length
    return False


def _pairs(node: fx.Node) -> Iterable[tuple[int, int]]:
    if node.target == "size":
        yield node.meta["probes"]
    else:
        for argument in node.all_input_nodes:
            yield from _pairs(argument)


def _number(node: fx.Node, lengths: Mapping[tuple[int, int], int]) -> Any:
    if node.target == "size":
        return lengths[node.meta["probes"]]
    if node.op != "call_function" or not callable(node.target):
        raise TypeError(f"{node} is not made of lengths alone")
    args = pytree.tree_map(lambda leaf: _number(leaf, lengths) if isinstance(leaf, fx.Node) else leaf, node.args)
    return node.target(*args)


def told(node: object) -> str:
    """How a number is made, in words of the graph."""
    if not isinstance(node, fx.Node):
        return str(node)
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    return f"{name}({', '.join(map(told, node.args))})" if node.args and node.op != "call_module" else str(node.target)
