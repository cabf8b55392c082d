"""Rules for If, Loop and Scan, which are unrolled where the condition or the number of iterations is known.

An If on a constant becomes the branch that is taken; a Loop or Scan of few iterations its body, repeated. Anything
else raises NeedsRuntimeValues and becomes a runtime node, whose rule runs each time with real tensors.
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx
import torch

from onward.trainer.onnx_graph.files.index import length_of
from onward.trainer.onnx_import.lowering.converter_table import Call, lower
from onward.trainer.onnx_import.tracing.values import NeedsRuntimeValues, Traced, Value

VERSIONS = (11, 13, 16, 19, 21, 23, 24, 25)
"""Versions of If, Loop and Scan that only added element types."""

MAX_UNROLLED_ITERATIONS = 64
"""A loop of more iterations is not unrolled: the graph would grow with each."""


@lower("If", since=(1, *VERSIONS))
def if_(c: Call, condition: Value) -> Value:
    # marks both as read: `run_rule` refuses attributes that a rule has not read
    c.attr("then_branch"), c.attr("else_branch")
    return tuple(c.body("then_branch" if c.number(condition) else "else_branch", ()))


def _check_iterations(c: Call, iterations: Value) -> int:
    """Return the number of iterations if it is known and small enough to unroll; else raise NeedsRuntimeValues."""
    # in eager evaluation there is no graph to grow
    if isinstance(iterations, Traced) or (iterations > MAX_UNROLLED_ITERATIONS and not c.eager):
        raise NeedsRuntimeValues("its iteration count is large or depends on data")
    return int(iterations)


@lower("Loop", since=(1, *VERSIONS))
def loop(c: Call, limit: Value, condition: Value, *state: Value) -> Value:
    """Run the body until the limit is reached or the condition is false; either may be absent."""
    # an absent condition is true, an absent limit is none
    goes_on = condition is None or bool(c.number(condition))
    most = None if limit is None else c.number(limit)
    if not c.eager and most is None:
        raise NeedsRuntimeValues("how often it loops is known only at run time")
    iterations = None if most is None else _check_iterations(c, most)
    rows: list[list[Value]] = []
    iteration = 0
    while goes_on and (iterations is None or iteration < iterations):
        # the condition that the body reads is true whenever it runs
        # filled and not copied from the host: in a runtime node the default device may be a GPU
        number = torch.full((), iteration)
        true = torch.full((), True)
        going, *results = c.body("body", [number, true, *state])
        # a condition that the body only passes on stays true, and need not be read from the device
        goes_on = going is true or bool(c.number(c.tracer.to_tensor(going)))
        # the body returns (condition, state, scan outputs)
        state, row = tuple(results[: len(state)]), results[len(state) :]
        rows.append(row)
        iteration += 1
    # 1 + : the body's outputs begin with the condition
    return (*state, *_stacked_outputs(c, rows, num_states=1 + len(state), axes=None))


@lower("Scan", since=(9, *VERSIONS))
def scan(c: Call, *operands: Value) -> Value:
    """Run the body for each slice of the scanned operands, and stack its results."""
    count = c.attr("num_scan_inputs")
    # the scanned operands are the last ones
    state = operands[:-count]
    scanned = operands[-count:]
    axes = [c.axis(x, axis) for x, axis in zip(scanned, c.attr("scan_input_axes", [0] * count), strict=True)]
    backwards = c.attr("scan_input_directions", [0] * count)
    # all scanned operands have one length
    iterations = _check_iterations(c, c.size(scanned[0], axes[0]))
    return _scan(c, state, [_slices(c, *which) for which in zip(scanned, axes, backwards, strict=True)], iterations)


def _slices(c: Call, x: Value, axis: int, backwards: int) -> list[Value]:
    slices = list(c(torch.unbind, x, axis))
    # direction 1 reads the operand from its end on
    return slices[::-1] if backwards else slices


def _scan(c: Call, state: Sequence[Value], slices: Sequence[list[Value]], iterations: int) -> Value:
    rows: list[list[Value]] = []
    num_states = len(state)
    for iteration in range(iterations):
        # the body takes the state first, then one slice of each scanned operand
        results = c.body("body", [*state, *(scanned[iteration] for scanned in slices)])
        state = results[:num_states]
        row = results[num_states:]
        rows.append(row)
    # known without an iteration, too
    num_rows = len(c.attr("body").output) - num_states
    backwards = c.attr("scan_output_directions", [0] * num_rows)
    axes = c.attr("scan_output_axes", [0] * num_rows)
    rows = [list(row) for row in rows]
    columns = _stacked_outputs(c, rows, num_states=num_states, axes=list(zip(axes, backwards, strict=True)))
    return (*state, *columns)


def _stacked_outputs(
    c: Call, rows: list[list[Value]], *, num_states: int, axes: Sequence[tuple[int, int]] | None
) -> list[Value]:
    """Stack the scan outputs of all iterations, along an axis and in reverse order if so given."""
    outputs = c.attr("body").output[num_states:]
    columns = []
    for i, output in enumerate(outputs):
        axis, backwards = axes[i] if axes else (0, 0)
        # Python numbers become tensors, so that they can be stacked
        column = [c.tracer.to_tensor(row[i]) for row in rows]
        if not column:
            columns.append(_empty_output(c, output, axis))
        else:
            columns.append(c(torch.stack, column[::-1] if backwards else column, axis))
    return columns


def _empty_output(c: Call, output: onnx.ValueInfoProto, axis: int) -> torch.Tensor:
    """Return the scan output of a loop without iterations: no rows, of the shape that the body declares."""
    kind = output.type.tensor_type
    lengths = [length_of(dim) or 0 for dim in kind.shape.dim]
    # the axis counts in the stacked result, which has one dimension more
    lengths.insert(axis if axis >= 0 else len(lengths) + 1 + axis, 0)
    return torch.empty(lengths, dtype=c.dtype(kind.elem_type or onnx.TensorProto.FLOAT))


@lower("Scan", since=(8,))
def scan_of_batches(c: Call, lengths: Value, *operands: Value) -> Value:
    """Scan each sample on its own: version 8 has a leading batch dimension, and a length for each sample."""
    count = c.attr("num_scan_inputs")
    state = operands[:-count]
    scanned = operands[-count:]
    backwards = c.attr("directions", [0] * count)
    # both are needed as numbers: each sample is unrolled by itself
    samples, longest = (_check_iterations(c, c.size(scanned[0], dim)) for dim in (0, 1))
    known = [longest] * samples if lengths is None else [_check_iterations(c, n) for n in c.ints(lengths)]
    results: list[list[Value]] = []
    for sample, iterations in enumerate(known):
        # without the padding of the sample, which `_padded` puts back behind its results
        parts = [c(torch.narrow, c(torch.select, x, 0, sample), 0, 0, iterations) for x in scanned]
        slices = [_slices(c, part, 0, back) for part, back in zip(parts, backwards, strict=True)]
        of_sample = list(_scan(c, [c(torch.select, x, 0, sample) for x in state], slices, iterations))
        # results of shorter samples are filled up, so that all can be stacked
        for i in range(len(state), len(of_sample)):
            of_sample[i] = c(_padded, of_sample[i], longest)
        results.append(of_sample)
    columns = zip(*results, strict=True)
    return tuple(c(torch.stack, [c.tracer.to_tensor(value) for value in column], 0) for column in columns)


def _padded(x: torch.Tensor, length: int) -> torch.Tensor:
    """Append rows of zeros, up to `length` rows."""
    return torch.cat([x, x.new_zeros(length - x.shape[0], *x.shape[1:])])
