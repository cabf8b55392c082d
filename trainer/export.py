"""The way out: trained weights in the original ONNX file, which exists only once it has passed every check.

Names, opset, inputs, outputs, dynamic axes and metadata stay. What only training needs is gone: Dropout
nodes (the identity at inference), and in BatchNormalization the update of the running statistics. The file
is checked as such, weight by weight against the checkpoint, and under onnxruntime against the trained
module. onnxruntime can take its process down, so this has one of its own: `python -m trainer export`.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

import numpy as np
import onnx
import torch
from onnx import TensorProto, numpy_helper
from torch import Tensor, nn

from trainer import graph
from trainer.config import ExportConfig, ModelConfig
from trainer.errors import ExportRefused, OnwardError, Refused
from trainer.judge import Evaluator, Judge
from trainer.ops.stored import slots
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
from trainer.surgery import is_cut
from trainer.trainee import finished, judged, open_trainee

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Checkpoint:
    """What is written back."""

    step: int
    weights: Mapping[str, Tensor]
    """Initializer name -> tensor, running statistics included."""


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
    trainee = open_trainee(config)
    original, module = trainee.model, trainee.module
    graph.load_weights(module, checkpoint.weights)
    done = finished(trainee).module
    trained = graph.to_onnx(done, original)
    named = tuple(filter(None, (*config.model.start, config.model.output)))
    removed, _ = strip_training(trained, keep=named), strip_training(original, keep=named)
    log.info("step %d; removed from the graph: %s", checkpoint.step, dict(removed) or "nothing")

    target = folder / source.name
    part = config.model if is_cut(original, config.model) else None
    before = Judge(judged(original, config.model), evaluator).evaluate()
    with durable_file(target) as file:
        file.write_bytes(_content(trained))
        weights = {name: tensor.detach() for name, tensor in graph.stored_weights(done).items()}
        judge = prove(file, original, module, weights, evaluator=evaluator, config=config.export, part=part)
        after = judge.evaluate()
    write_durably(example_in(folder), judge.example())
    exported = ExportedModel(
        path=target,
        sha256=sha256(target),
        step=checkpoint.step,
        parity=judge.parity,
        before=before,
        after=after,
        changed=sum(a != b for a, b in zip(original.graph.initializer, trained.graph.initializer, strict=True)),
        removed=dict(removed),
        judged_by=judge.by,
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


# -- the gate


def prove(
    file: Path,
    original: onnx.ModelProto,
    module: nn.Module,
    weights: Mapping[str, Tensor],
    *,
    evaluator: Evaluator,
    config: ExportConfig,
    part: ModelConfig | None = None,
) -> Judge:
    """Every check of a written file; returns who judged it. Raises ExportRefused with all that failed.

    `original`: what the file was made from, in its inference form; nothing but the tensors named in `weights`
    may differ from it. `module`: what was trained, with those weights. `part`: the settings that cut it out of the
    file's graph, if they did.
    """
    problems = [*file_problems(file, original, weights), *unwritten(file, weights)]
    judge = Judge(judged(onnx.load_model(file), part) if part else file, evaluator)
    problems += judge.compare(module.eval(), batches=config.parity_batches, tolerance=config.tolerance)
    if problems:
        raise ExportRefused(problems)
    return judge


def file_problems(file: Path, original: onnx.ModelProto, weights: Collection[str]) -> list[str]:
    """What onnx.checker says (shapes and types included), and what but the weights is not as in the original."""
    problems = [f"onnx.checker: {complaint}"] if (complaint := _complaint(str(file))) else []
    if complaint and _complaint(original):
        log.warning("onnx.checker complains of the file that came in, too: %s", complaint)
        problems = []
    was, now = (_parts(model, weights) for model in (original, onnx.load_model(str(file), load_external_data=False)))
    for what, parts in was.items():
        if number := sum(a != b for a, b in zip_longest(parts, now[what])):
            problems.append(f"{number} of the original's {len(parts)} {what} are not the same in the exported file")
    return problems


def _parts(model: onnx.ModelProto, weights: Collection[str]) -> dict[str, list[bytes]]:
    """All that training does not change, kind by kind: attributes, frozen tensors and all."""
    rest = onnx.ModelProto()
    rest.CopyFrom(model)
    for name, tensor in slots(rest.graph):
        if name in weights:
            for field in ("raw_data", "float_data", "int32_data", "double_data"):
                tensor.ClearField(field)
    parts = {
        "opsets": rest.opset_import,
        "metadata entries": rest.metadata_props,
        "functions": rest.functions,
        "inputs": rest.graph.input,
        "outputs": rest.graph.output,
        "nodes": rest.graph.node,
        "initializers": rest.graph.initializer,
    }
    found = {what: [part.SerializeToString(deterministic=True) for part in parts[what]] for what in parts}
    for what in ("opset_import", "metadata_props", "functions"):
        rest.ClearField(what)
    for what in ("input", "output", "node", "initializer"):
        rest.graph.ClearField(what)
    return found | {"further fields": [rest.SerializeToString(deterministic=True)]}


def _complaint(model: onnx.ModelProto | str) -> str:
    """What onnx.checker says of a model or file, shapes and types included; "" if nothing."""
    try:
        onnx.checker.check_model(model, full_check=True)
    except Exception as error:  # the checker's, and shape inference's own: they share no base
        return str(error)
    return ""


ROUNDED: dict[int, torch.dtype] = {TensorProto.FLOAT16: torch.float16, TensorProto.BFLOAT16: torch.bfloat16}


def unwritten(file: Path, weights: Mapping[str, Tensor]) -> list[str]:
    """One sentence for each stored tensor that is not the checkpoint's, in the type the file stores it in."""
    problems = []
    stored = dict(slots(onnx.load_model(str(file), load_external_data=False).graph))
    for name, weight in weights.items():
        if name not in stored:
            problems.append(f"tensor {name!r} is not in the exported file")
            continue
        rounded = weight.to(ROUNDED.get(stored[name].data_type, weight.dtype))
        wanted = rounded.double().numpy()
        found = numpy_helper.to_array(stored[name], str(file.parent)).astype(np.float64)
        if not np.array_equal(wanted, found, equal_nan=True):
            problems.append(
                f"initializer {name!r} differs from the checkpoint by up to {np.abs(wanted - found).max():.3g}; "
                f"its greatest value is {np.abs(wanted).max():.3g}"
            )
    return problems
