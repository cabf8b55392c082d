"""Compare the file under another runtime with the module that is trained: values, shapes, and one derivative.

    values, shapes    onnxruntime on the file         the module in evaluation mode      at several rows and lengths
    derivative        (L(w + hd) - L(w - hd)) / 2h    the sum of gradient x d            d random, of all weights
                      L by the file, in float64       as a training step computes it     in evaluation mode

A weight that is transposed, a length that was baked in, a gradient that is dropped, doubled or of the wrong sign change
one of these, whatever made them: the importer, a pass over the graph, torch, or the loss. The derivative costs six
passes of the file and one step on a few rows.

    the error is    |difference - gradient| / (|part of weight 1| + |part of weight 2| + ...)

compared with a bound. Two step lengths h show how much of it is curvature, kinks of ReLU, or rounding.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import onnx
import torch
from torch import Tensor

from onward.trainer.export.measuring.differences import output_difference
from onward.trainer.export.measuring.kernel_rounding import exact_form
from onward.trainer.export.model_file import ModelFile, proto_of
from onward.trainer.onnx_graph.files.onnxruntime_session import open_session
from onward.trainer.onnx_graph.surgery.stochastic_depth import random_nodes
from onward.trainer.onnx_graph.surgery.training_norms import training_norms
from onward.trainer.onnx_import.fixed_batch.batch_constants import dims_of_equal_rows
from onward.trainer.onnx_import.imported_graph import ImportedGraph, named_weights
from onward.trainer.rehearsal.trials.second_path import SecondPath, open_second_path
from onward.trainer.run.records import Guard

STEP = {torch.float64: 1e-4, torch.float32: 1e-2}
"""Step length, relative to the root mean square of each weight."""
BOUND = 1e-3
"""Greatest error; to this is added what rounding and the step length do."""
UNKNOWN = 0.1
"""Above this bound nothing is shown."""
ROUNDING = {torch.float64: 1e-14, torch.float32: 1e-6}
"""Of a loss, relative to it."""
LEAST_SCALE = 1e-2
"""Of the direction in a weight of zeros, such as a new bias."""


class GuardError(Exception):
    """The module that would be trained is not what the file computes; args[0] says how."""


@dataclass(frozen=True)
class Guarded:
    """What is compared."""

    file: ModelFile | onnx.ModelProto
    """The trained part, in inference form."""
    module: ImportedGraph
    inputs: tuple[Tensor, ...]
    """[B, ...] each."""
    rows: tuple[int, ...]
    """The batch sizes to compare at, none above B."""
    tolerance: float
    """Of the outputs, relative to the largest value."""
    loss: Callable[[Sequence[Tensor], torch.dtype], Tensor]
    """Returns the loss for the file's outputs on all rows."""
    gradients: Callable[[], Mapping[str, Tensor | None]]
    """Returns the gradient of each trained weight, by initializer name, for the same loss."""
    written: Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]] | None
    """Returns what the file stores, by initializer name, for values of the trained weights; None = a derivative does
    not exist, such as of weights that are stored as integers."""
    not_derived: str = ""
    """Why there is no derivative, as a clause."""


def guard(guarded: Guarded, *, seed: int = 0) -> Guard:
    """Compare, and return the record. Raises GuardError for a difference that is no rounding."""
    began = time.monotonic()
    left_out = list[str]()
    sizes, difference = _compare_values(guarded, left_out)
    found = _Derivative()
    if guarded.written is None:
        left_out.append(f"no derivative of the loss was compared: {guarded.not_derived}")
    else:
        try:
            found = _derivative(guarded, seed)
        except RuntimeError as error:
            left_out.append(f"no derivative of the loss was compared: {error}")
    if found.bound > UNKNOWN:
        left_out.append(
            f"the derivative of the loss by {found.judged_by} shows nothing on these rows: bound {found.bound:.1g}"
        )
    # written with `not`: an error that is NaN is none that fits
    elif not found.error <= found.bound and not math.isnan(found.bound):
        raise GuardError(
            f"the gradient of a training step is not the derivative of the file's loss: along a random direction of "
            f"the trained weights, the loss by {found.judged_by} changes by {found.derivative:.6g} for each unit, and "
            f"the gradient says {found.gradient:.6g}: {found.error:.2g} of the sum of all parts, above "
            f"{found.bound:.1g}; report it with the file, and train other weights (model.train) until it is fixed"
        )
    return Guard(
        sizes=tuple(sizes),
        difference=difference,
        derivative=found.derivative,
        gradient=found.gradient,
        error=found.error,
        bound=found.bound,
        judged_by=found.judged_by,
        left_out=tuple(left_out),
        elapsed_s=time.monotonic() - began,
    )


# -- values and shapes


def _compare_values(guarded: Guarded, left_out: list[str]) -> tuple[list[str], float]:
    """Return the sizes at which file and module agree, and the greatest difference."""
    proto = proto_of(guarded.file)
    opened = guarded.file.path if isinstance(guarded.file, ModelFile) else guarded.file
    if names := random_nodes(proto):
        left_out.append(f"values at other sizes were not compared: {len(names)} nodes draw random numbers")
        return [], math.nan
    # what the kernels round in quantized files is measured by the comparison before this one
    exact = exact_form(guarded.file)
    if exact is not None:
        opened = exact.model.path if isinstance(exact.model, ModelFile) else exact.model
    base = exact.folder if exact else None
    try:
        session = open_session(opened, optimise=exact is None, base=base, share_constants=not training_norms(proto))
    except Exception as error:  # onnxruntime's errors have no common base class
        left_out.append(f"values at other sizes were not compared: onnxruntime: {str(error).splitlines()[0][:160]}")
        return [], math.nan
    kinds = {value.name: value.type for value in session.get_inputs()}
    inputs_of_file = list(kinds)
    agree = list[str]()
    worst = 0.0
    # onnxruntime computes the inference form
    guarded.module.eval()
    for size, inputs in _variants(guarded, proto):
        feed = dict(zip(inputs_of_file, (each.numpy() for each in inputs), strict=True))
        halves = [name for name, kind in kinds.items() if kind == "tensor(float16)"]
        feed |= {name: feed[name].astype("float16") for name in halves}
        try:
            theirs = session.run(None, feed)
        except Exception as error:  # likewise
            left_out.append(f"{size}: onnxruntime does not run the file there ({str(error).splitlines()[0][:120]})")
            continue
        try:
            with torch.no_grad():
                results = guarded.module(*inputs)
        except Exception as error:  # torch raises errors of many types
            left_out.append(f"{size}: the module does not run there ({str(error).splitlines()[0][:120]})")
            continue
        ours = [results] if isinstance(results, Tensor) else list(results)
        for name, own, other in zip(guarded.module.output_names, ours, theirs, strict=False):
            difference, sentence = output_difference(own, other)
            if not difference <= guarded.tolerance:
                raise GuardError(
                    f"the module that would be trained differs from the file at {size}: output {name!r}, {sentence}, "
                    f"above export.tolerance {guarded.tolerance:g}; its shapes are understood wrongly: report it with "
                    "the file, or export it with the lengths that you use"
                )
            worst = max(worst, difference)
        agree.append(size)
    return agree, worst


def _variants(guarded: Guarded, proto: onnx.ModelProto) -> list[tuple[str, list[Tensor]]]:
    """Return (what it is, inputs) for each batch size, and for three lengths of the axes that the file leaves open."""
    variants = []
    for rows in guarded.rows:
        inputs = [tensor[:rows] if tensor.ndim else tensor for tensor in guarded.inputs]
        variants.append((f"{rows} rows" if rows > 1 else f"{rows} row", inputs))
    stored = {tensor.name for tensor in proto.graph.initializer}
    values = [value for value in proto.graph.input if value.name not in stored]
    # open axes but the batch, which the numbers of rows have varied
    axes = []
    for position, value in enumerate(values):
        for axis, dim in enumerate(value.type.tensor_type.shape.dim):
            if axis and not dim.HasField("dim_value") and guarded.inputs[position].ndim > axis:
                axes.append((position, axis))
    if not axes:
        return variants
    position, axis = axes[0]
    length = guarded.inputs[position].shape[axis]
    name = values[position].name
    for change in (_half, _less_one):
        inputs = list(guarded.inputs)
        # all open axes change together: inputs such as ids and their mask have the same length
        for position, axis in axes:
            inputs[position] = _with_length(inputs[position], axis, change(inputs[position].shape[axis]))
        variants.append((f"length {change(length)} of {name} (from {length})", inputs))
    return variants


def _half(length: int) -> int:
    # short axes are made longer: half of them would be one element or none
    return length // 2 if length > 3 else length + 1


def _less_one(length: int) -> int:
    return length - 1 if length > 3 else 2 * length + 1


def _with_length(tensor: Tensor, axis: int, length: int) -> Tensor:
    """Return a tensor that is cut, or continued by its own values, along an axis."""
    copies = -(-length // max(tensor.shape[axis], 1))
    return torch.cat([tensor] * copies, axis).narrow(axis, 0, length)


# -- the derivative


@dataclass(frozen=True)
class _Derivative:
    derivative: float = math.nan
    gradient: float = math.nan
    error: float = math.nan
    bound: float = math.nan
    judged_by: str = ""


def _derivative(guarded: Guarded, seed: int) -> _Derivative:
    """Compare the derivative along one random direction. Raises RuntimeError if no path computes the loss."""
    written = guarded.written
    assert written is not None
    # float64: in fp32 small differences of losses would vanish in the rounding
    weights = {name: each.detach().double() for name, each in named_weights(guarded.module).items()}
    gradients = dict(guarded.gradients())
    generator = torch.Generator().manual_seed(seed)
    # as large as the weights: the same relative step in each, and LEAST_SCALE in weights of zeros
    direction = {
        name: torch.randn(weights[name].shape, generator=generator, dtype=torch.float64)
        * max(float(weights[name].square().mean().sqrt()), LEAST_SCALE)
        for name in gradients
        if weights[name].numel()
    }
    for name, dim in dims_of_equal_rows(guarded.module).items():
        rows, gradient = direction.get(name), gradients.get(name)
        if rows is not None and gradient is not None:
            # one weight: its rows move together, and each of them has the gradient of all
            direction[name] = rows.narrow(dim, 0, 1).expand_as(rows)
            gradients[name] = gradient / rows.shape[dim]
    parts = {
        name: 0.0 if gradients[name] is None else float((gradients[name].double() * each).sum())  # type: ignore[union-attr]
        for name, each in direction.items()
    }
    start = written(weights)
    path = open_second_path(guarded.file, start, guarded.inputs, start)

    def loss(step: float) -> Tensor:
        # weights that are frozen or empty have no direction, and stay
        moved = {name: each + step * direction[name] if name in direction else each for name, each in weights.items()}
        return guarded.loss(path.outputs(guarded.inputs, written(moved)), path.dtype)

    return _compared(path, loss, parts)


def _compared(path: SecondPath, loss: Callable[[float], Tensor], parts: Mapping[str, float]) -> _Derivative:
    # a loss of a file may be computed in fp32 whatever it is given
    start = loss(0.0)
    dtype = torch.float64 if start.dtype == path.dtype == torch.float64 else torch.float32
    step = STEP[dtype]
    # central differences, in which the second derivative cancels
    ends = [float(loss(each)) for each in (step, -step, 2 * step, -2 * step)]
    if not all(map(math.isfinite, ends)):
        raise RuntimeError("the loss beside the weights is not finite")
    # what the two step lengths differ by is curvature of third order, or a kink
    near = (ends[0] - ends[1]) / (2 * step)
    far = (ends[2] - ends[3]) / (4 * step)
    # Where a ReLU reads exactly 0, as it does on rows of zeros, the loss has two slopes, of which the gradient is one.
    # How far they are apart is what remains of both second differences for a step of length 0.
    bends = [(ends[at] + ends[at + 1] - 2 * float(start)) / length for at, length in ((0, step), (2, 2 * step))]
    slopes_apart = abs(2 * bends[0] - bends[1])
    gradient = sum(parts.values())
    # relative to the sum of magnitudes: parts of opposite sign may cancel in the gradient
    whole = sum(map(abs, parts.values()))
    whole = max(whole, abs(near))
    if not whole:
        raise RuntimeError("the loss is flat in these weights on these rows")
    # the rounding of a loss, divided by the step like the difference itself
    rounding = ROUNDING[dtype] * max(map(abs, ends)) / step / whole
    return _Derivative(
        near,
        gradient,
        abs(near - gradient) / whole,
        BOUND + rounding + (2 * abs(near - far) + slopes_apart) / whole,
        path.name if dtype == path.dtype else f"{path.name} (the loss in float32)",
    )
