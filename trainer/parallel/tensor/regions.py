"""Tensor parallelism: pairs of products divided over the ranks of one group, column by column, then row by row.

    x -- enter -- x W1 (columns) -- ... heads or channels, each rank its own ... -- h W2 (rows) -- leave -- + bias

The pairs (regions) are found in the graph, whatever model it is of: from a product whose columns are divided, the
division is followed through every call (compute_rules.py) until it ends in products by rows. What breaks a
rule stays whole on every rank, and the plan says which rule. Then the graph is rewritten: `enter` and `leave` at the
borders, this rank's lengths in its arguments, this rank's parts in place of its weights. Its collectives are
Megatron-LM's (Shoeybi et al. 2019, section 3): one all-reduce for each way into a region and each product by rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import fx

import onward.trainer.parallel.tensor.compute_rules
import onward.trainer.parallel.tensor.view_rules  # noqa: F401  both file the rules
from onward.trainer.onnx_import.imported_graph import ImportedGraph
from onward.trainer.parallel.tensor.graph_analysis import (
    TRANSPOSED,
    Facts,
    Finer,
    Joined,
    Product,
    Whole,
)
from onward.trainer.parallel.tensor.propagation import Attempt, Work

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
class TensorSharding:
    """What is divided over `size` ranks, and what is not."""

    size: int
    regions: tuple[Region, ...]
    replicated: tuple[tuple[str, str], ...]
    """(weight of a product or convolution that every rank holds whole, the rule that keeps it so)"""


# -- the plan

MEETS = "its result meets that of"


def find_regions(module: ImportedGraph, size: int, *, convolutions: str = "auto") -> TensorSharding:
    """Find the regions of a graph for `size` ranks. Changes nothing, and needs no ranks.

    convolutions: "never", "always", or "auto": where they save more arithmetic than what they send costs.
    """
    if size == 1:
        return TensorSharding(1, (), ())
    return _Planner(module, size, convolutions).plan()


class _Planner:
    def __init__(self, module: ImportedGraph, size: int, convolutions: str) -> None:
        self.module, self.size, self.convolutions = module, size, convolutions
        self.facts = Facts(module, module.onnx_names)
        self.taken: set[fx.Node] = set()
        self.reasons: dict[fx.Node, str] = {}

    def plan(self) -> TensorSharding:
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
        return TensorSharding(self.size, tuple(regions), tuple(whole.items()))

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
