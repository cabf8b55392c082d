"""what tensor parallelism knows of a graph: how a dimension is divided, its weights, its products."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

from onward.trainer.distributed.placement import Interval, Placement, share
from onward.trainer.onnx_import.passes.rewriter import NoMatch, Rewriter

CONVOLUTIONS = (F.conv1d, F.conv2d, F.conv3d)
TRANSPOSED = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)
PRODUCTS = (F.linear, torch.matmul, torch.mm, torch.addmm, *CONVOLUTIONS, *TRANSPOSED)


class Whole(Exception):
    """A rule is broken; says which one, with its numbers."""


class Finer(Exception):
    """The columns of a weight are to be divided block by block, and a block ends at each of these."""

    def __init__(self, source: str, cuts: Iterable[int], otherwise: str = "") -> None:
        super().__init__(source)
        self.source, self.cuts = source, frozenset(cuts)
        self.otherwise = otherwise
        """The rule that is broken if this does not help."""


class Joined(Exception):
    """These products, too, are to be divided by columns: their results meet a divided one."""

    def __init__(self, products: Iterable[fx.Node]) -> None:
        super().__init__()
        self.products = tuple(products)


@dataclass(frozen=True)
class Division:
    """One dimension as [outer x] blocks x inner elements: every rank has its share of each block.

    32 channels of 4 x 4 pixels, flattened      dim 1, blocks (32,), inner 16
    query, key and value in one                 dim 2, blocks (64, 64, 64), inner 1
    """

    dim: int
    blocks: tuple[int, ...]
    inner: int = 1
    source: str = ""
    """The weight whose columns these are, the first of them, and how many each element of a block stands for."""
    start: int = 0
    unit: int = 0
    """0: they are not consecutive columns of one weight any more."""

    @property
    def length(self) -> int:
        return sum(self.blocks)

    @property
    def period(self) -> int:
        """Elements of the dimension, without the outer factor."""
        return self.length * self.inner

    def even(self, size: int) -> bool:
        return all(block % size == 0 for block in self.blocks)

    def held(self, rank: int, size: int) -> list[Interval]:
        """The intervals that a rank has of each period."""
        starts = itertools.accumulate(self.blocks, initial=0)
        shares = [
            tuple((start + end) * self.inner for end in share(block, rank, size))
            for start, block in zip(starts, self.blocks, strict=False)
        ]
        joined: list[Interval] = []
        for first, last in shares:
            if joined and joined[-1][1] == first:
                joined[-1] = (joined[-1][0], last)
            elif first < last:
                joined.append((first, last))
        return joined

    def own(self, rank: int, size: int) -> int:
        """Elements that a rank has of each period."""
        return sum(stop - start for start, stop in self.held(rank, size))

    def placement(self, shape: Sequence[int], rank: int, size: int) -> Placement:
        """The part of a tensor of this shape that a rank has."""
        whole = Placement.whole(shape).intervals
        return Placement(tuple(shape), (*whole[: self.dim], tuple(self.held(rank, size)), *whole[self.dim + 1 :]))

    @property
    def how(self) -> tuple[int, tuple[int, ...], int]:
        """All that decides which elements a rank has."""
        return self.dim, self.blocks, self.inner

    def moved(self, dim: int) -> Division:
        return replace(self, dim=dim)

    def finer(self, ends: Sequence[int], what: str, otherwise: str = "") -> Exception:
        """Asks for blocks that end at these elements, too; or says that this cannot be."""
        own = {*itertools.accumulate(self.blocks)}
        wanted = {end // self.inner for end in ends}
        if not self.unit or any(end % self.inner for end in ends) or wanted <= own:
            return Whole(otherwise or f"{what} cuts the divided dimension across, at {sorted(ends)} of {self.period}")
        return Finer(self.source, (self.start + end * self.unit for end in wanted), otherwise)


# -- what is known of the graph


@dataclass(frozen=True)
class Product:
    """A product or a convolution with a stored matrix, or with two of them: a low-rank adapter (model/adapters.py)."""

    node: fx.Node
    x: fx.Node
    bias: Any
    path: str
    """Of the weight whose `outputs` dimension is the columns."""
    outputs: int
    row_path: str
    """Of the weight whose `inputs` dimension is the rows: the same one but of an adapter, x A' B'."""
    inputs: int
    name: str
    """Of the first, in the file."""
    others: tuple[fx.Node, ...] = ()
    """The operands that are the weights, transposed or not."""
    groups: int = 1

    @property
    def convolution(self) -> bool:
        return self.node.target in (*CONVOLUTIONS, *TRANSPOSED)

    @property
    def low_rank(self) -> bool:
        return self.path != self.row_path


class Facts:
    """Shapes, weights and products of a graph."""

    def __init__(self, module: fx.GraphModule, onnx_names: dict[str, str]) -> None:
        self.module, self.names = module, onnx_names
        self._rewriter = Rewriter(module.graph, module)
        self.order = {node: index for index, node in enumerate(module.graph.nodes)}
        self.reads: dict[str, list[fx.Node]] = {}
        for node in self.order:
            if node.op == "get_attr":
                self.reads.setdefault(str(node.target), []).append(node)
        computed = self._computed_from({node for node in self.order if self._parameter(node)})
        self.gradient = {node for node in computed if self._may_be_float(node)}
        self.sampled = self._computed_from({node for node in self.order if node.op == "placeholder"})
        self.products = {node: product for node in self.order if (product := self._product(node)) is not None}

    # -- values

    def shapes(self, node: fx.Node) -> list[tuple[int, int]]:
        """Each length at both sizes the graph was traced at. Raises Whole where that is not known."""
        try:
            first, second = self._rewriter.shapes(node)
        except NoMatch:
            raise Whole(f"the shape of {node.name} is known only at run time") from None
        return list(zip(first, second, strict=True))

    def is_tensor(self, node: fx.Node) -> bool:
        """Whether it is a tensor. Raises Whole where that is not known."""
        try:
            return isinstance(self._rewriter.probes(node)[0], torch.Tensor)
        except NoMatch:
            raise Whole(f"the shape of {node.name} is known only at run time") from None

    def rank(self, node: fx.Node) -> int:
        return len(self.shapes(node))

    def stored(self, value: Any) -> str:
        """The path of the weight or running statistic that a node reads; "" for any other value."""
        read = isinstance(value, fx.Node) and value.op == "get_attr" and value.target in self.names
        return str(value.target) if read else ""

    def tensor(self, path: str) -> torch.Tensor:
        owner, _, leaf = path.rpartition(".")
        tensor: torch.Tensor = getattr(self.module.get_submodule(owner), leaf)
        return tensor

    def submodule(self, node: fx.Node) -> Any:
        """The module that a node calls."""
        return self.module.get_submodule(str(node.target))

    def readers(self, path: str) -> Iterator[fx.Node]:
        """Who reads a stored tensor, or its transpose."""
        waiting = [user for node in self.reads[path] for user in node.users]
        while waiting:
            node = waiting.pop()
            if transposes(node):
                waiting += node.users
            else:
                yield node

    def nearest(self, node: fx.Node) -> list[fx.Node]:
        """The last products that a value is computed from, in order."""
        found, seen, waiting = set(), set(), [node]
        while waiting:
            node = waiting.pop()
            if node in self.products:
                found.add(node)
            elif node not in seen and self._may_be_float(node):  # lengths are the same on all ranks
                seen.add(node)
                waiting += node.all_input_nodes
        return sorted(found, key=self.order.__getitem__)

    def ancestors(self, node: fx.Node) -> set[fx.Node]:
        """All that a value is computed from, itself included."""
        seen, waiting = set(), [node]
        while waiting:
            node = waiting.pop()
            if node not in seen:
                seen.add(node)
                waiting += node.all_input_nodes
        return seen

    def computed_matrices(self) -> Iterator[tuple[str, fx.Node]]:
        """(name of a weight, product) where a product's matrix is computed from the weight, whatever the input."""
        for node in self.order:
            if node.target not in (*PRODUCTS, torch.bmm) or node in self.products:
                continue
            for operand in node.all_input_nodes:
                for path in self._sources(operand):
                    if self.tensor(path).ndim > 1:
                        yield self.names[path], node

    def _sources(self, node: fx.Node) -> list[str]:
        """The weights that alone a value is computed from; none if something else is in it."""
        found, waiting = [], [node]
        while waiting:
            node = waiting.pop()
            if path := self.stored(node):
                found.append(path)
            elif node.op == "placeholder":
                return []
            waiting += node.all_input_nodes
        return found

    def _computed_from(self, begins: set[fx.Node]) -> set[fx.Node]:
        """What carries values, not just lengths, of these nodes."""
        found = {*begins}
        for node in self.order:
            if node.target != "size" and any(operand in found for operand in node.all_input_nodes):
                found.add(node)
        return found

    def _may_be_float(self, node: fx.Node) -> bool:
        if node.op == "call_method" and node.target == "size":
            return False
        try:
            return self._rewriter.dtype(node).is_floating_point
        except NoMatch:
            return True

    # -- products

    def _product(self, node: fx.Node) -> Product | None:
        if node.op != "call_function" or node.kwargs.keys() - {"beta", "alpha"}:
            return None
        args: list[Any] = list(node.args)
        of = node.target
        if of is F.linear and len(args) in (2, 3):
            return self._matrix(node, args[0], args[1], [*args, None][2], turned=True)
        if of in (torch.matmul, torch.mm) and len(args) == 2:
            return self._matrix(node, args[0], args[1], None, turned=False)
        if of is torch.addmm and len(args) == 3:
            return self._matrix(node, args[1], args[2], args[0], turned=False)
        if of in (*CONVOLUTIONS, *TRANSPOSED) and len(args) >= 7 and (path := self._parameter(args[1])):
            x, weight, bias, outputs = *args[:3], int(of in TRANSPOSED)
            where = (path, outputs, path, 1 - outputs)
            return Product(node, x, bias, *where, self.names[path], others=(weight,), groups=args[6])
        return self._adapter(node, args) if low_rank(node) else None

    def _matrix(self, node: fx.Node, x: Any, weight: Any, bias: Any, *, turned: bool) -> Product | None:
        """turned: the operand is [outputs, inputs]."""
        read = weight
        while isinstance(read, fx.Node) and transposes(read):
            read, turned = read.args[0], not turned
        path = self._parameter(read)
        if not path or self.tensor(path).ndim != 2 or not isinstance(x, fx.Node) or self.stored(x):
            return None
        return Product(node, x, bias, path, int(not turned), path, int(turned), self.names[path], others=(weight,))

    def _adapter(self, node: fx.Node, args: list[Any]) -> Product | None:
        """x, a [rank, inputs], b [outputs, rank], scale, reverse: with the weight's own transpose if reverse."""
        x, a, b, _, reverse = args
        first, last = (b, a) if reverse else (a, b)
        row_path, path = self._parameter(first), self._parameter(last)
        if not row_path or not path or self.tensor(path).ndim != 2:
            return None
        return Product(node, x, None, path, int(reverse), row_path, int(not reverse), self.names[path], others=(a, b))

    def _parameter(self, value: Any) -> str:
        path = self.stored(value)
        return path if path and isinstance(self.tensor(path), nn.Parameter) else ""


def low_rank(node: fx.Node) -> bool:
    """Whether it is an adapter's product, which trainer/model/adapters.py puts in: that module is above this one."""
    return getattr(node.target, "__name__", "") == "low_rank" and len(node.args) == 5


def transposes(node: Any) -> bool:
    """Whether a node is the transpose of a matrix."""
    if node.target in ("t", torch.t):
        return True
    if node.target in ("permute", torch.permute):
        return [*node.args[1:]] in ([[1, 0]], [1, 0])
    return node.target in ("transpose", torch.transpose) and sorted(dim % 2 for dim in node.args[1:]) == [0, 1]
