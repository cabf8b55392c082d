"""Vocabulary parallelism: embeddings, heads and their cross-entropy, divided by words over the ranks of one group.

    ids -- lookup_local_rows -- reduce_from_region -- x ... h -- copy_to_region -- head -- logits of this rank's words

The logits stay divided: the cross-entropy is computed from the parts (`loss.Slice`), so a head is divided only if
that loss, and nothing else, reads what it gives. A table that is the head, too, is divided at both ends alike, or at
none. All-reduces (Megatron-LM, Shoeybi et al. 2019, section 3): one for each look-up forward, one for the head
backward, two small ones for the loss.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from onward.trainer.config.sections import ModelConfig
from onward.trainer.distributed.collectives import copy_to_region, reduce_from_region
from onward.trainer.distributed.placement import Interval, Placement, share
from onward.trainer.model.loss import Slice, output_index
from onward.trainer.onnx_import.imported_graph import ImportedGraph, named_weights
from onward.trainer.onnx_import.ops.gather import from_front, gather_rows
from onward.trainer.parallel.tensor.graph_analysis import Facts, Product, Whole, transposes

FIRST_REGION = 1_000_000
"""`meta["tensor_parallel"]` of nodes inside: other numbers than those of the regions of regions.py."""
ELEMENTWISE = ("to", "float", torch.add, torch.sub, torch.mul, torch.div, torch.tanh)
"""What may stand between the head's product and the output: it works on each logit by itself."""


@dataclass(frozen=True)
class Head:
    """The product that gives the logits, by names of nodes, and what comes after it."""

    product: str
    chain: tuple[str, ...]
    """From the product to the output, both ends included."""
    parts: dict[str, int]
    """Path of each stored tensor that is divided (the matrix, biases) -> along which dimension."""
    constants: tuple[tuple[str, str], ...]
    """(node, operand): constants with a number for each word, of which the node gets this rank's."""
    total: int
    """Words, or classes."""


@dataclass(frozen=True)
class VocabularySharding:
    """What is divided by words over `size` ranks, and what is not."""

    size: int
    weights: tuple[str, ...] = ()
    """Tables, the head's matrix and its bias, by name in the file."""
    lookups: tuple[str, ...] = ()
    """Nodes that look rows up in a divided table: each all-reduces its result."""
    replicated: tuple[tuple[str, str], ...] = ()
    """(table or matrix of the head that every rank holds whole, the rule that keeps it so)"""
    head: Head | None = field(default=None, repr=False)
    parts: dict[str, int] = field(default_factory=dict, repr=False)
    """Path of each stored tensor that is divided -> along which dimension."""

    def classes(self, rank: int, group: str) -> Slice | None:
        """What rank `rank` computes of the logits, for the loss; None if it is all of them."""
        if self.head is None:
            return None
        return Slice(*share(self.head.total, rank, self.size), self.head.total, group)


# -- the plan


def find_vocabulary_sharding(
    module: ImportedGraph, size: int, config: ModelConfig, *, taken: Collection[str] = ()
) -> VocabularySharding:
    """Find what of a graph can be divided by words for `size` ranks. Changes nothing, and needs no ranks.

    config: says which loss reads which output. taken: names of weights that are divided in another way already.
    Raises ConfigError when `model.output` is no output of the graph.
    """
    if size == 1:
        return VocabularySharding(1)
    return _Planner(module, size, config, taken).plan()


class _Planner:
    def __init__(self, module: ImportedGraph, size: int, config: ModelConfig, taken: Collection[str]) -> None:
        self.facts = Facts(module, module.onnx_names)
        self.size, self.loss, self.taken = size, config.loss, taken
        (self.end,) = module.graph.find_nodes(op="output")
        (value,) = self.end.args
        self.outputs: Sequence[Any] = value if isinstance(value, tuple | list) else (value,)
        self.chain, self.product = self._chain(self.outputs[output_index(config, module.output_names)])

    def plan(self) -> VocabularySharding:
        whole, parts, lookups, head = dict[str, str](), dict[str, int](), list[str](), None
        if self.product is not None:
            try:
                head = self._head(self.product)
                parts |= head.parts
            except Whole as reason:
                whole[self.product.name] = str(reason)
        for path, nodes in self._tables().items():
            name = self.facts.names[path]
            try:
                if name in whole:
                    raise Whole(whole[name])
                if path not in parts:
                    dim = _dim_of_rows(nodes[0].args[0])
                    self._refuse_positions(nodes)
                    self._worth(path, dim)
                    self._refuse_others(path, dim)
                    parts[path] = dim
                lookups += [node.name for node in nodes]
            except Whole as reason:
                whole[name] = str(reason)
        names = tuple(self.facts.names[path] for path in parts)
        return VocabularySharding(self.size, names, tuple(lookups), tuple(whole.items()), head, parts)

    # -- what there is

    def _tables(self) -> dict[str, list[fx.Node]]:
        """Path of each matrix of which rows are looked up -> the nodes that do so."""
        tables: dict[str, list[fx.Node]] = {}
        for node in self.facts.order:
            if node.target is gather_rows and (path := self._matrix(node.args[0])):
                tables.setdefault(path, []).append(node)
        return tables

    def _matrix(self, table: Any) -> str:
        """Path of the weight that an operand is, or is the transpose of; "" if it is none."""
        path = self.facts.stored(_source(table))
        return path if path and isinstance(self.facts.tensor(path), nn.Parameter) else ""

    def _chain(self, value: Any) -> tuple[list[fx.Node], Product | None]:
        """From the product of a stored matrix to an output, and the product; none if the way there is not one way."""
        chain: list[fx.Node] = []
        while isinstance(value, fx.Node):
            chain.insert(0, value)
            if (product := self.facts.products.get(value)) is not None:
                plain = not product.convolution and not product.low_rank
                return chain, product if plain else None
            computed = [operand for operand in value.all_input_nodes if operand.op != "get_attr"]
            if len(computed) != 1:
                break
            (value,) = computed
        return [], None

    # -- what is refused

    def _head(self, product: Product) -> Head:
        """Raises Whole where the product, or what becomes of its result, breaks a rule."""
        if self.loss != "cross_entropy":
            raise Whole(f"the loss is {self.loss}: only cross_entropy is computed from divided logits")
        for node in self.chain[1:]:
            if node.target not in ELEMENTWISE and not _keeps_last(node):
                raise Whole(f"{node.name} comes between its result and the loss, and may need all words at once")
        self._refuse_readers()
        self._worth(product.path, product.outputs)
        self._refuse_others(product.path, product.outputs, reader=product.node)
        total = self.facts.tensor(product.path).shape[product.outputs]
        parts, constants = {product.path: product.outputs}, []
        for node, operand in self._joining(product):
            if self._is_bias(operand, total):
                path = str(operand.target)
                parts[path] = self.facts.tensor(path).ndim - 1
                self._refuse_others(path, parts[path], reader=node)
            elif operand.op != "get_attr" or self.facts.stored(operand):
                raise Whole(f"{node.name} joins its result with {operand.name}, which is not divided by words")
            elif self._last(operand) == total:
                constants.append((node.name, operand.name))
        return Head(product.node.name, tuple(node.name for node in self.chain), parts, tuple(constants), total)

    def _joining(self, product: Product) -> list[tuple[fx.Node, fx.Node]]:
        """(node, operand) of all that meets the logits on their way, the product's bias included."""
        known = {product.x, *product.others, *self.chain}
        return [(node, operand) for node in self.chain for operand in node.all_input_nodes if operand not in known]

    def _refuse_readers(self) -> None:
        for node, reader in zip(self.chain, [*self.chain[1:], self.end], strict=True):
            others = [user.name for user in node.users if user is not reader]
            if others:
                raise Whole(f"{others[0]} reads its result, too")
        if (times := sum(value is self.chain[-1] for value in self.outputs)) > 1:
            raise Whole(f"its result is {times} of the graph's outputs")

    def _worth(self, path: str, dim: int) -> None:
        words, width = self.facts.tensor(path).shape[dim], self.facts.tensor(path).shape[1 - dim]
        if words < self.size:
            raise Whole(f"its {words} words are fewer than {self.size} ranks")
        if words < width:
            # what a division saves is proportional to the words, what it sends to the width
            raise Whole(f"its {words} words are fewer than its width of {width}: it would send more than it saves")

    def _refuse_others(self, path: str, dim: int, *, reader: fx.Node | None = None) -> None:
        """Raises Whole if something but look-ups and one reader reads a stored tensor, or along another dimension."""
        name = self.facts.names[path]
        if name in self.taken:
            raise Whole(f"{name} is divided with other layers already")
        for node in self.facts.readers(path):
            if node is reader:
                continue
            if node.target is not gather_rows or self._matrix(node.args[0]) != path:
                raise Whole(f"{node.name} reads {name}, too, and needs all of it")
            if _dim_of_rows(node.args[0]) != dim:
                raise Whole(f"{node.name} looks up along dimension {1 - dim} of {name}, the words are dimension {dim}")

    def _refuse_positions(self, lookups: Sequence[fx.Node]) -> None:
        if not any(self._from_data(node.args[1]) for node in lookups):
            raise Whole(f"{lookups[0].name} looks up positions in it, not words: every rank needs the same few rows")

    def _from_data(self, value: Any) -> bool:
        """Whether a value depends on more of the graph's inputs than their lengths."""
        waiting, seen = [value], set()
        while waiting:
            node = waiting.pop()
            if not isinstance(node, fx.Node) or node in seen or node.target == "size":
                continue
            if node.op == "placeholder":
                return True
            seen.add(node)
            waiting += node.all_input_nodes
        return False

    def _last(self, operand: fx.Node) -> int:
        """Length of the last dimension of a stored tensor or a constant; 1 for a number."""
        shape = self.facts.tensor(str(operand.target)).shape
        return shape[-1] if shape else 1

    def _is_bias(self, operand: fx.Node, total: int) -> bool:
        """Whether it is a weight of one number for each word."""
        tensor = self.facts.tensor(self.facts.stored(operand)) if self.facts.stored(operand) else None
        return isinstance(tensor, nn.Parameter) and self._last(operand) == tensor.numel() == total


def _keeps_last(node: fx.Node) -> bool:
    """Whether a node moves dimensions, but not the last one."""
    if node.target not in ("permute", torch.permute):
        return False
    order: Any = node.args[1]
    return order[-1] in (-1, len(order) - 1)


def _source(table: Any) -> Any:
    """What an operand is, or is the transpose of."""
    while isinstance(table, fx.Node) and transposes(table):
        table = table.args[0]
    return table


def _dim_of_rows(table: Any) -> int:
    """Which dimension of what is stored the rows of an operand are: 1 if it is the transpose."""
    dim = 0
    while isinstance(table, fx.Node) and transposes(table):
        table, dim = table.args[0], 1 - dim
    return dim


# -- the rewriting


def lookup_local_rows(table: Tensor, indices: Tensor, start: int, total: int) -> Tensor:
    """Of the rows of a table of `total` rows those that this rank has, from `start` on; 0 in place of the others.

    table [n, width], indices [...] below `total`, negative ones counted from the back -> [..., width]. An index that
    is no row of any rank is not masked on the first or the last one, and raises there what `gather_rows` raises.
    """
    place, num = from_front(indices, total) - start, table.shape[0]
    elsewhere = (place < 0) & (start > 0) | (place >= num) & (start + num < total)
    rows = F.embedding(place.masked_fill(elsewhere, 0), table)
    return rows.masked_fill(elsewhere[..., None], 0.0)


def shard_vocabulary(module: ImportedGraph, plan: VocabularySharding, *, rank: int, group: str) -> dict[str, Placement]:
    """Rewrite the graph, in place, to what one rank of the tensor axis computes of tables and head.

    rank: this rank's coordinate; group: the name of the axis's process group. Divided weights become this rank's
    parts; returns which part each is, by name in the file. The output that the loss reads becomes [..., this rank's
    classes]: give the loss `plan.classes(rank, group)`.
    """
    nodes, stored = {node.name: node for node in module.graph.nodes}, named_weights(module)
    for number, name in enumerate(plan.lookups, FIRST_REGION):
        table = nodes[name].args[0]
        words = stored[module.onnx_names[_source(table).target]].shape[_dim_of_rows(table)]
        _divide_lookup(nodes[name], share(words, rank, plan.size)[0], words, number, group)
    if plan.head is not None:
        _divide_head(nodes, plan.head, share(plan.head.total, rank, plan.size), FIRST_REGION + len(plan.lookups), group)
    placements = {}
    for path, dim in plan.parts.items():
        name = module.onnx_names[path]
        placements[name] = _keep(module, path, stored[name], dim, share(stored[name].shape[dim], rank, plan.size))
    module.graph.lint()
    module.recompile()
    return placements


def _divide_lookup(node: fx.Node, start: int, words: int, number: int, group: str) -> None:
    table, indices = node.args
    node.target, node.args = lookup_local_rows, (table, indices, start, words)
    node.meta["tensor_parallel"] = number
    with node.graph.inserting_after(node):
        result = node.graph.call_function(reduce_from_region, (node, group))
    result.meta.update({key: value for key, value in node.meta.items() if key != "tensor_parallel"})
    node.replace_all_uses_with(result, delete_user_cb=lambda user: user is not result)


def _divide_head(nodes: dict[str, fx.Node], head: Head, own: Interval, number: int, group: str) -> None:
    product, graph = nodes[head.product], nodes[head.product].graph
    x = product.args[1 if product.target is torch.addmm else 0]
    assert isinstance(x, fx.Node)
    with graph.inserting_before(product):
        entered = graph.call_function(copy_to_region, (x, group))
    entered.meta.update(
        {key: value for key, value in x.meta.items() if key != "tensor_parallel"}, tensor_parallel=number
    )
    product.replace_input_with(x, entered)
    start, stop = own
    for name, operand in head.constants:
        with graph.inserting_before(nodes[name]):
            part = graph.call_method("narrow", (nodes[operand], -1, start, stop - start))
        nodes[name].replace_input_with(nodes[operand], part)
    for name in head.chain:
        nodes[name].meta["tensor_parallel"] = number
        nodes[name].meta.pop("probes", None)  # another shape now


def _keep(module: nn.Module, path: str, whole: Tensor, dim: int, own: Interval) -> Placement:
    """Put this rank's part in place of a weight."""
    owner, _, leaf = path.rpartition(".")
    part = whole.detach().narrow(dim, own[0], own[1] - own[0]).clone(memory_format=torch.contiguous_format)
    setattr(module.get_submodule(owner), leaf, nn.Parameter(part, requires_grad=whole.requires_grad))
    return Placement.whole(whole.shape).narrow(dim, *own)
