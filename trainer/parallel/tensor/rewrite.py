"""The rewriting of a graph into what one rank of the tensor axis computes of it."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import is_fake

from onward.trainer.distributed.collectives import copy_to_region, reduce_from_region
from onward.trainer.distributed.placement import Interval, Placement
from onward.trainer.onnx_import.imported_graph import ImportedGraph
from onward.trainer.parallel.tensor.graph_analysis import CONVOLUTIONS, TRANSPOSED, Division, low_rank
from onward.trainer.parallel.tensor.propagation import Length, Work
from onward.trainer.parallel.tensor.regions import TensorSharding

# -- what stands in the divided graph beside enter and leave


def local_slice(x: Tensor, dim: int, period: int, held: Sequence[Interval]) -> Tensor:
    """Of each `period` elements along a dimension those in the intervals `held`."""
    parts = x.unflatten(dim, (-1, period))  # type: ignore[no-untyped-call]
    pieces = [parts.narrow(dim + 1, start, stop - start) for start, stop in held]
    return torch.cat(pieces, dim + 1).flatten(dim, dim + 1) if len(pieces) > 1 else pieces[0].flatten(dim, dim + 1)


def row_parallel_low_rank(x: Tensor, a: Tensor, b: Tensor, scale: float, reverse: bool, group: str) -> Tensor:
    """An adapter's product of a divided x, whose `rank` intermediate results are summed: they are the fewest."""
    narrow = reduce_from_region(x @ (b if reverse else a.mT), group)
    return (narrow * scale) @ (a if reverse else b.mT)


class RankSeeded(nn.Module):
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


def shard_regions(module: ImportedGraph, plan: TensorSharding, *, rank: int, group: str) -> dict[str, Placement]:
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
        target = f"{str(node.target).replace('.', '_')}_rank_seeded_{self.number}"
        while hasattr(self.module, target):
            target += "_"
        drawing = self.module.get_submodule(str(node.target))
        self.module.add_module(target, RankSeeded(drawing, self.place[0]).train(drawing.training))
        node.target = target

    def _enter(self, operand: fx.Node) -> None:
        """One node for all readers inside, so that they share one all-reduce."""
        inside = {*self.work.inside}  # a product by rows reads nothing whole but what is added to the sum
        readers = [user for user in operand.users if user.name in inside]
        with self.graph.inserting_before(min(readers)):
            entered = self._call(copy_to_region, operand, self.group)
        entered.meta.update({key: operand.meta[key] for key in ("probes", "rank") if key in operand.meta})
        for reader in readers:
            reader.replace_input_with(operand, entered)
        self.nodes[operand.name] = entered  # of which a part may be taken

    def _slice(self, reader: fx.Node, operand: fx.Node, division: Division) -> None:
        with self.graph.inserting_before(reader):
            part = self._call(local_slice, operand, division.dim, division.period, division.held(*self.place))
        reader.replace_input_with(operand, part)

    def _leave(self, node: fx.Node) -> None:
        """The sum of a product by rows; its bias is added once, to the sum."""
        if low_rank(node):
            node.target, node.args = row_parallel_low_rank, (*node.args, self.group)
            node.meta.pop("tensor_parallel")
            return
        bias, alpha, beta = _take_bias(node)
        readers = [*node.users]
        with self.graph.inserting_after(node):
            result = self.graph.call_function(reduce_from_region, (node, self.group))
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
