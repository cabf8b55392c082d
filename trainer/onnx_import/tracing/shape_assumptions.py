"""Lengths, and numbers computed from lengths, that are equal at both trial sizes, but not at every size.

    width of an image    7     11           length % 2     1 and 1, but 0 at length 8
    halved               4      6
    halved               2      3
    halved               1      2
    halved               1      1           the width of this tensor: 10 if the image has 160

The import treats what is equal as a constant and adds a call of `check_assumption` to the graph: at other lengths the
graph raises an error and never returns a wrong result. Numbers are computed again at other lengths, and so is the shape
of every tensor, by running the recorded graph once more on meta tensors.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from operator import attrgetter
from typing import Any

import torch
from torch import fx, nn
from torch.fx.node import map_aggregate
from torch.utils import _pytree as pytree

from onward.trainer.onnx_import.tracing.probed_calls import ProbedCalls, call_key
from onward.trainer.onnx_import.tracing.probing import TORCH_ERRORS, as_function

log = logging.getLogger(__name__)

LENGTHS = (1, 2, 3, 4, 5, 6, 8, 9, 10, 12, 15, 16, 24, 32, 49, 64, 100, 128, 224, 256, 511, 512, 1000, 1024, 4096)
"""Lengths at which `can_differ` evaluates a number again."""

FURTHER: tuple[Callable[[int, int], int], ...] = (
    lambda first, second: 64 * second,
    lambda first, second: first + second,
    lambda first, second: max(2, first // 3),
    lambda first, second: 2,
)
"""From the two trial lengths of a dimension to others: a network that halves its lengths often does not make the first
one short, tables with few rows take the second, and the others are shorter than what a graph may cut off."""


class _Unknown:
    """The result of a call that depends on values, or that other lengths do not admit."""


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


def assumptions_of(graph: fx.Graph) -> list[str]:
    """Return the equations that a graph checks each time it runs, such as "size('h', 1) is 4"."""
    return [f"{node.args[2]} is {node.args[1]}" for node in graph.nodes if node.target is check_assumption]


def is_impure(node: fx.Node) -> bool:
    """Return whether dead-code elimination must keep a node although no other node reads it."""
    return node.op in ("placeholder", "output") or node.target in (check_assumption, check_rows, check_kept)


def lengths_equal_by_chance(
    graph: fx.Graph, root: nn.Module, runtime: Collection[fx.Node], known: ProbedCalls
) -> list[tuple[fx.Node, int, int]]:
    """Return (node, dimension, its length at both trial sizes) of the tensors whose length differs at other sizes.

    Of tensors that are computed from each other, only the first is returned. runtime: nodes whose results depend on
    values. known: what equal calls gave.
    """
    # two lengths may be equal at both trial sizes and at no other ones: further sizes show it
    equal_by_chance: dict[tuple[fx.Node, int], int] = {}
    for further in FURTHER:
        differing: dict[fx.Node, set[tuple[int, int]]] = {}
        for node, shape in _shapes(graph, root, further, runtime, known):
            # for each dimension its length at the two trial sizes and at the further one
            trial = zip(*(probe.shape for probe in node.meta["probes"]), shape, strict=True)
            other = {
                dim: (first, length) for dim, (first, second, length) in enumerate(trial) if first == second != length
            }
            # a length that an operand has already is checked there; one check is enough
            inherited = set().union(*(differing.get(operand, ()) for operand in node.all_input_nodes))
            differing[node] = set(other.values())
            equal_by_chance |= {(node, dim): pair[0] for dim, pair in other.items() if pair not in inherited}
    return [(node, dim, length) for (node, dim), length in equal_by_chance.items()]


def _shapes(
    graph: fx.Graph,
    root: nn.Module,
    further: Callable[[int, int], int],
    runtime: Collection[fx.Node],
    known: ProbedCalls,
) -> Iterator[tuple[fx.Node, torch.Size]]:
    """Yield the shape of every tensor of the graph whose inputs have other lengths than the trial ones."""
    results: dict[fx.Node, Any] = {}
    for node in graph.nodes:
        if node.target in (check_assumption, check_rows, check_kept):
            continue
        results[node] = _Unknown if node in runtime else _result(node, root, further, known, results)
        probes = node.meta.get("probes")
        # sequences and integers have no shape to compare
        is_known = isinstance(results[node], torch.Tensor) and probes is not None
        if is_known and isinstance(probes[0], torch.Tensor) and probes[0].ndim == results[node].ndim:
            yield node, results[node].shape


def _result(
    node: fx.Node,
    root: nn.Module,
    further: Callable[[int, int], int],
    known: ProbedCalls,
    results: Mapping[fx.Node, Any],
) -> Any:
    """Return what a node gives on meta tensors, or _Unknown."""
    if node.op == "placeholder":
        first, second = node.meta.get("probes") or (None, None)
        if not isinstance(first, torch.Tensor) or second is None:
            return _Unknown
        # static lengths stay, dynamic ones become longer or shorter
        shape = [a if a == b else further(a, b) for a, b in zip(first.shape, second.shape, strict=True)]
        return torch.empty(shape, dtype=first.dtype, device="meta")
    if node.op == "get_attr":
        return torch.empty_like(attrgetter(str(node.target))(root), device="meta", requires_grad=False)
    # what is not known of an operand is not known of the result
    if any(results[operand] is _Unknown for operand in node.all_input_nodes):
        return _Unknown
    run: Callable[..., Any]
    if node.op == "call_module":
        # a copy, because .to("meta") drops the data of a module in place
        run = copy.deepcopy(root.get_submodule(str(node.target))).to("meta").eval()
        key = None
    else:
        run = as_function(node.target)
        key = call_key(node.target)

    def value(leaf: Any) -> Any:
        return results[leaf] if isinstance(leaf, fx.Node) else leaf

    args: Any = map_aggregate(node.args, value)
    kwargs: Any = map_aggregate(node.kwargs, value)
    try:
        return known.run(key, run, args, kwargs)
    # the model may not take such lengths at all, which proves nothing
    except (*TORCH_ERRORS, ArithmeticError):
        return _Unknown


def can_differ(node: fx.Node, value: float) -> bool:
    """Return whether a number computed from lengths, `value` at both trial sizes, differs at some other lengths."""
    # a dimension is identified by its two trial lengths; unrelated dimensions have different ones
    pairs = list(dict.fromkeys(_lengths_read(node)))
    for shift in range(2):  # first all dimensions of one length, then each of another length
        # in the second round a dimension is 7 places further in the list than the one before it
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
        # arithmetic on lengths: down to the lengths themselves
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
    """Return the expression that computes a number from lengths of tensors, such as "mod(size('h', 1), 2)"."""
    if not isinstance(node, fx.Node):
        return str(node)
    probes = node.meta.get("probes")
    if probes is not None and isinstance(probes[0], torch.Tensor):
        return repr(node.meta["onnx"][-1]) if "onnx" in node.meta else node.name
    # methods are named by strings, functions by themselves
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    if not node.args or node.op == "call_module":
        return str(node.target)
    return f"{name}({', '.join(map(expression_text, node.args))})"
