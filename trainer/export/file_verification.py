"""Verify an ONNX file that was written, before it gets its final name.

    structure   onnx.checker accepts it; everything but the weights is as in the original
    weights     each trained tensor is the checkpoint's, rounded to the type the file stores; the others are unchanged
    results     under onnxruntime its outputs on evaluation data are those of the trained module

The file is parsed once, by the caller; onnx.checker and onnxruntime read it by themselves.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path

import numpy as np
import onnx
import torch
from onnx import TensorProto
from torch import Tensor, nn

from onward.trainer.config.sections.model import ModelConfig
from onward.trainer.config.sections.results import ExportConfig
from onward.trainer.errors import ExportRefused
from onward.trainer.export.measuring.evaluation_data import EvaluationData
from onward.trainer.export.measuring.fixed_noise import noise_inside_bodies
from onward.trainer.export.measuring.onnx_runner import OnnxRunner
from onward.trainer.export.model_file import ModelFile
from onward.trainer.onnx_graph.attribute_weights import held_attributes
from onward.trainer.onnx_graph.files.external_ranges import array_of, is_external
from onward.trainer.onnx_graph.files.index import locations
from onward.trainer.onnx_graph.initializers import stored_tensors
from onward.trainer.onnx_graph.inner_tensors import all_stored_protos
from onward.trainer.onnx_graph.surgery.surgery import extract_subgraph, trains_subgraph
from onward.trainer.onnx_import.quantization.quantized_weights import QuantizedWeight, integer_names, quantized_weights

log = logging.getLogger(__name__)

PARITY_BATCHES = 4
"""Evaluation batches on which onnxruntime and the trained module are compared: an error of the export shows in each."""
ROUNDED: dict[int, torch.dtype] = {TensorProto.FLOAT16: torch.float16, TensorProto.BFLOAT16: torch.bfloat16}
"""Stored types that fp32 weights are rounded to."""
MODEL_FIELDS = {"opset_import": "opsets", "metadata_props": "metadata entries", "functions": "functions"}
GRAPH_FIELDS = {name: f"{name}s" for name in ("input", "output", "node", "initializer")}
"""Fields whose entries are compared one by one, and what messages call them."""


@dataclass(frozen=True)
class Expected:
    """What a written file must be."""

    original: ModelFile
    """The file that came in, by path; its graph after surgery and in inference form, which is the one written."""
    weights: Mapping[str, Tensor]
    """The trained tensors by initializer name; all others are those of the original."""
    module: nn.Module
    """The module that was trained, with its weights rounded as the file stores them."""
    config: ModelConfig


def verify(written: ModelFile, expected: Expected, *, data: EvaluationData, config: ExportConfig) -> OnnxRunner:
    """Check structure, weights and results of a written file; return the runner that compared its results.

    Raises ExportRefused with a sentence for every check that failed.
    """
    problems = [*structure_problems(written, expected), *weight_problems(written, expected.weights)]
    trained_part: ModelFile | onnx.ModelProto = written
    if trains_subgraph(expected.original.proto, expected.config):
        # the module computes a part of the graph, so that part is compared; the whole file must load, too
        OnnxRunner(written, replace(data, file_rows=None))
        # cut out of the written file, so that what is compared is what was written
        trained_part = extract_subgraph(written.proto, expected.config)
        if locations(trained_part):
            # onnxruntime finds external data only beside a file; the name differs from that of the file itself
            path = written.path.with_name(f"{written.path.stem}.part.onnx")
            path.write_bytes(trained_part.SerializeToString())
            trained_part = ModelFile(path, trained_part)
    runner = OnnxRunner(trained_part, data)
    different = runner.compare(expected.module, batches=PARITY_BATCHES, tolerance=config.tolerance)
    part = written.proto if isinstance(trained_part, ModelFile) else trained_part
    # else the user would look for a numerical error, where no two runs of the file agree
    if different:
        problems += [*different, *noise_inside_bodies(part)]
    if problems:
        raise ExportRefused(problems)
    return runner


# -- structure


def structure_problems(written: ModelFile, expected: Expected) -> list[str]:
    """Run onnx.checker with shape inference, and compare everything but the trained weights with the original."""
    # by path, because the checker reads external data relative to the file
    complaint = _checker_complaint(written.path)
    problems = [f"onnx.checker: {complaint}"] if complaint else []
    if complaint and _checker_complaint(expected.original.path):
        log.warning("onnx.checker also refuses the original file, so this is not a fault of the export: %s", complaint)
        problems = []
    before, after = (_fields(model, expected.weights) for model in (expected.original.proto, written.proto))
    for what, fields in before.items():
        if number := sum(a != b for a, b in zip_longest(fields, after[what])):
            problems.append(f"{number} of the original's {len(fields)} {what} are not the same in the exported file")
    external = [name for name, tensor in all_stored_protos(written.proto).items() if is_external(tensor)]
    frozen = [name for name in external if name not in expected.weights]
    problems += [
        f"initializer {name!r} was not trained, but differs from the original in its external data file"
        for name in changed_tensors(written, expected.original, frozen)
    ]
    return problems


def changed_tensors(written: ModelFile, original: ModelFile, names: Iterable[str]) -> list[str]:
    """Return the names of the stored tensors whose bytes differ between two files."""
    before, after = (all_stored_protos(file.proto) for file in (original, written))

    def content(file: ModelFile, tensor: TensorProto) -> bytes:
        return array_of(tensor, file.path.parent).tobytes()

    return [name for name in names if content(original, before[name]) != content(written, after[name])]


def _fields(model: onnx.ModelProto, weights: Collection[str]) -> dict[str, list[bytes]]:
    """Serialize all that training does not change, by kind: attributes and frozen tensors included."""
    rest = deepcopy(model)
    for name, _, attribute in held_attributes(rest.graph):
        if name in weights:
            # zeros and not nothing: the number of values is structure, and is compared
            attribute.floats[:] = [0.0] * len(attribute.floats)
            attribute.ClearField("f")
    for name, tensor in all_stored_protos(rest).items():
        if name in weights:
            # the fields that hold values of trained types; names, shapes and types stay and are compared
            for field in ("raw_data", "float_data", "int32_data", "double_data"):
                tensor.ClearField(field)
    found = {}
    for holder, fields in ((rest, MODEL_FIELDS), (rest.graph, GRAPH_FIELDS)):
        for field, what in fields.items():
            found[what] = [entry.SerializeToString(deterministic=True) for entry in getattr(holder, field)]
            # what is left, such as names and versions, is compared as one field
            holder.ClearField(field)
    return found | {"further fields": [rest.SerializeToString(deterministic=True)]}


def _checker_complaint(file: Path) -> str:
    try:
        onnx.checker.check_model(str(file), full_check=True)
    except Exception as error:  # errors of the checker and of shape inference have no common base class
        return str(error)
    return ""


# -- weights


def weight_problems(written: ModelFile, weights: Mapping[str, Tensor]) -> list[str]:
    """Return one sentence for each stored tensor that is not the checkpoint's, in the type the file stores."""
    problems = []
    stored = all_stored_protos(written.proto)
    # a weight that is stored as integers agrees up to half a step, the others exactly
    integers = _dequantized(written, weights)
    for name, weight in weights.items():
        if name in integers:
            problems += _rounding_problems(name, weight, integers[name])
            continue
        # a weight that the surgery should not have removed
        if name not in stored:
            problems.append(f"tensor {name!r} is not in the exported file")
            continue
        # compared in fp64, which represents every value of the smaller types exactly
        expected = weight.to(ROUNDED.get(stored[name].data_type, weight.dtype)).double().numpy()
        found = array_of(stored[name], written.path.parent).astype(np.float64)
        if not np.array_equal(expected, found, equal_nan=True):
            problems.append(
                f"initializer {name!r} differs from the checkpoint by up to {np.abs(expected - found).max():.3g}; "
                f"its greatest value is {np.abs(expected).max():.3g}"
            )
    return problems


def _dequantized(written: ModelFile, weights: Mapping[str, Tensor]) -> dict[str, QuantizedWeight]:
    """Return those of the weights that the file stores as integers."""
    graph = written.proto.graph
    if not (integers := integer_names(graph) & weights.keys()):
        return {}
    found = quantized_weights(graph, stored_tensors(graph, written.path.parent))
    return {name: found[name] for name in integers if name in found}


def _rounding_problems(name: str, weight: Tensor, found: QuantizedWeight) -> list[str]:
    """Return a sentence if the integers of the file are not the nearest to a weight; beyond their range, the last."""
    steps = found.steps_from(weight)
    # half a step is rounding; the rest that of fp32, which int32 exceeds
    if bool((steps <= 0.5 + 1e-5 * found.integers.double().abs()).all()):
        return []
    return [f"initializer {name!r} is up to {float(steps.max()):.3g} scales from the checkpoint; rounding is 0.5"]
