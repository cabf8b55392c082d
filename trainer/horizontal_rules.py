"""How a divided dimension goes through each call of the graph: one rule for each kind of call.

A value of a region has one dimension of which every rank holds a part. A rule looks at one call with such an operand
and says which dimension of its result is divided, what else the call needs (a part of an operand, a length of its
own in an argument), or why it cannot be. Rules are pure: they note what is to change, trainer/horizontal.py changes it.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

from trainer.ops.attention import rotate
from trainer.ops.elementwise import hard_sigmoid, scaled_elu, shrink, swish
from trainer.ops.fuse_attention import Attention, nan_where_empty, without_empty_rows
from trainer.ops.gather import strided
from trainer.ops.noise import StochasticDepth
from trainer.ops.norm import BatchNorm, Dropout, instance_norm, rms_norm
from trainer.ops.reduce import (
    reduce_l1,
    reduce_l2,
    reduce_log_sum,
    reduce_log_sum_exp,
    reduce_max,
    reduce_mean,
    reduce_min,
    reduce_product,
    reduce_sum,
    reduce_sum_square,
)
from trainer.ops.rewriting import NoMatch, Rewriter
from trainer.ops.shape import expand
from trainer.placement import Interval, Placement, share

CONVOLUTIONS = (F.conv1d, F.conv2d, F.conv3d)
TRANSPOSED = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)


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
    """One dimension as [outer x] blocks x inner elements: of each block every rank has its share.

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
    """A product or a convolution with a stored matrix."""

    node: fx.Node
    name: str
    """Of the weight, in the file."""
    path: str
    x: fx.Node
    weight: fx.Node
    """The operand: the weight, or a transpose of it."""
    bias: Any
    outputs: int
    """The dimension of the stored weight that the columns are."""
    inputs: int
    groups: int = 1

    @property
    def convolution(self) -> bool:
        return self.node.target in (*CONVOLUTIONS, *TRANSPOSED)


class Facts:
    """Shapes, weights and products of a graph."""

    def __init__(self, module: fx.GraphModule, onnx_names: dict[str, str]) -> None:
        self.module, self.names = module, onnx_names
        self._rewriter = Rewriter(module.graph, module)
        self.order = {node: index for index, node in enumerate(module.graph.nodes)}
        self.gradient = self._with_gradient()
        self.products = {node: product for node in self.order if (product := self._product(node)) is not None}

    def shapes(self, node: fx.Node) -> list[tuple[int, int]]:
        """Each length at both sizes the graph was traced at. Raises Whole where that is not known."""
        try:
            first, second = self._rewriter.shapes(node)
        except NoMatch:
            raise Whole(f"the shape of {node.name} is known only at run time") from None
        return list(zip(first, second, strict=True))

    def is_tensor(self, node: fx.Node) -> bool:
        try:
            self._rewriter.shapes(node)
        except NoMatch:
            return False
        return True

    def rank(self, node: fx.Node) -> int:
        return len(self.shapes(node))

    def stored(self, value: Any) -> str:
        """The path of the weight or running statistic that a node reads; "" for any other value."""
        return str(value.target) if isinstance(value, fx.Node) and value.target in self.names else ""

    def is_parameter(self, path: str) -> bool:
        return isinstance(self.tensor(path), nn.Parameter)

    def tensor(self, path: str) -> torch.Tensor:
        owner, _, leaf = path.rpartition(".")
        tensor: torch.Tensor = getattr(self.module.get_submodule(owner), leaf)
        return tensor

    def _with_gradient(self) -> set[fx.Node]:
        """Nodes whose gradient somebody may need: computed from a weight, and floats."""
        found: set[fx.Node] = set()
        for node in self.order:
            if node.op == "get_attr":
                if self.stored(node) and self.is_parameter(str(node.target)):
                    found.add(node)
            elif any(operand in found for operand in node.all_input_nodes) and self._may_be_float(node):
                found.add(node)
        return found

    def _may_be_float(self, node: fx.Node) -> bool:
        if node.op == "call_method" and node.target == "size":
            return False
        try:
            return self._rewriter.dtype(node).is_floating_point
        except NoMatch:
            return True

    def nearest(self, node: fx.Node) -> set[fx.Node]:
        """The last products that a value is computed from."""
        found, seen, waiting = set(), set(), [node]
        while waiting:
            node = waiting.pop()
            if node in self.products:
                found.add(node)
            elif node not in seen and self._may_be_float(node):  # its lengths are the same on all ranks
                seen.add(node)
                waiting += node.all_input_nodes
        return found

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
        if of in (*CONVOLUTIONS, *TRANSPOSED) and len(args) >= 7 and self.stored(args[1]):
            outputs, path = int(of in TRANSPOSED), self.stored(args[1])
            return Product(node, self.names[path], path, args[0], args[1], args[2], outputs, 1 - outputs, args[6])
        return None

    def _matrix(self, node: fx.Node, x: Any, weight: Any, bias: Any, *, turned: bool) -> Product | None:
        """turned: the operand is [outputs, inputs]."""
        read = weight
        while isinstance(read, fx.Node) and transposes(read):
            read, turned = read.args[0], not turned
        path = self.stored(read)
        if not path or not self.is_parameter(path) or self.tensor(path).ndim != 2:
            return None
        if not isinstance(x, fx.Node) or not self.is_tensor(x) or self.stored(x) or not self.is_tensor(node):
            return None
        return Product(node, self.names[path], path, x, weight, bias, int(not turned), int(turned))


def transposes(node: Any) -> bool:
    """Of a matrix."""
    if node.target in ("t", torch.t) or node.target == "mT":
        return True
    if node.target in ("permute", torch.permute):
        return list(node.args[1:]) == [[1, 0]] or list(node.args[1:]) == [1, 0]
    return node.target in ("transpose", torch.transpose) and sorted(abs(dim) for dim in node.args[1:]) in (
        [0, 1],
        [1, 2],
    )  # type: ignore[arg-type]


# -- one attempt


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

    columns: dict[str, Division] = field(default_factory=dict)
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
            target = type(self.facts.module.get_submodule(str(target)))
        rule = RULES.get(target)
        if rule is None:
            raise Whole(f"{called(node)} is not known to work on parts ({node.name})")
        return rule(self, node)

    def column(self, node: fx.Node) -> Division:
        """A product whose columns are divided."""
        product = self.facts.products[node]
        if product.groups > 1:
            raise Whole(f"it is a convolution in {product.groups} groups")
        if product.x in self.states or not isinstance(node.kwargs.get("alpha", 1), int | float):
            raise Whole(f"its input {product.x.name} is divided already")
        if self.facts.nearest(product.x) & ({row.node for row in self.rows} | self.columns):
            raise Whole(f"{product.name} is computed from what the same division gives")
        total = self.facts.tensor(product.path).shape[product.outputs]
        ends = sorted({total, *self.cuts.get(product.name, ())})
        blocks = tuple(end - start for start, end in itertools.pairwise([0, *ends]))
        if min(blocks) < self.size:
            raise Whole(f"its {min(blocks)} columns are fewer than {self.size} ranks")
        dim = 1 if product.convolution else self.facts.rank(node) - 1
        own = Division(dim, blocks, source=product.name, unit=1)
        self.enter(product.x)
        self.part(node, product.path, own.moved(product.outputs))
        if isinstance(product.bias, fx.Node):
            self.operand(node, product.bias, self.facts.rank(product.bias) - 1, own)
        self.work.columns[node.name] = own
        return own

    # -- what rules ask for

    def shapes(self, node: fx.Node) -> list[tuple[int, int]]:
        return self.facts.shapes(node)

    def rank(self, node: fx.Node) -> int:
        return self.facts.rank(node)

    def division(self, value: Any) -> Division | None:
        """How a value is divided; None if it is not."""
        return self.states.get(value) if isinstance(value, fx.Node) else None

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
        if before != division and not self._equal(before, division):
            raise Whole(f"{self.facts.names[path]} is divided in two ways")
        self.work.readers.setdefault(path, []).append(node.name)

    def _equal(self, one: Division, other: Division) -> bool:
        return (one.dim, one.blocks, one.inner) == (other.dim, other.blocks, other.inner)

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
        if products := self.facts.nearest(operand):
            raise Joined(products)
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
RULES: dict[Any, Rule] = {}
"""Function, name of a method, or type of a module -> what it does to a division. Gives that of the result; a list of a
tuple's; None where the result is whole."""


def rule(*targets: Any) -> Callable[[Rule], Rule]:
    def file(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(targets, function))
        return function

    return file


# -- element by element

# fmt: off
ELEMENTWISE = (
    "abs", "acos", "acosh", "add", "asin", "asinh", "atan", "atanh", "bitwise_and", "bitwise_not", "bitwise_or",
    "bitwise_xor", "ceil", "celu", "clamp", "clamp_max", "clamp_min", "clip", "clone", "contiguous", "cos", "cosh",
    "detach", "div", "elu", "eq", "erf", "exp", "float", "floor", "fmod", "ge", "gelu", "gt", "hardshrink",
    "hardsigmoid", "hardswish", "hardtanh", "isinf", "isnan", "le", "leaky_relu", "log", "log1p", "logical_and",
    "logical_not", "logical_or", "logical_xor", "logsigmoid", "lt", "masked_fill", "maximum", "minimum", "mish", "mul",
    "ne", "neg", "pow", "reciprocal", "relu", "relu6", "remainder", "round", "rsqrt", "selu", "sigmoid", "sign",
    "silu", "sin", "sinh", "softplus", "softshrink", "softsign", "sqrt", "square", "sub", "tan", "tanh", "tanhshrink",
    "threshold", "to", "truediv", "where", "zeros_like", "ones_like",
)
# fmt: on


@rule(
    *(getattr(owner, name) for name in ELEMENTWISE for owner in (torch, F, operator) if hasattr(owner, name)),
    *ELEMENTWISE,
    *(hard_sigmoid, scaled_elu, shrink, swish),
)
def elementwise(t: Attempt, node: Any) -> Division:
    return t.aligned(node, t.tensors(node), t.rank(node))


@rule(Dropout)
def dropout(t: Attempt, node: Any) -> Division:
    if t.facts.module.get_submodule(str(node.target)).with_mask:
        raise Whole(f"the mask of {node.name} is read, too")
    t.work.apart.append(node.name)
    return elementwise(t, node)


@rule(StochasticDepth)
def stochastic_depth(t: Attempt, node: Any) -> Division:
    """A sample is dropped on all ranks or on none: but for its channels, each has its own."""
    division = elementwise(t, node)
    if division.dim < t.facts.module.get_submodule(str(node.target)).whole:
        t.work.apart.append(node.name)
    return division


# -- products


@rule(F.linear, torch.addmm)
def linear(t: Attempt, node: Any) -> Division | None:
    product = t.facts.products.get(node)
    if product is None:
        raise Whole(f"{node.name} multiplies by a matrix that is computed")
    division = t.division(product.x)
    if division is None:
        raise Whole(f"{node.name} adds a divided value")
    rank = t.rank(product.x)
    if division.dim == rank - 1:
        return row(t, product, division)
    for whole in (product.weight, product.bias):
        if isinstance(whole, fx.Node):
            t.enter(whole)
    return division


def row(t: Attempt, product: Product, division: Division) -> None:
    """The product that adds up the parts."""
    rows = t.facts.tensor(product.path).shape[product.inputs]
    if rows != division.period:
        raise Whole(f"{product.name} has {rows} rows, of which {division.period} repeat")
    t.part(product.node, product.path, division.moved(product.inputs))
    t.rows.append(product)
    t.work.rows.append(product.node.name)


@rule(torch.matmul, torch.mm, torch.bmm)
def matmul(t: Attempt, node: Any) -> Division | None:
    if node in t.facts.products:
        return linear(t, node)
    a, b = node.args
    ranks, rank = (t.rank(a), t.rank(b)), t.rank(node)
    if min(ranks) < 2:
        raise Whole(f"{node.name} multiplies by a vector")
    places = [None if (own := t.division(x)) is None else n - own.dim for x, n in zip((a, b), ranks, strict=True)]
    if places[0] == 1 or places[1] == 2:
        raise Whole(f"{node.name} adds up products along the divided dimension")
    if places[0] == 2 or places[1] == 1:  # rows of the one, columns of the other: each is the result's own dimension
        if None not in places:
            raise Whole(f"two dimensions of {node.name} would be divided")
        own, other, last = (t.division(a), b, 2) if places[1] is None else (t.division(b), a, 1)
        assert own is not None
        t.enter(other)
        return own.moved(rank - last)
    return t.aligned(node, [a, b], rank)


@rule(*CONVOLUTIONS, *TRANSPOSED)
def convolution(t: Attempt, node: Any) -> Division | None:
    product = t.facts.products.get(node)
    if product is None:
        raise Whole(f"{node.name} convolves with a kernel that is computed")
    division = t.division(product.x)
    if division is None or division.dim > 1:
        raise Whole(f"{node.name} convolves along the divided dimension")
    if division.dim == 0:
        for whole in (product.weight, product.bias):
            if isinstance(whole, fx.Node):
                t.enter(whole)
        return division
    return row(t, product, division) if product.groups == 1 else grouped(t, product, division)


def grouped(t: Attempt, product: Product, division: Division) -> Division:
    """Each rank has whole groups: of single channels, or as many as divide evenly."""
    channels, groups = division.period, product.groups
    if product.outputs:
        raise Whole(f"{product.node.name} is a transposed convolution in {groups} groups")
    outputs = t.facts.tensor(product.path).shape[0]
    if groups == channels:
        own, after = division, outputs // groups
    elif len(division.blocks) == 1 and division.even(t.size) and groups % t.size == 0:
        own, after = Division(1, (groups,)), outputs // groups
    else:
        raise Whole(f"{product.node.name} has {groups} groups of {channels} channels, over {t.size} ranks")
    result = replace(own, inner=own.inner * after, unit=own.unit if after == 1 else 0)
    t.part(product.node, product.path, result.moved(0))
    if isinstance(product.bias, fx.Node):
        t.operand(product.node, product.bias, 0, result)
    t.length(product.node, (6,), own)
    return result


# -- attention


@rule(Attention, F.scaled_dot_product_attention)
def attention(t: Attempt, node: Any) -> Division:
    query, key, value, *rest = node.args
    mask = rest[0] if rest else node.kwargs.get("attn_mask")
    if node.op == "call_module":
        if t.facts.module.get_submodule(str(node.target)).dropout > 0:
            t.work.apart.append(node.name)
    elif node.kwargs.get("dropout_p") or len(rest) > 1:
        raise Whole(f"{node.name} drops out weights in another way than Attention")
    rank = t.rank(query)
    heads = next(own for x in (query, key, value, mask) if (own := t.division(x)) is not None)
    at = heads.dim + rank - t.rank(next(x for x in (query, key, value, mask) if t.division(x) is not None))
    if at >= rank - 2:
        raise Whole(f"{node.name} would be divided along dimension {at} of {rank}, not by heads")
    for operand in (query, key, value):
        own = t.division(operand)
        if own is None:
            length = t.shapes(operand)[at][0]
            fitting = heads.period != length and length % t.size == 0
            t.operand(node, operand, at, Division(at, (length,)) if fitting else heads)
        elif own.dim != at:
            raise Whole(f"{node.name} would be divided along dimensions {at} and {own.dim}")
    own, keys = t.division(query), [t.division(x) for x in (key, value)]
    if own is None:
        raise Whole(f"the query of {node.name} is the same for all heads")
    for other in keys:
        if other is not None and other.period != own.period and not (other.even(t.size) and own.even(t.size)):
            raise Whole(f"{node.name}: {own.period} heads share {other.period}, over {t.size} ranks")
        if other is not None and other.period == own.period:
            t.same(own, other, node)
    if isinstance(mask, fx.Node):
        _mask(t, node, mask, at - rank, own)
    t.work.attends = True
    return own


def _mask(t: Attempt, node: fx.Node, mask: fx.Node, at: int, heads: Division) -> None:
    """at: which dimension is divided, counted from behind."""
    own = t.division(mask)
    if own is None:
        t.operand(node, mask, t.rank(mask) + at, heads)
    elif own.dim - t.rank(mask) != at:
        raise Whole(f"the mask of {node.name} is divided along another dimension")
    else:
        t.same(own, heads, node)


@rule(F.softmax, F.log_softmax, torch.softmax, torch.log_softmax)
def softmax(t: Attempt, node: Any) -> Division:
    division = elementwise(t, node)
    dim: Any = node.kwargs.get("dim", node.args[1] if len(node.args) > 1 else -1)
    _not_along(t, node, division, [dim])
    t.work.attends = True
    return division


def _not_along(t: Attempt, node: fx.Node, division: Division, dims: Iterable[int]) -> None:
    """Raises if one of these dimensions of the first operand is the divided one."""
    rank = t.rank(node.args[0])  # type: ignore[arg-type]
    if division.dim in [dim % rank for dim in dims]:
        raise Whole(f"{called(node)} works along the divided dimension ({node.name})")


@rule(rotate)
def rotary(t: Attempt, node: Any) -> Division:
    division = t.aligned(node, t.tensors(node), t.rank(node))
    _not_along(t, node, division, [-1])
    return division


@rule(nan_where_empty, without_empty_rows)
def rowwise(t: Attempt, node: Any) -> Division:
    division = t.aligned(node, t.tensors(node), t.rank(node))
    _not_along(t, node, division, [-1])
    return division


# -- normalisation, reduction, pooling


@rule(F.layer_norm, F.rms_norm)
def layer_norm(t: Attempt, node: Any) -> Division:
    x, shape, *weights = node.args
    division = t.division(x)
    if division is None:
        raise Whole(f"the weights of {node.name} are divided")
    _not_along(t, node, division, range(-len(shape), 0))
    for weight in (*weights, node.kwargs.get("weight"), node.kwargs.get("bias")):
        if isinstance(weight, fx.Node):
            t.enter(weight)
    return division


@rule(rms_norm)
def rms_norm_without_weight(t: Attempt, node: Any) -> Division:
    x, axis, *_ = node.args
    division = t.division(x)
    assert division is not None
    _not_along(t, node, division, range(axis, t.rank(x)))
    return division


@rule(BatchNorm)
def batch_norm(t: Attempt, node: Any) -> Division:
    x, *stored = node.args
    return _by_channel(t, node, x, stored)


@rule(instance_norm)
def instance_norm_(t: Attempt, node: Any) -> Division:
    return _by_channel(t, node, node.args[0], node.args[1:3])


def _by_channel(t: Attempt, node: fx.Node, x: Any, weights: Iterable[Any]) -> Division:
    division = t.division(x)
    if division is None or division.dim != 1:
        raise Whole(f"{node.name} normalises along the divided dimension")
    for weight in weights:
        if isinstance(weight, fx.Node):
            t.operand(node, weight, 0, division)
    return division


@rule(F.group_norm)
def group_norm(t: Attempt, node: Any) -> Division:
    x, groups, *weights = node.args
    own = t.division(x)
    if own is not None and (len(own.blocks) > 1 or not own.even(t.size) or groups % t.size):
        raise Whole(f"{node.name} has {groups} groups of {own.period} channels, over {t.size} ranks")
    division = _by_channel(t, node, x, weights[:2])
    t.length(node, (1,), Division(0, (groups,)))
    return division


REDUCTIONS = (
    *(reduce_sum, reduce_mean, reduce_product, reduce_max, reduce_min, reduce_l1, reduce_l2, reduce_log_sum),
    *(reduce_log_sum_exp, reduce_sum_square, torch.mean, torch.sum, torch.amax, torch.amin, torch.prod),
)


@rule(*REDUCTIONS)
def reduction(t: Attempt, node: Any) -> Division:
    x, *rest = node.args
    division, dims = t.division(x), rest[0] if rest else node.kwargs.get("dim")
    if division is None or dims is None:
        raise Whole(f"{called(node)} adds up the divided dimension ({node.name})")
    dims = [dim % t.rank(x) for dim in ([dims] if isinstance(dims, int) else dims)]
    _not_along(t, node, division, dims)
    lost = sum(dim < division.dim for dim in dims) if t.rank(node) < t.rank(x) else 0
    return division.moved(division.dim - lost)


@rule(
    *(F.max_pool1d, F.max_pool2d, F.max_pool3d, F.avg_pool1d, F.avg_pool2d, F.avg_pool3d),
    *(torch.max_pool1d, torch.max_pool2d, torch.max_pool3d, torch.avg_pool1d),
)
def pool(t: Attempt, node: Any) -> Division:
    division = t.division(node.args[0])
    if division is None or division.dim > 1:
        raise Whole(f"{called(node)} works along the divided dimension ({node.name})")
    return division


@rule(F.pad)
def pad(t: Attempt, node: Any) -> Division:
    x, borders, *_ = node.args
    division = t.division(x)
    assert division is not None
    _not_along(t, node, division, (-1 - i // 2 for i, n in enumerate(borders) if n != 0))
    return division


# -- moving dimensions


@rule("size")
def size(t: Attempt, node: Any) -> None:
    """All numbers of the graph stay those of whole values."""
    x, dim = node.args
    division = t.division(x)
    if division is not None and dim % t.rank(x) == division.dim:
        t.work.measured.append((node.name, division))


@rule("permute", torch.permute, "transpose", torch.transpose, "t", torch.t)
def permute(t: Attempt, node: Any) -> Division:
    x, *rest = node.args
    division, rank = t.division(x), t.rank(x)
    assert division is not None
    order = list(range(rank))
    if called(node) == "permute":
        order = [dim % rank for dim in (rest[0] if isinstance(rest[0], list | tuple) else rest)]
    else:
        one, other = rest or (0, rank - 1)
        order[one], order[other] = order[other], order[one]
    return division.moved(order.index(division.dim))


@rule(torch.unsqueeze, "unsqueeze")
def unsqueeze(t: Attempt, node: Any) -> Division:
    x, dim = node.args
    division = t.division(x)
    assert division is not None
    return division.moved(division.dim + (dim % t.rank(node) <= division.dim))


@rule(torch.squeeze, "squeeze")
def squeeze(t: Attempt, node: Any) -> Division:
    x, *rest = node.args
    division = t.division(x)
    if division is None or not rest:
        raise Whole(f"{node.name} does not say which dimensions it takes away")
    dims = [dim % t.rank(x) for dim in (rest[0] if isinstance(rest[0], list | tuple) else rest)]
    gone = [dim for dim in dims if t.shapes(x)[dim] == (1, 1)]
    return division.moved(division.dim - sum(dim < division.dim for dim in gone))


@rule("reshape", "view", torch.reshape, "flatten", torch.flatten)
def reshape(t: Attempt, node: Any) -> Division:
    x, *rest = node.args
    division = t.division(x)
    if division is None:
        raise Whole(f"{node.name} takes its lengths from a divided value")
    result = regroup(t.shapes(x), t.shapes(node), division, t.size, node.name)
    if called(node) != "flatten":
        t.reached(node, rest, result.dim, result)
    return result


Pairs = Sequence[tuple[int, int]]
FEW = 8
"""So many elements of a divided dimension may turn out to be blocks, as query, key and value are."""


def regroup(before: Pairs, after: Pairs, division: Division, size: int, name: str) -> Division:
    """Where a divided dimension is after a reshape, by the strides of its elements (at both sizes of the inputs).

    [.., 64] -> [.., 4, 16]     4 heads are divided: they must divide evenly
    [.., 4, 16] -> [.., 64]     blocks of 16 elements each
    """
    behind = [division.inner * math.prod(length[side] for length in before[division.dim + 1 :]) for side in (0, 1)]
    top = [n * division.length for n in behind]  # stride of what is outside the divided factor
    strides = [[math.prod(length[side] for length in after[dim + 1 :]) for side in (0, 1)] for dim in range(len(after))]
    for dim, (stride, length) in enumerate(zip(strides, after, strict=True)):  # noqa: B007
        span = [n * m for n, m in zip(stride, length, strict=True)]
        if all(s < n <= m for s, n, m in zip(stride, top, span, strict=True)):
            break
    else:
        raise Whole(f"{name} merges the divided dimension in two ways")
    if any(m % n for n, m in zip(top, span, strict=True)):
        raise Whole(f"{name} cuts the divided dimension across")
    if all(n % s == 0 for s, n in zip(stride, behind, strict=True)):
        inner = {n // s for s, n in zip(stride, behind, strict=True)}
        if len(inner) > 1:
            raise Whole(f"{name} merges the divided dimension with one of dynamic length behind it")
        return replace(division, dim=dim, inner=inner.pop())
    if any(s % n for s, n in zip(stride, behind, strict=True)) or any(n % s for s, n in zip(stride, top, strict=True)):
        raise Whole(f"{name} cuts the divided dimension across")
    unit = stride[0] // behind[0]
    blocks = division.blocks
    count = division.length // unit
    if len(blocks) == count > 1 and set(blocks) == {unit}:  # the blocks are a dimension of their own now
        inside = replace(division, blocks=(unit,), unit=0)
        return regroup(before, after, inside, size, name)
    finer = replace(division, dim=dim, blocks=tuple(block // unit for block in blocks), unit=division.unit * unit)
    if all(block % unit == 0 for block in blocks) and finer.even(size):
        return finer
    broken = f"{name} makes {count} x {unit} of {division.length}: {count} is no multiple of {size}"
    if len(blocks) > 1 or unit < size or count > FEW:
        raise Whole(broken)
    raise division.finer([unit * i * division.inner for i in range(1, count)], name, broken)


@rule(expand, "expand")
def expand_(t: Attempt, node: Any) -> Division:
    x, *rest = node.args
    division = t.division(x)
    if division is None:
        raise Whole(f"{node.name} takes its lengths from a divided value")
    result = division.moved(division.dim + t.rank(node) - t.rank(x))
    lengths = rest[0] if isinstance(rest[0], list | tuple) else rest
    place = result.dim - (t.rank(node) - len(lengths))
    if place >= 0:
        t.reached(node, rest, place, result)
    return result


@rule("repeat")
def repeat(t: Attempt, node: Any) -> Division:
    x, *rest = node.args
    division = t.division(x)
    counts = rest[0] if isinstance(rest[0], list | tuple) else rest
    assert division is not None
    result = division.moved(division.dim + t.rank(node) - t.rank(x))
    if counts[result.dim] != 1:
        raise Whole(f"{node.name} repeats the divided dimension")
    return result


@rule(torch.repeat_interleave, "repeat_interleave")
def repeat_interleave(t: Attempt, node: Any) -> Division:
    x, count, *rest = node.args
    dim = rest[0] if rest else node.kwargs.get("dim")
    division = t.division(x)
    if division is None or not isinstance(dim, int) or not isinstance(count, int):
        raise Whole(f"{node.name} repeats by a value")
    if dim % t.rank(x) != division.dim:
        return division
    result = replace(division, inner=division.inner * count)
    if "output_size" in node.kwargs:
        t.length(node, ("output_size",), result)
    return result


# -- cutting and joining


@rule(operator.getitem)
def getitem(t: Attempt, node: Any) -> Division:
    parts, index = node.args
    states = t.states[parts]
    if not isinstance(states, list) or not isinstance(index, int):
        raise Whole(f"{node.name} indexes a divided value")
    part: Division = states[index]
    return part


@rule(torch.split, "split", torch.chunk, "chunk")
def split(t: Attempt, node: Any) -> list[Division]:
    x, lengths = node.args[:2]
    dim = (node.args[2] if len(node.args) > 2 else node.kwargs.get("dim", 0)) % t.rank(x)
    division, total = t.division(x), t.shapes(x)[dim]
    assert division is not None
    count = max((int(user.args[1]) for user in node.users if user.target is operator.getitem), default=0) + 1
    if dim != division.dim:
        return [division] * count
    if total != (division.period, division.period):
        raise Whole(f"{node.name} cuts a dimension of dynamic length")
    if isinstance(lengths, int):
        piece = -(-total[0] // lengths) if called(node) == "chunk" else lengths
        lengths = [min(piece, total[0] - start) for start in range(0, total[0], piece)]
        ends = list(itertools.accumulate(lengths))
        pieces = [_piece(division, start, end, node) for start, end in itertools.pairwise([0, *ends])]
        if len({piece.blocks for piece in pieces}) > 1 or any(len(piece.blocks) > 1 for piece in pieces):
            raise Whole(f"{node.name} cuts into pieces of {lengths}, which are not divided alike")
        if called(node) != "chunk":
            t.length(node, (1,), pieces[0])
        return pieces
    ends = list(itertools.accumulate(lengths))
    pieces = [_piece(division, start, end, node) for start, end in itertools.pairwise([0, *ends])]
    for i, piece in enumerate(pieces):
        t.length(node, (1, i), piece)
    return pieces


def _piece(division: Division, start: int, end: int, node: fx.Node) -> Division:
    """The elements from start to end of a divided dimension; asks for blocks that end there."""
    ends = [0, *(end * division.inner for end in itertools.accumulate(division.blocks))]
    if start not in ends or end not in ends:
        raise division.finer([place for place in (start, end) if place not in ends], called(node))
    blocks = division.blocks[ends.index(start) : ends.index(end)]
    return replace(division, blocks=blocks, start=division.start + start // division.inner * division.unit)


@rule(strided)
def slice_(t: Attempt, node: Any) -> Division:
    x, axis, start, end, step = node.args
    division, rank = t.division(x), t.rank(x)
    if division is None:
        raise Whole(f"{node.name} takes its bounds from a divided value")
    if axis % rank != division.dim:
        return division
    total = t.shapes(x)[division.dim]
    if step != 1 or total != (division.period,) * 2 or not isinstance(start, int) or not isinstance(end, int):
        raise Whole(f"{node.name} cuts the divided dimension across")
    start, end, _ = slice(start, end).indices(division.period)
    piece = _piece(division, start, end, node)
    if start:
        t.length(node, (2,), _piece(division, 0, start, node))
    t.length(node, (3,), _piece(division, 0, end, node))
    return piece


@rule(torch.unbind, "unbind")
def unbind(t: Attempt, node: Any) -> list[Division]:
    x, *rest = node.args
    dim = (rest[0] if rest else node.kwargs.get("dim", 0)) % t.rank(x)
    division = t.division(x)
    assert division is not None
    count = t.shapes(x)[dim][0]
    _not_picked(t, node, division, dim)
    return [division.moved(division.dim - (dim < division.dim))] * count


@rule(torch.select, "select")
def select(t: Attempt, node: Any) -> Division:
    x, dim, _ = node.args
    division = t.division(x)
    assert division is not None
    _not_picked(t, node, division, dim % t.rank(x))
    return division.moved(division.dim - (dim % t.rank(x) < division.dim))


def _not_picked(t: Attempt, node: fx.Node, division: Division, dim: int) -> None:
    """Raises if single elements of the divided dimension are picked: few of them may be blocks of their own."""
    if dim != division.dim:
        return
    if division.length > FEW:
        raise Whole(f"{node.name} picks one of {division.length} divided elements")
    raise division.finer([i * division.inner for i in range(1, division.length)], called(node))


@rule(torch.cat)
def cat(t: Attempt, node: Any) -> Division:
    parts = list(node.args[0])
    rank = t.rank(node)
    dim = (node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)) % rank
    divisions = [t.division(part) for part in parts]
    first = next(own for own in divisions if own is not None)
    if first.dim != dim:
        return t.aligned(node, parts, rank)
    blocks: list[int] = []
    for part, own in zip(parts, divisions, strict=True):
        if own is None or own.dim != dim or t.shapes(part)[dim] != (own.period,) * 2:
            raise Whole(f"{node.name} joins divided and whole values along the divided dimension")
        if own.inner > 1 and not own.even(t.size):
            raise Whole(f"{node.name} joins {own.length} x {own.inner} elements, over {t.size} ranks")
        blocks += [block * own.inner for block in own.blocks]
    return Division(dim, tuple(blocks))


@rule(torch.stack)
def stack(t: Attempt, node: Any) -> Division:
    parts, rank = list(node.args[0]), t.rank(node)
    dim = (node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)) % rank
    division = t.aligned(node, parts, rank - 1)
    return division.moved(division.dim + (dim <= division.dim))


@rule(F.glu)
def glu(t: Attempt, node: Any) -> Division:
    x = node.args[0]
    dim = (node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", -1)) % t.rank(x)
    division = t.division(x)
    assert division is not None
    if dim != division.dim:
        return division
    half = division.period // 2
    first, second = _piece(division, 0, half, node), _piece(division, half, division.period, node)
    t.same(first, second, node)
    return first
