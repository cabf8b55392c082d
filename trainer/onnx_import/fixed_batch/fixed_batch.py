"""Decide how a file that declares a fixed batch of B rows is trained, by running it.

    any     its shapes are rewritten for every batch size (batch_constants.py), and that computes what the file does
    own     B rows at a time; fewer rows are filled up to B, and the results of the others are dropped
    joint   B rows at a time, never filled up: the rows influence each other, as in a softmax over the batch

The proof for B = 2, with made-up rows a, b, c, d:

    the file, B rows at a time        f(a b)   f(c d)   f(d a)
    rows are independent if           a is the same in f(a b) and f(d a), though its place and its companion differ
    the widened graph is right if     w(a), w(a b) and w(a b c d) give for each row what the file gives
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

import onnx
import torch
from onnx import helper
from torch import Tensor

from onward.trainer.errors import UnsupportedModel
from onward.trainer.onnx_graph.files.element_types import DTYPES, torch_dtype
from onward.trainer.onnx_graph.files.index import HALF_TYPES, inputs_of, locations
from onward.trainer.onnx_graph.files.onnxruntime_session import open_session
from onward.trainer.onnx_graph.inner_tensors import all_stored_protos
from onward.trainer.onnx_graph.surgery.strip_training import strip_training
from onward.trainer.onnx_graph.surgery.training_norms import training_norms
from onward.trainer.onnx_import.driver import to_module
from onward.trainer.onnx_import.tracing.trial_sizes import declared_batch, trial_sizes

Kind = Literal["any", "own", "joint"]
Compute = Callable[[Sequence[Tensor]], list[Tensor]]
"""The graph's inputs to its outputs, in order."""

TOLERANCE = 1e-4
MOST = 0.05
"""Greatest difference that counts as rounding, relative to the greatest value; a graph that differs from onnxruntime by
more at the file's own batch may differ four times as much at another, up to `MOST`."""
LARGE = 30
"""Factor of the inputs with which rows are tried once more: some graphs mix them only behind a limit."""
VARIES = 1e-3
"""Rows whose results differ by less than this, relative to the greatest value, prove nothing."""


@dataclass(frozen=True)
class BatchUse:
    """How a file is trained as regards its batch."""

    kind: Kind
    declared: int
    """The batch that all inputs declare; 0 if it is dynamic, and `kind` is "any" then."""
    reason: str = ""
    """What was found, as a clause."""
    proved: bool = True
    """Whether the file was run; else `kind` is what is right for every file, and the user may know better."""


def batch_use(
    model: onnx.ModelProto, base: Path | None = None, *, train: Sequence[str] = (), outputs: Sequence[str] = ("",)
) -> BatchUse:
    """Return how a file, or the part of it that is trained, is used as regards its batch.

    base, train: as for `to_module`. outputs: those that the losses read; "" = the first. Runs onnxruntime, and torch
    where onnxruntime cannot run the file. Raises UnsupportedModel if the file cannot be imported at its own batch
    either.
    """
    declared = declared_batch(model.graph)
    if not declared:
        return BatchUse("any", 0)
    compute = _file(model, base, train)
    trial = _trial(model, declared, compute)
    if isinstance(trial, str):
        to_module(model, base=base, train=train, widen=False)
        return BatchUse("own" if declared == 1 else "joint", declared, trial, proved=False)
    reason = trial.widened_problem(model, base, train)
    if not reason:
        # a right rewriting says nothing about rows that influence each other for large values alone
        if mixed := trial.first(trial.dependence_of_large, model, outputs):
            return BatchUse("own" if declared == 1 else "joint", declared, mixed)
        tried = f"batches of 1 and {len(trial.inputs[0])} rows"
        return BatchUse("any", declared, f"{tried} give row by row what the file gives {declared} at a time")
    to_module(model, base=base, train=train, widen=False)  # otherwise the reason is not about the batch
    if declared > 1 and (mixed := trial.first(trial.dependence, model, outputs)):
        return BatchUse("joint", declared, mixed)
    return BatchUse("own", declared, reason)


def _index(model: onnx.ModelProto, output: str) -> int:
    names = [value.name for value in model.graph.output]
    return names.index(output) if output in names else 0


def _file(model: onnx.ModelProto, base: Path | None, train: Sequence[str]) -> Compute:
    """Return what computes a file at its own batch: onnxruntime, or the module imported at that batch.

    The module computes files in half precision, which onnxruntime rounds at every step, and those with external data,
    of which onnxruntime would need a copy.
    """
    inference = deepcopy(model)
    # dropout differs from run to run, and statistics of a batch would mix its rows
    strip_training(inference, keep=[value.name for value in model.graph.output], base=base)
    halves = any(proto.data_type in HALF_TYPES for proto in all_stored_protos(model).values())
    if not locations(model) and not halves:
        try:
            session = open_session(inference, share_constants=not training_norms(inference))
        except Exception:  # onnxruntime's errors have no common base class
            pass
        else:
            kinds = {value.name: value.type.tensor_type.elem_type for value in model.graph.input}
            names = [value.name for value in session.get_inputs()]

            def run(inputs: Sequence[Tensor]) -> list[Tensor]:
                feed = {
                    name: value.numpy().astype(helper.tensor_dtype_to_np_dtype(kinds[name]))
                    for name, value in zip(names, inputs, strict=True)
                }
                return [torch.from_numpy(array) for array in session.run(None, feed)]

            return run
    module = to_module(model, base=base, train=train, widen=False).eval()
    return _module(module)


def _module(module: torch.nn.Module) -> Compute:
    @torch.no_grad()
    def run(inputs: Sequence[Tensor]) -> list[Tensor]:
        results = module(*inputs)
        return [results] if isinstance(results, Tensor) else list(results)

    return run


def _trial(model: onnx.ModelProto, declared: int, compute: Compute) -> _Trial | str:
    """Return the file's results on made-up rows on which it runs, or why there are none."""
    if single := [value.name for value in inputs_of(model.graph) if not value.type.tensor_type.shape.dim]:
        return f"input {single[0]!r} has no rows, so that nothing is proved"
    problem = "no rows can be made up for its inputs, so that nothing is proved"
    # more rows than a batch, so that groups of rows differ and overlap
    for inputs in made_up_rows(model, max(declared, 2) + 2):
        try:
            trial = _Trial(declared, inputs, compute)
        except Exception as error:  # those of onnxruntime and of torch have no common base class
            problem = f"it does not run on made-up rows, so that nothing is proved: {str(error).splitlines()[0][:200]}"
            continue
        if trial.is_conclusive:
            return trial
        problem = "made-up rows all give the same results, or none that are finite, so that nothing is proved"
    return problem


MOST_MADE_UP = 2**28
"""Numbers that are made up at a time, 1 GiB: nothing is proved of a file whose inputs have more."""


def made_up_rows(model: onnx.ModelProto, rows: int) -> Iterator[list[Tensor]]:
    """Yield inputs of this many rows, in the sizes that the importer tries: normal floats, and integers that are ids.

    Integers are below the number of rows of the table that they index; some models take none but 0 and 1, or none but 1
    (a length), or need another length (an image).
    """
    inputs = inputs_of(model.graph)
    kinds = {value.name: value.type.tensor_type for value in inputs}
    if not all(kind.elem_type in DTYPES for kind in kinds.values()):
        return
    tried: set[tuple[tuple[int, ...], ...]] = set()
    for lengths, _ in trial_sizes(model.graph, widen=True):
        dims = [len(value.type.tensor_type.shape.dim) for value in inputs]
        shapes = tuple(
            (rows, *(lengths[value.name, dim][0] for dim in range(1, rank)))
            for value, rank in zip(inputs, dims, strict=True)
        )
        if shapes in tried or sum(map(math.prod, shapes)) > MOST_MADE_UP:
            continue
        tried.add(shapes)
        generator = torch.Generator().manual_seed(0)
        types = [torch_dtype(kind.elem_type) for kind in kinds.values()]
        tables = [_rows_indexed(model.graph, value.name) for value in inputs]
        for least, known in ((0, True), (0, False), (1, False)):
            made_up = []
            for shape, dtype, table in zip(shapes, types, tables, strict=True):
                if dtype.is_floating_point:
                    values = torch.randn(shape, generator=generator)
                else:
                    values = torch.randint(least, table if known else 2, shape, generator=generator)
                made_up.append(values.to(dtype))
            yield made_up
            # the other two ranges change integers alone
            if all(dtype.is_floating_point for dtype in types):
                break


def _rows_indexed(graph: onnx.GraphProto, name: str) -> int:
    """Return the rows of the smallest stored table that an input indexes; 2 if it indexes none."""
    stored = {tensor.name: tensor.dims[0] for tensor in graph.initializer if tensor.dims}
    names = {name}
    rows = []
    for node in graph.node:
        # ids are often cast before they index a table
        if node.op_type == "Cast" and node.input[0] in names:
            names.add(node.output[0])
        if node.op_type == "Gather" and node.input[1] in names and node.input[0] in stored:
            rows.append(stored[node.input[0]])
    return min(rows, default=2)


class _Trial:
    """What a file computes for made-up rows, in several groups of as many rows as it declares."""

    def __init__(self, declared: int, inputs: Sequence[Tensor], compute: Compute) -> None:
        self.declared = declared
        self.inputs = list(inputs)
        self.compute = compute
        self.widened = compute
        """The widened graph, as soon as `widened_problem` has imported it."""
        total = len(inputs[0])
        # the last group begins with the last row and goes on with the first ones, which are at other places there and
        # have other companions
        starts = [*range(0, total, declared), total - 1]
        self.groups = [[(start + i) % total for i in range(declared)] for start in starts]
        self.results = [compute(self.rows(group)) for group in self.groups]
        # random nodes that no seed fixes would make every comparison fail for another reason
        if any(
            _difference(a, b) > TOLERANCE
            for a, b in zip(self.results[0], compute(self.rows(self.groups[0])), strict=True)
        ):
            raise ValueError("its results differ from run to run")

    def rows(self, numbers: Sequence[int]) -> list[Tensor]:
        return [value[list(numbers)] for value in self.inputs]

    @property
    def is_conclusive(self) -> bool:
        """Return whether results are finite and at least one of them differs from group to group."""
        # equal results of all rows would agree with any graph, and prove nothing
        first, *others = self.results
        if not all(bool(value.double().isfinite().all()) for value in first):
            return False
        return any(_difference(a, b) > VARIES for other in others for a, b in zip(first, other, strict=True))

    def first(self, examine: Callable[[int], str], model: onnx.ModelProto, outputs: Sequence[str]) -> str:
        """Return the first reason that is found for one of the outputs; "" if there is none."""
        return next(filter(None, (examine(_index(model, output)) for output in outputs)), "")

    def dependence(self, number: int, tolerance: float = TOLERANCE) -> str:
        """Return why one row of an output depends on the other rows or on its place; "" if it does not."""
        first = self.results[0][number]
        if not first.ndim or not len(first) or len(first) % self.declared:
            return f"output {number + 1} has no dimension of rows in front ({list(first.shape)})"
        mixed = "the results of a row depend on the other rows of its batch, or on its place among them"
        known: dict[int, Tensor] = {}
        for group, results in zip(self.groups, self.results, strict=True):
            if results[number].shape != first.shape:
                return mixed
            now = results[number].reshape(self.declared, -1)
            again = [at for at, row in enumerate(group) if row in known]
            # `not <=` rather than `>`, so that a NaN counts as a difference
            if again and not _greatest(torch.stack([known[group[at]] for at in again]), now[again]) <= tolerance:
                return mixed
            known |= dict(zip(group, now, strict=True))
        return ""

    def dependence_of_large(self, number: int) -> str:
        """Return why a row depends on others for large inputs alone, as behind a limit for the whole batch; else ""."""
        large = None if self.dependence(number) else self._of_large
        mixed = large.dependence(number, MOST) if large and large.is_conclusive else ""
        return mixed and f"for inputs {LARGE} times as large as normal ones {mixed}"

    @cached_property
    def _of_large(self) -> _Trial | None:
        """The results for large inputs, of all outputs; None if there are none.

        The file is run, since the widened graph may round large values otherwise; that one if the file has one row.
        """
        if not any(value.is_floating_point() for value in self.inputs):
            return None
        compute = self.compute if self.declared > 1 else self.widened
        inputs = [LARGE * value if value.is_floating_point() else value for value in self.inputs]
        try:
            return _Trial(max(self.declared, 2), inputs, compute)
        except Exception:  # those of onnxruntime and of torch have no common base class
            return None

    def widened_problem(self, model: onnx.ModelProto, base: Path | None, train: Sequence[str]) -> str:
        """Return why the widened graph does not exist or computes something else; "" if it is right."""
        try:
            self.widened = widened = _module(to_module(model, base=base, train=train, widen=True).eval())
        except UnsupportedModel as error:
            return f"its shapes hold for no other batch: {error.problems[0]}"
        tolerance = TOLERANCE
        total = len(self.inputs[0])
        # the file's own batch first: its difference, from rounding alone, sets the tolerance of the other batches
        for numbers in (self.groups[0], [0], [self.declared - 1], list(range(total))):
            try:
                ours = widened(self.rows(numbers))
            except Exception as error:  # those of torch have no common base class
                return f"its shapes hold for no other batch: {str(error).splitlines()[0][:200]}"
            for number, value in enumerate(ours):
                if numbers == self.groups[0]:
                    difference = _difference(self.results[0][number], value)
                    tolerance = max(tolerance, min(4 * difference, MOST))
                else:
                    difference = self._difference(number, value, numbers)
                if not difference <= tolerance:
                    return (
                        f"rewritten for other batches, output {number + 1} differs by {difference:.2g} in a batch of "
                        f"{len(numbers)} rows"
                    )
        return ""

    def _difference(self, number: int, value: Tensor, numbers: Sequence[int]) -> float:
        """Return how far an output of the widened graph is from the file's, row by row, at another batch."""
        axis = self._axis(value, self.results[0][number], len(numbers))
        if axis is None:
            # an output without rows, such as a loss, must be the mean over its rows
            rows = [self.compute(self.rows([row] * self.declared))[number] for row in numbers]
            return _difference(torch.stack(rows).double().mean(0), value)
        tried = [row for group in self.groups for row in group]
        places = {row: at for at, row in enumerate(tried)}
        theirs = torch.cat([_by_row(results[number], axis, self.declared) for results in self.results])
        return _greatest(theirs[[places[row] for row in numbers]], _by_row(value, axis, len(numbers)))

    def _axis(self, ours: Tensor, theirs: Tensor, rows: int) -> int | None:
        """Return the dimension of an output that grows with the batch; None if it has none."""
        if ours.ndim != theirs.ndim:
            return None
        for axis in range(ours.ndim):
            grows = ours.shape[axis] * self.declared == theirs.shape[axis] * rows
            holds_rows = ours.shape[axis] % rows == theirs.shape[axis] % self.declared == 0
            others_stay = all(ours.shape[i] == length for i, length in enumerate(theirs.shape) if i != axis)
            if grows and holds_rows and others_stay:
                return axis
        return None


def _by_row(value: Tensor, axis: int, rows: int) -> Tensor:
    """Return a tensor [..., rows x n, ...] as [rows, numbers], with the rows in order along an axis."""
    return value.movedim(axis, 0).reshape(rows, -1)


def _greatest(expected: Tensor, found: Tensor) -> float:
    """Return the greatest `_difference` of the rows of two tensors [rows, numbers]."""
    if expected.shape != found.shape:
        return float("inf")
    if not expected.numel():
        return 0.0
    greatest, scale = (value.double().abs().amax(1) for value in (expected.double() - found.double(), expected))
    return float((greatest / torch.where(scale > 0, scale, 1.0)).nan_to_num(float("inf")).max())


def _difference(expected: Tensor, found: Tensor) -> float:
    """Return the greatest difference relative to the greatest value; infinite for other shapes or a NaN."""
    if expected.shape != found.shape:
        return float("inf")
    expected = expected.double()
    found = found.double()
    if not expected.numel():
        return 0.0
    greatest = float((expected - found).abs().max())
    scale = float(expected.abs().max())
    if math.isnan(greatest):
        return float("inf")
    return greatest / scale if scale else greatest
