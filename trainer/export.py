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
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import onnx
import onnxruntime
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import Tensor, nn

from trainer import graph
from trainer.config import RunConfig
from trainer.errors import ExportRefused, OnwardError, Refused
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
    if not source.is_file():
        raise ExportRefused(f"the original model {source} is gone; its graph is needed to write the weights into")
    if (found := sha256(source)) != identity.model_sha256:
        raise ExportRefused(
            f"{source} changed since the run began (SHA-256 {identity.model_sha256[:12]}, now {found[:12]}); "
            "put the original back: its graph is needed to write the weights into"
        )
    return source


def _content(model: onnx.ModelProto) -> bytes:
    if (size := sum(len(tensor.raw_data) for tensor in model.graph.initializer)) > 2**31 - 2**20:
        raise ExportRefused(f"the weights are {size / 2**30:.2f} GB; one ONNX file holds at most 2 GB")
    return bytes(model.SerializeToString())


# -- training-only parts of a graph


def strip_training(model: onnx.ModelProto) -> Counter[str]:
    """Bring a graph into its inference form, in place; returns what was taken out, by kind and number.

    Dropout nodes go, their readers read what they read; one whose result has a name that must stay (a graph
    output, a value read by an inner graph, a mask in use) only loses its training mode. BatchNormalization
    keeps its running statistics as inputs and no longer computes new ones. Constants and initializers that
    nobody reads any more go too.
    """
    nodes, removed = model.graph.node, Counter[str]()
    read_before = _reads(model.graph)
    pinned = {value.name for value in model.graph.output} | _inner_reads(nodes)
    renamed: dict[str, str] = {}
    kept: list[onnx.NodeProto] = []
    for node in nodes:
        for place, name in enumerate(node.input):
            node.input[place] = renamed.get(name, name)
        if _is(node, "Dropout"):
            if not pinned & set(node.output) and not read_before & set(node.output[1:]):
                removed["Dropout"] += 1
                renamed[node.output[0]] = node.input[0]
                continue
            removed["Dropout training mode"] += len(node.input) > 2
            del node.input[2:]
        kept.append(node)
        if _is(node, "BatchNormalization") and (len(node.output) > 1 or _mode(node)):
            removed["BatchNormalization update"] += 1
            kept += _freeze_statistics(node, read_before)
    if removed:
        del nodes[:]
        nodes.extend(kept)
        _prune(model.graph, read_before)
    return +removed


def _freeze_statistics(node: onnx.NodeProto, read: set[str]) -> Iterable[onnx.NodeProto]:
    """Inference form of one BatchNormalization; yields what still gives its statistics to those who read them."""
    for result, statistic in zip(node.output[1:3], node.input[3:5], strict=False):
        if result in read:
            yield helper.make_node("Identity", [statistic], [result])
    del node.output[1:]
    for mode in _mode(node):
        node.attribute.remove(mode)


def _is(node: onnx.NodeProto, operator: str) -> bool:
    return node.op_type == operator and node.domain in ("", "ai.onnx")


def _mode(node: onnx.NodeProto) -> list[onnx.AttributeProto]:
    return [attribute for attribute in node.attribute if attribute.name == "training_mode"]


def _prune(graph: onnx.GraphProto, read_before: set[str]) -> None:
    """Remove what was read before and is not now, and the value descriptions of what is gone."""
    while idle := [node for node in graph.node if set(node.output) <= read_before - _reads(graph)]:
        for node in idle:
            graph.node.remove(node)
    unread = read_before - _reads(graph) - {value.name for value in graph.input}
    for tensor in [tensor for tensor in graph.initializer if tensor.name in unread]:
        graph.initializer.remove(tensor)
    known = _reads(graph) | {name for node in graph.node for name in node.output}
    for value in [value for value in graph.value_info if value.name not in known]:
        graph.value_info.remove(value)


def _reads(graph: onnx.GraphProto) -> set[str]:
    """Every name read: by nodes, by inner graphs, as output."""
    names = {name for node in graph.node for name in node.input} | {value.name for value in graph.output}
    return (names | _inner_reads(graph.node)) - {""}


def _inner_reads(nodes: Iterable[onnx.NodeProto]) -> set[str]:
    inner = [graph for node in nodes for a in node.attribute for graph in ([a.g] if a.HasField("g") else a.graphs)]
    return set().union(*map(_reads, inner))


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
    for tensor in onnx.load_model(str(file)).graph.initializer:
        if tensor.name not in weights:
            continue
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
