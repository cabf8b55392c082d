"""Apply all passes: rewrite an imported graph into calls for which torch has fast kernels.

Each pass keeps results and gradients up to rounding, and changes nothing where one of its conditions does not hold
(rewriter.py). The order matters:

    cse          sharing.py        first, so that equal values are one node
    cut          views.py          several slices of one tensor become one split
    layer_norm   fused_norms.py    before rms_norm, which would match the inner part of a layer norm
    rms_norm     fused_norms.py
    gelu, silu   activations.py
    attention    fused_attention.py, attention_masks.py
    linear       sharing.py        after attention, whose products must not become linear layers
    cse          sharing.py        again: the masks of all layers are equal by now
"""

from __future__ import annotations

from torch import fx, nn

from onward.trainer.onnx_import.passes.activations import fuse_gelus, fuse_silus
from onward.trainer.onnx_import.passes.fused_attention import fuse_attentions
from onward.trainer.onnx_import.passes.fused_norms import fuse_layer_norms, fuse_rms_norms
from onward.trainer.onnx_import.passes.rewriter import Rewriter
from onward.trainer.onnx_import.passes.sharing import fuse_linears, share_equal_calls
from onward.trainer.onnx_import.passes.views import fuse_slices
from onward.trainer.onnx_import.tracing.shape_assumptions import is_impure

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
    """Apply every pass to a traced graph; return how often each one applied."""
    # tracing records sizes that nothing uses; as readers of a value they would prevent rewrites
    graph.eliminate_dead_code(is_impure_node=is_impure)
    rewriter = Rewriter(graph, root)
    counts = dict.fromkeys((name for name, _ in PASSES), 0)
    for name, rewrite in PASSES:
        counts[name] += rewrite(rewriter)
    return counts
