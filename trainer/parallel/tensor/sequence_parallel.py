"""Sequence parallelism: what lies between tensor-parallel regions is divided along the sequence.

    replicated     g ---- + bias ---- dropout ---- + ---- layer_norm ---- f ---- next region        [b, s, h]
    all-reduce     |                  |                                   |
                   identity           the same elements on all ranks      identity (all-reduce backwards)

    divided        g ---- + bias ---- dropout ---- + ---- layer_norm ---- f ---- next region        [b, s / size, h]
    reduce-        |                  |                                   |
    scatter        own rows           other elements on each rank         all-gather (reduce-scatter backwards)

(Korthikanti et al. 2022, https://arxiv.org/abs/2205.05198.) The bytes that are sent are the same; the activations of
what is divided, and its arithmetic, are 1 / size. The search begins at the row-parallel sums, and follows every call
that computes each position of the sequence alone. What reads a divided value in another way gets all of it back.

Weights between regions stay replicated. Each rank computes their gradients from its own rows, and the reducer sums them
once in a step; those of a weight that something else reads, too, are summed by copy_to_region in each backward pass.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from onward.trainer.config.sections.ranks import ParallelConfig
from onward.trainer.distributed.collectives import (
    copy_to_region,
    gather_from_sequence,
    reduce_from_region,
    reduce_scatter_to_sequence,
    take_from_sequence,
)
from onward.trainer.errors import ConfigError
from onward.trainer.onnx_import.imported_graph import ImportedGraph
from onward.trainer.onnx_import.ops.norm import Dropout, rms_norm
from onward.trainer.onnx_import.ops.random import StochasticDepth
from onward.trainer.parallel.tensor.compute_rules import ELEMENTWISE_CALLS
from onward.trainer.parallel.tensor.graph_analysis import CONVOLUTIONS, TRANSPOSED, copy_meta
from onward.trainer.parallel.tensor.region_dropout import seed_by_rank

SEQUENCE_DIM = 1
"""Of activations [batch, sequence, features]."""


@dataclass(frozen=True)
class SequenceDivision:
    """What is divided along the sequence."""

    nodes: tuple[str, ...] = ()
    partial: frozenset[str] = frozenset()
    """Names of replicated weights of whose gradient each tensor-parallel rank computes the part of its own rows."""


def divide_sequence(module: ImportedGraph, parallel: ParallelConfig, *, rank: int, group: str) -> SequenceDivision:
    """Divide, in place, what lies between the regions of a rewritten graph, if it is configured.

    rank, group: this rank's place on the tensor axis. Raises ConfigError if there is nothing to divide.
    """
    if not parallel.sequence_parallel or parallel.tensor == 1:
        return SequenceDivision()
    found = _Divider(module, parallel, rank, group).divide()
    if not found.nodes:
        raise ConfigError(
            "parallel.sequence_parallel: nothing between the tensor-parallel layers of this graph is divided, because "
            "no norm, dropout or element-wise call on values [batch, sequence, features] follows one of them; set "
            "parallel.sequence_parallel = false (onward plan names the layers)"
        )
    return found


class _Divider:
    def __init__(self, module: ImportedGraph, parallel: ParallelConfig, rank: int, group: str) -> None:
        # Adasum is no sum of what the ranks have for their rows: gradients must be complete before it
        self.sum_in_reducer = parallel.reduction == "sum"
        self.module = module
        self.graph = module.graph
        self.rank = rank
        self.group = group
        self.place = (SEQUENCE_DIM, rank, parallel.tensor, group)
        self.divided: dict[fx.Node, tuple[int, ...]] = {}
        """Node -> the trial lengths of the dimension that is divided."""
        self.copies: dict[fx.Node, fx.Node] = {}
        self.with_gradient = self._computed_from_weights()

    def divide(self) -> SequenceDivision:
        for node in self.graph.nodes:
            # inside a region values are sharded by features already
            lengths = () if "tensor_parallel" in node.meta else self._lengths(node, SEQUENCE_DIM)
            if lengths and len(self._shapes(node)[0]) >= 3 and self._can_be_divided(node, lengths):
                self.divided[node] = lengths
        # a sum that nothing divided reads is wanted completely
        for node in [node for node in self.divided if node.target is reduce_from_region]:
            if not any(user in self.divided for user in node.users):
                del self.divided[node]
        partial = self._partial_weights() if self.sum_in_reducer else set()
        # the reducer sums the gradients of these weights, so their copies need no all-reduce of their own
        weights = [node for node in self.graph.nodes if node.op == "get_attr"]
        self.with_gradient -= {node for node in weights if node.target in partial}
        for node in self.divided:
            self._divide(node)
        for node in self.divided:
            self._give_back(node)
        self.graph.lint()
        self.module.recompile()
        names = frozenset(self.module.onnx_names[path] for path in partial)
        return SequenceDivision(tuple(node.name for node in self.divided), names)

    # -- what can be divided

    def _can_be_divided(self, node: fx.Node, lengths: tuple[int, ...]) -> bool:
        if node.target is reduce_from_region:
            partial: Any = node.args[0]
            return partial.target not in (*CONVOLUTIONS, *TRANSPOSED)  # whose second dimension has the channels
        operands = node.all_input_nodes
        # the division only spreads: a call is divided because an operand is
        if not any(operand in self.divided for operand in operands) or not self._is_rowwise(node):
            return False
        rank = len(self._shapes(node)[0])
        for operand in operands:
            if not (shapes := self._shapes(operand)):
                return False
            # broadcasting aligns last dimensions, so an operand of lower rank may lack the sequence
            aligned = self._lengths(operand, SEQUENCE_DIM + len(shapes[0]) - rank)
            if operand in self.divided and (len(shapes[0]) != rank or aligned != lengths):
                return False
            # another length would broadcast, or fail, against this rank's rows
            if aligned and aligned != lengths and {*aligned} != {1}:
                return False
        return True

    def _is_rowwise(self, node: fx.Node) -> bool:
        """Whether a call computes each position of the sequence alone."""
        if node.op == "call_module":
            drawing = self.module.get_submodule(str(node.target))
            # draws for single samples are the same on all ranks
            if isinstance(drawing, StochasticDepth):
                return drawing.mask_dims <= SEQUENCE_DIM
            return isinstance(drawing, Dropout) and not drawing.with_mask
        rank = len(self._shapes(node)[0])
        normalized: Any = node.args[1] if len(node.args) > 1 else None
        if node.target in (F.layer_norm, torch.layer_norm, F.rms_norm, torch.rms_norm):
            return rank - len(normalized) > SEQUENCE_DIM
        if node.target is rms_norm:  # from this dimension on
            return normalized % rank > SEQUENCE_DIM  # type: ignore[no-any-return]
        return node.op in ("call_function", "call_method") and node.target in ELEMENTWISE_CALLS

    def _shapes(self, node: fx.Node) -> list[tuple[int, ...]]:
        """Return the trial shapes of a tensor; empty if they are not known."""
        # a sum that is followed by a bias has no trial shapes of its own
        source = node.args[0] if node.target in (reduce_from_region, reduce_scatter_to_sequence) else node
        assert isinstance(source, fx.Node)
        probes = source.meta.get("probes", ())
        if not all(isinstance(probe, Tensor) for probe in probes):
            return []
        return [tuple(probe.shape) for probe in probes]

    def _lengths(self, node: fx.Node, dim: int) -> tuple[int, ...]:
        shapes = self._shapes(node)
        if not shapes or not 0 <= dim < len(shapes[0]):
            return ()
        return tuple(shape[dim] for shape in shapes)

    def _computed_from_weights(self) -> set[fx.Node]:
        found: set[fx.Node] = set()
        for node in self.graph.nodes:
            if node.op == "get_attr":
                tensor = operator.attrgetter(str(node.target))(self.module)
                if isinstance(tensor, torch.nn.Parameter) and tensor.requires_grad:
                    found.add(node)
            elif any(operand in found for operand in node.all_input_nodes):
                found.add(node)
        return found

    def _partial_weights(self) -> set[str]:
        """Return the paths of trained weights that only divided calls read, each of them completely."""
        found: set[str] = set()
        others: set[str] = set()
        for node in self.graph.nodes:
            if node.op == "get_attr" and node in self.with_gradient:
                # a weight with a number for each position is read in parts: its gradient is no partial sum
                reads = [user in self.divided and not self._meets_rows(node, user) for user in node.users]
                (found if all(reads) else others).add(str(node.target))
        return found - others

    def _meets_rows(self, operand: fx.Node, node: fx.Node) -> bool:
        """Whether a dimension of a replicated operand meets the divided one of a call."""
        aligned = self._lengths(operand, self._aligned_dim(operand, node))
        return aligned == self.divided[node] and {*aligned} != {1}

    def _aligned_dim(self, operand: fx.Node, node: fx.Node) -> int:
        return SEQUENCE_DIM + len(self._shapes(operand)[0]) - len(self._shapes(node)[0])

    # -- the rewriting

    def _divide(self, node: fx.Node) -> None:
        if node.target is reduce_from_region:
            node.target = reduce_scatter_to_sequence
            node.args = (node.args[0], *self.place)
            return
        for operand in node.all_input_nodes:
            if operand in self.divided:
                continue
            if self._meets_rows(operand, node):
                node.replace_input_with(operand, self._part(operand, self._aligned_dim(operand, node)))
            elif operand in self.with_gradient:
                node.replace_input_with(operand, self._copy(operand))
        if node.op == "call_module":
            self._draw_by_rank(node)

    def _part(self, operand: fx.Node, dim: int) -> fx.Node:
        with self.graph.inserting_after(operand):
            return self.graph.call_function(take_from_sequence, (operand, dim, *self.place[1:]))

    def _copy(self, operand: fx.Node) -> fx.Node:
        if operand not in self.copies:
            with self.graph.inserting_after(operand):
                self.copies[operand] = self.graph.call_function(copy_to_region, (operand, self.group))
        return self.copies[operand]

    def _draw_by_rank(self, node: fx.Node) -> None:
        drawing = self.module.get_submodule(str(node.target))
        if isinstance(drawing, Dropout):
            seed_by_rank(self.module, node, self.rank, "by_rows")

    def _give_full_length(self, length: fx.Node, *, is_divided: bool) -> None:
        if is_divided:
            with self.graph.inserting_after(length):
                full = self.graph.call_function(operator.mul, (length, self.place[2]))
            length.replace_all_uses_with(full, delete_user_cb=lambda user: user is not full)

    def _give_back(self, node: fx.Node) -> None:
        """Let all readers of a divided value that are not divided read all of it."""
        rank = len(self._shapes(node)[0])
        node.meta.pop("probes", None)
        shared: fx.Node | None = None
        for user in [user for user in node.users if user not in self.divided]:
            if user.op == "call_method" and user.target == "size" and isinstance(dim := user.args[-1], int):
                self._give_full_length(user, is_divided=dim in (SEQUENCE_DIM, SEQUENCE_DIM - rank))
                continue
            # all-gather forward, reduce-scatter backward: in place of the all-reduce of copy_to_region
            if user.target is copy_to_region:
                user.target = gather_from_sequence
                user.args = (node, *self.place, "sum")
                continue
            if shared is None:
                with self.graph.inserting_after(node):
                    shared = self.graph.call_function(gather_from_sequence, (node, *self.place, "same"))
                copy_meta(shared, node)
            user.replace_input_with(node, shared)
