"""Give matrix products in half precision a number of output features that tensor cores take at full speed.

    before    x [n, 768] @ w.t() [768, 50257]                                   rows of 50257 x 2 bytes: not aligned
    after     x [n, 768] @ pad(w).t() [768, 50264] -> [..., :50257], a view     rows of 50264 x 2 bytes: 16-byte aligned

cuBLAS reads rows of half precision in blocks of 16 bytes, 8 elements; where a row does not begin at such a block it
uses kernels of older GPUs (NVIDIA, Matrix Multiplication Background User's Guide, "Requirements to use Tensor Cores").
The three products of a GPT-2's output layer, whose vocabulary has 50,257 entries, took 30 ms of a step of 87 ms on an
H100 for that reason. Zeros are appended to a copy of the weight in each forward pass; the weight itself, its gradient
and the file keep their shapes. Every element of the result is the sum of the same products.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from onward.trainer.model.weight_casts import casts_with_products
from onward.trainer.onnx_import.imported_graph import ImportedGraph

ALIGNMENT = 8
"""Elements of half precision in 16 bytes."""
LEAST_FEATURES = 1024
"""Smaller layers take less time than what is copied around them."""


def aligned_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x weight.T + bias, a view into a tensor with aligned rows: x [..., in], weight [out, in], bias [out]."""
    features = weight.shape[0]
    missing = -features % ALIGNMENT
    weight = F.pad(weight, (0, 0, 0, missing))
    bias = None if bias is None else F.pad(bias, (0, missing))
    return F.linear(x, weight, bias)[..., :features]


def aligned_matmul(x: Tensor, weight: Tensor) -> Tensor:
    """Return x @ weight as `aligned_linear` does: x [..., in], weight [in, out]."""
    return aligned_linear(x, weight.t())


def align_products(graph: ImportedGraph, device: torch.device) -> None:
    """Replace the large products of a cast weight whose output features are not aligned, in place.

    Does nothing on a CPU, whose kernels do not need it.
    """
    if device.type != "cuda":
        return
    for product, operand in casts_with_products(graph):
        # both functions have the weight as their second operand, in one layout or the other
        target: Any = None
        if product.target is F.linear and operand.ndim == 2:
            target = aligned_linear
            features = operand.shape[0]
        elif product.target is torch.matmul and operand.ndim == 2:
            target = aligned_matmul
            features = operand.shape[1]
        if target and features >= LEAST_FEATURES and features % ALIGNMENT:
            product.target = target
    graph.recompile()
