"""Rules for matrix products. Weights keep the layout of the file: a transpose is a call in the graph."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from onward.trainer.onnx_import.lowering.converter_table import Call, lower
from onward.trainer.onnx_import.tracing.values import Value


@lower("MatMul", since=(1, 9, 13))
def matmul(c: Call, a: Value, b: Value) -> Value:
    return c(torch.matmul, a, b)


@lower("Gemm", since=(7, 9, 11, 13))
def gemm(c: Call, a: Value, b: Value, bias: Value = None) -> Value:
    """Return alpha a b + beta bias, a and b transposed if transA, transB; by F.linear where that is the same."""
    alpha = c.attr("alpha", 1.0)
    beta = c.attr("beta", 1.0)
    a = c("t", a) if c.attr("transA", 0) else a
    transposed = c.attr("transB", 0)
    # F.linear adds only a bias [outputs]; any other one that broadcasts needs addmm
    plain = bias is None
    if bias is not None and bias.ndim == 1:
        plain = c.size(bias, 0) == c.size(b, 0 if transposed else 1)
    # F.linear is what fused kernels, adapters and tensor parallelism look for in the graph
    if alpha == beta == 1.0 and plain:
        return c(F.linear, a, b if transposed else c("t", b), bias)
    # addmm and mm have no option for transposed operands
    b = c("t", b) if transposed else b
    if bias is not None:
        return c(torch.addmm, bias, a, b, beta=beta, alpha=alpha)
    product = c(torch.mm, a, b)
    return product if alpha == 1.0 else c(torch.mul, product, alpha)


@lower("Einsum", since=(12, 28))
def einsum(c: Call, *operands: Value) -> Value:
    return c(torch.einsum, c.attr("equation"), *operands)
