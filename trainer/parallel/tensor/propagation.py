"""One attempt at dividing the columns of some products: their division followed through the graph.

Rules (compute_rules.py, view_rules.py) say what each call does to a division; they change
nothing, but note in `Work` what is to be changed.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import fx

from onward.trainer.parallel.tensor.graph_analysis import Division, Facts, Joined, Product, Whole, low_rank


@dataclass(frozen=True)
class Length:
    """An argument that becomes this rank's: what it has of `outer` periods, or of as many as the argument says."""

    node: str
    where: tuple[int | str, ...]
    """Of args (or, by name, of kwargs), then of the list that this is."""
    division: Division
    outer: int = 1


@dataclass
class Work:
    """What is to be changed where, by names of nodes."""

    rows: list[str] = field(default_factory=list)
    inside: list[str] = field(default_factory=list)
    """Every node with a divided value."""
    parts: dict[str, Division] = field(default_factory=dict)
    """Path of a weight or running statistic -> how it is divided."""
    readers: dict[str, list[str]] = field(default_factory=dict)
    """Path -> the nodes that read it divided."""
    entered: list[str] = field(default_factory=list)
    """Whole values with a gradient that go in."""
    sliced: dict[tuple[str, str], Division] = field(default_factory=dict)
    """(node, operand): of which only a part goes in."""
    lengths: list[Length] = field(default_factory=list)
    measured: list[tuple[str, Division]] = field(default_factory=list)
    """Nodes that ask for the length of a divided dimension."""
    apart: list[str] = field(default_factory=list)
    """Modules that draw random numbers, different ones on each rank."""
    attends: bool = False


class Attempt:
    """Follows the division of some products' columns until it ends in products by rows, or a rule is broken."""

    def __init__(self, facts: Facts, size: int, columns: Iterable[fx.Node], cuts: dict[str, frozenset[int]]) -> None:
        self.facts, self.size = facts, size
        self.columns = set(columns)
        self.cuts = cuts
        self.states: dict[fx.Node, Any] = {}
        self.rows: list[Product] = []
        self.work = Work()

    def run(self) -> Work:
        """Raises Whole, Finer or Joined."""
        waiting = {*self.columns}
        while waiting:
            node = min(waiting, key=self.facts.order.__getitem__)
            waiting.remove(node)
            state = self.column(node) if node in self.columns else self._apply(node)
            if state is not None:
                self.states[node] = state
                self.work.inside.append(node.name)
                waiting |= node.users.keys()
        if not self.rows:
            raise Whole("no product by rows follows that could add the parts up")
        return self.work

    def _apply(self, node: fx.Node) -> Any:
        if node.op == "output":
            raise Whole("it is an output of the graph")
        target: Any = node.target
        if node.op == "call_module":
            target = type(self.facts.submodule(node))
        if low_rank(node):
            target = torch.matmul
        if (follow := RULES.get(target)) is None:
            raise Whole(f"{called(node)} is not known to work on parts ({node.name})")
        return follow(self, node)

    def column(self, node: fx.Node) -> Division:
        """A product whose columns are divided."""
        product = self.facts.products[node]
        if product.groups > 1:
            raise Whole(f"it is a convolution in {product.groups} groups")
        if product.x in self.states:
            raise Whole(f"the input of {product.name} is divided already")
        total = self.facts.tensor(product.path).shape[product.outputs]
        self._check_chain(product, total)
        ends = sorted({total, *self.cuts.get(product.name, ())})
        blocks = tuple(end - start for start, end in itertools.pairwise([0, *ends]))
        if min(blocks) < self.size:
            raise Whole(f"its {min(blocks)} columns are fewer than {self.size} ranks")
        dim = 1 if product.convolution else self.rank(node) - 1
        own = Division(dim, blocks, source=product.name, unit=1)
        self.enter(product.x)
        self.part(node, product.path, own.moved(product.outputs))
        if product.low_rank:
            self.enter(next(node for node in product.others if self.facts.stored(node) == product.row_path))
        if isinstance(product.bias, fx.Node):
            self.operand(node, product.bias, self.rank(product.bias) - 1, own)
        return own

    def _check_chain(self, product: Product, total: int) -> None:
        """Two products in a row, the second by columns again, are worth it only where few numbers pass between them."""
        rows = {row.node: self.facts.tensor(row.path).shape[row.outputs] for row in self.rows}
        nearest = self.facts.nearest(product.x)
        for node in self.facts.ancestors(product.x) & rows.keys():
            if node not in nearest or rows[node] >= total:
                raise Whole(f"{product.name} reads what the same division gives, {rows[node]} columns for {total}")

    # -- what rules ask for

    def shapes(self, node: fx.Node) -> list[tuple[int, int]]:
        return self.facts.shapes(node)

    def rank(self, node: fx.Node) -> int:
        return self.facts.rank(node)

    def division(self, value: Any) -> Division | None:
        """How a value is divided; None if it is not."""
        return self.states.get(value) if isinstance(value, fx.Node) else None

    def first(self, node: fx.Node) -> Division:
        """The division of a call's first operand. Raises Whole if another one is divided instead."""
        if (division := self.division(node.args[0])) is None:
            raise Whole(f"{node.name} reads a divided value where a whole one is needed")
        return division

    def tensors(self, node: fx.Node) -> list[fx.Node]:
        """The operands that are tensors."""
        return [operand for operand in node.all_input_nodes if self.facts.is_tensor(operand)]

    def enter(self, operand: fx.Node) -> None:
        """A whole value goes in: what comes back is a part of its gradient."""
        if operand in self.facts.gradient and operand.name not in self.work.entered:
            self.work.entered.append(operand.name)

    def part(self, node: fx.Node, path: str, division: Division) -> None:
        """A node reads a part of a stored tensor."""
        before = self.work.parts.setdefault(path, division)
        if before.how != division.how:
            raise Whole(f"{self.facts.names[path]} is divided in two ways")
        self.work.readers.setdefault(path, []).append(node.name)

    def operand(self, node: fx.Node, operand: fx.Node, dim: int, division: Division) -> None:
        """A whole operand whose dimension `dim` meets a divided one: a part of it, unless it has one element there."""
        shapes = self.shapes(operand)
        if dim < 0 or shapes[dim] == (1, 1):
            self.enter(operand)
            return
        division = division.moved(dim)
        if any(length % division.period for length in shapes[dim]):
            raise Whole(f"{operand.name} has {shapes[dim][0]} elements where {division.period} are divided")
        if self.facts.stored(operand) and shapes[dim] == (division.period, division.period):
            self.part(node, str(operand.target), division)
            return
        rows = [row.node for row in self.rows]
        if products := [product for product in self.facts.nearest(operand) if product not in rows]:
            raise Joined(products)
        # heads may meet a bias of their own; single features meet the residual stream, which nothing else divides
        if division.unit == 1 and operand in self.facts.gradient & self.facts.sampled:
            raise Whole(f"{node.name} meets {operand.name}, which every rank has whole")
        self.enter(operand)
        self.work.sliced[node.name, operand.name] = division

    def length(self, node: fx.Node, where: tuple[int | str, ...], division: Division, outer: int = 1) -> None:
        """An argument becomes this rank's length."""
        self.work.lengths.append(Length(node.name, where, division, outer))

    def reached(self, node: fx.Node, lengths: Any, dim: int, division: Division) -> None:
        """The same of one of several lengths, a list or arguments of their own; -1 and 1 stay what they are."""
        listed = isinstance(lengths[0], list | tuple)
        given = lengths[0][dim] if listed else lengths[dim]
        if given not in (-1, 1):
            outer = given // division.period if isinstance(given, int) else 1
            self.length(node, (1, dim) if listed else (1 + dim,), division, outer)

    def same(self, one: Division, other: Division, node: fx.Node) -> None:
        """Raises unless two divisions that meet are one."""
        if one.blocks == other.blocks and one.inner == other.inner:
            return
        if one.period != other.period:
            raise Whole(f"{one.period} divided elements meet {other.period} ({node.name})")
        sizes = [[block * division.inner for block in division.blocks] for division in (one, other)]
        if sizes[0] == sizes[1]:
            if one.even(self.size) and other.even(self.size):
                return
            raise Whole(f"{sizes[0]} in units of {one.inner} and of {other.inner} over {self.size} ranks ({node.name})")
        ends = [{*itertools.accumulate(size)} for size in sizes]
        coarse, wanted = (one, ends[1]) if ends[1] - ends[0] else (other, ends[0])
        raise coarse.finer(sorted(wanted), called(node))

    def aligned(self, node: fx.Node, operands: Sequence[fx.Node], rank: int) -> Division:
        """The division of a result of `rank` dimensions, with which operands broadcast, counted from the last."""
        found: Division | None = None
        for operand in operands:
            if (own := self.division(operand)) is not None:
                own = own.moved(own.dim + rank - self.rank(operand))
                if found is not None and found.dim != own.dim:
                    raise Whole(f"dimensions {found.dim} and {own.dim} of {node.name} would be divided")
                if found is not None:
                    self.same(found, own, node)
                found = found or own
        assert found is not None
        for operand in operands:
            if self.division(operand) is None:
                self.operand(node, operand, found.dim - (rank - self.rank(operand)), found)
        return found


def called(node: fx.Node) -> str:
    """What a node calls, as reasons name it."""
    return str(node.target) if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))


Rule = Callable[[Attempt, Any], Any]
R = TypeVar("R", bound=Rule)
# Each says which dimension of a call's result is divided, notes what else the call needs (a part of an operand, a
# length of its own in an argument), or raises why it cannot be.
RULES: dict[Any, Rule] = {}
"""Function, name of a method, or type of a module -> what it does to a division. Gives that of the result; a list of a
tuple's; None where the result is whole."""


def rule(*targets: Any) -> Callable[[R], R]:
    """Files the rule of these calls."""

    def file(function: R) -> R:
        RULES.update(dict.fromkeys(targets, function))
        return function

    return file
