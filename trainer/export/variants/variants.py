"""Make variants of the exported file for deployment; each is measured, and refused if it loses too much.

    optimized      onnxruntime's own graph optimisation, for any processor
    fp16, bf16     weights stored in half the bytes; a Cast before their first reader converts them to fp32
    fp16_compute   weights, activations and products in fp16 (half_precision.py)
    int8_dynamic   weights in 8 bits, activations quantized when the model runs
    int8_static    both in 8 bits, calibrated on evaluation data
    with_preprocessing   the file behind nodes that compute its inputs of raw data (with_preprocessing.py)
    without_loss   a file that computes its own loss, without it and its labels (without_loss.py)

A refused variant leaves no file, and the exported file does not depend on it. Quantizers can crash their process, so
each has one of its own: `python -m onward.trainer variant`.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from onnxruntime.quantization import CalibrationDataReader, QuantType, quantize_dynamic, quantize_static
from onnxruntime.quantization.shape_inference import quant_pre_process

from onward.trainer.errors import ExportRefused
from onward.trainer.export.measuring.cuda_provider import has_cuda, measure_on_cuda
from onward.trainer.export.measuring.evaluation_data import EvaluationData
from onward.trainer.export.measuring.helper_nodes import without_helpers
from onward.trainer.export.measuring.latency import latency_on_evaluation
from onward.trainer.export.measuring.onnx_runner import Array, OnnxRunner
from onward.trainer.export.model_file import ModelFile
from onward.trainer.export.variants.half_precision import in_half_precision, refuse_overflow, with_types
from onward.trainer.export.without_loss import write_without_loss
from onward.trainer.onnx_graph.files.index import known_types, locations, nodes_between, opsets_of, replace_entries
from onward.trainer.onnx_graph.files.onnxruntime_session import open_session
from onward.trainer.onnx_graph.files.stored_protos import stored_protos
from onward.trainer.onnx_graph.files.whole_models import MOST_BYTES, data_file_of, whole_file, write_whole
from onward.trainer.run.outcomes.storage import storage_error
from onward.trainer.run.recorded.exported_files import variant_beside
from onward.trainer.run.records import Variant

log = logging.getLogger(__name__)

CALIBRATION_BATCHES = 32
MIN_HALVED_ELEMENTS = 1024
"""Halving a smaller tensor saves less than the Cast node costs."""


def make_variant(
    kind: str,
    exported: Path,
    *,
    data: EvaluationData,
    tolerance: float,
    losses: Sequence[str] = (),
    read: Sequence[str] = (),
    most: int = MOST_BYTES,
) -> Variant:
    """Make one variant beside the exported file; return its size, latency and metrics.

    losses: the outputs that are losses of the graph itself; "" = the first. read: the tensors that the losses read,
    which may be inside the graph: while it is made and measured the variant returns them, too. most: bytes of one ONNX
    file; a larger variant has its weights in a file beside it.

    If it loses more than `tolerance`, or cannot be made, no file is left and the record gives the reason.
    """
    # without the loss nothing is measured, and no scores are read
    inner = [] if kind == "without_loss" else _inner(exported, read)
    with _returning(exported, inner) as file:
        return _made(kind, exported, file, data=data, tolerance=tolerance, losses=losses, inner=inner, most=most)


def _made(
    kind: str,
    exported: Path,
    file: ModelFile,
    *,
    data: EvaluationData,
    tolerance: float,
    losses: Sequence[str],
    inner: Sequence[str],
    most: int,
) -> Variant:
    target = variant_beside(exported, kind)
    runner = OnnxRunner(file, data)
    # by the same runtime as the variant: only what the variant changes makes a difference
    before = runner.evaluate()
    size = _size(file)
    base = Variant(kind=kind, path=None, bytes=0, size_ratio=0, latency_ratio=0, metrics={})
    try:
        with whole_file(target) as partial, _without_helpers(file, kind) as plain:
            if kind == "without_loss":
                write_without_loss(file, partial, losses, next(runner.feeds()), most=most)
                measured: dict[str, float] = {}  # there is no loss left to measure; the outputs have the same bits
            else:
                MAKERS[kind](plain, partial, runner, most)
                # without widening: a variant is measured in the precision that it is made for
                made = OnnxRunner(ModelFile.read(partial), data, widen=False)
                measured = made.evaluate()
            found = base.model_copy(
                update={
                    **_sizes(partial, target, size),
                    "metrics": measured,
                    "latency_ratio": latency_on_evaluation(plain.path, partial, runner),
                }
            )
            # inside of whole_file: leaving it by an error removes what was made
            if measured and (lost := too_much(before, measured, tolerance)):
                raise ExportRefused(lost)
            if kind == "fp16_compute" and has_cuda():
                found = found.model_copy(update={"cuda": measure_on_cuda(exported, partial, runner, made)})
                if found.cuda and found.cuda.metrics and (lost := too_much(before, found.cuda.metrics, tolerance)):
                    raise ExportRefused(f"on a GPU {lost}")
            if inner:
                _drop_outputs(partial, inner)
                found = found.model_copy(update=_sizes(partial, target, size))
    except Exception as error:  # errors of quantizers and of onnxruntime have no common base class
        if storage := storage_error(error, exported):
            raise storage from error
        why = str(error) if isinstance(error, ExportRefused | OSError) else f"{type(error).__name__}: {error}"
        return base.model_copy(update={"refused": why})
    return found


@contextlib.contextmanager
def _without_helpers(file: ModelFile, kind: str) -> Iterator[ModelFile]:
    """Yield the file that a variant is made of and measured beside: a copy without helper nodes (helper_nodes.py).

    `optimized`, and what keeps the graph, is made of the file itself.
    """
    if kind in ("optimized", "without_loss"):
        yield file
        return
    with tempfile.TemporaryDirectory(prefix="onward-plain-") as folder:
        yield without_helpers(file, Path(folder)) or file


def _inner(exported: Path, read: Sequence[str]) -> list[str]:
    """Return the tensors inside a file's graph that the losses read."""
    graph = ModelFile.read(exported).proto.graph
    outputs = {value.name for value in graph.output}
    computed = {name for node in graph.node for name in node.output}
    return [name for name in dict.fromkeys(read) if name in computed - outputs]


@contextlib.contextmanager
def _returning(exported: Path, inner: Sequence[str]) -> Iterator[ModelFile]:
    """Yield the file; with inner tensors a copy beside it, where its external data is, that returns them, too."""
    file = ModelFile.read(exported)
    if not inner:
        yield file
        return
    # an output needs a declared type, which inner tensors often lack
    types = known_types(file.proto)
    path = variant_beside(exported, "scores")
    file.proto.graph.output.extend(types[name] for name in inner)
    try:
        write_whole(file.proto, path)
        yield ModelFile(path, file.proto)
    finally:
        path.unlink(missing_ok=True)


def _drop_outputs(path: Path, names: Sequence[str]) -> None:
    """Remove outputs from a file, with the nodes and tensors that only they need."""
    model = onnx.load_model(path, load_external_data=False)
    graph = model.graph
    kept = [value for value in model.graph.output if value.name not in names]
    nodes, needed = nodes_between(graph, [value.name for value in kept], set())
    tensors = [each for each in graph.initializer if each.name in needed]
    replace_entries(graph, output=kept, node=nodes, initializer=tensors)
    write_whole(model, path)


def kept_if_written(kind: str, exported: Path, write: Callable[[Path], tuple[float, float]]) -> Variant:
    """Make a variant that has other inputs and the same outputs, so that it has no metrics of its own.

    write: writes it to a path and verifies it; returns (its difference, its latency ratio), or raises ExportRefused,
    and then no file is left.
    """
    target = variant_beside(exported, kind)
    made = Variant(kind=kind, path=target, bytes=0, size_ratio=0, latency_ratio=0, metrics={})
    try:
        with whole_file(target) as partial:
            _, latency = write(partial)
            sizes = _sizes(partial, target, _size(ModelFile.read(exported)))
    except Exception as error:  # errors of onnx.checker and of onnxruntime have no common base class
        why = str(error) if isinstance(error, ExportRefused) else f"{type(error).__name__}: {error}"
        return made.model_copy(update={"path": None, "refused": why})
    return made.model_copy(update={**sizes, "latency_ratio": latency})


def _size(file: ModelFile) -> int:
    """Return the bytes of a file and of its external data."""
    return sum(
        path.stat().st_size for path in (file.path, *(file.path.parent / name for name in locations(file.proto)))
    )


def _sizes(made: Path, target: Path, exported_bytes: int) -> dict[str, Any]:
    """Return the fields of a variant's record that say where its files will be, and how large they are."""
    size = made.stat().st_size
    data = data_file_of(made) if data_file_of(made).exists() else None
    if data:
        size += data.stat().st_size
    place = data_file_of(target) if data else None
    return {"path": target, "data": place, "bytes": size, "size_ratio": size / exported_bytes}


def too_much(before: dict[str, float], after: dict[str, float], tolerance: float) -> str:
    """Return why a variant is refused, or "". Compares the accuracy if there is one, else the loss."""
    name = next((name for name in ("evaluation/accuracy", "evaluation/loss") if name in before), "")
    if not name:
        return f"there is neither accuracy nor loss to compare among {', '.join(before) or 'no metrics'}"
    # how much worse it is: accuracies fall and losses rise
    lost = before[name] - after[name] if name.endswith("accuracy") else after[name] - before[name]
    if name.endswith("loss") and before[name]:
        # relative: a loss has no unit that a tolerance could have
        lost /= abs(before[name])
    if lost <= tolerance:  # false for NaN, too
        return ""
    return (
        f"{name} {before[name]:.4f} -> {after[name]:.4f}, a loss of {lost:.3g}, "
        f"above export.variant_tolerance {tolerance:g}"
    )


# -- the kinds


def _optimized(exported: ModelFile, target: Path, runner: OnnxRunner, most: int) -> None:
    split = _size(exported) > most
    # the copy of a file with external data would refer to the file's own
    embedded = not split and locations(exported.proto)
    open_session(exported.with_external_data() if embedded else exported.path, save=target, save_data=split)


def _halved(element_type: int) -> Callable[..., None]:
    """Store fp32 weights in half the bytes. Arithmetic stays fp32, so this saves size, not time."""

    def make(exported: ModelFile, target: Path, runner: OnnxRunner, most: int) -> None:
        model = _with_initializers(exported)
        opset = opsets_of(model)[""]
        if element_type == TensorProto.BFLOAT16 and opset < 13:
            raise ExportRefused(f"bfloat16 weights need opset 13; the file has {opset}")
        # every reader stays unchanged: the Cast gets the weight's old name as its output, and the stored half a new one
        graph = model.graph
        casts = []
        greatest = float(np.finfo(helper.tensor_dtype_to_np_dtype(TensorProto.FLOAT16)).max)
        # names of the whole graph, since ONNX values are unique in it
        taken = {name for node in graph.node for name in (*node.input, *node.output)}
        taken |= {tensor.name for tensor in graph.initializer}
        listed = {value.name for value in (*graph.input, *graph.output)}
        for tensor in graph.initializer:
            if (
                tensor.data_type != TensorProto.FLOAT
                or math.prod(tensor.dims) < MIN_HALVED_ELEMENTS
                # an initializer that is also an input or an output has a declared type
                or tensor.name in listed
            ):
                continue
            values = numpy_helper.to_array(tensor)
            if element_type == TensorProto.FLOAT16 and float(np.abs(values).max()) > greatest:
                raise ExportRefused(f"{tensor.name!r} has values beyond fp16's {greatest:g}; bf16 holds them")
            name = tensor.name
            stored = _unused_name(f"{tensor.name}.half", taken)
            half = helper.tensor_dtype_to_np_dtype(element_type)
            tensor.CopyFrom(numpy_helper.from_array(values.astype(half), stored))
            casts.append(helper.make_node("Cast", [stored], [name], to=TensorProto.FLOAT))
        if not casts:
            raise ExportRefused(f"no fp32 weight has {MIN_HALVED_ELEMENTS} elements or more: there is nothing to gain")
        # nodes must be sorted topologically, so the Casts come first
        replace_entries(graph, node=[*casts, *graph.node])
        write_whole(model, target, most=most)

    return make


def _computing_in_half(exported: ModelFile, target: Path, runner: OnnxRunner, most: int) -> None:
    with tempfile.TemporaryDirectory(prefix="onward-half-") as folder:
        typed = with_types(_with_initializers(exported), Path(folder), most=most)
        refuse_overflow(typed, Calibration(runner, CALIBRATION_BATCHES))
        write_whole(in_half_precision(onnx.load_model(str(typed))), target, most=most)


def _with_initializers(exported: ModelFile) -> onnx.ModelProto:
    """Return a copy of the model whose weights in Constant nodes are initializers, as quantizers expect."""
    model = exported.with_external_data()
    graph = model.graph
    held = {node.output[0]: node for node in graph.node if node.op_type == "Constant"}
    outputs = {value.name for value in graph.output}
    for name, tensor in list(stored_protos(graph)):
        if name in held and tensor.dims and name not in outputs:
            graph.initializer.append(tensor)
            graph.initializer[-1].name = name
            graph.node.remove(held[name])
    model.ir_version = max(model.ir_version, 4)  # before, every initializer had to be an input
    return model


def _unused_name(name: str, taken: set[str]) -> str:
    while name in taken:
        name += "_"
    taken.add(name)
    return name


def _dynamic(exported: ModelFile, target: Path, runner: OnnxRunner, most: int) -> None:
    with tempfile.TemporaryDirectory(prefix="onward-quantize-") as folder:
        ready = prepared(exported, Path(folder), most=most)
        # convolutions are left out: onnxruntime has a fast kernel for them with calibrated activations only
        quantize_dynamic(
            ready,
            target,
            op_types_to_quantize=["MatMul", "Gemm", "LSTM", "Gather", "Attention"],
            use_external_data_format=_size(exported) > most,
        )
    _refuse_unquantized(target, "no MatMul, Gemm, LSTM or embedding; int8_static quantizes convolutions")


def _static(exported: ModelFile, target: Path, runner: OnnxRunner, most: int) -> None:
    with tempfile.TemporaryDirectory(prefix="onward-quantize-") as folder:
        quantize_static(
            prepared(exported, Path(folder), most=most),
            target,
            Calibration(runner, CALIBRATION_BATCHES),
            # one scale for each output channel: channels whose weights differ in magnitude keep their precision
            per_channel=True,
            weight_type=QuantType.QInt8,
            use_external_data_format=_size(exported) > most,
        )
    _refuse_unquantized(target, "no layer that onnxruntime quantizes")


def prepared(exported: ModelFile, folder: Path, *, most: int = MOST_BYTES) -> Path:
    """Write a copy with the shapes of all values, which quantizers need."""
    given = folder / "given.onnx"
    prepared = folder / "prepared.onnx"
    split = write_whole(_with_initializers(exported), given, most=most) is not None
    how: dict[str, Any] = {"save_as_external_data": split, "all_tensors_to_one_file": True}
    with contextlib.chdir(folder):  # it leaves files in the working directory when it fails
        try:
            quant_pre_process(given, prepared, **how)
        except Exception:  # symbolic shape inference fails on some graphs that onnx's own accepts
            log.info("quantizing without symbolic shapes")
            quant_pre_process(given, prepared, skip_symbolic_shape=True, **how)
    return prepared


def _refuse_unquantized(target: Path, nothing: str) -> None:
    types = {tensor.data_type for tensor in onnx.load_model(target, load_external_data=False).graph.initializer}
    if not types & {TensorProto.INT8, TensorProto.UINT8}:
        raise ExportRefused(f"nothing was quantized: {nothing}")


class Calibration(CalibrationDataReader):  # type: ignore[misc]
    """Batches in the interface of onnxruntime's quantizer. most: how many, None = all."""

    def __init__(self, runner: OnnxRunner, most: int | None = None) -> None:
        self._feeds: Iterator[dict[str, Array]] = itertools.islice(runner.feeds(), most)

    def get_next(self) -> dict[str, Array] | None:
        return next(self._feeds, None)


MAKERS: dict[str, Callable[[ModelFile, Path, OnnxRunner, int], None]] = {
    "optimized": _optimized,
    "fp16": _halved(TensorProto.FLOAT16),
    "bf16": _halved(TensorProto.BFLOAT16),
    "fp16_compute": _computing_in_half,
    "int8_dynamic": _dynamic,
    "int8_static": _static,
}
