"""What an ONNX file computes, by onnxruntime: on evaluation data, against a torch module, against another file.

Where onnxruntime cannot judge, the next best does, and the record says which: a file in half precision is
judged as its fp32 shadow (the module computes in fp32, and onnxruntime's CPU has no bfloat16); a file that
onnxruntime takes only row by row (RotaryEmbedding with the cache of one row) goes row by row, and as a batch
through onnx.reference; a file it does not take at all goes through onnx.reference alone.
"""

from __future__ import annotations

import contextlib
import io
import logging
import math
import re
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import torch
from onnx import TensorProto, TypeProto, numpy_helper
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun
from torch import Tensor, nn

from onward.trainer.data.batches import Batch
from onward.trainer.errors import ExportRefused
from onward.trainer.model.loss import Evaluation
from onward.trainer.onnx_graph.index import all_tensors, graphs_of

log = logging.getLogger(__name__)

Array = np.ndarray[Any, np.dtype[Any]]
HALVES = (TensorProto.FLOAT16, TensorProto.BFLOAT16)


@dataclass(frozen=True)
class Evaluator:
    """What a file is judged by; each call begins anew."""

    batches: Callable[[], Iterable[Batch]]
    """All evaluation data, on the CPU."""
    totals: Callable[[Sequence[str]], Evaluation]
    """Names of the graph's outputs in order -> empty totals."""


class Judge:
    """Runs an ONNX file on the evaluation data. `model`: a path, or a model that holds its tensors.

    `shadow`: judge a file in half precision as its fp32 shadow. Raises ExportRefused when neither onnxruntime
    nor onnx.reference can load it.
    """

    def __init__(self, model: Path | onnx.ModelProto, evaluator: Evaluator, *, shadow: bool = True) -> None:
        self._evaluator = evaluator
        structure = onnx.load_model(model, load_external_data=False) if isinstance(model, Path) else model
        stored = {tensor.name for tensor in structure.graph.initializer}
        self._inputs = [value for value in structure.graph.input if value.name not in stored]
        self.outputs = [value.name for value in structure.graph.output]
        self.by = "onnxruntime"
        """Who computes, for the record."""
        self._shadowed = shadow and in_half_precision(structure)
        if self._shadowed:
            model, self.by = fp32_shadow(model), "onnxruntime, on the file's fp32 shadow"
        self._model = model
        self._compute = self._open(model)
        self._rows = self._fixed
        """Rows taken at a time; 0 = any number."""
        self.parity = math.nan
        """What `compare` found."""

    def _open(self, model: Path | onnx.ModelProto) -> Callable[[Mapping[str, Array]], list[Array]]:
        try:
            session = self._session(model)
        except Exception as error:  # onnxruntime's errors share no base
            reason = str(error)
        else:
            return lambda feed: list(session.run(None, dict(feed)))
        try:
            reference = _reference(model)
        except Exception as error:  # nor do those of onnx.reference
            raise ExportRefused(
                f"onnxruntime cannot load the model: {reason}; nor can onnx.reference: {error}. Operators of one's own "
                "are defined as onnx.reference.op_run.OpRun, in a file of model.converters"
            ) from error
        log.warning("onnxruntime cannot load the model, so onnx.reference judges it, slowly: %s", reason)
        self.by = "onnx.reference"
        return lambda feed: list(reference.run(None, dict(feed)))

    def _session(self, model: Path | onnx.ModelProto) -> onnxruntime.InferenceSession:
        """A session; of a copy with an older IR version if that is all onnxruntime objects to."""
        try:
            return open_session(model)
        except Exception as error:
            newest = re.search(r"max supported IR version: (\d+)", str(error))
            if newest is None:
                raise
            copy = onnx.ModelProto()
            copy.CopyFrom(onnx.load_model(model) if isinstance(model, Path) else model)
            copy.ir_version = int(newest[1])
            self.by += f", on a copy of IR version {copy.ir_version}"
            return open_session(copy)

    def compare(self, module: nn.Module, *, batches: int, tolerance: float) -> list[str]:
        """Compare with the module over a few batches and one row alone: a sentence for each output that is
        further off than `tolerance`, relative to its greatest value. The greatest of them becomes `parity`.

        `module` takes the inputs in order and gives the outputs in order.
        """
        worst = dict.fromkeys(self.outputs, (0.0, ""))
        for where, inputs, run in self._samples(batches):
            with torch.no_grad():
                results = module(*inputs)
            expected = [results] if len(self.outputs) == 1 else results
            for name, ours, theirs in zip(self.outputs, expected, run(inputs), strict=True):
                difference, sentence = _apart(ours, theirs)
                if not (math.isnan(worst[name][0]) or difference <= worst[name][0]):  # NaN is the worst
                    worst[name] = (difference, f"output {name!r}, {where}: {sentence}")
        problems = [
            f"{sentence}: {self.by} is {difference:.3g} off the trained module, above export.tolerance {tolerance:g}"
            for difference, sentence in worst.values()
            if not difference <= tolerance
        ]
        self.parity = max(difference for difference, _ in worst.values())
        return problems

    def evaluate(self) -> dict[str, float]:
        """Loss and metrics over the whole evaluation data, as `evaluation/<name>`.

        A file of a fixed batch that computes its own loss counts the rows repeated to fill its last batch, too.
        """
        totals = self._evaluator.totals(self.outputs)
        for batch in self._evaluator.batches():
            for start, stop in self._cuts(batch.size):
                labels = None if batch.labels is None else batch.labels[start:stop]
                results = self.run([tensor[start:stop] for tensor in batch.inputs])
                totals.update([self._own_rows(result, stop - start) for result in results], labels, stop - start)
        return {f"evaluation/{name}": value for name, value in totals.compute().items()}

    def example(self) -> bytes:
        """One row (or as many as a fixed batch takes) as the content of an .npz file."""
        batch = next(iter(self._evaluator.batches()))
        content = io.BytesIO()
        with zipfile.ZipFile(content, "w") as archive:  # not np.savez: its own arguments are names, too
            for name, array in self.feed([tensor[: self._fixed or 1] for tensor in batch.inputs]).items():
                with archive.open(f"{name}.npy", "w") as file:
                    np.lib.format.write_array(file, array, allow_pickle=False)
        return content.getvalue()

    def _samples(self, batches: int) -> Iterator[tuple[str, Sequence[Tensor], Callable[..., list[Array]]]]:
        number = 0
        for number, batch in enumerate(islice(self._evaluator.batches(), batches), start=1):
            if number == 1:
                yield "row 1 alone", self._filled([tensor[:1] for tensor in batch.inputs]), self.run
            for start, stop in self._cuts(batch.size):
                where = f"({batch.size} rows)" if not self._fixed else f"(rows {start + 1} to {stop})"
                yield (
                    f"batch {number} {where}",
                    self._filled([tensor[start:stop] for tensor in batch.inputs]),
                    self.run,
                )
            if number == 1 and self._rows == 1 and not self._fixed and batch.size > 1:
                two = [tensor[:2] for tensor in batch.inputs]
                yield from (("rows 1 and 2, by onnx.reference", two, lambda _, r=r: r) for r in self._refer(two))
        if not number:
            raise ExportRefused("no evaluation data to prove the file on; set data.evaluation_fraction above 0")

    @property
    def _fixed(self) -> int:
        """The batch size the file declares; 0 = any."""
        leading = {value.type.tensor_type.shape.dim[0].dim_value for value in self._inputs if _ndim(value)}
        return leading.pop() if len(leading) == 1 else 0

    def _cuts(self, rows: int) -> list[tuple[int, int]]:
        """The pieces of a batch, [start, stop), that the file takes by its declaration."""
        step = self._fixed or max(rows, 1)
        return [(start, min(start + step, rows)) for start in range(0, max(rows, 1), step)]

    def _filled(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """The last row repeated up to a fixed batch size."""
        return [
            torch.cat([tensor, tensor[-1:].expand(self._fixed - len(tensor), *tensor.shape[1:])])
            if 0 < len(tensor) < self._fixed
            else tensor
            for tensor in inputs
        ]

    def feed(self, inputs: Sequence[Tensor], *, shadow: bool = True) -> dict[str, Array]:
        """Input name -> array of the declared type, the last row repeated up to a fixed batch size.

        `shadow`: of the type that the fp32 shadow declares, if one is run; else of the file's own.
        """
        return {
            value.name: tensor.numpy().astype(self._dtype(value.type.tensor_type.elem_type, shadow=shadow))
            for value, tensor in zip(self._inputs, self._filled(inputs), strict=True)
        }

    def feeds(self) -> Iterator[dict[str, Array]]:
        """Evaluation batches for a session of the file itself, with no more rows than `run` found it to take."""
        for batch in self._evaluator.batches():
            yield self.feed([tensor[: self._rows or batch.size] for tensor in batch.inputs], shadow=False)

    def _dtype(self, element_type: int, *, shadow: bool) -> np.dtype[Any]:
        shadowed = shadow and self._shadowed and element_type in HALVES
        return np.dtype(np.float32 if shadowed else onnx.helper.tensor_dtype_to_np_dtype(element_type))

    def run(self, inputs: Sequence[Tensor]) -> list[Array]:
        """The file's outputs for one batch: row by row if onnxruntime turns out to take no more, by onnx.reference
        if it takes none.

        A file of a fixed batch gives as many rows as it takes, of which those beyond `inputs` are repetitions.
        """
        rows = len(inputs[0])
        try:
            return self._in_pieces(inputs, self._rows or rows)
        except Exception as error:  # of no common base
            first, former = error, (self._compute, self._rows, self.by)
        for compute, piece, by in self._retreats(rows):
            self._compute, self._rows, self.by = compute, piece, by
            try:
                results = self._in_pieces(inputs, piece or rows)
            except Exception as error:
                log.info("%s fails, too: %s", by, error)
            else:
                log.warning("the model is judged by %s, for %s cannot run %d rows: %s", by, former[2], rows, first)
                return results
        self._compute, self._rows, self.by = former
        raise ExportRefused(f"{self.by} cannot run the model on {rows} rows: {first}") from first

    def _retreats(self, rows: int) -> Iterator[tuple[Callable[[Mapping[str, Array]], list[Array]], int, str]]:
        """(what computes, rows at a time, its name), for a batch that the way so far fails on."""
        if not self._rows and rows > 1:
            yield self._compute, 1, f"{self.by}, row by row"
        if "onnx.reference" not in self.by:
            with contextlib.suppress(Exception):  # it does not know every operator, either
                reference = _reference(self._model)
                yield lambda feed: list(reference.run(None, dict(feed))), self._fixed, "onnx.reference"

    def _in_pieces(self, inputs: Sequence[Tensor], piece: int) -> list[Array]:
        rows = len(inputs[0])
        parts = [
            self._compute(self.feed([tensor[start : start + piece] for tensor in inputs]))
            for start in range(0, max(rows, 1), max(piece, 1))
        ]
        if len(parts) == 1:
            return parts[0]
        return [np.concatenate(pieces) for pieces in zip(*parts, strict=True)]

    def _own_rows(self, result: Any, rows: int) -> Any:
        """An output as torch has it, without the rows that were repeated to fill a fixed batch."""
        if isinstance(result, list):
            return [self._own_rows(each, rows) for each in result]
        array = np.array(result)
        return torch.from_numpy(array[:rows] if array.ndim and len(array) == self._fixed else array)

    def _refer(self, inputs: Sequence[Tensor]) -> Iterator[list[Array]]:
        """The outputs by onnx.reference, if it can run the file."""
        try:
            results: Any = _reference(self._model).run(None, self.feed(inputs))
            yield list(results)
        except Exception as error:  # of no common base
            log.warning("onnx.reference cannot run the model on %d rows, so nobody but torch has: %s", 2, error)


def _reference(model: Path | onnx.ModelProto) -> ReferenceEvaluator:
    """onnx.reference, with the operators that a file of `model.converters` has defined for it."""
    own = [kind for kind in _subclasses(OpRun) if getattr(kind, "op_domain", "") and not _is_onnxs(kind)]
    return ReferenceEvaluator(str(model) if isinstance(model, Path) else model, new_ops=own)


def _subclasses(kind: type[Any]) -> Iterator[type[Any]]:
    below: type[Any]
    for below in kind.__subclasses__():
        yield below
        yield from _subclasses(below)


def _is_onnxs(kind: type[Any]) -> bool:
    return kind.__module__.split(".")[0] == "onnx"


def _ndim(value: onnx.ValueInfoProto) -> int:
    return len(value.type.tensor_type.shape.dim)


def open_session(
    model: Path | onnx.ModelProto, *, optimise: bool = True, save: Path | None = None
) -> onnxruntime.InferenceSession:
    """An onnxruntime session on the CPU. `save`: also write the graph it runs, optimised for any machine."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    levels = onnxruntime.GraphOptimizationLevel
    options.graph_optimization_level = levels.ORT_ENABLE_ALL if optimise else levels.ORT_DISABLE_ALL
    if save:  # beyond EXTENDED, the layout is that of this very processor
        options.graph_optimization_level = levels.ORT_ENABLE_EXTENDED
        options.optimized_model_filepath = str(save)
    content = str(model) if isinstance(model, Path) else model.SerializeToString()
    return onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])


def relative_difference(ours: Array, theirs: Array) -> tuple[float, str]:
    """(greatest |difference| / greatest |value|, a clause with both); NaN if either has one, or another shape.

    Equal values differ by nothing, infinite ones included.
    """
    if ours.shape != theirs.shape:
        return float("nan"), f"shape {list(theirs.shape)} instead of {list(ours.shape)}"
    with np.errstate(invalid="ignore"):
        apart = np.where(ours == theirs, 0.0, np.abs(ours - theirs))
    greatest = float(np.abs(ours[np.isfinite(ours)]).max(initial=0.0))
    difference = float(apart.max(initial=0.0))
    relative = difference / greatest if greatest else difference
    return relative, f"greatest difference {difference:.3g}, greatest value {greatest:.3g}"


def _apart(ours: Any, theirs: Any) -> tuple[float, str]:
    """`relative_difference` of an output: a tensor, or a sequence, whose furthest tensor counts."""
    if isinstance(ours, Tensor):
        return relative_difference(ours.detach().double().numpy(), np.asarray(theirs).astype(np.float64))
    if len(ours) != len(theirs):
        return math.nan, f"{len(theirs)} tensors instead of {len(ours)}"
    found = [_apart(*pair) for pair in zip(ours, theirs, strict=True)]
    return max(found, key=lambda each: math.inf if math.isnan(each[0]) else each[0], default=(0.0, "no tensor"))


# -- half precision


def in_half_precision(model: onnx.ModelProto) -> bool:
    """Whether any tensor the file stores, takes or gives is fp16 or bf16."""
    return any(tensor.data_type in HALVES for tensor in all_tensors(model)) or any(
        value.type.tensor_type.elem_type in HALVES for value in (*model.graph.input, *model.graph.output)
    )


def fp32_shadow(model: Path | onnx.ModelProto) -> onnx.ModelProto:
    """The same model with every fp16 and bf16 made fp32: what the file computes, without the rounding between."""
    shadow = onnx.ModelProto()
    shadow.CopyFrom(onnx.load_model(model) if isinstance(model, Path) else model)
    for graph in graphs_of(shadow.graph):
        for value in (*graph.input, *graph.output, *graph.value_info):
            _widen_type(value.type)
        for node in graph.node:
            for attribute in node.attribute:
                if attribute.name in ("to", "dtype", "output_dtype", "stash_type") and attribute.i in HALVES:
                    attribute.i = TensorProto.FLOAT
    for tensor in all_tensors(shadow):
        if tensor.data_type in HALVES:
            name = tensor.name
            tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor).astype(np.float32), name))
    return shadow


def _widen_type(kind: TypeProto) -> None:
    if kind.HasField("tensor_type") and kind.tensor_type.elem_type in HALVES:
        kind.tensor_type.elem_type = TensorProto.FLOAT
    elif kind.HasField("sequence_type"):
        _widen_type(kind.sequence_type.elem_type)
    elif kind.HasField("optional_type"):
        _widen_type(kind.optional_type.elem_type)
