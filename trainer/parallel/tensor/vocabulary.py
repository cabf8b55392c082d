"""Vocabulary parallelism: embedding tables, the output layer (head) and cross-entropy, sharded by vocabulary entries.

Megatron-LM (Shoeybi et al. 2019, section 3); table and head may be one tied weight [vocabulary, width]:

    ids --- gather_rows --- x ... h --- matmul --- logits [b, s, v] --- cross-entropy

    ids --- lookup_local_rows --- all-reduce --- x ... h --- copy_to_region --- matmul --- logits [b, s, v / size]
            0 for the entries                                                        |
            of other ranks                                                     cross-entropy (ClassShard)

v is the number of vocabulary entries, size that of the ranks. The logits stay sharded: the cross-entropy is computed
from the parts, so that a head is sharded only if that loss, and nothing else, reads its output. All-reduces: one for
each look-up in the forward pass, one for the head in the backward pass, two small ones for the loss.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from onward.trainer.config.loss_rules import LOSS_RULES
from onward.trainer.config.losses import LossConfig
from onward.trainer.distributed.collectives import copy_to_region, reduce_from_region
from onward.trainer.distributed.weights import Interval, Placement, share
from onward.trainer.model.losses.loss import output_index
from onward.trainer.model.losses.vocabulary_loss import ClassShard
from onward.trainer.onnx_import.imported_graph import ImportedGraph
from onward.trainer.onnx_import.ops.gather import gather_rows, non_negative_indices
from onward.trainer.onnx_import.passes.dropout import reads_input
from onward.trainer.parallel.tensor.graph_analysis import GraphAnalysis, Product, copy_meta, is_transpose, stored_tensor
from onward.trainer.parallel.tensor.rewrite import keep_shards
from onward.trainer.parallel.tensor.tensor_shardings import CannotShard

FIRST_REGION = 1_000_000
"""`meta["tensor_parallel"]` of the nodes inside: numbers that no region of regions.py has."""
ELEMENTWISE = ("to", "float", torch.add, torch.sub, torch.mul, torch.div, torch.tanh)
"""Calls that may come between the head's product and the output: they work on each logit by itself."""


@dataclass(frozen=True)
class Head:
    """The product that gives the logits, by names of nodes, and what comes after it."""

    product: str
    chain: tuple[str, ...]
    """From the product to the output, both ends included."""
    weights: dict[str, int]
    """Path of each stored tensor that is sharded (the matrix, biases) -> the dimension of the vocabulary."""
    constants: tuple[tuple[str, str], ...]
    """(node, operand): constants with a number for each vocabulary entry; the node reads this rank's part."""
    total: int
    """The number of vocabulary entries, or classes."""


@dataclass(frozen=True)
class VocabularySharding:
    """What is sharded by vocabulary entries over `size` ranks, and what is not."""

    size: int
    weights: tuple[str, ...] = ()
    """Names of tables, of the head's matrix and of its bias."""
    lookups: tuple[str, ...] = ()
    """Nodes that look rows up in a sharded table: each all-reduces its result."""
    replicated: tuple[tuple[str, str], ...] = ()
    """(table or matrix of the head that every rank holds completely, the reason)"""
    head: Head | None = field(default=None, repr=False)
    dims: dict[str, int] = field(default_factory=dict, repr=False)
    """Path of each stored tensor that is sharded -> the dimension of the vocabulary."""

    def classes(self, rank: int, group: str) -> ClassShard | None:
        """Return which of the logits a rank computes, for the loss; None if it computes all."""
        if self.head is None:
            return None
        return ClassShard(*share(self.head.total, rank, self.size), self.head.total, group)


# -- the search


def find_vocabulary_sharding(
    module: ImportedGraph,
    size: int,
    losses: Sequence[LossConfig],
    *,
    taken: Collection[str] = (),
    has_teacher: bool = False,
) -> VocabularySharding:
    """Find what of a graph can be sharded by vocabulary entries over `size` ranks. Changes nothing, and needs no ranks.

    losses: of the run. taken: names of weights that are sharded otherwise already. has_teacher: whether the logits are
    compared with those of a teacher as well.
    Raises ConfigError when `model.output` is not an output of the graph.
    """
    if size == 1:
        return VocabularySharding(1)
    return _Finder(module, size, losses, taken, has_teacher=has_teacher).find()


class _Finder:
    """Methods that begin with `_why` return the reason why a weight cannot be sharded, "" if it can."""

    def __init__(
        self,
        module: ImportedGraph,
        size: int,
        losses: Sequence[LossConfig],
        taken: Collection[str],
        *,
        has_teacher: bool,
    ) -> None:
        self.graph = GraphAnalysis(module, module.onnx_names)
        self.size = size
        self.losses = losses
        self.taken = taken
        self.has_teacher = has_teacher
        (self.end,) = module.graph.find_nodes(op="output")
        (value,) = self.end.args
        self.outputs: Sequence[Any] = value if isinstance(value, tuple | list) else (value,)
        output = output_index(losses[0].outputs[0], module.output_names) if losses else 0
        self.chain, self.product = self._head_chain(self.outputs[output])

    def find(self) -> VocabularySharding:
        replicated = dict[str, str]()
        dims = dict[str, int]()
        lookups = list[str]()
        head: Head | None = None
        if self.product is not None:
            found = self._head(self.product)
            if isinstance(found, CannotShard):
                replicated[self.product.name] = found.reason
            else:
                head = found
                dims |= head.weights
        # the head before the tables: if it is refused, a table tied to it is refused with the same reason
        for path, nodes in self._tables().items():
            name = self.graph.names[path]
            dim = _table_of(nodes[0].args[0])[1]
            # a table that is the head, too, is sharded at both ends or at none
            if name not in replicated and path not in dims and (reason := self._why_not_table(path, dim, nodes)):
                replicated[name] = reason
            if name not in replicated:
                dims.setdefault(path, dim)
                lookups += [node.name for node in nodes]
        names = tuple(self.graph.names[path] for path in dims)
        return VocabularySharding(self.size, names, tuple(lookups), tuple(replicated.items()), head, dims)

    def _tables(self) -> dict[str, list[fx.Node]]:
        """Return the path of each matrix in which rows are looked up -> the nodes that do so."""
        tables: dict[str, list[fx.Node]] = {}
        for node in self.graph.order:
            if node.target is gather_rows and (path := self._table(node.args[0])):
                tables.setdefault(path, []).append(node)
        return tables

    def _table(self, operand: Any) -> str:
        """Return the path of the weight that an operand, or its transpose, is; "" if it is none."""
        return self.graph.parameter(_table_of(operand)[0])

    def _head_chain(self, value: Any) -> tuple[list[fx.Node], Product | None]:
        """Return the nodes from the product with a stored matrix to an output, and the product.

        None where a node on the way has two computed operands.
        """
        chain: list[fx.Node] = []
        while isinstance(value, fx.Node):
            chain.insert(0, value)
            # only a matrix that is read completely has a row or column for each vocabulary entry
            if (product := self.graph.products.get(value)) is not None:
                is_whole = not product.is_low_rank and not product.is_einsum and product.part is None
                is_matrix = is_whole and self.graph.tensor(product.path).ndim == 2
                return chain, product if is_matrix else None
            # walk back along the only computed operand: biases and constants are stored
            computed = [operand for operand in value.all_input_nodes if operand.op != "get_attr"]
            if len(computed) != 1:
                break
            (value,) = computed
        return [], None

    def _head(self, product: Product) -> Head | CannotShard:
        if reason := self._why_not_head(product):
            return CannotShard(reason)
        total = self.graph.tensor(product.path).shape[product.outputs]
        weights = {product.path: product.outputs}
        constants = []
        for node, operand in self._operands_of_chain(product):
            # a stored number for each entry is sharded with the entries
            if self._is_bias(operand, total):
                path = str(operand.target)
                weights[path] = self.graph.tensor(path).ndim - 1
                if reason := self._why_needed_elsewhere(path, weights[path], reader=node):
                    return CannotShard(reason)
            # a computed operand may differ from entry to entry, and this rank would need its part of it
            elif operand.op != "get_attr" or self.graph.stored(operand):
                return CannotShard(
                    f"{node.name} combines its output with {operand.name}, which is not sharded by vocabulary entries"
                )
            # a constant stays as it is, and each rank reads its part; a number broadcasts
            elif self._last_length(operand) == total:
                constants.append((node.name, operand.name))
        return Head(product.node.name, tuple(node.name for node in self.chain), weights, tuple(constants), total)

    def _operands_of_chain(self, product: Product) -> list[tuple[fx.Node, fx.Node]]:
        """Return (node, operand) of all that is combined with the logits, the product's bias included."""
        computing = {product.x, *product.weight_operands, *self.chain}
        operands = [(node, operand) for node in self.chain for operand in node.all_input_nodes]
        return [(node, operand) for node, operand in operands if operand not in computing]

    def _last_length(self, operand: fx.Node) -> int:
        """Return the length of the last dimension of a stored tensor or a constant; 1 for a number."""
        shape = self.graph.tensor(str(operand.target)).shape
        return shape[-1] if shape else 1

    def _is_bias(self, operand: fx.Node, total: int) -> bool:
        """Whether an operand is a weight with one number for each vocabulary entry."""
        path = self.graph.parameter(operand)
        return bool(path) and self._last_length(operand) == self.graph.tensor(path).numel() == total

    # -- conditions

    def _why_not_table(self, path: str, dim: int, lookups: Sequence[fx.Node]) -> str:
        if not any(reads_input(node.args[1]) for node in lookups):
            # positions depend on lengths alone: every rank needs the same few rows, and sharding would save nothing
            called = lookups[0].name
            return f"{called} looks up positions in it, not vocabulary entries: every rank needs the same few rows"
        return self._why_too_small(path, dim) or self._why_needed_elsewhere(path, dim)

    def _why_not_head(self, product: Product) -> str:
        if self.has_teacher:
            return "there is a teacher: its logits are compared with all logits"
        if len(self.losses) > 1:
            return f"there are {len(self.losses)} losses: only one alone is computed from sharded logits"
        if not self.losses[0].rule.sharded_logits:
            names = [name for name, rule in LOSS_RULES.items() if rule.sharded_logits]
            return f"the loss is {self.losses[0].name}: only {' and '.join(names)} is computed from sharded logits"
        if not self.losses[0].is_plain or self.losses[0].class_axis not in (None, -1):
            return "label smoothing, class weights, soft labels and a class axis need all logits at once"
        for node in self.chain[1:]:
            if node.target not in ELEMENTWISE and not _keeps_last_dim(node):
                return f"{node.name} comes between its output and the loss, and may need all vocabulary entries at once"
        for node, reader in zip(self.chain, [*self.chain[1:], self.end], strict=True):
            # another reader would get this rank's entries only
            if others := [user.name for user in node.users if user is not reader]:
                return f"{others[0]} reads its output, too"
        if (times := sum(value is self.chain[-1] for value in self.outputs)) > 1:
            return f"its output is {times} of the graph's outputs"
        return self._why_too_small(product.path, product.outputs) or self._why_needed_elsewhere(
            product.path, product.outputs, reader=product.node
        )

    def _why_too_small(self, path: str, dim: int) -> str:
        # each rank needs one entry at least
        num_entries = self.graph.tensor(path).shape[dim]
        width = self.graph.tensor(path).shape[1 - dim]
        few = f"its {num_entries} vocabulary entries are fewer than"
        if num_entries < self.size:
            return f"{few} {self.size} ranks"
        if num_entries < width:
            # what sharding saves is proportional to the entries, what it sends to the width
            return f"{few} its width of {width}: it would send more than it saves"
        return ""

    def _why_needed_elsewhere(self, path: str, dim: int, *, reader: fx.Node | None = None) -> str:
        """Allow only look-ups along `dim`, and one other reader, of a stored tensor."""
        name = self.graph.names[path]
        if name in self.taken:
            return f"{name} is sharded with other layers already"
        for node in self.graph.readers(path):
            if node is reader:
                continue
            if node.target is not gather_rows or self._table(node.args[0]) != path:
                return f"{node.name} reads {name}, too, and needs all of it"
            if _table_of(node.args[0])[1] != dim:
                looked_up = f"{node.name} looks up along dimension {1 - dim} of {name}"
                return f"{looked_up}, the vocabulary entries are dimension {dim}"
        return ""


def _keeps_last_dim(node: fx.Node) -> bool:
    """Whether a node permutes dimensions other than the last one, which is that of the vocabulary."""
    if node.target not in ("permute", torch.permute):
        return False
    order: Any = node.args[1]
    return order[-1] in (-1, len(order) - 1)


def _table_of(operand: Any) -> tuple[Any, int]:
    """Return the node whose transpose an operand is, else the operand; and the dimension of it that has the rows."""
    dim = 0
    while isinstance(operand, fx.Node) and is_transpose(operand):
        operand = operand.args[0]
        dim = 1 - dim
    return operand, dim


# -- the rewriting


def lookup_local_rows(table: Tensor, indices: Tensor, start: int, total: int) -> Tensor:
    """Look up rows of a table of which this rank has those from `start` on; zeros in place of other ranks' rows.

    table [n, width], indices [...] below `total`, negative ones counted from the end -> [..., width]. An index out of
    range is not masked on the first or the last rank, and raises there what `gather_rows` raises.
    """
    # in this rank's rows; other ranks' entries are below 0 or behind the last row
    row = non_negative_indices(indices, total) - start
    num_rows = table.shape[0]
    elsewhere = (row < 0) & (start > 0) | (row >= num_rows) & (start + num_rows < total)
    # row 0 stands for another rank's entries, and its gradient is masked as well
    rows = F.embedding(row.masked_fill(elsewhere, 0), table)
    return rows.masked_fill(elsewhere[..., None], 0.0)


def shard_vocabulary(
    module: ImportedGraph, found: VocabularySharding, *, rank: int, group: str
) -> dict[str, Placement]:
    """Rewrite the graph, in place, to what one rank of the tensor axis computes of tables and head.

    rank: this rank's coordinate; group: the name of the axis's process group. Sharded weights become this rank's
    parts; returns which part each is, by initializer name. The output that the loss reads becomes [..., this rank's
    classes]: give the loss `found.classes(rank, group)`.
    """
    nodes = {node.name: node for node in module.graph.nodes}
    for number, name in enumerate(found.lookups, FIRST_REGION):
        table, dim = _table_of(nodes[name].args[0])
        num_entries = stored_tensor(module, table.target).shape[dim]
        # before the tables are cut: the number of entries is that of the full table
        _shard_lookup(nodes[name], share(num_entries, rank, found.size)[0], num_entries, number, group)
    if found.head is not None:
        interval = share(found.head.total, rank, found.size)
        _shard_head(nodes, found.head, interval, FIRST_REGION + len(found.lookups), group)
    placements = {}
    for path, dim in found.dims.items():
        shape = stored_tensor(module, path).shape
        placements[path] = Placement.full(shape).narrow(dim, *share(shape[dim], rank, found.size))
    return keep_shards(module, placements)


def _shard_lookup(node: fx.Node, start: int, num_entries: int, number: int, group: str) -> None:
    table, indices = node.args
    node.target = lookup_local_rows
    node.args = (table, indices, start, num_entries)
    node.meta["tensor_parallel"] = number
    with node.graph.inserting_after(node):
        result = node.graph.call_function(reduce_from_region, (node, group))
    copy_meta(result, node)
    node.replace_all_uses_with(result, delete_user_cb=lambda user: user is not result)


def _shard_head(nodes: dict[str, fx.Node], head: Head, interval: Interval, number: int, group: str) -> None:
    product = nodes[head.product]
    graph = nodes[head.product].graph
    x = product.args[1 if product.target is torch.addmm else 0]
    assert isinstance(x, fx.Node)
    # each rank computes a part of the gradient of x, from its own entries
    with graph.inserting_before(product):
        copied = graph.call_function(copy_to_region, (x, group))
    copied.meta.update(x.meta, tensor_parallel=number)
    product.replace_input_with(x, copied)
    start, stop = interval
    for name, operand in head.constants:
        with graph.inserting_before(nodes[name]):
            part = graph.call_method("narrow", (nodes[operand], -1, start, stop - start))
        nodes[name].replace_input_with(nodes[operand], part)
    for name in head.chain:
        nodes[name].meta["tensor_parallel"] = number
        nodes[name].meta.pop("probes", None)  # the traced shapes were those of all entries
