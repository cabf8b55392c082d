"""What tensor parallelism reads off an fx graph: shapes, and which calls multiply by a stored matrix."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

from onward.trainer.onnx_import.passes.rewriter import NoMatch, Rewriter

CONVOLUTIONS = (F.conv1d, F.conv2d, F.conv3d)
TRANSPOSED = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)
PRODUCTS = (F.linear, torch.matmul, torch.mm, torch.bmm, torch.addmm, torch.einsum, *CONVOLUTIONS, *TRANSPOSED)


@dataclass(frozen=True)
class WeightPart:
    """The rows of a stored matrix that a product reads, where the matrix is split in the graph: torch's cross-attention
    multiplies the queries by the first rows of one matrix and the memory by the others."""

    split: fx.Node
    start: int
    stop: int


@dataclass(frozen=True)
class Product:
    """A matrix product or a convolution with a stored weight, or a low-rank adapter's with two (model/adapters.py)."""

    node: fx.Node
    x: fx.Node
    bias: Any
    path: str
    """Of the weight that has the output features, for column parallelism."""
    outputs: int
    """Their dimension."""
    row_path: str
    """Of the weight that has the input features, for row parallelism: the same one, except in an adapter, x A' B'."""
    inputs: int
    """Their dimension."""
    name: str
    """The initializer name of `path`."""
    weight_operands: tuple[fx.Node, ...] = ()
    """The operands that are the weights, transposed or not."""
    groups: int = 1
    other_outputs: tuple[int, ...] = ()
    """Of an einsum whose weight has output features in several dimensions, such as experts and columns: the others."""
    part: WeightPart | None = None
    """The output features of `path` that it reads; None: all."""
    is_stacked: bool = False
    """Whether the weight is [experts or heads, .., ..]: a matrix for each."""

    @property
    def is_convolution(self) -> bool:
        return self.node.target in (*CONVOLUTIONS, *TRANSPOSED)

    @property
    def is_einsum(self) -> bool:
        return self.node.target is torch.einsum

    @property
    def output_dim(self) -> int:
        """Return the dimension of the result that has the output features; negative ones count from the end."""
        if self.is_einsum:
            *terms, result = einsum_labels(self.node)
            return result.index(terms[1 - self.node.args[1:].index(self.x)][self.outputs])
        return 1 if self.is_convolution else -1

    @property
    def is_low_rank(self) -> bool:
        return self.path != self.row_path


class GraphAnalysis:
    """The shapes, weights and products of a graph, and how values depend on each other."""

    def __init__(self, module: fx.GraphModule, onnx_names: dict[str, str]) -> None:
        self.module = module
        self.names = onnx_names
        self._rewriter = Rewriter(module.graph, module)
        self.order = {node: index for index, node in enumerate(module.graph.nodes)}
        self.reads: dict[str, list[fx.Node]] = {}
        for node in self.order:
            if node.op == "get_attr":
                self.reads.setdefault(str(node.target), []).append(node)
        # a replicated value needs an all-reduce of its gradient only if it has one
        computed = self._computed_from({node for node in self.order if self.parameter(node)})
        self.has_gradient = {node for node in computed if self._may_be_float(node)}
        self.depends_on_input = self._computed_from({node for node in self.order if node.op == "placeholder"})
        self.products = {node: product for node in self.order if (product := self._product(node)) is not None}

    # -- values

    def has_known_shape(self, node: fx.Node) -> bool:
        """Whether the shape (or the number) that a node gives is known before the graph runs."""
        try:
            self._rewriter.probes(node)
        except NoMatch:
            return False
        return True

    def is_tensor(self, node: fx.Node) -> bool:
        """Whether a node of known shape gives a tensor, not a number or a tuple."""
        return isinstance(self._rewriter.probes(node)[0], torch.Tensor)

    @contextmanager
    def with_other_outputs(self) -> Iterator[None]:
        """Take the other dimension of those that could be the output features of an einsum's weight."""
        products = self.products
        self.products = {
            node: replace(product, outputs=product.other_outputs[0]) if product.other_outputs else product
            for node, product in products.items()
        }
        try:
            yield
        finally:
            self.products = products

    def shapes(self, node: fx.Node) -> list[tuple[int, int]]:
        """Return the length of each dimension of a tensor of known shape.

        A pair each, since the graph is traced at two sizes of its inputs: a length that differs is a dynamic one.
        """
        first, second = self._rewriter.shapes(node)
        return list(zip(first, second, strict=True))

    def rank(self, node: fx.Node) -> int:
        return len(self.shapes(node))

    def stored(self, value: Any) -> str:
        """Return the path of the weight or running statistic that a node reads; "" for any other value."""
        is_stored = isinstance(value, fx.Node) and value.op == "get_attr" and value.target in self.names
        return str(value.target) if is_stored else ""

    def tensor(self, path: str) -> torch.Tensor:
        return stored_tensor(self.module, path)

    def submodule(self, node: fx.Node) -> Any:
        """Return the module that a call_module node calls."""
        return self.module.get_submodule(str(node.target))

    def readers(self, path: str) -> Iterator[fx.Node]:
        """Yield the nodes that read a stored tensor or its transpose."""
        return _past_transposes(self.reads[path], self.tensor(path).ndim)

    def num_outputs(self, product: Product) -> int:
        part = product.part
        return part.stop - part.start if part else self.tensor(product.path).shape[product.outputs]

    def readers_of_parts(self, split: fx.Node) -> Iterator[fx.Node]:
        """Yield the nodes that read an output of the split of a matrix, or its transpose."""
        return _past_transposes(split.users, 2)

    def nearest_products(self, node: fx.Node) -> list[fx.Node]:
        """Return the last products that a value is computed from, in the order of the graph."""
        found = set()
        seen = set()
        waiting = [node]
        while waiting:
            node = waiting.pop()
            if node in self.products:
                found.add(node)
            # a product is not passed: what it is computed from is not nearest
            elif node not in seen and self._may_be_float(node):  # integers are lengths, the same on all ranks
                seen.add(node)
                waiting += node.all_input_nodes
        return sorted(found, key=self.order.__getitem__)

    def ancestors(self, node: fx.Node) -> set[fx.Node]:
        """Return all that a value is computed from, itself included."""
        seen = set()
        waiting = [node]
        while waiting:
            node = waiting.pop()
            if node not in seen:
                seen.add(node)
                waiting += node.all_input_nodes
        return seen

    def computed_matrices(self) -> Iterator[tuple[str, fx.Node]]:
        """Yield (name of a weight, product) where a product's matrix is computed from that weight alone."""
        for node in self.order:
            # a matrix made of weights, such as a normed one, has no stored part that a rank could keep
            if node.target not in PRODUCTS or node in self.products:
                continue
            for operand in node.all_input_nodes:
                for path in self._sources(operand):
                    if self.tensor(path).ndim > 1:
                        yield self.names[path], node

    def _sources(self, node: fx.Node) -> list[str]:
        """Return the weights that a value is computed from; none if an input of the graph is among its sources."""
        sources = self.ancestors(node)
        # a matrix that depends on the data, such as the keys of attention, is no weight
        if any(source.op == "placeholder" for source in sources):
            return []
        return [path for source in sorted(sources, key=self.order.__getitem__) if (path := self.stored(source))]

    def _computed_from(self, sources: set[fx.Node]) -> set[fx.Node]:
        """Return the nodes whose values depend on these, other than through lengths (`size`)."""
        found = {*sources}
        for node in self.order:
            # a length is the same whatever the values are
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
        # other keyword arguments could change what the product computes
        if node.op != "call_function" or node.kwargs.keys() - {"beta", "alpha"}:
            return None
        args: list[Any] = list(node.args)
        target = node.target
        if target is F.linear and len(args) in (2, 3):
            return self._matrix(node, args[0], args[1], [*args, None][2], transposed=True)
        if target in (torch.matmul, torch.mm, torch.bmm) and len(args) == 2:
            return self._matrix(node, args[0], args[1], None, transposed=False)
        if target is torch.addmm and len(args) == 3:
            return self._matrix(node, args[1], args[2], args[0], transposed=False)
        if target is torch.einsum:
            return self._einsum(node)
        if target in (*CONVOLUTIONS, *TRANSPOSED) and len(args) >= 7 and (path := self.parameter(args[1])):
            x, weight, bias, outputs = *args[:3], int(target in TRANSPOSED)
            dims = (path, outputs, path, 1 - outputs)
            return Product(node, x, bias, *dims, self.names[path], weight_operands=(weight,), groups=args[6])
        return self._adapter(node, args) if is_low_rank(node) else None

    def _matrix(self, node: fx.Node, x: Any, weight: Any, bias: Any, *, transposed: bool) -> Product | None:
        """transposed: the operand is [outputs, inputs]."""
        # `x` must be computed: a product of two stored matrices is no layer
        if not isinstance(x, fx.Node) or self.stored(x):
            return None
        for ndim in (2, 3):  # one matrix, or one for each expert or head
            read = weight
            reads_columns = not transposed
            # two transposes cancel, and each one exchanges rows and columns
            while isinstance(read, fx.Node) and is_transpose(read, ndim):
                read = read.args[0]
                reads_columns = not reads_columns
            read, part = _part(read) if ndim == 2 else (read, None)
            path = self.parameter(read)
            if path and self.tensor(path).ndim == ndim:
                columns = ndim - 2 + reads_columns
                rows = ndim - 1 - reads_columns
                # parts are rows of the stored matrix, so that only column-parallel products can read them
                if part is not None and columns != 0:
                    return None
                dims = (path, columns, path, rows)
                return Product(
                    node, x, bias, *dims, self.names[path], weight_operands=(weight,), part=part, is_stacked=ndim == 3
                )
        return None

    def _einsum(self, node: fx.Node) -> Product | None:
        """einsum("bsd,dhk->bshk", x, weight): rows d; columns h, the first label behind it that x lacks."""
        *terms, result = einsum_labels(node)
        paths = [self.parameter(operand) for operand in node.args[1:]]
        # exactly one is a weight: two make a constant, and none a product of activations
        if len(terms) != 2 or bool(paths[0]) == bool(paths[1]):
            return None
        which = int(bool(paths[1]))
        x = node.args[2 - which]
        weight = node.args[1 + which]
        if not isinstance(x, fx.Node) or not isinstance(weight, fx.Node):
            return None
        weight_labels = terms[which]
        x_labels = terms[1 - which]
        # a label of all three is a batch of products: neither a column nor a row
        column_labels = {*result} - {*x_labels}
        row_labels = {*x_labels} - {*result}
        columns = [dim for dim, label in enumerate(weight_labels) if label in column_labels]
        rows = [dim for dim, label in enumerate(weight_labels) if label in row_labels]
        if not columns or not rows:
            return None
        # the first column behind the rows is sharded
        outputs, *others = sorted(columns, key=lambda dim: dim < rows[0])
        path = paths[which]
        dims = (path, outputs, path, rows[0])
        return Product(node, x, None, *dims, self.names[path], (weight,), other_outputs=tuple(others))

    def _adapter(self, node: fx.Node, args: list[Any]) -> Product | None:
        """low_rank(x, a [rank, inputs], b [outputs, rank], scale, reverse): x A' B', or x B A if reverse."""
        x, a, b, _, reverse = args
        # the factor that x meets first has the input features, the last one the output features
        first, last = (b, a) if reverse else (a, b)
        row_path = self.parameter(first)
        path = self.parameter(last)
        if not row_path or not path or self.tensor(path).ndim != 2:
            return None
        dims = (path, int(reverse), row_path, int(not reverse))
        return Product(node, x, None, *dims, self.names[path], weight_operands=(a, b))

    def parameter(self, value: Any) -> str:
        """Return the path of the weight that a node reads; "" for any other value."""
        path = self.stored(value)
        return path if path and isinstance(self.tensor(path), nn.Parameter) else ""


def _past_transposes(values: Iterable[fx.Node], ndim: int) -> Iterator[fx.Node]:
    """Yield the nodes that read values of `ndim` dimensions or their transposes."""
    waiting = [user for value in values for user in value.users]
    while waiting:
        node = waiting.pop()
        if is_transpose(node, ndim):
            waiting += node.users
        else:
            yield node


def _part(node: Any) -> tuple[Any, WeightPart | None]:
    """Return what a node is an output of a split of, along dimension 0 into known lengths; else the node itself."""
    if isinstance(node, fx.Node) and node.target is operator.getitem:
        split, index = node.args
        # along dimension 0 alone: only there the parts are rows of the stored matrix
        if isinstance(split, fx.Node) and split.target is torch.split and [*split.args[2:]] == [0]:
            whole, lengths, _ = split.args
            if isinstance(lengths, list | tuple) and all(isinstance(length, int) for length in lengths):
                ends = [0, *itertools.accumulate(lengths)]
                return whole, WeightPart(split, ends[index], ends[index + 1])  # type: ignore[index,operator]
    return node, None


def einsum_labels(node: fx.Node) -> list[str]:
    """Return the labels of each operand of an einsum, and last those of its result; [""] where a sharding cannot be
    followed: with an ellipsis, an implicit result or a diagonal."""
    equation = str(node.args[0]).replace(" ", "")
    operands, arrow, result = equation.partition("->")
    terms = operands.split(",")
    has_diagonal = any(len(set(term)) < len(term) for term in terms)
    if not arrow or "." in equation or has_diagonal:
        return [""]
    return [*terms, result]


def stored_tensor(module: nn.Module, path: str) -> torch.Tensor:
    """Return a parameter or buffer by its path."""
    tensor: torch.Tensor = operator.attrgetter(path)(module)
    return tensor


def is_low_rank(node: fx.Node) -> bool:
    """Whether a node is the product of an adapter, which trainer/model/adapters.py adds.

    The function is recognised by its name, so that what imports this module need not import the adapters.
    """
    return getattr(node.target, "__name__", "") == "low_rank" and len(node.args) == 5


def is_transpose(node: Any, ndim: int = 2) -> bool:
    """Whether a node is the transpose of a matrix, or of each matrix in a tensor of `ndim` dimensions."""
    if node.target in ("t", torch.t):
        return ndim <= 2
    # the last two dimensions exchanged, those before them where they are
    swapped = [*range(ndim - 2), ndim - 1, ndim - 2]
    if node.target in ("permute", torch.permute):
        return [*node.args[1:]] in ([swapped], swapped)
    dims = node.args[1:] if node.target in ("transpose", torch.transpose) else ()
    return sorted(dim % ndim for dim in dims) == [ndim - 2, ndim - 1]


def copy_meta(node: fx.Node, other: fx.Node) -> None:
    """Give a node what is known of another one, without the mark of a region: a stage may end behind it."""
    node.meta.update({key: value for key, value in other.meta.items() if key != "tensor_parallel"})
