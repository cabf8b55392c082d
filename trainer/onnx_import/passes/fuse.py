"""Apply all passes: rewrite an imported graph into calls for which torch has fast kernels.

Each pass keeps results and gradients up to rounding, and changes nothing where one of its conditions does not hold
(rewriter.py). The order matters:

    cse          sharing.py        first, so that equal values are one node
    cut          views.py          several slices of one tensor become one split
    layer_norm   fused_norms.py    before rms_norm, which would match the inner part of a layer norm
    rms_norm     fused_norms.py
    gelu, silu   here
    attention    fused_attention.py, attention_masks.py
    linear       sharing.py        after attention, whose products must not become linear layers
    cse          sharing.py        again: the masks of all layers are equal by now
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

from onward.trainer.onnx_import.passes.fused_attention import fuse_attentions
from onward.trainer.onnx_import.passes.fused_norms import fuse_layer_norms, fuse_rms_norms
from onward.trainer.onnx_import.passes.rewriter import NoMatch, Rewriter, has_one_user, is_call, require
from onward.trainer.onnx_import.passes.sharing import fuse_linears, share_equal_calls
from onward.trainer.onnx_import.passes.views import fuse_slices
from onward.trainer.onnx_import.tracing.shape_assumptions import is_impure

# -- fuse activations that are written as elementary functions, in any order and grouping of their factors
#
#     0.5 x (1 + erf(x / sqrt(2)))                              ->  gelu
#     0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x x x)))       ->  gelu, tanh
#     x sigmoid(x)                                              ->  silu
#
# The numbers must be those of the formula up to rounding in the tensor's type.

CUBIC = 0.044715
"""The coefficient of x^3 in the tanh approximation of GELU (Hendrycks and Gimpel 2016, arXiv:1606.08415)."""


def _silu(r: Rewriter, node: Any) -> fx.Node:
    for x, gate in (node.args, node.args[::-1]):
        if is_call(gate, torch.sigmoid) and has_one_user(gate) and gate.args[0] is x:
            return r.call(F.silu, x)
    raise NoMatch


def _gelu(r: Rewriter, node: Any) -> fx.Node:
    number, parts = r.factors(node, root=True)
    # the three factors may be multiplied in any order, and a division by 2 is a factor of 0.5, so all are collected
    # first
    require(len(parts) == 2 and r.near(number, 0.5, node))
    for x, sum_ in (parts, parts[::-1]):
        function = _other_summand_of_one(r, sum_)
        # an erf or tanh with another reader is computed anyway, so that nothing would be saved
        if not has_one_user(function):
            continue
        if is_call(function, torch.erf) and _is_scaled(r, function.args[0], 1 / math.sqrt(2), x):
            return r.call(F.gelu, x, approximate="none")
        if is_call(function, torch.tanh) and _is_tanh_argument(r, function.args[0], x):
            return r.call(F.gelu, x, approximate="tanh")
    raise NoMatch


def _other_summand_of_one(r: Rewriter, value: Any) -> Any:
    """Return f of a sum f + 1, else None."""
    if not is_call(value, torch.add) or not has_one_user(value):
        return None
    # with a third argument, alpha, the sum is of a multiple
    if len(value.args) != 2 or value.kwargs:
        return None
    for function, one in (value.args, value.args[::-1]):
        if r.number(one) == 1.0:
            return function
    return None


def _is_scaled(r: Rewriter, value: Any, scale: float, x: Any) -> bool:
    number, parts = r.factors(value)
    return parts == [x] and r.near(number, scale, x)


def _is_tanh_argument(r: Rewriter, value: Any, x: Any) -> bool:
    """Return whether a value is sqrt(2 / pi) (x + 0.044715 x^3), or sqrt(2 / pi) x (1 + 0.044715 x^2)."""
    number, parts = r.factors(value)
    if not r.near(number, math.sqrt(2 / math.pi), x):
        return False
    # both forms occur: exporters differ in whether they factor out x
    if len(parts) == 2 and x in parts:  # x (1 + 0.044715 x^2)
        square = _other_summand_of_one(r, parts[parts[0] is x])
        return square is not None and _is_power(r, square, 2, x)
    if len(parts) != 1 or not is_call(parts[0], torch.add) or parts[0].kwargs:
        return False
    summands = parts[0].args
    return any(linear is x and _is_power(r, cubic, 3, x) for linear, cubic in (summands, summands[::-1]))


def _is_power(r: Rewriter, value: Any, power: int, x: Any) -> bool:
    number, parts = r.factors(value)
    return parts == [x] * power and r.near(number, CUBIC, x)


PASSES: tuple[tuple[str, Callable[[Rewriter], int]], ...] = (
    ("cse", share_equal_calls),
    ("cut", fuse_slices),
    ("layer_norm", fuse_layer_norms),
    ("rms_norm", fuse_rms_norms),
    ("gelu", lambda r: r.apply(_gelu, torch.mul, torch.div)),
    ("silu", lambda r: r.apply(_silu, torch.mul)),
    ("attention", fuse_attentions),
    ("linear", fuse_linears),
    ("cse", share_equal_calls),
)


def fuse_graph(graph: fx.Graph, root: nn.Module) -> dict[str, int]:
    """Apply every pass to a traced graph; return how often each one applied."""
    # tracing records sizes that nothing uses; as readers of a value they would prevent rewrites
    graph.eliminate_dead_code(is_impure_node=is_impure)
    rewriter = Rewriter(graph, root)
    counts = dict.fromkeys((name for name, _ in PASSES), 0)
    for name, rewrite in PASSES:
        counts[name] += rewrite(rewriter)
    return counts
