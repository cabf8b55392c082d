"""Further files made of the exported one for deployment, each measured beside it and refused if it lost too much.

    optimized      onnxruntime's own graph optimisation, for any processor
    fp16, bf16     weights stored in half the bytes; a Cast before their first reader brings them back to fp32
    int8_dynamic   weights in 8 bits, activations quantized as they come
    int8_static    both in 8 bits, calibrated on evaluation data

A variant that fails its gate does not come to exist; the exported file does not depend on it. Quantizers can
take their process down, so each has one of its own: `python -m onward.trainer variant`.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from onnxruntime.quantization import CalibrationDataReader, QuantType, quantize_dynamic, quantize_static
from onnxruntime.quantization.shape_inference import quant_pre_process

from onward.trainer.errors import ExportRefused
from onward.trainer.export.verification import Array, Evaluator, Judge, open_session
from onward.trainer.onnx_graph.index import locations
from onward.trainer.onnx_graph.initializers import stored_protos
from onward.trainer.run.durable_files import durable_file
from onward.trainer.run.records import Variant

log = logging.getLogger(__name__)

CALIBRATION_BATCHES = 32
LATENCY_ROUNDS = 15
"""Runs of each of the two files, in turns; the figure is the ratio of the medians."""
SMALL = 1024
"""Elements: what halving tensors below this saves is less than the node that brings them back costs."""


def make_variant(kind: str, exported: Path, *, evaluator: Evaluator, tolerance: float) -> Variant:
    """Make one variant beside the exported file, judge it, and say what it gained and lost.

    The record says why if there is none: too great a loss, or a step that failed.
    """
    target = exported.with_name(f"{exported.stem}.{kind}.onnx")
    known = Judge(exported, evaluator)
    before = known.evaluate()
    size = _bytes(exported)
    base = Variant(kind=kind, path=None, bytes=0, size_ratio=0, latency_ratio=0, metrics={})
    if size > 2**31 - 2**20:
        return base.model_copy(update={"refused": f"the file has {size:,} bytes; variants are made up to 2 GB"})
    try:
        with durable_file(target) as partial:
            MAKERS[kind](exported, partial, known)
            judge = Judge(partial, evaluator, shadow=False)
            found = base.model_copy(
                update={
                    "path": target,
                    "bytes": partial.stat().st_size,
                    "size_ratio": partial.stat().st_size / size,
                    "metrics": judge.evaluate(),
                    "latency_ratio": latency_ratio(exported, partial, known),
                }
            )
            if lost := too_much(before, found.metrics, tolerance):
                raise ExportRefused(lost)
    except (ExportRefused, OSError) as error:
        return base.model_copy(update={"refused": str(error)})
    except Exception as error:  # whatever a quantizer or onnxruntime raises: they share no base
        return base.model_copy(update={"refused": f"{type(error).__name__}: {error}"})
    return found


def too_much(before: dict[str, float], after: dict[str, float], tolerance: float) -> str:
    """Why a variant is not good enough; "" if it is. Judged by accuracy, else by the loss."""
    name = next((name for name in ("evaluation/accuracy", "evaluation/loss") if name in before), "")
    if not name:
        return f"there is nothing to judge it by among {', '.join(before) or 'no metrics'}"
    lost = before[name] - after[name] if name.endswith("accuracy") else after[name] - before[name]
    if name.endswith("loss") and before[name]:
        lost /= abs(before[name])
    if lost <= tolerance:  # false for NaN, too
        return ""
    return (
        f"{name} {before[name]:.4f} -> {after[name]:.4f}, a loss of {lost:.3g}, "
        f"above export.variant_tolerance {tolerance:g}"
    )


def latency_ratio(exported: Path, variant: Path, judge: Judge) -> float:
    """Time of the variant over time of the exported file on one evaluation batch, measured in turns."""
    feed = next(judge.feeds())
    sessions = [open_session(path) for path in (exported, variant)]
    times: list[list[float]] = [[], []]
    for _ in range(LATENCY_ROUNDS + 1):
        for session, column in zip(sessions, times, strict=True):
            started_at = time.perf_counter()
            session.run(None, feed)
            column.append(time.perf_counter() - started_at)
    ours, theirs = (statistics.median(column[1:]) for column in times)  # the first run of each warms up
    return theirs / ours


def _bytes(path: Path) -> int:
    """The size of a model, its external data included."""
    model = onnx.load_model(path, load_external_data=False)
    return sum(file.stat().st_size for file in (path, *(path.parent / name for name in locations(model))))


# -- the kinds


def _optimized(exported: Path, target: Path, judge: Judge) -> None:
    open_session(exported, save=target)


def _halved(element_type: int) -> Callable[..., None]:
    def make(exported: Path, target: Path, judge: Judge) -> None:
        model = _with_initializers(exported)
        opset = next(entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx"))
        if element_type == TensorProto.BFLOAT16 and opset < 13:
            raise ExportRefused(f"bfloat16 weights need opset 13; the file has {opset}")
        graph, casts = model.graph, []
        greatest = float(np.finfo(helper.tensor_dtype_to_np_dtype(TensorProto.FLOAT16)).max)
        taken = {name for node in graph.node for name in (*node.input, *node.output)}
        taken |= {tensor.name for tensor in graph.initializer}
        listed = {value.name for value in (*graph.input, *graph.output)}
        for tensor in graph.initializer:
            if tensor.data_type != TensorProto.FLOAT or math.prod(tensor.dims) < SMALL or tensor.name in listed:
                continue
            values = numpy_helper.to_array(tensor)
            if element_type == TensorProto.FLOAT16 and float(np.abs(values).max()) > greatest:
                raise ExportRefused(f"{tensor.name!r} has values beyond fp16's {greatest:g}; bf16 holds them")
            name, stored = tensor.name, _fresh(f"{tensor.name}.half", taken)
            half = helper.tensor_dtype_to_np_dtype(element_type)
            tensor.CopyFrom(numpy_helper.from_array(values.astype(half), stored))
            casts.append(helper.make_node("Cast", [stored], [name], to=TensorProto.FLOAT))
        if not casts:
            raise ExportRefused(f"no fp32 weight has {SMALL} elements or more: there is nothing to gain")
        nodes = [*casts, *graph.node]
        del graph.node[:]
        graph.node.extend(nodes)
        target.write_bytes(model.SerializeToString())

    return make


def _with_initializers(exported: Path) -> onnx.ModelProto:
    """The exported model with the weights that it keeps in Constant nodes as initializers, where variants look."""
    model = onnx.load_model(exported)
    graph = model.graph
    held = {node.output[0]: node for node in graph.node if node.op_type == "Constant"}
    for name, tensor in list(stored_protos(graph)):
        if name in held and tensor.dims and name not in {value.name for value in graph.output}:
            graph.initializer.append(tensor)
            graph.initializer[-1].name = name
            graph.node.remove(held[name])
    model.ir_version = max(model.ir_version, 4)  # before, every initializer had to be an input
    return model


def _fresh(name: str, taken: set[str]) -> str:
    while name in taken:
        name += "_"
    taken.add(name)
    return name


def _dynamic(exported: Path, target: Path, judge: Judge) -> None:
    with tempfile.TemporaryDirectory(prefix="onward-quantize-") as folder:
        prepared = _prepared(exported, Path(folder))
        # convolutions want calibrated activations: onnxruntime has no fast kernel for them otherwise
        quantize_dynamic(prepared, target, op_types_to_quantize=["MatMul", "Gemm", "LSTM", "Gather", "Attention"])
    _must_differ(exported, target, "no MatMul, Gemm, LSTM or embedding; int8_static quantizes convolutions")


def _static(exported: Path, target: Path, judge: Judge) -> None:
    with tempfile.TemporaryDirectory(prefix="onward-quantize-") as folder:
        quantize_static(
            _prepared(exported, Path(folder)),
            target,
            _Calibration(judge),
            per_channel=True,
            weight_type=QuantType.QInt8,
        )
    _must_differ(exported, target, "no layer that onnxruntime quantizes")


def _prepared(exported: Path, folder: Path) -> Path:
    """The file with the shapes a quantizer asks for."""
    given, prepared = folder / "given.onnx", folder / "prepared.onnx"
    onnx.save_model(_with_initializers(exported), given)
    with contextlib.chdir(folder):  # it leaves files where it stands when it fails
        try:
            quant_pre_process(given, prepared)
        except Exception:  # its symbolic shape inference gives up on some graphs; onnx's own does not
            log.info("quantizing without symbolic shapes")
            quant_pre_process(given, prepared, skip_symbolic_shape=True)
    return prepared


def _must_differ(exported: Path, target: Path, nothing: str) -> None:
    types = {tensor.data_type for tensor in onnx.load_model(target, load_external_data=False).graph.initializer}
    if not types & {TensorProto.INT8, TensorProto.UINT8}:
        raise ExportRefused(f"nothing was quantized: {nothing}")


class _Calibration(CalibrationDataReader):  # type: ignore[misc]
    """Evaluation batches, as the quantizer reads them."""

    def __init__(self, judge: Judge) -> None:
        self._feeds: Iterator[dict[str, Array]] = itertools.islice(judge.feeds(), CALIBRATION_BATCHES)

    def get_next(self) -> dict[str, Array] | None:
        return next(self._feeds, None)


MAKERS: dict[str, Callable[[Path, Path, Judge], None]] = {
    "optimized": _optimized,
    "fp16": _halved(TensorProto.FLOAT16),
    "bf16": _halved(TensorProto.BFLOAT16),
    "int8_dynamic": _dynamic,
    "int8_static": _static,
}
