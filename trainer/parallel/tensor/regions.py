"""Tensor parallelism: pairs of products divided over the ranks of one group, column by column, then row by row.

    x -- enter -- x W1 (columns) -- ... heads or channels, each rank its own ... -- h W2 (rows) -- leave -- + bias

The pairs (regions) are found in the graph, whatever model it is of: from a product whose columns are divided, the
division is followed through every call (compute_rules.py) until it ends in products by rows. What breaks a
rule stays whole on every rank, and the plan says which rule. Then the graph is rewritten: `enter` and `leave` at the
borders, this rank's lengths in its arguments, this rank's parts in place of its weights. Its collectives are
Megatron-LM's (Shoeybi et al. 2019, section 3): one all-reduce for each way into a region and each product by rows.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import is_fake

import onward.trainer.parallel.tensor.compute_rules
import onward.trainer.parallel.tensor.view_rules  # noqa: F401  both file the rules
from onward.trainer.distributed.collectives import enter, leave
from onward.trainer.distributed.placement import Interval, Placement
from onward.trainer.onnx_import.module import ImportedGraph
from onward.trainer.parallel.tensor.facts import (
    CONVOLUTIONS,
    TRANSPOSED,
    Division,
    Facts,
    Finer,
    Joined,
    Product,
    Whole,
    low_rank,
)
from onward.trainer.parallel.tensor.propagation import Attempt, Length, Work

FLOPS_PER_BYTE = 250
"""A division by channels must save so much arithmetic for each byte it sends: about what a device computes in the time
it sends a byte to its neighbour (60 TFLOP/s beside 240 GB/s; 100 GFLOP/s beside 0.4 GB/s over gloo)."""


@dataclass(frozen=True)
class Region:
    """Products that are divided together."""

    kind: str
    """attention, mlp or convolutions."""
    columns: tuple[str, ...]
    """Names of the weights of which each rank has some columns (outputs), those of convolutions in groups included."""
    rows: tuple[str, ...]
    """Names of the weights of which each rank has some rows (inputs)."""
    work: Work = field(repr=False, compare=False)


@dataclass(frozen=True)
class TensorPlan:
    """What is divided over `size` ranks, and what is not."""

    size: int
    regions: tuple[Region, ...]
    whole: tuple[tuple[str, str], ...]
    """(weight of a product or convolution that every rank holds whole, the rule that keeps it so)"""


# -- the plan

MEETS = "its result meets that of"


def plan_regions(module: ImportedGraph, size: int, *, convolutions: str = "auto") -> TensorPlan:
    """Find the regions of a graph for `size` ranks. Changes nothing, and needs no ranks.

    convolutions: "never", "always", or "auto": where they save more arithmetic than what they send costs.
    """
    if size == 1:
        return TensorPlan(1, (), ())
    return _Planner(module, size, convolutions).plan()


class _Planner:
    def __init__(self, module: ImportedGraph, size: int, convolutions: str) -> None:
        self.module, self.size, self.convolutions = module, size, convolutions
        self.facts = Facts(module, module.onnx_names)
        self.taken: set[fx.Node] = set()
        self.reasons: dict[fx.Node, str] = {}

    def plan(self) -> TensorPlan:
        found = []
        for node in self.facts.products:
            if node in self.taken or node in self.reasons:
                continue
            if (region := self._region(node)) is not None:
                found.append(region)
        regions = self._consistent(found)
        divided = {path for region in regions for path in region.work.parts}
        whole = {
            product.name: self.reasons.get(node, "no divided value reaches it")
            for node, product in self.facts.products.items()
            if product.path not in divided and not product.low_rank
        }
        for name, node in self.facts.computed_matrices():
            whole.setdefault(name, f"the matrix of {node.name} is computed from it")
        return TensorPlan(self.size, tuple(regions), tuple(whole.items()))

    def _region(self, seed: fx.Node) -> Region | None:
        """The region that begins with a product, and those it meets; None, and the reason noted, if there is none."""
        columns, cuts, doubt = {seed}, dict[str, frozenset[int]](), ""
        while True:
            try:
                work = Attempt(self.facts, self.size, columns, cuts).run()
                region = self._made(columns, work)
                self.taken |= {product.node for product in (*self._inside(work), *self._rows(work))}
                return region
            except Finer as finer:
                cuts[finer.source] = cuts.get(finer.source, frozenset()) | finer.cuts
                doubt = doubt or finer.otherwise
            except Joined as joined:
                if {*joined.products} <= columns:
                    self.reasons[seed] = "its result meets what is computed from it whole"
                    return None
                columns |= {*joined.products}
                if (met := self._unfit(joined.products)) is not None:
                    self.reasons[seed] = f"{MEETS} {met}"
                    return None
            except Whole as reason:
                self.reasons[seed] = doubt or str(reason)
                return None

    def _unfit(self, products: Iterable[fx.Node]) -> str | None:
        """The weight of one of these that cannot be divided by columns, and why."""
        for node in products:
            name = self.facts.products[node].name
            if node in self.taken:
                return f"{name}, which is whole"
            if (reason := self.reasons.get(node)) is not None:
                return f"{name}, which is whole{'' if reason.startswith(MEETS) else f': {reason}'}"
        return None

    def _made(self, columns: set[fx.Node], work: Work) -> Region:
        inside, rows = self._inside(work), self._rows(work)
        if any(product.node in self.taken for product in (*inside, *rows)):
            raise Whole("it meets another region")
        kind = "attention" if work.attends else "mlp"
        if any(product.convolution for product in (*rows, *(self.facts.products[node] for node in columns))):
            kind = "convolutions"
            self._check_convolutions(inside, rows, work)
        columns_of = dict.fromkeys(product.name for product in inside if product.path in work.parts)
        rows_of = dict.fromkeys(self.facts.names[product.row_path] for product in rows)
        return Region(kind, tuple(columns_of), tuple(rows_of), work)

    def _inside(self, work: Work) -> list[Product]:
        return [product for node, product in self.facts.products.items() if node.name in work.inside]

    def _rows(self, work: Work) -> list[Product]:
        return [product for node, product in self.facts.products.items() if node.name in work.rows]

    def _check_convolutions(self, inside: Sequence[Product], rows: Sequence[Product], work: Work) -> None:
        if self.convolutions == "never":
            raise Whole("parallel.convolutions is never")
        if self.convolutions == "always":
            return
        saved = 3 * (1 - 1 / self.size) * sum(self._flops(product) for product in (*inside, *rows))
        entered = [node for node in self.facts.order if node.name in work.entered]
        crossing = sum(self._numel(node) for node in (*(row.node for row in rows), *entered))
        sent = 4 * crossing * 2 * (1 - 1 / self.size)
        if saved < FLOPS_PER_BYTE * sent:
            ratio = f"{saved / sent:.0f} operations for each byte sent, less than {FLOPS_PER_BYTE}"
            raise Whole(f"convolutions: auto; divided with {rows[0].name} it would save {ratio}")

    def _numel(self, node: fx.Node) -> int:
        return torch.Size(length for length, _ in self.facts.shapes(node)).numel()

    def _flops(self, product: Product) -> int:
        """Of the forward pass."""
        if product.low_rank:
            return 0  # next to nothing
        weight = self.facts.tensor(product.path).shape
        if not product.convolution:
            return 2 * self._numel(product.node) * weight[product.inputs]
        over = product.x if product.node.target in TRANSPOSED else product.node
        return 2 * self._numel(over) * weight[1:].numel()

    def _consistent(self, regions: list[Region]) -> list[Region]:
        """Without regions of weights that something else reads whole, or divided in another way."""
        while True:
            for region in regions:
                if (reason := self._conflict(region, regions)) is not None:
                    products = (*self._inside(region.work), *self._rows(region.work))
                    self.reasons |= {product.node: reason for product in products}
                    regions = [other for other in regions if other is not region]
                    break
            else:
                return regions

    def _conflict(self, region: Region, regions: Sequence[Region]) -> str | None:
        for path, division in region.work.parts.items():
            others = [other.work for other in regions if path in other.work.parts]
            readers = {name for work in others for name in work.readers[path]}
            if strangers := [node.name for node in self.facts.readers(path) if node.name not in readers]:
                return f"{self.facts.names[path]} is also read by {strangers[0]}, where it is whole"
            if any(work.parts[path].how != division.how for work in others):
                return f"{self.facts.names[path]} is divided in two ways"
        return None


# -- what stands in the divided graph beside enter and leave


def portion(x: Tensor, dim: int, period: int, held: Sequence[Interval]) -> Tensor:
    """Of each `period` elements along a dimension those in the intervals `held`."""
    parts = x.unflatten(dim, (-1, period))  # type: ignore[no-untyped-call]
    pieces = [parts.narrow(dim + 1, start, stop - start) for start, stop in held]
    return torch.cat(pieces, dim + 1).flatten(dim, dim + 1) if len(pieces) > 1 else pieces[0].flatten(dim, dim + 1)


def low_rank_by_rows(x: Tensor, a: Tensor, b: Tensor, scale: float, reverse: bool, group: str) -> Tensor:
    """An adapter's product of a divided x, whose `rank` intermediate results are summed: they are the fewest."""
    narrow = leave(x @ (b if reverse else a.mT), group)
    return (narrow * scale) @ (a if reverse else b.mT)


class Apart(nn.Module):
    """A module inside a region whose random numbers are other ones on each rank of the group.

    Their seed is drawn from torch's generator, which is in the same state on all of them and stays so, however many
    numbers each draws here; who restores that generator (recomputation) gets the same numbers again.
    """

    def __init__(self, drawing: nn.Module, coordinate: int) -> None:
        super().__init__()
        self.drawing = drawing
        self.coordinate = coordinate

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, x: Tensor, *more: Tensor) -> Tensor:
        """As the module's own."""
        if not self.training or is_fake(x):
            return self.drawing(x, *more)  # type: ignore[no-any-return]
        seed = int(torch.randint(2**62, ())) + self.coordinate
        with torch.random.fork_rng(devices=[x.device] if x.is_cuda else []):
            torch.manual_seed(seed)
            return self.drawing(x, *more)  # type: ignore[no-any-return]

    def extra_repr(self) -> str:
        return f"coordinate={self.coordinate}"


# -- the rewriting


def divide(module: ImportedGraph, plan: TensorPlan, *, rank: int, group: str) -> dict[str, Placement]:
    """Rewrite the graph, in place, to what one rank of the tensor axis computes of it.

    rank: this rank's coordinate; group: the name of the axis's process group. Divided weights and running statistics
    become this rank's parts; returns which part each is, by name in the file. Every node whose value is divided, a part
    of a sum or on its way in gets the number of its region as `meta["tensor_parallel"]`: no cut may go through it.
    """
    rewritings = [_Rewriting(module, r.work, n, (rank, plan.size), group) for n, r in enumerate(plan.regions)]
    for rewriting in rewritings:
        rewriting.apply()
    for rewriting in rewritings:  # last: one region's sum may be what enters another
        rewriting.leave()
    placements = {}
    for path, division in {path: own for region in plan.regions for path, own in region.work.parts.items()}.items():
        placements[module.onnx_names[path]] = _replace(module, path, division, rank, plan.size)
    module.graph.lint()
    module.recompile()
    return placements


def _replace(module: nn.Module, path: str, division: Division, rank: int, size: int) -> Placement:
    """Put this rank's part in place of a stored tensor."""
    name, _, leaf = path.rpartition(".")
    owner = module.get_submodule(name)
    whole: Tensor = getattr(owner, leaf)
    placement = division.placement(whole.shape, rank, size)
    part = whole.new_empty(placement.local_shape)
    with torch.no_grad():
        pieces = [whole.narrow(division.dim, start, stop - start) for start, stop in division.held(rank, size)]
        torch.cat(pieces, division.dim, out=part)
    if isinstance(whole, nn.Parameter):
        owner.register_parameter(leaf, nn.Parameter(part, requires_grad=whole.requires_grad))
    else:
        owner.register_buffer(leaf, part, persistent=leaf not in owner._non_persistent_buffers_set)
    return placement


class _Rewriting:
    """One region of one graph."""

    def __init__(self, module: ImportedGraph, work: Work, number: int, place: tuple[int, int], group: str) -> None:
        self.module, self.graph, self.work, self.number = module, module.graph, work, number
        self.place, self.group = place, group
        self.nodes = {node.name: node for node in self.graph.nodes}

    def apply(self) -> None:
        """Arguments first: what goes in and comes out changes who reads what."""
        for name in (*self.work.inside, *self.work.rows):
            self.nodes[name].meta["tensor_parallel"] = self.number
        for length in self.work.lengths:
            self._shorten(length)
        for name, division in self.work.measured:
            self._measure(self.nodes[name], division)
        for name in self.work.apart:
            self._set_apart(self.nodes[name])
        for name in self.work.entered:
            self._enter(self.nodes[name])
        for (reader, operand), division in self.work.sliced.items():
            self._slice(self.nodes[reader], self.nodes[operand], division)

    def leave(self) -> None:
        """Add up what the products by rows give: after all regions were applied."""
        for name in self.work.rows:
            self._leave(self.nodes[name])

    def _call(self, function: Any, *args: Any) -> fx.Node:
        node = self.graph.call_function(function, args)
        node.meta["tensor_parallel"] = self.number
        return node

    def _shorten(self, length: Length) -> None:
        node, (first, *rest) = self.nodes[length.node], length.where
        value: Any = node.kwargs[first] if isinstance(first, str) else node.args[first]
        old = value[rest[0]] if rest else value
        new: Any = length.outer * length.division.own(*self.place)
        if isinstance(old, fx.Node):
            with self.graph.inserting_before(node):
                new = self._scaled(old, length.division.own(*self.place), length.division.period)
        if rest:
            new = [*value[: rest[0]], new, *value[rest[0] + 1 :]]  # type: ignore[operator]
        if isinstance(first, str):
            node.update_kwarg(first, new)
        else:
            node.update_arg(first, new)

    def _scaled(self, number: fx.Node, by: int, over: int) -> fx.Node:
        return self._call(operator.floordiv, self._call(operator.mul, number, by), over)

    def _measure(self, node: fx.Node, division: Division) -> None:
        """A length of this rank's part, as that of the whole value."""
        with self.graph.inserting_after(node):
            product = self._call(operator.mul, node, division.period)
        with self.graph.inserting_after(product):
            whole = self._call(operator.floordiv, product, division.own(*self.place))
        node.replace_all_uses_with(whole, delete_user_cb=lambda user: user is not product)

    def _set_apart(self, node: fx.Node) -> None:
        target = f"{str(node.target).replace('.', '_')}_apart_{self.number}"
        while hasattr(self.module, target):
            target += "_"
        drawing = self.module.get_submodule(str(node.target))
        self.module.add_module(target, Apart(drawing, self.place[0]).train(drawing.training))
        node.target = target

    def _enter(self, operand: fx.Node) -> None:
        """One node for all readers inside, so that they share one all-reduce."""
        inside = {*self.work.inside}  # a product by rows reads nothing whole but what is added to the sum
        readers = [user for user in operand.users if user.name in inside]
        with self.graph.inserting_before(min(readers)):
            entered = self._call(enter, operand, self.group)
        entered.meta.update({key: operand.meta[key] for key in ("probes", "rank") if key in operand.meta})
        for reader in readers:
            reader.replace_input_with(operand, entered)
        self.nodes[operand.name] = entered  # of which a part may be taken

    def _slice(self, reader: fx.Node, operand: fx.Node, division: Division) -> None:
        with self.graph.inserting_before(reader):
            part = self._call(portion, operand, division.dim, division.period, division.held(*self.place))
        reader.replace_input_with(operand, part)

    def _leave(self, node: fx.Node) -> None:
        """The sum of a product by rows; its bias is added once, to the sum."""
        if low_rank(node):
            node.target, node.args = low_rank_by_rows, (*node.args, self.group)
            node.meta.pop("tensor_parallel")
            return
        bias, alpha, beta = _take_bias(node)
        readers = [*node.users]
        with self.graph.inserting_after(node):
            result = self.graph.call_function(leave, (node, self.group))
        if alpha != 1:
            with self.graph.inserting_after(result):
                result = self.graph.call_function(torch.mul, (result, alpha))
        if bias is not None:
            convolutions = [*CONVOLUTIONS, *TRANSPOSED]
            dims = 1 + convolutions.index(node.target) % 3 if node.target in convolutions else 0
            result = self._add(result, bias, beta, dims)
        result.meta.update({key: value for key, value in node.meta.items() if key != "tensor_parallel"})
        for reader in readers:
            reader.replace_input_with(node, result)

    def _add(self, total: fx.Node, bias: fx.Node, factor: Any, dims: int) -> fx.Node:
        """dims: behind the bias's own."""
        with self.graph.inserting_after(total):
            shaped = self.graph.call_method("reshape", (bias, [-1, *[1] * dims])) if dims else bias
        with self.graph.inserting_after(shaped if dims else total):
            return self.graph.call_function(torch.add, (total, shaped), {"alpha": factor} if factor != 1 else {})


def _take_bias(node: fx.Node) -> tuple[Any, Any, Any]:
    """Take the bias out of a call; returns it, and what product and bias are multiplied by."""
    if node.target is torch.addmm:
        bias, x, weight = node.args
        factors = node.kwargs.get("alpha", 1), node.kwargs.get("beta", 1)
        node.target, node.args, node.kwargs = torch.mm, (x, weight), {}
        return bias, *factors
    if node.target in (torch.matmul, torch.mm) or len(node.args) < 3:
        return None, 1, 1
    bias = node.args[2]
    node.update_arg(2, None)
    return bias, 1, 1
