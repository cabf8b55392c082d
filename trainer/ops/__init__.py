"""The operator table, by family; importing this package files every rule."""

from trainer.ops import conv, elementwise, gather, host, loss, matmul, norm, reduce, shape

__all__ = ["conv", "elementwise", "gather", "host", "loss", "matmul", "norm", "reduce", "shape"]
