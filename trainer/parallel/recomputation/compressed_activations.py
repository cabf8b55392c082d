"""Rewrite a graph so that its forward pass keeps less for the backward pass (`recompute.mode = "compressed"`).

What autograd keeps of a block of SqueezeNet, 4 bytes an element but for the int64 indices, and what is left of it:

    conv ──► relu ──► concat ──► max pool ──► conv
               result     input, indices         input     kept by torch
               bits              1 byte          input     stash = "exact":   gradients are the same bits
               bits              1 byte          bf16      stash = "bf16":    and inputs of products are rounded

A convolution keeps the tensor that it reads. If that is the result of a ReLU, torch keeps it once for both, and bits
beside it would save nothing: `exact` leaves such a ReLU alone. When inputs are rounded, it gets its bits too, because
a positive number may have become 0.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from torch import fx, nn

from onward.trainer.model.in_place import relu_in_place
from onward.trainer.model.weight_casts import PRODUCTS, is_view
from onward.trainer.onnx_import.ops.batch_norm import BatchNorm
from onward.trainer.onnx_import.ops.conv import pad_spatial
from onward.trainer.onnx_import.ops.norm import Dropout
from onward.trainer.parallel.pipeline.stage import Stage
from onward.trainer.parallel.recomputation import compressed_functions as stash_functions
from onward.trainer.parallel.recomputation.compressed_functions import RoundedInputs

Stash = Literal["exact", "bf16", "fp8"]
"""How `recompute.mode` keeps inputs of products: `compressed`, `compressed_bf16` and `compressed_fp8`."""

MAX_POOLS = (F.max_pool1d, F.max_pool2d, F.max_pool3d)
READS_NO_INPUT = frozenset(
    {
        *(torch.cat, torch.add, torch.sub, torch.neg, operator.add, operator.sub, operator.neg),
        *(F.avg_pool1d, F.avg_pool2d, F.avg_pool3d, torch.mean, torch.sum, F.pad, pad_spatial, F.interpolate),
        *(torch.relu, stash_functions.relu, stash_functions.leaky_relu, stash_functions.clamp),
        stash_functions.max_pool,
    }
)
"""Functions whose backward pass reads no element of what they are given. Of others it is not known."""
KEEPS_RESULT = frozenset(
    {
        *(torch.relu, torch.sigmoid, torch.tanh, torch.exp, torch.sqrt, torch.rsqrt, torch.reciprocal),
        *(torch.softmax, F.softmax, torch.log_softmax, F.log_softmax, F.elu, F.scaled_dot_product_attention),
    }
)
"""Functions whose backward pass reads their result, which is then kept once for all that read it."""


def compress_stages(stages: Sequence[Stage], stash: Stash) -> None:
    """Compress all units of a rank's stages."""
    for part in [part for stage in stages for part in stage.chain.parts]:
        assert isinstance(part.module, fx.GraphModule)
        compress(part.module, stash)
        relu_in_place(part.module)


def compress(module: fx.GraphModule, stash: Stash) -> None:
    """Replace operators by those of compressed_functions.py, in place.

    Call before compiling, and after what looks for convolutions in the graph.
    """
    for node in list(module.graph.nodes):
        _delay_relu(module.graph, node)
    for node in list(module.graph.nodes):
        _replace(module.graph, node)
    for node in module.graph.find_nodes(op="call_function", target=torch.relu):
        if stash != "exact" or not any(_keeps_input(module, user) for user in _readers(node)):
            node.target = stash_functions.relu
    if stash != "exact":
        _round_inputs(module, stash)
    module.graph.lint()
    module.recompile()


# -- bits and bytes


def _delay_relu(graph: fx.Graph, node: fx.Node) -> None:
    """Let concat and max pooling come before ReLU, for as many elements or fewer: their results are often kept anyway.

        a ── relu ── concat ── max pool ── conv             a ── concat ── max pool ── relu ── conv
        b ── relu ──/                                       b ──/

    Results and gradients are the same bits: where a maximum is not positive, no gradient passes either way.
    """
    if node.target in MAX_POOLS:
        relus = [node.args[0]]
    elif node.target is torch.cat and isinstance(node.args[0], list | tuple):
        relus = list(node.args[0])
    else:
        return
    for relu in relus:
        # another reader of a ReLU would need its result before the concat
        if not isinstance(relu, fx.Node) or relu.target is not torch.relu or len(relu.users) != 1:
            return
    first, *others = cast("list[fx.Node]", relus)
    for relu in (first, *others):
        node.replace_input_with(relu, relu.all_input_nodes[0])
    node.replace_all_uses_with(first)
    first.args = (node,)
    # one ReLU for the result replaces those of the operands
    node.append(first)
    for relu in others:
        graph.erase_node(relu)


def _replace(graph: fx.Graph, node: fx.Node) -> None:
    """Replace a max pool or an activation but ReLU."""
    if node.target in MAX_POOLS:
        node.target = stash_functions.max_pool
    elif node.target is F.leaky_relu and len(node.args) == 2:
        node.target = stash_functions.leaky_relu
    elif node.target in (torch.clamp_min, torch.clamp_max) and isinstance(node.args[1], int | float):
        x, bound = cast("tuple[fx.Node, float]", node.args)
        if node.target is torch.clamp_min:
            node.args = (x, bound, None)
        elif x.target is stash_functions.clamp and x.args[2] is None and len(x.users) == 1:
            # Clip is two nodes, for which one set of bits is enough
            node.args = (*x.args[:2], bound)
            graph.erase_node(x)
        else:
            node.args = (x, None, bound)
        node.target = stash_functions.clamp


def _readers(node: fx.Node) -> Iterator[fx.Node]:
    """Yield the nodes that read a value, directly or through views of it."""
    for value in _with_views(node):
        yield from (user for user in value.users if not is_view(user))


def _with_views(node: fx.Node) -> Iterator[fx.Node]:
    yield node
    for user in node.users:
        if is_view(user):
            yield from _with_views(user)


def _keeps_input(module: fx.GraphModule, node: fx.Node) -> bool:
    """Return whether a node may keep what it reads for its backward pass. What reads an output is not known."""
    if node.op == "call_function":
        return node.target not in READS_NO_INPUT
    called = _called(module, node)
    if isinstance(called, Dropout):
        return called.with_mask
    return not (node.op == "call_method" and node.target == "size")


# -- rounded inputs


def _round_inputs(module: fx.GraphModule, stash: Stash) -> None:
    """Wrap each product and batch normalisation of which an activation can be rounded."""
    positions = _activations(module)
    for number, (node, found) in enumerate(positions.items()):
        rounded = [at for at in found if _can_round(module, cast("fx.Node", node.args[at]), positions)]
        if not rounded:
            continue
        called: Any = _called(module, node) or node.target
        name = f"rounded_{number}"
        module.add_module(name, RoundedInputs(called, rounded, stash))
        node.op = "call_module"
        node.target = name


def _activations(module: fx.GraphModule) -> dict[fx.Node, list[int]]:
    """Return the positions of activations among the operands of each product and batch normalisation."""
    found = {}
    stored: set[fx.Node] = set()
    """Weights and constants, and what is computed from these alone."""
    for node in module.graph.nodes:
        inputs = node.all_input_nodes
        # weights are in memory anyway: rounding a copy of them would save nothing
        if node.op == "get_attr" or (inputs and stored.issuperset(inputs)):
            stored.add(node)
        elif node.op == "call_function" and node.target in PRODUCTS:
            operands = [(position, x) for position, x in enumerate(node.args) if isinstance(x, fx.Node)]
            found[node] = [position for position, x in operands if x not in stored]
        elif isinstance(_called(module, node), BatchNorm):
            found[node] = [0]
    return found


def _called(module: fx.GraphModule, node: fx.Node) -> nn.Module | None:
    return module.get_submodule(str(node.target)) if node.op == "call_module" else None


def _can_round(module: fx.GraphModule, operand: fx.Node, positions: Mapping[fx.Node, list[int]]) -> bool:
    """Return whether nothing keeps a value as it is. If something does, torch keeps it once for all."""
    origin = operand
    # a view has the memory of its origin, which is kept once for both
    while is_view(origin):
        origin = origin.all_input_nodes[0]
    # what other modules keep is not known: attention keeps its result
    called = _called(module, origin)
    if origin.target in KEEPS_RESULT or not isinstance(called, BatchNorm | Dropout | RoundedInputs | None):
        return False
    for value in _with_views(origin):
        for user in value.users:
            rounds = any(user.args[at] is value for at in positions.get(user, ()))
            only_passes_on = is_view(user) or user.op == "output"
            if not rounds and not only_passes_on and _keeps_input(module, user):
                return False
    return True
