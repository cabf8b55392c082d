"""Find the tensor-parallel regions of a graph: column-parallel products, what follows, row-parallel products.

An MLP, hidden size 64, over 2 ranks (Megatron-LM, Shoeybi et al. 2019, section 3; f and g are its names):

    x [b, s, 64] --- linear [256, 64] --- gelu --- linear [64, 256] --- + bias

    x --- f --- linear [128, 64] --- gelu --- linear [64, 128] --- g --- + bias
          |     column-parallel               row-parallel         |     added once, to the sum
          copy_to_region                                           reduce_from_region
          (all-reduce in the backward pass)                        (all-reduce in the forward pass)

Attention, 4 heads of 16; one fused weight is sharded in three blocks, so that each rank has 2 heads of each:

    x --- linear [192, 64] --- split in 3 --- 4 heads --- attention --- merge --- linear [64, 64] --- + bias

    x --- f --- linear [96, 64] --- split in 3 --- 2 heads --- attention --- merge --- linear [64, 32] --- g --- + bias

No model is known by name: from every product whose columns may be sharded, the sharding is propagated through the graph
(propagation.py) until it ends in row-parallel products. If a condition is not met the weight stays replicated, and
`TensorSharding.replicated` holds the reason. One all-reduce for each way into a region and each row-parallel product:
the numbers of collectives are Megatron-LM's. The rewriting of the graph is in rewrite.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from torch import fx, nn

import onward.trainer.parallel.tensor.compute_rules
import onward.trainer.parallel.tensor.index_rules
import onward.trainer.parallel.tensor.product_rules
import onward.trainer.parallel.tensor.view_rules  # noqa: F401  these four register the rules
from onward.trainer.onnx_import.imported_graph import ImportedGraph
from onward.trainer.parallel.tensor.graph_analysis import TRANSPOSED, GraphAnalysis, Product
from onward.trainer.parallel.tensor.propagation import Propagation
from onward.trainer.parallel.tensor.region_edits import RegionEdits
from onward.trainer.parallel.tensor.tensor_shardings import CannotShard, MustShardTogether, NeedsFinerBlocks

FLOPS_PER_BYTE = 250.0
"""What a CPU computes in the time it sends a byte to its neighbour: 100 GFLOP/s beside 0.4 GB/s over gloo."""


@dataclass(frozen=True)
class Region:
    """Products that are sharded together."""

    kind: str
    """attention, mlp or convolutions."""
    columns: tuple[str, ...]
    """Names of the column-parallel weights (output features sharded), those of grouped convolutions included."""
    rows: tuple[str, ...]
    """Names of the row-parallel weights (input features sharded)."""
    edits: RegionEdits = field(repr=False, compare=False)


@dataclass(frozen=True)
class TensorSharding:
    """What is sharded over `size` ranks, and what is not."""

    size: int
    regions: tuple[Region, ...]
    replicated: tuple[tuple[str, str], ...]
    """(weight of a product or convolution that every rank holds completely, the reason)"""


COMBINED = "its output is combined with that of"


def find_regions(
    module: ImportedGraph, size: int, *, convolutions: str = "auto", flops_per_byte: float = FLOPS_PER_BYTE
) -> TensorSharding:
    """Find the regions of a graph for `size` ranks. Changes nothing, and needs no ranks.

    convolutions: "never", "always", or "auto": where they save at least `flops_per_byte` FLOPs for each byte they send.
    """
    if size == 1:
        return TensorSharding(1, (), ())
    return _Finder(module, size, convolutions, flops_per_byte).find()


class _Finder:
    def __init__(self, module: ImportedGraph, size: int, convolutions: str, flops_per_byte: float) -> None:
        self.size = size
        self.convolutions = convolutions
        self.flops_per_byte = flops_per_byte
        self.graph = GraphAnalysis(module, module.onnx_names)
        self.taken: set[fx.Node] = set()
        """Products of the regions found so far."""
        self.reasons: dict[fx.Node, str] = {}
        """Product -> why no region begins with it."""
        self.refused_alone: dict[fx.Node, bool] = {}
        self.kept_whole: set[str] = set()
        """Paths of vectors that are not sharded where they are stored."""

    def find(self) -> TensorSharding:
        found = self._search()
        # A vector that something else reads completely: exporters store equal biases once, such as those that are zero
        # before the first training. It stays replicated, and a region reads its part.
        while shared := {path for path in self._conflicts(found) if self._is_trained_vector(path)} - self.kept_whole:
            self.kept_whole |= shared
            self.taken = set()
            self.reasons = {}
            self.refused_alone = {}
            found = self._search()
        # a region is found on its own; weights that several regions read are compared afterwards
        regions = self._without_conflicts(found)
        sharded = {path for region in regions for path in region.edits.weights}
        replicated: dict[str, str] = {}
        for node, product in self.graph.products.items():
            if product.path not in sharded and not product.is_low_rank:
                replicated[product.name] = self.reasons.get(node, "no region shards its rows or columns")
        for name, node in self.graph.computed_matrices():
            replicated.setdefault(name, f"{node.name} multiplies by a matrix that is computed from it")
        return TensorSharding(self.size, tuple(regions), tuple(replicated.items()))

    def _search(self) -> list[Region]:
        """Return the regions that begin with each product, in the order of the graph."""
        found = []
        for node in self.graph.products:
            if node in self.taken or node in self.reasons:
                continue
            region = self._region(node)
            if isinstance(region, CannotShard):
                self.reasons[node] = region.reason
            else:
                found.append(region)
                # a product belongs to one region: it cannot be sharded twice
                self.taken |= {product.node for product in self._products_of(region.edits)}
        return found

    def _region(self, seed: fx.Node) -> Region | CannotShard:
        """Find the region that begins with a product, together with the products that its sharding meets.

        What is joined with its sharded values (`cat`, `stack`) is sharded with them if it can be. If not, it stays
        replicated, and each rank reads its part: one more all-reduce, of the gradient.
        """
        first, may_slice = self._grow(seed, slice_joined=False)
        second: Region | CannotShard = first
        # the second choice, since slicing costs an all-reduce more
        if isinstance(second, CannotShard) and may_slice:
            second, _ = self._grow(seed, slice_joined=True)
        # an einsum by experts may be sharded along its columns where it cannot be along its experts
        if isinstance(second, CannotShard) and self.graph.products[seed].other_outputs:
            with self.graph.with_other_outputs():
                second, _ = self._grow(seed, slice_joined=False)
        # the reason of the first attempt is reported: the others only tried to avoid it
        return second if isinstance(second, Region) else first

    def _grow(self, seed: fx.Node, *, slice_joined: bool) -> tuple[Region | CannotShard, bool]:
        """Return the region, or why there is none, and whether a joined value may be sliced instead.

        Each propagation either succeeds or says what to change: it is repeated with more products or finer blocks,
        both of which only grow, until it succeeds or cannot.
        """
        columns = {seed}
        cuts = dict[str, frozenset[int]]()
        first_doubt = ""
        may_slice = False
        while True:
            result = self._propagation(columns, cuts, slice_joined=slice_joined).run()
            match result:
                # begin again with more blocks: the earlier shardings were made without them
                case NeedsFinerBlocks(weight, at, otherwise):
                    cuts[weight] = cuts.get(weight, frozenset()) | at
                    first_doubt = first_doubt or otherwise
                case MustShardTogether(products, joined):
                    may_slice |= joined or len(products) > 1
                    if slice_joined:  # behind a join, one of them may be sharded and another one sliced
                        shardable = tuple(product for product in products if not self._is_refused_alone(product))
                        products = shardable or products
                    # they are column-parallel already, and still meet a replicated value: growing would not end
                    if {*products} <= columns:
                        reason = "its output is combined with a replicated value that is computed from it"
                        return CannotShard(reason), may_slice
                    if (why := self._why_replicated(products)) is not None:
                        return CannotShard(f"{COMBINED} {why}"), may_slice
                    columns |= {*products}
                case CannotShard(reason):
                    return CannotShard(first_doubt or reason), may_slice
                case RegionEdits():
                    region = self._checked_region(columns, result)
                    if isinstance(region, CannotShard):
                        return CannotShard(first_doubt or region.reason), may_slice
                    return region, may_slice

    def _propagation(
        self, columns: set[fx.Node], cuts: dict[str, frozenset[int]], *, slice_joined: bool = False
    ) -> Propagation:
        return Propagation(self.graph, self.size, columns, cuts, slice_joined=slice_joined, kept_whole=self.kept_whole)

    def _is_refused_alone(self, node: fx.Node) -> bool:
        """Whether a product cannot be column-parallel whatever else is, such as one whose features are normalised."""
        if node not in self.refused_alone:
            self.refused_alone[node] = isinstance(self._propagation({node}, {}).run(), CannotShard)
        return self.refused_alone[node]

    def _why_replicated(self, products: Iterable[fx.Node]) -> str | None:
        """Return the weight of the first product that cannot be column-parallel, and why; None if all can."""
        for node in products:
            name = self.graph.products[node].name
            if node in self.taken:
                return f"{name}, which is replicated"
            if (reason := self.reasons.get(node)) is not None:
                # a chain of such reasons would repeat itself
                return f"{name}, which is replicated{'' if reason.startswith(COMBINED) else f': {reason}'}"
        return None

    def _checked_region(self, columns: set[fx.Node], edits: RegionEdits) -> Region | CannotShard:
        inside = self._inside(edits)
        rows = self._rows(edits)
        # the other region has put its own collectives there
        if any(product.node in self.taken for product in (*inside, *rows)):
            return CannotShard("its sharded output reaches another region")
        kind = "attention" if edits.has_attention else "mlp"
        if any(product.is_convolution for product in (*rows, *(self.graph.products[node] for node in columns))):
            kind = "convolutions"
            if reason := self._why_not_worth_it(inside, rows, edits):
                return CannotShard(reason)
        columns_of = dict.fromkeys(product.name for product in inside if product.path in edits.weights)
        rows_of = dict.fromkeys(self.graph.names[product.row_path] for product in rows)
        return Region(kind, tuple(columns_of), tuple(rows_of), edits)

    def _inside(self, edits: RegionEdits) -> list[Product]:
        """Return the products with a sharded output."""
        return [product for node, product in self.graph.products.items() if node.name in edits.sharded]

    def _rows(self, edits: RegionEdits) -> list[Product]:
        return [product for node, product in self.graph.products.items() if node.name in edits.row_products]

    def _products_of(self, edits: RegionEdits) -> list[Product]:
        return [*self._inside(edits), *self._rows(edits)]

    def _why_not_worth_it(self, inside: Sequence[Product], rows: Sequence[Product], edits: RegionEdits) -> str:
        """Return why convolutions are not sharded by the setting parallel.convolutions; "" if they are."""
        if self.convolutions == "never":
            return "parallel.convolutions is never"
        if self.convolutions == "always":
            return ""
        # one all-reduce for each row-parallel product (forward) and for each copied value (its gradient)
        copied = [node for node in self.graph.order if node.name in edits.copied]
        all_reduced = [*(row.node for row in rows), *copied]
        if unknown := [node.name for node in all_reduced if not self.graph.has_known_shape(node)]:
            return f"the shape of {unknown[0]} is known only at run time"
        # 3: the backward pass has a product for the input's gradient and one for the weight's.
        flops_saved = 3 * (1 - 1 / self.size) * sum(self._flops(product) for product in (*inside, *rows))
        # A ring all-reduce sends every element (4 bytes) 2 (size - 1) / size times.
        bytes_sent = 4 * sum(self._numel(node) for node in all_reduced) * 2 * (1 - 1 / self.size)
        if flops_saved >= self.flops_per_byte * bytes_sent:
            return ""
        ratio = f"{flops_saved / bytes_sent:.0f} operations per byte sent, less than {self.flops_per_byte:.0f}"
        return f"parallel.convolutions is auto, and sharding it with {rows[0].name} saves only {ratio}"

    def _numel(self, node: fx.Node) -> int:
        return math.prod(length for length, _ in self.graph.shapes(node))

    def _flops(self, product: Product) -> int:
        """Return the arithmetic operations of the forward pass; an adapter's few are neglected."""
        if product.is_low_rank:
            return 0
        # 2: a multiplication and an addition for each number of the weight
        weight = self.graph.tensor(product.path).shape
        if not product.is_convolution:
            return 2 * self._numel(product.node) * weight[product.inputs]
        # each element of the input is multiplied by the kernel if transposed, else each element of the output
        over = product.x if product.node.target in TRANSPOSED else product.node
        return 2 * self._numel(over) * weight[1:].numel()

    def _without_conflicts(self, regions: list[Region]) -> list[Region]:
        """Remove regions with weights that something else reads completely, or that are sharded in another way there.

        Begins again after each removal, since another region may have been consistent only with the removed one.
        """
        while True:
            for region in regions:
                if reason := next(iter(self._conflicts([region], regions).values()), None):
                    self.reasons |= {product.node: reason for product in self._products_of(region.edits)}
                    # the loop over `regions` ends here, since the list that it iterates over is replaced
                    regions = [other for other in regions if other is not region]
                    break
            else:
                return regions

    def _conflicts(self, regions: Sequence[Region], all_regions: Sequence[Region] = ()) -> dict[str, str]:
        """Return path -> why a weight of these regions cannot be sharded, beside all regions; () = these."""
        found: dict[str, str] = {}
        compared = all_regions or regions
        for path, sharding in ((path, each) for region in regions for path, each in region.edits.weights.items()):
            all_edits = [other.edits for other in compared if path in other.edits.weights]
            readers = {name for edits in all_edits for name in edits.weight_readers[path]}
            # a reader outside of all regions would find a part where it needs the full weight
            if others := [node.name for node in self.graph.readers(path) if node.name not in readers]:
                found[path] = f"{self.graph.names[path]} is also read by {others[0]}, which needs all of it"
            elif any(edits.weights[path].pattern != sharding.pattern for edits in all_edits):
                found[path] = f"{self.graph.names[path]} would be sharded in two different ways"
        return found

    def _is_trained_vector(self, path: str) -> bool:
        """Whether a stored tensor is a parameter with one dimension. Running statistics are updated where they are
        stored, so a rank cannot take its part of them."""
        tensor = self.graph.tensor(path)
        return isinstance(tensor, nn.Parameter) and tensor.ndim == 1
