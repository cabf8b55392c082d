"""The operator rules, one file for each family of ONNX operators; importing this package registers all of them.

A rule lowers one node: `@lower(operator, since=versions)` registers a function that calls torch through its `Call`
(registry.py). Functions without a `Call` argument are what the rules call: they appear in the fx graph, and other
packages may import them to recognise or rewrite those calls (passes, tensor parallelism). A rule never reads the file,
never changes another node, and never decides what is trained.
"""

from onward.trainer.onnx_import.ops import (
    attention,
    batch_norm,
    cast,
    contrib,
    control,
    conv,
    detection,
    elementwise,
    gather,
    image,
    loss,
    matmul,
    norm,
    pool,
    quant,
    random,
    recurrent_state,
    reduce,
    removed_ops,
    rnn,
    sequence,
    shape,
    shape_arithmetic,
    signal,
)

__all__ = [
    "attention",
    "batch_norm",
    "cast",
    "contrib",
    "control",
    "conv",
    "detection",
    "elementwise",
    "gather",
    "image",
    "loss",
    "matmul",
    "norm",
    "pool",
    "quant",
    "random",
    "recurrent_state",
    "reduce",
    "removed_ops",
    "rnn",
    "sequence",
    "shape",
    "shape_arithmetic",
    "signal",
]
