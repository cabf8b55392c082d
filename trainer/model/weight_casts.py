"""Cast each weight to half precision once in a step, and not in each of its micro-batches.

Under autocast a product casts its operands itself. autocast keeps a cast for the next product only of a parameter that
needs a gradient and is read directly, not of its transpose and not of a frozen weight. So the cast becomes a node:

    before      w (fp32) ---- t ---- linear             autocast casts w.t() in every forward pass
    after       w (fp32) ---- half ---- t ---- linear   `half` casts w in the first forward pass of `casts_kept`

Results and gradients have the same bits: a cast and a transpose commute, and all backward passes go through one cast
node, which saves no tensors. Only products and convolutions that autocast computes in half precision on every device
get the node; every other reader of a weight (look-ups of rows, norms, sums) still reads fp32. If several products read
transposes of one weight, their gradients are now summed in half precision, as autocast sums those of direct readers.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from onward.trainer.config.sections import PrecisionConfig
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
    """Return a weight in autocast's type, as a product would cast it, and in a memory format, in one pass.

    Outside of autocast the type stays; the weight itself is returned if nothing is to be changed.
    """
    kind, dtype = weight.device.type, weight.dtype
    if dtype == torch.float32 and not weight.is_meta and torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
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


_kept: dict[tuple[Tensor, bool, torch.memory_format], Tensor] | None = None


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
    outer, _kept = _kept, {}
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
    """Add a `half` node for each parameter that products and convolutions read, in place."""
    if config.compute not in COMPUTE:
        return
    for node in list(module.graph.find_nodes(op="get_attr")):
        owner, _, name = str(node.target).rpartition(".")
        tensor = getattr(module.get_submodule(owner), name)
        if not isinstance(tensor, nn.Parameter) or tensor.dtype != torch.float32:
            continue
        if readers := [user for user in node.users if _computes_in_half(user)]:
            with module.graph.inserting_after(node):
                cast = module.graph.call_function(half, (node,))
            cast.meta = {key: value for key, value in node.meta.items() if key != "probes"}
            for reader in readers:
                reader.replace_input_with(node, cast)
    module.recompile()


def cast_weights(module: fx.GraphModule) -> set[nn.Parameter]:
    """Return the parameters that a `half` node reads."""
    casts = module.graph.find_nodes(op="call_function", target=half)
    return {module.get_parameter(str(node.all_input_nodes[0].target)) for node in casts}


def make_casts(module: nn.Module) -> list[Tensor]:
    """Cast now, inside `casts_kept` and autocast, every weight that a step casts; return the casts."""
    graphs = [each for each in module.modules() if isinstance(each, fx.GraphModule)]
    return [half(weight) for graph in graphs for weight in cast_weights(graph)]


def read_in_half_only(module: fx.GraphModule) -> set[nn.Parameter]:
    """Return the parameters that nothing reads but `half` nodes."""
    reads = module.graph.find_nodes(op="get_attr")
    found = {node: module.get_parameter(str(node.target)) for node in reads if _is_parameter(module, node)}
    others = {found[node] for node in found if any(user.target is not half for user in node.users)}
    return set(found.values()) - others


def _is_parameter(module: fx.GraphModule, node: fx.Node) -> bool:
    owner, _, name = str(node.target).rpartition(".")
    return isinstance(getattr(module.get_submodule(owner), name), nn.Parameter)


def _computes_in_half(node: fx.Node) -> bool:
    """Return whether a reader is a product, or a view that only products read."""
    if node.op == "call_function" and node.target in PRODUCTS:
        return True
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    is_view = node.op == "call_method" or getattr(torch, name, None) is node.target
    return bool(is_view and name in VIEWS and node.users and all(map(_computes_in_half, node.users)))
