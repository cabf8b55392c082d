"""Cast each weight to half precision once in a step, and not in each of its micro-batches.

Under autocast a product casts its operands itself. autocast keeps a cast for the next product only of a parameter that
needs a gradient and is read directly, not of its transpose and not of a frozen weight. So the cast becomes a node:

    before      w (fp32) ---- t ---- linear             autocast casts w.t() in every forward pass
    after       w (fp32) ---- half ---- t ---- linear   `half` casts w in the first forward pass of `casts_kept`

Results and gradients have the same bits: a cast and a transpose commute, and all backward passes go through one cast
node, which saves no tensors. A weight that several products read (the layers of ALBERT) is cast once as well, but each
product gets a node with a backward of its own (`half_with_own_backward`), so that their gradients are summed in fp32.

Only products and convolutions that autocast computes in half precision on every device get the node; every other reader
of a weight (look-ups of rows, norms, sums) still reads fp32.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from onward.trainer.config.sections.training import PrecisionConfig
from onward.trainer.model.adapters import low_rank, low_rank_conv
from onward.trainer.model.precision import COMPUTE
from onward.trainer.onnx_import.imported_graph import ImportedGraph

PRODUCTS = frozenset(
    {
        *(F.linear, torch.matmul, operator.matmul, torch.mm, torch.bmm, torch.addmm, torch.baddbmm),
        *(F.conv1d, F.conv2d, F.conv3d, F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d),
        *(low_rank, low_rank_conv),
    }
)
"""Functions whose every float operand autocast casts, on CPUs and on GPUs."""
VIEWS = frozenset({"t", "permute", "transpose", "reshape", "view", "flatten", "unflatten", "unsqueeze", "squeeze"})
"""Tensor methods, and functions of torch, that change a shape and no value."""


def half(weight: Tensor, memory_format: torch.memory_format = torch.preserve_format) -> Tensor:
    """Return a weight [...] in autocast's type, as a product would cast it, and in a memory format, in one pass.

    Outside of autocast the type stays; the weight itself is returned if nothing is to be changed.
    """
    dtype = torch.get_autocast_dtype(weight.device.type) if _is_cast(weight) else weight.dtype
    if dtype == weight.dtype and memory_format == torch.preserve_format:
        return weight
    # the compiler records the cast and cannot follow the dictionary
    if torch.compiler.is_compiling() or _kept is None:
        return weight.to(dtype, memory_format=memory_format)
    # a cast made without gradients has no history, so a forward pass that needs gradients makes its own
    key = weight, torch.is_grad_enabled(), memory_format
    if key not in _kept:
        _kept[key] = weight.to(dtype, memory_format=memory_format)
    return _kept[key]


def half_with_own_backward(weight: Tensor) -> Tensor:
    """Return what `half` returns, with a backward node of its own: its gradient is cast to fp32 before it is summed."""
    if torch.compiler.is_compiling() or _kept is None or not _is_cast(weight):
        return half(weight)
    with torch.no_grad():
        cast = half(weight)
    return _CastBackward.apply(weight, cast)  # type: ignore[no-any-return, no-untyped-call]


class _CastBackward(torch.autograd.Function):
    """The gradient of a cast that has been made before."""

    @staticmethod
    def forward(context: Any, weight: Tensor, cast: Tensor) -> Tensor:
        context.dtype = weight.dtype
        return cast.view_as(cast)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient.to(context.dtype), None


def _is_cast(weight: Tensor) -> bool:
    is_full = weight.dtype == torch.float32 and not weight.is_meta
    return is_full and torch.is_autocast_enabled(weight.device.type)


_kept: dict[tuple[Tensor, bool, torch.memory_format], Tensor] | None = None
"""The casts inside `casts_kept`. A variable of the module, because autograd recomputes forward passes on a GPU in
threads of its own, where a ContextVar would be empty."""


@contextmanager
def casts_kept(device: torch.device) -> Iterator[None]:
    """Keep casts from one forward pass to the next inside a block, in which no weight changes.

        with casts_kept(device):
            for batch in micro_batches:
                with autocast(config, device):
                    loss = ...
                loss.backward()                 outside of autocast, whose rules are those of forward passes

    A context of autocast around the others, though disabled, makes autocast keep its own casts as well, which operators
    without a `half` node read.
    """
    global _kept
    outer = _kept
    _kept = {}
    try:
        with torch.autocast(device.type, enabled=False):
            yield
    finally:
        _kept = outer


def forget_casts() -> None:
    """Drop the casts that have been kept: their memory is free once no backward pass needs them."""
    torch.clear_autocast_cache()
    if _kept is not None:
        _kept.clear()


def insert_casts(module: ImportedGraph, config: PrecisionConfig) -> None:
    """Add a cast before every product and convolution that reads a parameter, in place."""
    if config.compute not in COMPUTE:
        return
    reads = [node for node in module.graph.find_nodes(op="get_attr") if _is_fp32_parameter(module, node)]
    paths = {node: list(_paths_to_products(node)) for node in reads}
    # counted by weight and not by read: several nodes may read one weight
    times = Counter(str(node.target) for node in reads for _ in paths[node])
    for node in reads:
        for *views, product in paths[node]:
            last = views[-1] if views else node
            with module.graph.inserting_before(product):
                cast = module.graph.call_function(
                    half_with_own_backward if times[str(node.target)] > 1 else half, (node,)
                )
                cast.meta = {key: value for key, value in node.meta.items() if key != "probes"}
                # the views between weight and product are repeated behind the cast
                for view, before in zip(views, [node, *views], strict=False):
                    copied = {before: cast}
                    cast = module.graph.node_copy(view, lambda x, copied=copied: copied.get(x, x))  # type: ignore[misc]
            product.replace_input_with(last, cast)
            # from the last one, since a view that is read cannot be erased
            for view in reversed(views):
                if not view.users:
                    module.graph.erase_node(view)
    module.recompile()


def _paths_to_products(node: fx.Node) -> Iterator[tuple[fx.Node, ...]]:
    """Yield (view, view, ..., product) for each product that reads a value directly or through views."""
    for user in node.users:
        if user.op == "call_function" and user.target in PRODUCTS:
            yield (user,)
        elif is_view(user) and user.all_input_nodes == [node]:
            yield from ((user, *rest) for rest in _paths_to_products(user))


def is_view(node: fx.Node) -> bool:
    """Return whether a node changes the shape of what it reads, and no value."""
    if node.op == "call_method":
        return node.target in VIEWS
    name = getattr(node.target, "__name__", "")
    return node.op == "call_function" and name in VIEWS and getattr(torch, name, None) is node.target


def _is_fp32_parameter(module: nn.Module, node: fx.Node) -> bool:
    tensor = operator.attrgetter(str(node.target))(module)
    return isinstance(tensor, nn.Parameter) and tensor.dtype == torch.float32


def cast_weights(module: fx.GraphModule) -> set[nn.Parameter]:
    """Return the parameters that are cast."""
    return {module.get_parameter(str(node.all_input_nodes[0].target)) for node in _cast_nodes(module)}


def casts_with_products(module: fx.GraphModule) -> Iterator[tuple[fx.Node, Tensor]]:
    """Yield each product whose second operand is a cast weight or a view of it, and that operand on the meta device."""
    for cast in _cast_nodes(module):
        weight = module.get_parameter(str(cast.all_input_nodes[0].target))
        for *views, product in _paths_to_products(cast):
            operand = torch.empty_like(weight, device="meta")
            for view in views:
                function: Any = getattr(torch.Tensor, str(view.target)) if view.op == "call_method" else view.target
                operand = function(operand, *view.args[1:], **view.kwargs)
            if len(product.args) > 1 and product.args[1] is (views[-1] if views else cast):
                yield product, operand


def make_casts(module: nn.Module) -> list[Tensor]:
    """Cast now, inside `casts_kept` and autocast, every weight that a step casts; return the casts."""
    made = []
    for graph in [child for child in module.modules() if isinstance(child, fx.GraphModule)]:
        for node in _cast_nodes(graph):
            cast: Any = node.target
            made.append(cast(graph.get_parameter(str(node.all_input_nodes[0].target)), *node.args[1:]))
    return made


def _cast_nodes(module: fx.GraphModule) -> list[fx.Node]:
    targets = (half, half_with_own_backward)
    return [node for target in targets for node in module.graph.find_nodes(op="call_function", target=target)]


def read_in_half_only(module: fx.GraphModule) -> set[nn.Parameter]:
    """Return the parameters that nothing reads but one product of the whole graph, in half precision."""
    reads = [node for node in module.graph.find_nodes(op="get_attr") if _is_fp32_parameter(module, node)]
    weights = {node: module.get_parameter(str(node.target)) for node in reads}
    # `half_with_own_backward` counts as another reader: several products have the weight then
    others = set[nn.Parameter]()
    for node, weight in weights.items():
        if any(user.target is not half for user in node.users):
            others.add(weight)
    return set(weights.values()) - others
