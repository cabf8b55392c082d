"""The operator table, by family; importing this package files every rule."""

from trainer.ops import (
    cast,
    control,
    conv,
    elementwise,
    gather,
    host,
    image,
    loss,
    matmul,
    noise,
    norm,
    pool,
    reduce,
    rnn,
    sequence,
    shape,
)

__all__ = [
    "cast",
    "control",
    "conv",
    "elementwise",
    "gather",
    "host",
    "image",
    "loss",
    "matmul",
    "noise",
    "norm",
    "pool",
    "reduce",
    "rnn",
    "sequence",
    "shape",
]
