"""Run an ONNX file on evaluation data: for its metrics, and to compare its outputs with those of a torch module.

Files run under onnxruntime's CPU provider. Where it cannot run a file, the first of these that can does, and
`OnnxRunner.runtime` says which:

    onnxruntime, on a copy with an older IR version         the file is newer than onnxruntime
    onnxruntime, without its optimiser ConstantSharing      a BatchNormalization stays in training form (open_session)
    onnxruntime, on an fp32 copy                            half precision: the module has fp32, and CPUs no bfloat16
    onnxruntime, row by row                                 it takes one row only, such as RotaryEmbedding with the
                                                            cache of one row; two rows also go through onnx.reference
    onnx.reference                                          onnxruntime does not run it at all
"""

from __future__ import annotations

import contextlib
import logging
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import onnxruntime
import torch
from torch import Tensor, nn

from onward.trainer.data.batches.batches import Batch
from onward.trainer.data.formats.npz_files import npz_content
from onward.trainer.errors import ExportRefused
from onward.trainer.export.measuring.differences import output_difference
from onward.trainer.export.measuring.fixed_noise import NoiseSessions, recorded_noise
from onward.trainer.export.measuring.kernel_rounding import ExactForm, Measured, beyond_rounding, exact_form
from onward.trainer.export.measuring.reference_evaluator import open_reference
from onward.trainer.export.measuring.rounding_neighbours import Neighbours
from onward.trainer.export.model_file import ModelFile, fp32_copy, full_copy, in_half_precision
from onward.trainer.onnx_graph.files.index import HALF_TYPES, inputs_of, length_of
from onward.trainer.onnx_graph.files.onnxruntime_session import Device, open_session
from onward.trainer.onnx_graph.surgery.quantizing import output_steps
from onward.trainer.onnx_graph.surgery.row_layout import RowLayout, read_layout
from onward.trainer.onnx_graph.surgery.stochastic_depth import draws_noise
from onward.trainer.onnx_graph.surgery.training_norms import training_norms

if TYPE_CHECKING:
    from onward.trainer.export.measuring.evaluation_data import EvaluationData
    from onward.trainer.model.metrics.evaluation_metrics import EvaluationMetrics

log = logging.getLogger(__name__)

Array = np.ndarray[Any, np.dtype[Any]]
Compute = Callable[[Mapping[str, Array]], list[Array]]
"""Input name -> array, to the outputs in order."""
Seen = Callable[[Sequence[Tensor], Batch, int, int], None]  # outputs of rows [start, stop), their batch, start, stop


class OnnxRunner:
    """Runs one ONNX file on evaluation data. `model`: a file, or a model that holds all of its tensors.

    A file that begins with pre-processing is given the numbers of rows, and fed these rows as the data has them. Of its
    outputs only that of the trained part is compared and evaluated.

    `widen`: run a file in half precision as a copy in fp32. `device`: where onnxruntime runs it. `exact`: what `model`
    is the exact form of. Raises ExportRefused when neither onnxruntime nor onnx.reference can load it.
    """

    def __init__(
        self,
        model: ModelFile | onnx.ModelProto,
        data: EvaluationData,
        *,
        widen: bool = True,
        device: Device = "cpu",
        exact: ExactForm | None = None,
    ) -> None:
        self._data, self._device, self._exact = data, device, exact
        structure = model.proto if isinstance(model, ModelFile) else model
        self._inputs = inputs_of(structure.graph)
        self._layout = read_layout(structure.graph, data.model) if data.model else RowLayout()
        self._fed = [value for value in self._inputs if value.name not in self._layout.bound]
        outputs = [value.name for value in structure.graph.output]
        self.outputs = data.file_rows.outputs if data.file_rows else outputs
        self._places = [outputs.index(name) for name in self.outputs]
        self.runtime = "onnxruntime"
        """What runs the file, for the record."""
        self._rounds = any("Quantize" in node.op_type or "QLinear" in node.op_type for node in structure.graph.node)
        self._steps = output_steps(structure) if self._rounds else {}
        self._widened = widen and in_half_precision(structure)
        if self._widened:
            model, self.runtime = fp32_copy(model), "onnxruntime, on an fp32 copy of the file"
        self._model, self.draws = model, draws_noise(structure, None)
        self._noise: dict[str, Array] = {}
        """What the random nodes of the module drew, while both are compared."""
        self._noise_sessions = NoiseSessions(model)
        self._share_constants = not training_norms(structure)
        if not self._share_constants:
            self.runtime += ", without its optimiser ConstantSharing"
        # one session for all batches: opening one loads and optimises the graph
        self._compute = self._open(model)
        self._max_rows = self._fixed_batch_size
        """Rows that one call takes; 0 = any number."""
        self.parity = math.nan
        """The greatest relative difference that `compare` found."""
        self.neighbours = 0.0
        """If the file rounds to integers: the greatest share of elements that `compare` found beyond the tolerance."""
        self.rounding = 0.0
        """What the kernels of the file round, of an output's greatest value, if `compare` had to allow it."""

    # -- what it measures

    def compare(self, module: nn.Module, *, batches: int, tolerance: float, alone: bool = True) -> list[str]:
        """Compare with a module over a few batches, and over one row if `alone`; return a sentence for each difference.

        An output differs if its greatest difference, relative to its greatest value, is above `tolerance`. The
        greatest over all outputs becomes `parity`. `module` takes the inputs and returns the outputs in order.

        Of a file with QuantizeLinear, few elements may be further apart (`Neighbours`); of one whose kernels round what
        the file does not, all may be by as much as that rounding (`kernel_rounding`).
        """
        worst = dict.fromkeys(self.outputs, (0.0, ""))
        apart = {name: Neighbours(self._steps.get(name, 0.0), tolerance) for name in self.outputs if self._rounds}
        for where, inputs, run in self._samples(batches, alone=alone):
            with torch.no_grad(), recorded_noise(module) as self._noise:
                results = module(*self._as_trained(inputs))
            expected = [results] if len(self.outputs) == 1 else results
            for name, ours, theirs in zip(self.outputs, expected, run(inputs), strict=True):
                difference, sentence = output_difference(ours, theirs)
                if name in apart:
                    apart[name].add(ours, theirs)
                # written with `not`, because every comparison with NaN is false
                if not (math.isnan(worst[name][0]) or difference <= worst[name][0]):  # NaN is the worst of all
                    worst[name] = (difference, f"output {name!r}, {where}: {sentence}")
        self._noise = {}
        problems = []
        above = f"off the torch module, above export.tolerance {tolerance:g}"
        for name, (difference, sentence) in worst.items():
            if difference <= tolerance or (name in apart and apart[name].allowed):
                continue
            problem = f"{sentence}: {self.runtime} is {difference:.3g} {above}"
            problems.append(f"{problem}; {apart[name]}" if name in apart else problem)
        self.neighbours = max((each.share for each in apart.values()), default=0.0)
        self.parity = max(difference for difference, _ in worst.values())
        if problems and self._exact is None and (form := exact_form(self._model)):
            measured = partial(self._measure, form, module, batches, tolerance)
            problems, self.rounding = beyond_rounding(problems, form, measured)
        return problems

    def _measure(self, form: ExactForm, module: nn.Module, batches: int, tolerance: float) -> Measured:
        exact = OnnxRunner(form.model, self._data, widen=False, exact=form)
        problems = exact.compare(module, batches=batches, tolerance=tolerance)
        return Measured(problems, exact.parity, self.difference_from(exact, batches=batches))

    def evaluate(self, *also: Seen, metrics: EvaluationMetrics | None = None) -> dict[str, float]:
        """Return loss and metrics over all rows of the split, as `<split>/<name>`.

        metrics: None = new ones. Of a file with a fixed batch and a loss of its own, the rows that fill the last count.
        """
        metrics = metrics or self._data.new_metrics(self.outputs)
        for batch in self._data.batches():
            for start, stop in self._slices(batch.size):
                labels = [None if each is None else each[start:stop] for each in batch.labels]
                outputs = self.outputs_of(batch, start, stop)
                metrics.update(outputs, labels, stop - start)
                for each in also:
                    each(outputs, batch, start, stop)
        return {f"{self._data.split}/{name}": value for name, value in metrics.compute().items()}

    def on(self, device: Device) -> OnnxRunner:
        """Return a runner of the same file on another device."""
        return OnnxRunner(self._model, self._data, widen=False, device=device)

    def difference_from(self, other: OnnxRunner, *, batches: int) -> float:
        """Return the greatest difference of the outputs from those of another runner, as `compare` measures it."""
        samples = (inputs for _, inputs, _ in self._samples(batches))
        pairs = (pair for inputs in samples for pair in zip(other.run(inputs), self.run(inputs), strict=True))
        found = [output_difference(theirs, ours)[0] for theirs, ours in pairs]
        return math.nan if any(map(math.isnan, found)) else max(found, default=math.nan)

    def row_totals(self) -> tuple[EvaluationMetrics, Tensor]:
        """Return the totals of each row of the split alone, fp64 [rows, n], and metrics that read their sums.

        Raises ExportRefused for outputs that have no part for each row.
        """
        totals, metrics = [], self._data.new_metrics(self.outputs)
        for batch in self._data.batches():
            for start, stop in self._slices(batch.size):
                outputs = self.outputs_of(batch, start, stop)
                if any(not each.ndim or len(each) % (stop - start) for each in outputs):
                    raise ExportRefused("export.promote_if.confidence needs outputs with results for each row")
                for row in range(stop - start):
                    metrics = self._data.new_metrics(self.outputs)
                    own = [each.view(stop - start, -1, *each.shape[1:])[row] for each in outputs]
                    labels = [None if each is None else each[start + row : start + row + 1] for each in batch.labels]
                    metrics.update(own, labels, 1)
                    totals.append(metrics.totals())
        return metrics, torch.stack(totals)

    def example(self) -> bytes:
        """Return one row of inputs (or as many as a fixed batch takes) as the content of an .npz file."""
        batch = next(iter(self._data.batches()))
        one = self.feed([tensor[: self._fixed_batch_size or 1] for tensor in self.inputs_of(batch)])
        # without sequences, which such a file cannot hold
        return npz_content({name: array for name, array in one.items() if not isinstance(array, list)})

    def feeds(self) -> Iterator[dict[str, Array]]:
        """Yield evaluation batches for a session of the file itself, with no more rows than one call takes."""
        for batch in self._data.batches():
            rows = self._max_rows or batch.size
            yield self.feed([tensor[:rows] for tensor in self.inputs_of(batch)], widened=False)

    # -- running

    def outputs_of(self, batch: Batch, start: int, stop: int) -> list[Tensor]:
        """Return the outputs of the rows [start, stop) of a batch, no more than one call takes, without repetitions."""
        inputs = [tensor[start:stop] for tensor in self.inputs_of(batch)]
        return [self._without_padding(each, stop - start) for each in self.run(inputs)]

    def run(self, inputs: Sequence[Tensor]) -> list[Array]:
        """Return the outputs [B, ...] for one batch, and use a fallback from now on if the runtime so far fails on it.

        A file with a fixed batch size gives that many rows; those beyond `inputs` are repetitions.
        """
        rows = len(inputs[0])
        try:
            return self._run_in_parts(inputs, self._max_rows or rows)
        except Exception as error:  # onnxruntime's errors have no common base class
            first, former = error, (self._compute, self._max_rows, self.runtime)
        for compute, max_rows, runtime in self._fallbacks(rows):
            self._compute, self._max_rows, self.runtime = compute, max_rows, runtime
            try:
                results = self._run_in_parts(inputs, max_rows or rows)
            except Exception as error:
                # the first error is the one that is reported: it is of the file itself, not of a workaround
                log.info("%s also fails: %s", runtime, error)
            else:
                log.warning(
                    "%s cannot run %d rows of the model, so it runs under %s: %s", former[2], rows, runtime, first
                )
                return results
        # restored: the error names this runtime, and no fallback that has failed stays in use
        self._compute, self._max_rows, self.runtime = former
        raise ExportRefused(f"{self.runtime} cannot run the model on {rows} rows: {first}") from first

    def feed(self, inputs: Sequence[Tensor], *, widened: bool = True) -> dict[str, Array]:
        """Return input name -> array [B, ...] of the declared type, the last row repeated up to a fixed batch size.

        `widened`: of the types of the fp32 copy, if one is run; else of the file's own.
        """
        filled, rows = self._filled(inputs), self._data.file_rows
        if rows is None:
            filled = filled[: len(self._fed)] if self.draws else filled  # without the keys of the noise
            arrays = {value.name: tensor.numpy() for value, tensor in zip(self._fed, filled, strict=True)}
        else:
            arrays = dict(rows.inputs(filled[0].numpy()))
        arrays = {name: self._layout.as_in_file(name, array) for name, array in arrays.items()}
        arrays |= {name: bound.for_rows(len(filled[0])) for name, bound in self._layout.bound.items()}
        fed = {}
        for value in self._inputs:
            array = arrays[value.name]
            if not isinstance(array, list) and array.dtype != object:  # neither a sequence nor strings
                array = array.astype(self._dtype(value.type.tensor_type.elem_type, widened=widened))
            fed[value.name] = array
        return fed

    def inputs_of(self, batch: Batch) -> Sequence[Tensor]:
        """Return what a batch is run from: its inputs, or the numbers of its rows, int64 [B]."""
        return batch.inputs if self._data.file_rows is None else (torch.from_numpy(batch.rows),)

    def _as_trained(self, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return the inputs of the trained part."""
        rows = self._data.file_rows
        return inputs if rows is None else rows.batch(inputs[0].numpy()).inputs

    def _open(self, model: ModelFile | onnx.ModelProto) -> Compute:
        try:
            session = self._session(model)
        except Exception as error:  # onnxruntime's errors have no common base class
            reason = str(error)
        else:
            return lambda feed: list(session.run(None, dict(feed)))
        try:
            reference = open_reference(model)
        except Exception as error:  # nor do those of onnx.reference
            raise ExportRefused(
                f"onnxruntime cannot load the model: {reason}; nor can onnx.reference: {error}. Define operators of "
                "your own as onnx.reference.op_run.OpRun, in a file of model.converters"
            ) from error
        log.warning("onnxruntime cannot load the model, so it runs under onnx.reference, slowly: %s", reason)
        self.runtime = "onnx.reference"
        return lambda feed: list(reference.run(None, dict(feed)))

    def _session(self, model: ModelFile | onnx.ModelProto) -> onnxruntime.InferenceSession:
        """Open a session, of a copy with an older IR version if onnxruntime refuses only the version."""
        opened, parsed = (model.path, model.proto) if isinstance(model, ModelFile) else (model, None)
        base, optimise = (self._exact.folder, False) if self._exact else (None, True)
        start = partial(open_session, optimise=optimise, device=self._device, base=base, parsed=parsed)
        onnxruntime.set_seed(0)  # of the nodes that draw: each evaluation draws the same numbers
        try:
            return start(opened, share_constants=self._share_constants)
        except Exception as error:
            newest = re.search(r"max supported IR version: (\d+)", str(error))
            # only the text of the error has the number that this onnxruntime supports
            if newest is None:
                raise
            copy = full_copy(model)
            copy.ir_version = int(newest[1])
            self.runtime += f", on a copy of IR version {copy.ir_version}"
            return start(copy, share_constants=self._share_constants)

    def _fallbacks(self, rows: int) -> Iterator[tuple[Compute, int, str]]:
        """Yield (what computes, rows of one call, its name) for a batch that the runtime so far fails on."""
        if not self._max_rows and rows > 1:
            yield self._compute, 1, f"{self.runtime}, row by row"
        if "onnx.reference" not in self.runtime:
            with contextlib.suppress(Exception):  # onnx.reference does not know every operator
                reference = open_reference(self._model)
                yield lambda feed: list(reference.run(None, dict(feed))), self._fixed_batch_size, "onnx.reference"

    def _run_in_parts(self, inputs: Sequence[Tensor], rows: int) -> list[Array]:
        compute = partial(self._noise_sessions.run, self._noise) if self._noise else self._compute
        parts = []
        for start in range(0, max(len(inputs[0]), 1), max(rows, 1)):
            results = compute(self.feed([tensor[start : start + rows] for tensor in inputs]))
            parts.append(self._chosen(results))
        if len(parts) == 1:
            return parts[0]
        return [np.concatenate(results) for results in zip(*parts, strict=True)]

    def _chosen(self, results: Sequence[Array]) -> list[Array]:
        """Return the outputs that are compared, with their rows on axis 0."""
        pairs = zip(self.outputs, self._places, strict=True)
        return [self._layout.rows_first(name, results[place]) for name, place in pairs]

    # -- rows and types

    def _samples(
        self, batches: int, *, alone: bool = True
    ) -> Iterator[tuple[str, Sequence[Tensor], Callable[..., list[Array]]]]:
        """Yield (where the rows come from, inputs, what runs them) for `compare`."""
        number = 0
        for number, batch in enumerate(islice(self._data.batches(), batches), start=1):
            inputs = self.inputs_of(batch)
            if number == 1 and alone:
                yield "row 1 alone", self._filled([tensor[:1] for tensor in inputs]), self.run
            for start, stop in self._slices(batch.size):
                rows = f"({batch.size} rows)" if not self._fixed_batch_size else f"(rows {start + 1} to {stop})"
                yield f"batch {number} {rows}", self._filled([tensor[start:stop] for tensor in inputs]), self.run
            runs_row_by_row = self._max_rows == 1 and not self._fixed_batch_size
            if number == 1 and runs_row_by_row and batch.size > 1:
                # rows that only went through one by one say nothing about a batch: two go through onnx.reference
                two = [tensor[:2] for tensor in inputs]
                for results in self._run_by_reference(two):
                    yield "rows 1 and 2, by onnx.reference", two, lambda _, results=results: results
        if not number:
            raise ExportRefused("no evaluation data to verify the file on; set data.evaluation_fraction above 0")

    def _run_by_reference(self, inputs: Sequence[Tensor]) -> Iterator[list[Array]]:
        """Yield the outputs by onnx.reference, if it can run the file."""
        try:
            results: Any = open_reference(self._model).run(None, self.feed(inputs))
            yield self._chosen(results)
        except Exception as error:  # they have no common base class
            log.warning("onnx.reference cannot run the model on 2 rows, so its batches are not verified: %s", error)

    @property
    def _fixed_batch_size(self) -> int:
        """Return the batch size that the file declares; 0 = any."""
        shapes = [(value.type.tensor_type.shape.dim, self._layout.axes.get(value.name, 0)) for value in self._fed]
        leading = {length_of(dims[axis]) for dims, axis in shapes if dims}
        return leading.pop() or 0 if len(leading) == 1 else 0

    def _slices(self, rows: int) -> list[tuple[int, int]]:
        """Return the ranges [start, stop) of a batch, each of as many rows as the file declares."""
        step = self._fixed_batch_size or max(rows, 1)
        return [(start, min(start + step, rows)) for start in range(0, max(rows, 1), step)]

    def _filled(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Repeat the last row up to a fixed batch size."""
        size = self._fixed_batch_size
        return [
            torch.cat([tensor, tensor[-1:].expand(size - len(tensor), *tensor.shape[1:])])
            if 0 < len(tensor) < size
            else tensor
            for tensor in inputs
        ]

    def _without_padding(self, result: Any, rows: int) -> Any:
        """Return an output as tensors, without the rows that were repeated to fill a fixed batch."""
        if isinstance(result, list):
            return [self._without_padding(each, rows) for each in result]
        array, size = np.array(result), self._fixed_batch_size
        if rows < size and array.ndim and len(array) % size == 0:  # [B, ...], or [B x m, ...] of m results for each row
            array = array[: len(array) // size * rows]
        return torch.from_numpy(array)

    def _dtype(self, element_type: int, *, widened: bool) -> np.dtype[Any]:
        to_fp32 = widened and self._widened and element_type in HALF_TYPES
        return np.dtype(np.float32 if to_fp32 else onnx.helper.tensor_dtype_to_np_dtype(element_type))
