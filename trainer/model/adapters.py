"""Add low-rank adapters (LoRA) to products and convolutions of an imported graph (Hu et al. 2021, arXiv:2106.09685).

    W + (alpha / rank) B A          A [rank, inputs], B [outputs, rank], of which only A and B are trained

    before      x ------ linear(W) ------ y
    after       x --+--- linear(W) --- add --- y
                    `-- A' -- B' ------'              low_rank: [..., inputs] -> [..., rank] -> [..., outputs]

A is initialised Kaiming-uniform and B with zeros, so an adapted graph first computes the same as the graph. No matrix
of W's size is made, unless a weight is also read by another operator than a product, a convolution or a look-up of
rows: then W + (alpha / rank) B A is computed. W keeps the layout of the file ([outputs, inputs] or its transpose).
Beside quantized weights the file itself gets adapters, which are ordinary weights here (quantized_adapters.py).
"""

from __future__ import annotations

import difflib
import math
import zlib
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from onward.trainer.config.sections.model import LoraConfig
from onward.trainer.errors import ConfigError
from onward.trainer.onnx_import.imported_graph import ImportedGraph, named_weights
from onward.trainer.onnx_import.ops.gather import gather_rows
from onward.trainer.onnx_import.ops.norm import Dropout
from onward.trainer.onnx_import.roles.roles import INTEGERS, Role

CONVOLUTIONS: dict[int, Callable[..., Tensor]] = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
DROPOUT = "lora_dropout"
"""Name of the submodule that drops the inputs of adapters."""


@dataclass(frozen=True)
class Adapter:
    """The adapter of one weight. Names are initializer names, or derived from one."""

    weight: str
    scale: float
    outputs_first: bool
    """Whether the file's layout of the weight is [outputs, inputs]."""

    @property
    def a(self) -> str:
        return f"{self.weight}.lora_a"

    @property
    def b(self) -> str:
        return f"{self.weight}.lora_b"


# -- what the graph computes


def low_rank(x: Tensor, a: Tensor, b: Tensor, scale: float, reverse: bool) -> Tensor:
    """Multiply x [..., inputs] by A and B -> [..., outputs]; in reverse, [..., outputs] -> [..., inputs]."""
    return (x @ b * scale) @ a if reverse else (x @ a.mT * scale) @ b.mT


def low_rank_rows(indices: Tensor, a: Tensor, b: Tensor, scale: float, reverse: bool) -> Tensor:
    """Return rows of B A, or (reverse) of its transpose: indices [...] -> [..., inputs], or [..., outputs]."""
    return (gather_rows(a.mT, indices) * scale) @ b.mT if reverse else (gather_rows(b, indices) * scale) @ a


def low_rank_conv(x: Tensor, a: Tensor, b: Tensor, scale: float, *where: Any) -> Tensor:
    """Convolve to `rank` channels, then with a kernel of one element: [batch, inputs, ...] -> [batch, outputs, ...].

    a: [rank, inputs / groups, *kernel]; b: [outputs, rank]; where: strides, pads, dilations, groups.
    """
    convolve = CONVOLUTIONS[a.ndim - 2]
    groups = where[-1]
    # every group of a grouped convolution has the same A, and its own rows of B
    narrow = convolve(x, a.repeat(groups, *[1] * (a.ndim - 1)), None, *where)
    return convolve(narrow * scale, b.reshape(*b.shape, *[1] * (a.ndim - 2)), groups=groups)


def product(a: Tensor, b: Tensor, scale: float, outputs_first: bool) -> Tensor:
    """Return (alpha / rank) B A in layout and shape of the weight. a: [..., rank, inputs]; b: [..., outputs, rank]."""
    if a.ndim > b.ndim:  # a convolution's
        return (b @ a.flatten(1) * scale).reshape(b.shape[0], *a.shape[1:])
    return b @ a * scale if outputs_first else (b @ a * scale).mT


def adapted(weight: Tensor, a: Tensor, b: Tensor, scale: float, outputs_first: bool) -> Tensor:
    """Return the weight with its adapter added, in its shape; a, b: see `product`."""
    return weight + product(a, b, scale, outputs_first)


# -- adding adapters


def add_adapters(
    module: ImportedGraph, config: LoraConfig, *, seed: int, beside: Collection[str] = ()
) -> tuple[Adapter, ...]:
    """Give every matching weight an adapter, in place: parameters `<weight>.lora_a` and `<weight>.lora_b`.

    beside: the factors of the adapters that the graph itself has beside quantized weights. The same seed makes the
    same adapters on every rank. Raises ConfigError for each pattern that matches no weight
    of a product or convolution, and for each weight whose use leaves no place for `lora.dropout`.
    """
    stored = [node for node in module.graph.find_nodes(op="get_attr") if str(node.target) in module.onnx_names]
    reads = {module.onnx_names[str(node.target)]: node for node in stored}
    # a weight that only look-ups and other operators read has no product beside which B A x could be computed
    candidates = {name: uses for name, node in reads.items() if (uses := _Uses.of(node)).main}
    chosen = {}
    for name, uses in candidates.items():
        if any(fnmatchcase(name, pattern) for pattern in config.weights):
            chosen[name] = uses
    # a pattern may also match quantized weights alone, which have their adapters in the file
    adapted_weights = [*chosen, *(name.removesuffix(".lora_a") for name in beside)]
    problems = []
    for pattern in config.weights:
        if not any(fnmatchcase(name, pattern) for name in adapted_weights):
            nearest = _nearest(pattern, list(candidates))
            problems.append(f"lora.weights: {_why_none(pattern, module)}; there is {nearest}")
    for name, uses in chosen.items():
        if config.dropout and uses.other:
            problems.append(
                f"lora.dropout: {name!r} is also read by {uses.other}, where its adapter has no input to drop; leave "
                "it out"
            )
    if problems:
        raise ConfigError(problems)
    if config.dropout:
        # one module for all adapters: it holds no tensors, and each call draws numbers of its own
        module.add_module(DROPOUT, Dropout(config.dropout))
        _drop_inputs(module, beside)
    return tuple(_adapt(module, name, uses, config, seed) for name, uses in chosen.items())


def _drop_inputs(module: ImportedGraph, factors: Collection[str]) -> None:
    """Drop the inputs of the adapters beside quantized weights."""
    for read in [node for node in module.graph.nodes if node.op == "get_attr"]:
        name = module.onnx_names.get(str(read.target), "")
        if name in factors and name.endswith(".lora_a"):
            [use] = _Uses.of(read).uses
            with module.graph.inserting_before(use.node):
                dropped = module.graph.call_module(DROPOUT, (use.node.args[use.x],))
            use.node.update_arg(use.x, dropped)
    module.graph.lint()
    module.recompile()


def _why_none(pattern: str, module: ImportedGraph) -> str:
    """Return why a pattern matches no weight that can have an adapter."""
    matching = [name for name in module.roles if fnmatchcase(name, pattern)]
    frozen = [name for name in matching if module.roles[name].kind == "frozen"]
    integers = [name for name in frozen if module.roles[name].reason.startswith(INTEGERS)]
    if integers:
        return (
            f"{integers[0]!r} is stored as integers, and is no second operand of a single MatMulNBits, MatMul or Gemm "
            "of floats, beside which the file can have an adapter; put it on the model that this one was quantized from"
        )
    return f"no MatMul, Gemm or Conv weight matches {pattern!r}"


def _nearest(pattern: str, known: Sequence[str]) -> str:
    return ", ".join(difflib.get_close_matches(pattern, known, n=1, cutoff=0.3) or known[:1]) or "none at all"


def _adapt(module: ImportedGraph, name: str, uses: _Uses, config: LoraConfig, seed: int) -> Adapter:
    assert uses.main is not None
    # the layout of the first product is the adapter's; for readers of the other one the factors change sides
    adapter = Adapter(name, config.alpha / config.rank, uses.main.outputs_first)
    tensors = _initial_factors(adapter, named_weights(module)[name], config.rank, seed, conv=uses.main.kind == "conv")
    nodes = []
    for of, tensor in zip((adapter.a, adapter.b), tensors, strict=True):
        # beside the weight, with underscores where the name is taken
        owner, _, leaf = str(uses.read.target).rpartition(".")
        leaf += of.removeprefix(name).replace(".", "_")
        while hasattr(module.get_submodule(owner), leaf):
            leaf += "_"
        module.get_submodule(owner).register_parameter(leaf, nn.Parameter(tensor))
        path = f"{owner}.{leaf}" if owner else leaf
        module.onnx_names[path] = of
        # listed like weights of the file, so that selection, checkpoints and reducers treat them alike
        module.roles[of] = Role("trained", f"adapter of {name}", module.roles[name].operator)
        with module.graph.inserting_after(uses.read):
            nodes.append(module.graph.get_attr(path))
    uses.rewrite(module.graph, (nodes[0], nodes[1]), adapter, dropout=bool(config.dropout))
    module.graph.lint()
    module.recompile()
    return adapter


def _initial_factors(adapter: Adapter, weight: Tensor, rank: int, seed: int, *, conv: bool) -> tuple[Tensor, Tensor]:
    """Initialise A like torch's Linear and Conv, U(-1/sqrt(fan_in), 1/sqrt(fan_in)), and B with zeros."""
    if conv:
        a_shape = [rank, *weight.shape[1:]]
        b_shape = [weight.shape[0], rank]
        fan_in = math.prod(weight.shape[1:])
    else:
        *batch, outputs, fan_in = (weight if adapter.outputs_first else weight.mT).shape
        a_shape = [*batch, rank, fan_in]
        b_shape = [*batch, outputs, rank]
    # a generator for each adapter: its values depend on the seed and its name, not on the order of adapters
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {adapter.a}".encode()))
    a = torch.empty(a_shape, dtype=weight.dtype).uniform_(-1, 1, generator=generator) / math.sqrt(fan_in)
    return a, torch.zeros(b_shape, dtype=weight.dtype)


# -- the nodes that read a weight

Kind = Literal["linear", "matmul", "conv", "rows", "other"]
"""x W', x W, a convolution with W, rows of W, anything else."""


@dataclass(frozen=True)
class _Use:
    """A node that reads a weight, or its transpose (`transposed`)."""

    node: fx.Node
    transposed: bool
    kind: Kind
    x: int = 0
    """The operand that meets the weight."""

    @property
    def outputs_first(self) -> bool:
        """Return whether the weight's own layout is [outputs, inputs], as this node uses it."""
        return self.transposed if self.kind == "matmul" else not self.transposed

    @classmethod
    def of(cls, node: fx.Node, weight: fx.Node, *, transposed: bool) -> _Use:
        """Classify what a node does with one of its operands."""
        # W x W, or a weight inside a list of operands: its place cannot be told apart
        if node.all_input_nodes.count(weight) != 1 or sum(arg is weight for arg in node.args) != 1:
            return cls(node, transposed, "other")
        place = node.args.index(weight)
        is_kernel = place == 1 and not transposed and len(node.args) == 7
        if node.op == "call_function":
            if node.target is F.linear and place == 1:
                return cls(node, transposed, "linear")
            if node.target in (torch.matmul, torch.mm) and place == 1:
                return cls(node, transposed, "matmul")
            if node.target is torch.addmm and place == 2:
                return cls(node, transposed, "matmul", x=1)
            if node.target in CONVOLUTIONS.values() and is_kernel:
                return cls(node, transposed, "conv")
            if node.target is gather_rows and place == 0:
                return cls(node, transposed, "rows", x=1)
        return cls(node, transposed, "other")


@dataclass(frozen=True)
class _Uses:
    """All nodes that read one stored tensor."""

    read: fx.Node
    uses: tuple[_Use, ...]

    @classmethod
    def of(cls, read: fx.Node) -> _Uses:
        return cls(read, tuple(_follow(read, transposed=False)))

    @property
    def main(self) -> _Use | None:
        """Return the first product or convolution that reads it; None if there is none."""
        return next((use for use in self.uses if use.kind in ("linear", "matmul", "conv")), None)

    @property
    def other(self) -> str:
        """Return the first other kind of reader, or ""."""
        return next((str(use.node.target) for use in self.uses if use.kind == "other"), "")

    def rewrite(self, graph: fx.Graph, factors: tuple[fx.Node, fx.Node], adapter: Adapter, *, dropout: bool) -> None:
        """Add the adapter's part to the result of every reader."""
        # there is no product beside which B A x could be computed, so W + B A itself is
        if self.other:
            readers = list(self.read.users)
            with graph.inserting_after(max(factors, key=list(graph.nodes).index)):
                merged = graph.call_function(adapted, (self.read, *factors, adapter.scale, adapter.outputs_first))
            merged.meta = dict(self.read.meta)
            for reader in readers:
                reader.replace_input_with(self.read, merged)
            return
        for use in self.uses:
            with graph.inserting_after(use.node):
                total = graph.call_function(torch.add, (use.node,))
            total.meta = dict(use.node.meta)
            use.node.replace_all_uses_with(total, delete_user_cb=lambda user, total=total: user is not total)  # type: ignore[misc]
            with graph.inserting_before(total):
                total.args = (use.node, self._beside(graph, use, factors, adapter, dropout=dropout))

    def _beside(
        self, graph: fx.Graph, use: _Use, factors: tuple[fx.Node, fx.Node], adapter: Adapter, *, dropout: bool
    ) -> fx.Node:
        """Return the node that computes the adapter's part of one result."""
        x = use.node.args[use.x]
        reverse = use.outputs_first != adapter.outputs_first
        if use.kind == "rows":
            return graph.call_function(low_rank_rows, (x, *factors, adapter.scale, reverse))
        if dropout:
            x = graph.call_module(DROPOUT, (x,))
        if use.kind == "conv":
            return graph.call_function(low_rank_conv, (x, *factors, adapter.scale, *use.node.args[3:]))
        # addmm multiplies its product by alpha, and so must the adapter
        scale = adapter.scale * float(use.node.kwargs.get("alpha", 1.0))  # type: ignore[arg-type]
        return graph.call_function(low_rank, (x, *factors, scale, reverse))


def _follow(node: fx.Node, *, transposed: bool) -> Iterator[_Use]:
    """Yield the readers of a matrix and of its transpose."""
    for user in node.users:
        if _transposes(user):
            yield from _follow(user, transposed=not transposed)
        else:
            yield _Use.of(user, node, transposed=transposed)


def _transposes(node: fx.Node) -> bool:
    """Return whether a node swaps the two dimensions of a matrix."""
    if node.target in ("t", torch.t):
        return True
    return node.target in ("permute", torch.permute) and list(node.args[1]) == [1, 0]  # type: ignore[arg-type]


# -- merging adapters


def merge_adapters(module: ImportedGraph, plain: fx.Graph, adapters: Sequence[Adapter]) -> ImportedGraph:
    """Return the graph without adapters, with W + (alpha / rank) B A in place of each W.

    It shares every other tensor with `module`. A weight whose adapter is still zero keeps its bits.
    """
    # shares the tensors: a copy of all weights would double the memory
    result = ImportedGraph(module, plain, "ImportedGraph")
    own = {adapter.a for adapter in adapters} | {adapter.b for adapter in adapters}
    for name in ImportedGraph.__annotations__:
        setattr(result, name, getattr(module, name))
    result.onnx_names = {path: name for path, name in module.onnx_names.items() if name not in own}
    result.roles = {name: role for name, role in module.roles.items() if name not in own}
    tensors = named_weights(module)
    paths = {name: path for path, name in result.onnx_names.items()}
    for adapter in adapters:
        weight, a, b = (tensors[name].detach() for name in (adapter.weight, adapter.a, adapter.b))
        # in fp64, so that the merged weight is rounded once
        change = product(a.double(), b.double(), adapter.scale, adapter.outputs_first)
        changed = torch.where(change == 0, weight, (weight + change).to(weight.dtype))  # -0.0 + 0.0 would be 0.0
        owner, _, leaf = paths[adapter.weight].rpartition(".")
        setattr(result.get_submodule(owner), leaf, nn.Parameter(changed))
    return result
