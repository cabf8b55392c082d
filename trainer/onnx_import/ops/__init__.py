"""The operator rules, one file for each family of ONNX operators; importing this package registers all of them.

A rule lowers one node: `@lower(operator, since=versions)` registers a function that calls torch through its `Call`
(registry.py). Functions without a `Call` argument are what the rules call: they appear in the fx graph, and other
packages may import them to recognise or rewrite those calls (passes, tensor parallelism). A rule never reads the file,
never changes another node, and never decides what is trained.
"""

from onward.trainer.onnx_import.ops import (
    batch_norm,
    cast,
    control,
    conv,
    detection,
    elementwise,
    gather,
    image,
    matmul,
    norm,
    pool,
    random,
    reduce,
    removed_ops,
    sequence,
    shape,
    shape_arithmetic,
    signal,
)
from onward.trainer.onnx_import.ops import training_losses as loss
from onward.trainer.onnx_import.ops.classical import ml
from onward.trainer.onnx_import.ops.contributed import attention, contrib, nchwc
from onward.trainer.onnx_import.ops.quantized import blockwise, moe, qlinear, quant
from onward.trainer.onnx_import.ops.recurrent import recurrent_state, rnn

__all__ = [
    "attention",
    "batch_norm",
    "blockwise",
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
    "ml",
    "moe",
    "nchwc",
    "norm",
    "pool",
    "qlinear",
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
