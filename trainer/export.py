"""The way out: trained weights in the original ONNX file, which exists only once it has passed every check.

Names, opset, inputs, outputs, dynamic axes and metadata stay. What only training needs is gone: Dropout
nodes (the identity at inference), and in BatchNormalization the update of the running statistics. The file
is checked as such, weight by weight against the checkpoint, and under onnxruntime against the trained
module. onnxruntime can take its process down, so this has one of its own: `python -m trainer export`.
"""

from __future__ import annotations

import contextlib
import io
import logging
import math
import sys
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import onnx
import onnxruntime
import torch
from onnx import TensorProto, numpy_helper
from torch import Tensor, nn

from trainer import graph
from trainer.config import RunConfig
from trainer.errors import ExportRefused, OnwardError, Refused
from trainer.ops.strip import strip_training
from trainer.run import (
    ExportedModel,
    Refusal,
    RunDir,
    RunIdentity,
    durable_file,
    example_in,
    read_config,
    read_record,
    refusal_in,
    sha256,
    write_durably,
    write_record,
)

log = logging.getLogger(__name__)

Array = np.ndarray[Any, np.dtype[Any]]


class Batch(Protocol):
    """One evaluation batch: the graph's inputs in order, the labels, and the number of samples."""

    @property
    def inputs(self) -> Sequence[Tensor]: ...
    @property
    def labels(self) -> Tensor | None: ...
    @property
    def size(self) -> int: ...


class Totals(Protocol):
    """Adds up an evaluation (trainer/loss.py)."""

    def update(self, outputs: Sequence[Tensor], labels: Tensor | None, size: int) -> None: ...
    def compute(self) -> dict[str, float]: ...


@dataclass(frozen=True)
class Checkpoint:
    """What is written back."""

    step: int
    weights: Mapping[str, Tensor]
    """Initializer name -> tensor, running statistics included."""


@dataclass(frozen=True)
class Evaluator:
    """What the file is judged by; each call begins anew."""

    batches: Callable[[], Iterable[Batch]]
    """All evaluation data, on the CPU."""
    totals: Callable[[Sequence[str]], Totals]
    """Names of the graph's outputs in order -> empty totals."""


@contextlib.contextmanager
def refusals(folder: Path) -> Iterator[None]:
    """Leave an error of Onward's own in `folder` as data (Refusal) and end the process with its exit code."""
    try:
        yield
    except OnwardError as error:
        problems = error.problems if isinstance(error, Refused) else (str(error),)
        write_record(refusal_in(folder), Refusal(kind=type(error).__name__, problems=problems))
        log.error("%s: %s", type(error).__name__, error)
        sys.exit(error.exit_code)


def export(run: RunDir, checkpoint: Checkpoint, *, evaluator: Evaluator, folder: Path | None = None) -> ExportedModel:
    """Write the trained ONNX file, its record and an example row into `folder` (the run's own if None).

    Raises ExportRefused with every check that failed and by how much; nothing is written then.
    """
    config, folder = read_config(run), folder or run.export
    source = _unchanged(config.model.path, read_record(run.identity, RunIdentity))
    original = graph.load_model(source)
    module = graph.to_module(original)
    graph.load_weights(module, checkpoint.weights)
    trained = graph.to_onnx(module, original)
    removed, _ = strip_training(trained), strip_training(original)
    log.info("step %d; removed from the graph: %s", checkpoint.step, dict(removed) or "nothing")

    target = folder / source.name
    before = Judge(config, evaluator, _content(original)).evaluate()
    with durable_file(target) as file:
        file.write_bytes(_content(trained))
        problems = [*file_problems(file, original), *unwritten(file, checkpoint.weights)]
        judge = Judge(config, evaluator, file)
        parity, different = judge.compare(module.eval())
        if problems := [*problems, *different]:
            raise ExportRefused(problems)
        after = judge.evaluate()
    write_durably(example_in(folder), judge.example())
    exported = ExportedModel(
        path=target,
        sha256=sha256(target),
        step=checkpoint.step,
        parity=parity,
        before=before,
        after=after,
        changed=sum(a != b for a, b in zip(original.graph.initializer, trained.graph.initializer, strict=True)),
        removed=dict(removed),
    )
    write_record(folder / "model.json", exported)
    return exported


def _unchanged(source: Path, identity: RunIdentity) -> Path:
    """The file the run began with. Raises ExportRefused when it is not there or another one is."""
    found = sha256(source) if source.is_file() else "gone"
    if found != identity.model_sha256:
        raise ExportRefused(
            f"{source} changed since the run began (SHA-256 {identity.model_sha256[:12]}, now {found[:12]}); "
            "put the original back: its graph is needed to write the weights into"
        )
    return source


def _content(model: onnx.ModelProto) -> bytes:
    if (size := sum(len(tensor.raw_data) for tensor in model.graph.initializer)) > 2**31 - 2**20:
        raise ExportRefused(f"the weights are {size / 2**30:.2f} GB; one ONNX file holds at most 2 GB")
    return bytes(model.SerializeToString())


# -- checks of the file


def file_problems(file: Path, original: onnx.ModelProto) -> list[str]:
    """What onnx.checker says (shapes and types included), and what is not as in the original (inference form)."""
    problems = [f"onnx.checker: {complaint}"] if (complaint := _complaint(str(file))) else []
    if complaint and _complaint(original):
        log.warning("onnx.checker complains of the file that came in, too: %s", complaint)
        problems = []
    was, now = _structure(original), _structure(onnx.load_model(str(file)))
    for what, parts in was.items():
        if number := sum(a != b for a, b in zip_longest(parts, now[what])):
            problems.append(f"{number} of the original's {len(parts)} {what} are not the same in the exported file")
    return problems


def _structure(model: onnx.ModelProto) -> dict[str, list[Any]]:
    """All that training does not change, kind by kind."""
    return {
        "opsets": list(model.opset_import),
        "metadata entries": list(model.metadata_props),
        "inputs": list(model.graph.input),
        "outputs": list(model.graph.output),
        "nodes": [(node.op_type, node.domain, *node.input, "->", *node.output) for node in model.graph.node],
        "initializers": [(tensor.name, tensor.data_type, *tensor.dims) for tensor in model.graph.initializer],
    }


def _complaint(model: onnx.ModelProto | str) -> str:
    """What onnx.checker says of a model or file, shapes and types included; "" if nothing."""
    try:
        onnx.checker.check_model(model, full_check=True)
    except Exception as error:  # the checker's, and shape inference's own: they share no base
        return str(error)
    return ""


ROUNDED = {TensorProto.FLOAT16: torch.float16, TensorProto.BFLOAT16: torch.bfloat16}


def unwritten(file: Path, weights: Mapping[str, Tensor]) -> list[str]:
    """One sentence for each initializer that is not the checkpoint's, in the type the file stores it in."""
    problems = []
    stored = onnx.load_model(str(file)).graph.initializer
    for tensor in [tensor for tensor in stored if tensor.name in weights]:
        wanted = weights[tensor.name].to(ROUNDED.get(tensor.data_type, weights[tensor.name].dtype)).double().numpy()
        found = numpy_helper.to_array(tensor).astype(np.float64)
        if not np.array_equal(wanted, found, equal_nan=True):
            problems.append(
                f"initializer {tensor.name!r} differs from the checkpoint by up to {np.abs(wanted - found).max():.3g}; "
                f"its greatest value is {np.abs(wanted).max():.3g}"
            )
    return problems


# -- checks under onnxruntime


class Judge:
    """Runs an ONNX file under onnxruntime on the evaluation data. `model`: a path, or the file's content."""

    def __init__(self, config: RunConfig, evaluator: Evaluator, model: Path | bytes) -> None:
        self._config = config.export
        self._evaluator = evaluator
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        try:
            content = model if isinstance(model, bytes) else str(model)
            self._session = onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
        except Exception as error:  # onnxruntime's errors share no base
            raise ExportRefused(f"onnxruntime cannot load the model: {error}") from error
        self._inputs = self._session.get_inputs()
        self._outputs = [output.name for output in self._session.get_outputs()]

    def compare(self, module: nn.Module) -> tuple[float, list[str]]:
        """Greatest difference from the module, relative to each output's greatest value, over a few batches
        and over one row alone; and a sentence for each output where it is above `export.tolerance`.
        """
        worst = dict.fromkeys(self._outputs, (0.0, ""))
        for where, inputs in self._samples():
            with torch.no_grad():
                results = module(*inputs)
            expected = [results] if isinstance(results, Tensor) else results
            for name, ours, theirs in zip(self._outputs, expected, self._run(inputs), strict=True):
                difference, sentence = relative_difference(ours.double().numpy(), theirs.astype(np.float64))
                if not (math.isnan(worst[name][0]) or difference <= worst[name][0]):  # NaN is the worst
                    worst[name] = (difference, f"output {name!r}, {where}: {sentence}")
        limit = self._config.tolerance
        problems = [
            f"{sentence}: onnxruntime is {difference:.3g} off the trained module, above export.tolerance {limit:g}"
            for difference, sentence in worst.values()
            if not difference <= limit
        ]
        return max(difference for difference, _ in worst.values()), problems

    def evaluate(self) -> dict[str, float]:
        """Loss and metrics over the whole evaluation data, as `evaluation/<name>`."""
        totals = self._evaluator.totals(self._outputs)
        for batch in self._evaluator.batches():
            totals.update([torch.from_numpy(array) for array in self._run(batch.inputs)], batch.labels, batch.size)
        return {f"evaluation/{name}": value for name, value in totals.compute().items()}

    def example(self) -> bytes:
        """One row (or as many as a fixed batch takes) as the content of an .npz file."""
        batch = next(iter(self._evaluator.batches()))
        content = io.BytesIO()
        with zipfile.ZipFile(content, "w") as archive:  # not np.savez: its own arguments are names, too
            for name, array in self._feed([tensor[: self._fixed or 1] for tensor in batch.inputs]).items():
                with archive.open(f"{name}.npy", "w") as file:
                    np.lib.format.write_array(file, array, allow_pickle=False)
        return content.getvalue()

    def _samples(self) -> Iterable[tuple[str, Sequence[Tensor]]]:
        number = 0
        for number, batch in enumerate(islice(self._evaluator.batches(), self._config.parity_batches), start=1):
            if number == 1:
                yield "row 1 alone", [tensor[:1] for tensor in batch.inputs]
            yield f"batch {number} ({batch.size} rows)", batch.inputs
        if not number:
            raise ExportRefused("no evaluation data to prove the file on; set data.evaluation_fraction above 0")

    @property
    def _fixed(self) -> int:
        """The batch size the file declares; 0 = any."""
        leading = {entry.shape[0] for entry in self._inputs if entry.shape}
        size = leading.pop() if len(leading) == 1 else 0
        return size if isinstance(size, int) else 0

    def _feed(self, inputs: Sequence[Tensor]) -> dict[str, Array]:
        """Input name -> array of the declared type, the last row repeated up to a fixed batch size."""
        feed = {}
        for entry, tensor in zip(self._inputs, inputs, strict=True):
            array = tensor.numpy().astype(ARRAYS.get(entry.type, tensor.numpy().dtype))
            if 0 < len(array) < self._fixed:
                array = np.concatenate([array, np.repeat(array[-1:], self._fixed - len(array), axis=0)])
            feed[entry.name] = array
        return feed

    def _run(self, inputs: Sequence[Tensor]) -> list[Array]:
        """The file's outputs for one batch, in pieces if the file takes a fixed number of rows."""
        rows = len(inputs[0])
        piece = self._fixed or max(rows, 1)
        parts = []
        for start in range(0, rows, piece):
            feed = self._feed([tensor[start : start + piece] for tensor in inputs])
            try:
                parts.append(self._session.run(None, feed))
            except Exception as error:
                raise ExportRefused(f"onnxruntime cannot run the model on {rows} rows: {error}") from error
        if len(parts) == 1 and rows == piece:
            return list(parts[0])
        return [np.concatenate(pieces)[:rows] for pieces in zip(*parts, strict=True)]


ARRAYS = {"tensor(float)": np.float32, "tensor(float16)": np.float16, "tensor(double)": np.float64}
"""What onnxruntime calls the types that the module may compute in another precision."""


def relative_difference(ours: Array, theirs: Array) -> tuple[float, str]:
    """(greatest |difference| / greatest |value|, a clause with both); NaN if either has one where the other has not.

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
