"""Find the repeated blocks of a graph, such as the layers of a transformer, and make each kind one module.

    before   embed - ln linear gelu linear add - ln linear gelu linear add - ln linear gelu linear add - head
                     weights a                   weights b                   weights c

    after    block_0 -- block_1(x, a) ----------- block_1(x, b) ------------ block_1(x, c) ------------- block_2

Such a module holds no weights: they are among its inputs, so three calls of one compute three layers, and what compiles
it compiles it once. What is before, between and behind repeated blocks becomes a module of one call.

Blocks are found by the sequence of their nodes: two nodes are alike if they call the same with the same constants and
weights of the same shape. If positions i and i + p of the sequence are alike for p positions or more, blocks of p nodes
repeat there. Where a block begins is free (after the `ln`, the values of both branches would pass between blocks): it
begins where the fewest values pass. Then the blocks are compared exactly, with what each node reads.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import fx, nn

MIN_PERIOD = 4
"""Fewest nodes of a block."""
MIN_SAVED = 16
"""Fewest nodes that need not be compiled again: a call of compiled code has a price of its own."""


class _Run(NamedTuple):
    """Equal consecutive blocks, by position in the sequence of calls."""

    start: int
    period: int
    times: int

    @property
    def end(self) -> int:
        return self.start + self.period * self.times


def outline_repeated_blocks(module: fx.GraphModule) -> list[str]:
    """Replace the blocks of a graph, in place, by calls of modules; return their names: [] without repeated blocks."""
    calls = [node for node in module.graph.nodes if node.op.startswith("call_")]
    sequence = _Sequence(module, calls)
    # by position: what is between two runs is found from one to the next
    runs = sorted(sequence.find(0, len(calls)))
    if not runs:
        return []
    made: list[str] = []
    for run in [*_with_rests(runs, len(calls))]:
        blocks = [calls[first : first + run.period] for first in range(run.start, run.end, run.period)]
        # a stretch of lengths alone stays where it is
        if any(_is_tensor(node) for node in blocks[0]):
            name = f"block_{len(made)}"
            _outline(module, name, blocks)
            made.append(name)
    module.graph.lint()
    module.recompile()
    return made


def repeated_blocks(module: fx.GraphModule, calls: Sequence[fx.Node]) -> list[list[list[fx.Node]]]:
    """Return the runs of equal consecutive blocks among some calls of the graph: of each run, each block's nodes."""
    runs = sorted(_Sequence(module, calls).find(0, len(calls)))
    firsts = [range(run.start, run.end, run.period) for run in runs]
    return [[list(calls[first : first + positions.step]) for first in positions] for positions in firsts]


def _with_rests(runs: Sequence[_Run], end: int) -> Iterator[_Run]:
    """Yield the runs, and what is before, between and behind them as runs of one block."""
    position = 0
    for run in [*runs, _Run(end, 0, 0)]:
        if run.start > position:
            yield _Run(position, run.start - position, 1)
        if run.times:
            yield run
        position = run.end


# -- finding


class _Sequence:
    """The calls of a graph in order, each with a number that equal calls have in common."""

    def __init__(self, module: fx.GraphModule, calls: Sequence[fx.Node]) -> None:
        self.module = module
        self.calls = calls
        numbers: dict[Any, int] = {}
        # operands count by their kind alone: the same layer reads other nodes in each block
        keys = [_call_key(module, node, self._kind) for node in calls]
        self.kinds = np.array([numbers.setdefault(key, len(numbers)) for key in keys], dtype=np.int64)
        self.passing = self._passing()

    def find(self, begin: int, end: int) -> list[_Run]:
        """Return the runs of equal blocks between two positions: the one that saves most, and those beside it."""
        for _, start, period, length in sorted(self._candidates(begin, end), reverse=True):
            if run := self._best_run(start, period, length):
                return [run, *self.find(begin, run.start), *self.find(run.end, end)]
        return []

    def _candidates(self, begin: int, end: int) -> list[tuple[int, int, int, int]]:
        """Return (nodes saved, start, period, length) where `length` positions equal those a period later."""
        candidates = []
        for period in range(MIN_PERIOD, (end - begin) // 2 + 1):
            kinds = self.kinds[begin:end]
            # the borders of the stretches in which position i and i + period are alike
            alike = np.concatenate(([False], kinds[:-period] == kinds[period:], [False]))
            starts = np.flatnonzero(alike[:-1] < alike[1:])
            ends = np.flatnonzero(alike[:-1] > alike[1:])
            for start, length in zip(starts, ends - starts, strict=True):
                if (saved := length // period * period) >= MIN_SAVED:
                    # of equal savings the shorter period: two layers are no block
                    candidates.append((int(saved), int(begin + start), period, int(length)))
        # the last of these is tried first; more than a few are tried only if all of them turn out not to be equal
        return sorted(candidates, key=lambda each: (each[0], -each[2]))[-8:]

    def _best_run(self, start: int, period: int, length: int) -> _Run | None:
        """Return the blocks of a stretch that begin where the fewest values pass, if they are really equal."""
        # `length` positions equal those a period later, so that the stretch is a period longer
        counts = {offset: (length + period - offset) // period for offset in range(period)}
        offsets = [offset for offset, count in counts.items() if count > 1]
        offset = min(offsets, key=lambda each: (self.passing[start + each + period], -counts[each]))
        firsts = [start + offset + number * period for number in range(counts[offset])]
        keys = [_block_key(self.module, self.calls[first : first + period])[0] for first in firsts]
        # the longest stretch of equal ones
        best = (0, 0)
        begin = 0
        for number in range(1, len(keys) + 1):
            if number == len(keys) or keys[number] != keys[begin]:
                best = max(best, (number - begin, -begin))
                begin = number
        count = best[0]
        first = -best[1]
        return _Run(firsts[first], period, count) if (count - 1) * period >= MIN_SAVED else None

    def _passing(self) -> list[int]:
        """Return for each position how many values of earlier calls are read there or later."""
        order = {node: position for position, node in enumerate(self.calls)}
        passing = np.zeros(len(self.calls) + 2, dtype=np.int64)
        for node, position in order.items():
            # a value passes every position from behind its call to its last reader; what is returned passes all
            last = max((order.get(user, len(self.calls)) for user in node.users), default=position)
            passing[position + 1] += 1
            passing[last + 1] -= 1
        return np.cumsum(passing).tolist()  # type: ignore[no-any-return]

    def _kind(self, node: fx.Node) -> Any:
        return _value_key(self.module, node)


# -- comparing


def _block_key(module: fx.GraphModule, nodes: Sequence[fx.Node]) -> tuple[Any, list[fx.Node]]:
    """Return what equal blocks have in common, and the values of other nodes that the block reads, in order."""
    own = {node: position for position, node in enumerate(nodes)}
    inputs: dict[fx.Node, int] = {}

    def reference(node: fx.Node) -> Any:
        if node in own:
            return own[node]
        return "input", inputs.setdefault(node, len(inputs)), _value_key(module, node)

    return tuple(_call_key(module, node, reference) for node in nodes), list(inputs)


def _call_key(module: fx.GraphModule, node: fx.Node, reference: Callable[[fx.Node], Any]) -> Any:
    target = _module_key(module.get_submodule(str(node.target))) if node.op == "call_module" else node.target
    return node.op, target, _literal((node.args, node.kwargs), reference), _value_key(module, node)


def _value_key(module: fx.GraphModule, node: fx.Node) -> Any:
    """Return what is known of a value: of a stored tensor all but its data, of a computed one its shape in tracing."""
    if node.op == "get_attr":
        stored = operator.attrgetter(str(node.target))(module)
        if isinstance(stored, torch.Tensor):
            return type(stored), tuple(stored.shape), stored.dtype, stored.requires_grad
    probes = node.meta.get("probes") or ()
    return tuple((tuple(probe.shape), probe.dtype) for probe in probes if isinstance(probe, torch.Tensor))


def _module_key(child: nn.Module) -> Any:
    """Return what equal modules have in common. A module with tensors of its own equals only itself."""
    tensors = itertools.chain(child.parameters(), child.buffers())
    if next(tensors, None) is not None:
        return id(child)
    # what a layer without tensors computes is decided by its class and its settings
    options = {key: value for key, value in vars(child).items() if not key.startswith("_")}
    options.pop("training", None)
    if not all(isinstance(value, (int, float, str, tuple, type(None))) for value in options.values()):
        return id(child)
    return type(child), tuple(sorted(options.items())), tuple(map(_module_key, child.children()))


def _literal(value: Any, reference: Callable[[fx.Node], Any]) -> Any:
    """Return a hashable form of arguments; 1, 1.0 and True are different."""
    if isinstance(value, fx.Node):
        return reference(value)
    if isinstance(value, (tuple, list)):
        return tuple(_literal(item, reference) for item in value)
    if isinstance(value, dict):
        return tuple((key, _literal(item, reference)) for key, item in sorted(value.items()))
    if isinstance(value, slice):
        return "slice", *(_literal(item, reference) for item in (value.start, value.stop, value.step))
    return type(value), value if value.__hash__ and not isinstance(value, torch.Tensor) else id(value)


def _is_tensor(node: fx.Node) -> bool:
    """Return whether a value is a tensor; lengths alone are not worth a call."""
    probes = node.meta.get("probes")
    return node.target not in ("size", operator.getitem) and (not probes or isinstance(probes[0], torch.Tensor))


# -- rewriting


def _outline(module: fx.GraphModule, name: str, blocks: Sequence[Sequence[fx.Node]]) -> None:
    """Replace equal blocks by calls of one new submodule."""
    positions = [{node: position for position, node in enumerate(block)} for block in blocks]
    # what any of the blocks returns, all do
    read_outside = set[int]()
    for position_of in positions:
        for node, position in position_of.items():
            if any(user not in position_of for user in node.users):
                read_outside.add(position)
    returned = sorted(read_outside)
    module.add_submodule(name, _block_module(module, blocks[0], returned))
    for block in blocks:
        # now, since earlier blocks have been replaced
        _, inputs = _block_key(module, block)
        with module.graph.inserting_after(block[-1]):
            call = module.graph.call_module(name, tuple(inputs))
        results = [call]
        if len(returned) == 1:
            call.meta.update(block[returned[0]].meta)
        else:
            with module.graph.inserting_after(call):
                results = [module.graph.call_function(operator.getitem, (call, i)) for i in range(len(returned))]
            for place, result in zip(returned, results, strict=True):
                result.meta.update(block[place].meta)
        for place, result in zip(returned, results, strict=True):
            block[place].replace_all_uses_with(result)
        for node in reversed(block):
            module.graph.erase_node(node)


def _block_module(module: fx.GraphModule, nodes: Sequence[fx.Node], returned: Sequence[int]) -> fx.GraphModule:
    """Return a module that takes what the nodes read, and returns the values at these positions."""
    graph = fx.Graph()
    _, inputs = _block_key(module, nodes)
    copies: dict[fx.Node, fx.Node] = {}
    for node in inputs:
        # weights among the inputs too, so that one module computes every block
        copies[node] = graph.placeholder(node.name)
        copies[node].meta = dict(node.meta)
    for node in nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    results = tuple(copies[nodes[place]] for place in returned)
    graph.output(results[0] if len(results) == 1 else results)
    return fx.GraphModule(module, graph, "Block")
