"""Propose batch size, length, learning rate and schedule, by the kind of model and by whether it was trained before.

Weights are fresh where normalisations have never seen data (running means 0, scales 1), where all biases are 0, or
where matrices are uniform in ±1/√fan_in, as torch initialises them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import numpy as np
import onnx

from onward.trainer.data.schema.columns import Array
from onward.trainer.onnx_graph.initializers import stored_tensors
from onward.trainer.proposal.draft import Draft

Family = Literal["transformer", "convolution", "layers"]
RATES: dict[Family, tuple[float, float, str]] = {
    "transformer": (1e-3, 5e-5, "BERT is fine-tuned with 2e-5 to 5e-5 (Devlin et al. 2019)"),
    "convolution": (2e-3, 2e-4, "a tenth of the rate for fresh weights"),
    "layers": (3e-3, 3e-4, "a tenth of the rate for fresh weights"),
}
"""Family -> the learning rate of AdamW for fresh weights, for trained ones, and why the latter."""
NORMS = ("LayerNormalization", "SkipLayerNormalization", "SimplifiedLayerNormalization", "RMSNormalization")
ATTENTION = ("Attention", "MultiHeadAttention", "GroupQueryAttention")
STEPS_FRESH = 2000
STEPS_TRAINED = 500
"""Steps that are aimed at."""
LEAST_ELEMENTS = 64
"""Smaller matrices say nothing of their distribution."""
LEAST_NORMAL = 4
"""So many normal matrices with a usual deviation are no chance."""


def family_of(graph: onnx.GraphProto) -> Family:
    """Return the kind of a network."""
    operators = {node.op_type for node in graph.node}
    if operators & {*NORMS, *ATTENTION} or {"Softmax", "MatMul", "Gather"} <= operators:
        return "transformer"
    return "convolution" if operators & {"Conv", "ConvTranspose", "FusedConv"} else "layers"


def trained_before(model: onnx.ModelProto, base: Path) -> tuple[bool | None, str]:
    """Return whether the weights were trained before, None if they do not say it, and how that was found."""
    floats = {name: value for name, value in stored_tensors(model.graph, base).items() if value.is_floating_point()}
    # floats of 8 bits have no numbers in numpy
    tensors = {name: value.numpy() for name, value in floats.items() if value.dtype.itemsize > 2}
    vectors = {name: value for name, value in tensors.items() if value.size > 1}
    biases = [value for name, value in vectors.items() if _is_bias(model.graph, name)]
    # the surest sign first: the first step of a training changes running means and scales
    for what, values, fresh in (
        ("running means", list(_operands(model.graph, tensors, "BatchNormalization", 3)), 0.0),
        ("scales of normalisations", list(_operands(model.graph, tensors, "LayerNormalization", 1)), 1.0),
        ("biases", biases, 0.0),
    ):
        if values:
            if all((value == fresh).all() for value in values):
                return False, f"all {what} are {fresh:g}"
            # torch draws biases at random, so that others than 0 may be fresh, too
            if what != "biases":
                return True, f"its {what} have seen data"
    large = [value for value in tensors.values() if value.size >= LEAST_ELEMENTS]
    matrices = [value for value in large if value.ndim > 1]
    uniform = [value for value in matrices if _is_uniform(value)]
    others = [value for value in matrices if not _is_uniform(value)]
    normal = [value for value in others if _is_normal(value)]
    if matrices and len(uniform) == len(matrices):
        return False, "its matrices are uniform in ±1/√fan_in, as torch initialises them"
    # one small matrix may look so by chance
    if len(normal) >= LEAST_NORMAL and len(uniform) + len(normal) == len(matrices):
        counted = f"{len(normal)} of its {len(matrices)} matrices"
        return False, f"{counted} are normal with a usual deviation, the rest uniform"
    return None, "its weights do not look as if they were drawn at random"


def _operands(graph: onnx.GraphProto, tensors: dict[str, Array], operator: str, slot: int) -> Iterator[Array]:
    for node in graph.node:
        if node.op_type == operator and len(node.input) > slot and node.input[slot] in tensors:
            yield tensors[node.input[slot]]


def _is_bias(graph: onnx.GraphProto, name: str) -> bool:
    for node in graph.node:
        if node.op_type not in ("Gemm", "Conv", "ConvTranspose", "Add") or name not in node.input:
            continue
        # the bias of a layer is its third operand; exporters write that of a MatMul as an Add behind it
        if node.op_type == "Add" or list(node.input).index(name) == 2:
            return True
    return False


def _is_uniform(value: Array) -> bool:
    """Return whether a matrix is bounded by 1/√fan_in and fills the interval, for one of its two ways to be stored."""
    most = float(np.abs(value).max())
    # [out, in, ...] of Conv and torch's Linear, [in, out] of MatMul
    fans = {math.prod(value.shape[1:]), math.prod(value.shape[:-1]), value.shape[0]}
    spread = float(value.std()) * math.sqrt(3)  # of a uniform distribution the bound
    fills_interval = 0.85 * most <= spread <= 1.15 * most
    # of many random numbers the greatest comes near the bound; above it only rounding does
    return fills_interval and any(0.9 / math.sqrt(fan) <= most <= 1.001 / math.sqrt(fan) for fan in fans)


def _is_normal(value: Array) -> bool:
    """Return whether a matrix is normal with a deviation of the usual initialisations (He, Glorot, LeCun, 0.02).

    Training widens some rows and columns, which makes the distribution's tails heavier.
    """
    numbers = value.astype(np.float64).ravel()
    field = math.prod(value.shape[2:])
    for fan_out, fan_in in ((value.shape[0] * field, value.shape[1] * field), (value.shape[1], value.shape[0])):
        deviations = (math.sqrt(2 / fan_in), math.sqrt(2 / fan_out), math.sqrt(1 / fan_in), 0.02, 0.01)
        of_both = math.sqrt(2 / (fan_in + fan_out))
        # three standard errors of a deviation, and of a kurtosis, which is 3 of a normal distribution
        near = 0.01 + 3 / math.sqrt(2 * numbers.size)
        if any(abs(numbers.std() / deviation - 1) < near for deviation in (*deviations, of_both)):
            kurtosis = float(((numbers - numbers.mean()) ** 4).mean() / numbers.var() ** 2)
            return abs(kurtosis - 3) < 0.1 + 3 * math.sqrt(24 / numbers.size)
    return False


def propose_training(
    draft: Draft, family: Family, *, trained: bool, why: str, num_rows: int | None, is_dense: bool
) -> None:
    """Propose [train], [optimizer] and [schedule].

    num_rows: those to train on; None if they are not known. is_dense: whether each row has many targets, such as the
    pixels of a mask or the tokens of a text.
    """
    size, reason = (8, "each row has many targets") if is_dense else (32, "a usual size")
    # an epoch has ten steps or more, unless that would need a batch of less than four rows
    while num_rows and size > 4 and num_rows < 10 * size:
        size = size // 2
        reason = f"small, because there are {num_rows} rows"
    draft.set("train.global_batch_size", size, reason)
    steps = STEPS_TRAINED if trained else STEPS_FRESH
    if not draft.is_given("train.num_steps"):
        if num_rows:
            per_epoch = math.ceil(num_rows / size)
            most = 10 if trained else 50
            epochs = max(1, min(most, round(steps / per_epoch)))
            about = f"about {epochs * per_epoch} steps"
        else:
            epochs = 1 if trained else 3
            about = "the rows were not all counted"
        draft.set("train.num_epochs", epochs, about)
    fresh_rate, trained_rate, rule = RATES[family]
    network = {
        "transformer": "a transformer",
        "convolution": "a convolutional network",
        "layers": "a network of plain layers",
    }[family]
    rate, how = fresh_rate, f"fresh weights of {network}"
    if trained:
        rate, how = trained_rate, f"fine-tuning of {network}: {rule}"
    draft.set("optimizer.learning_rate", rate, f"AdamW; {how}; {why}")
    draft.set("schedule.mode", "cosine", "falls to 0 at the last step")
    draft.set("schedule.warmup_ratio", 0.1 if family == "transformer" else 0.05, "")
