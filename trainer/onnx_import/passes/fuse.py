"""Rewrites of an imported graph into the calls torch has fast kernels for.

Each takes a graph that computes f and leaves one that computes f up to rounding, and its gradient; where a
condition of it does not hold, nothing is changed (rewriter.py). What others read too is not taken
away. In this order, which matters:

    cse          calls made twice                 first, so that what is one value is one node
    cut          fuse_views.py                    a tensor's parts in one call
    layer_norm   fuse_norms.py                    before rms_norm, which would take the inner part
    rms_norm
    gelu, silu   fuse_activations.py
    attention    fuse_attention.py, fuse_masks.py
    linear       fuse_sharing.py                  last: it needs nothing but products that are left
    cse          once more: masks made for each layer are one
"""

from __future__ import annotations

from torch import fx, nn

from onward.trainer.onnx_import.passes.activations import fuse_gelus, fuse_silus
from onward.trainer.onnx_import.passes.attention import fuse_attentions
from onward.trainer.onnx_import.passes.norms import fuse_layer_norms, fuse_rms_norms
from onward.trainer.onnx_import.passes.rewriter import Rewriter
from onward.trainer.onnx_import.passes.sharing import fuse_linears, share_equal_calls
from onward.trainer.onnx_import.passes.views import fuse_slices
from onward.trainer.onnx_import.shape_assumptions import is_impure

PASSES = (
    ("cse", share_equal_calls),
    ("cut", fuse_slices),
    ("layer_norm", fuse_layer_norms),
    ("rms_norm", fuse_rms_norms),
    ("gelu", fuse_gelus),
    ("silu", fuse_silus),
    ("attention", fuse_attentions),
    ("linear", fuse_linears),
    ("cse", share_equal_calls),
)


def fuse_graph(graph: fx.Graph, root: nn.Module) -> dict[str, int]:
    """Apply every rewrite to a graph as the tracer left it; returns how often each applied."""
    # the tracer asks for sizes that nothing needs, and who reads a value decides
    graph.eliminate_dead_code(is_impure_node=is_impure)
    rewriter = Rewriter(graph, root)
    counts = dict.fromkeys((name for name, _ in PASSES), 0)
    for name, rewrite in PASSES:
        counts[name] += rewrite(rewriter)
    return counts
