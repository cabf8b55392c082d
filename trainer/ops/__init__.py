"""The operator table, by family; importing this package files every rule."""

from trainer.ops import control, conv, elementwise, gather, host, loss, matmul, norm, reduce, rnn, sequence, shape

__all__ = [
    "control",
    "conv",
    "elementwise",
    "gather",
    "host",
    "loss",
    "matmul",
    "norm",
    "reduce",
    "rnn",
    "sequence",
    "shape",
]
