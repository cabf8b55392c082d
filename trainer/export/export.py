"""The way out: trained weights in the original ONNX file, which exists only once it has passed every check.

Names, opset, inputs, outputs, dynamic axes and metadata stay. What only training needs is gone: Dropout
nodes and stochastic depth (the identity at inference), and in BatchNormalization the update of the running
statistics. The file is checked as such, weight by weight against the checkpoint, and under onnxruntime against
the trained module. onnxruntime can take its process down, so this has one of its own:
`python -m onward.trainer export`.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import shutil
import sys
import tempfile
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

import numpy as np
import onnx
import torch
from onnx import TensorProto, numpy_helper
from torch import Tensor, nn

from onward.trainer.config.sections import ExportConfig, ModelConfig
from onward.trainer.data.signature import model_digest
from onward.trainer.errors import ExportRefused, OnwardError, Refused, RuntimeUnavailable
from onward.trainer.export.verification import Evaluator, Judge
from onward.trainer.model.trainable import finished, judged, open_trainee
from onward.trainer.onnx_graph.external_data import is_external
from onward.trainer.onnx_graph.index import locations
from onward.trainer.onnx_graph.initializers import stored_protos
from onward.trainer.onnx_graph.stochastic_depth import random_nodes
from onward.trainer.onnx_graph.strip_training import strip_training
from onward.trainer.onnx_graph.surgery import trains_subgraph
from onward.trainer.onnx_import.imported_graph import ImportedGraph, load_weights, named_weights, stored_weights
from onward.trainer.onnx_import.write_back import write_model
from onward.trainer.run.directory import RunDir, example_in, read_config, refusal_in
from onward.trainer.run.durable_files import fsync, write_durably
from onward.trainer.run.records import ExportedModel, Refusal, RunIdentity, read_record, write_record

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Checkpoint:
    """What is written back."""

    step: int
    weights: Mapping[str, Tensor]
    """Initializer name -> tensor, running statistics included."""


@contextlib.contextmanager
def refusals(folder: Path) -> Iterator[None]:
    """Leave an error of Onward's own in `folder` as data (Refusal) and end the process with its exit code.

    A disk that is full is one, too.
    """
    try:
        try:
            yield
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise RuntimeUnavailable(
                f"no room to write the exported file in {folder}: {error.strerror}; make room and export again"
            ) from error
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
    original = trainee.model
    kept = tuple(filter(None, (*config.model.start, config.model.output)))
    removed = strip_training(original, keep=kept, base=source.parent)
    log.info("step %d; removed from the graph: %s", checkpoint.step, dict(removed) or "nothing")
    with _stage(folder) as stage:
        before = Judge(_beside_its_weights(original, source, stage / "before", config.model), evaluator).evaluate()
        load_weights(trainee.module, checkpoint.weights)
        done = finished(trainee).module
        file, *beside = write_model(done, original, source, stage / source.name)
        weights = {name: tensor.detach() for name, tensor in stored_weights(done).items()}
        module = _as_stored(trainee.module, done, original)
        expected = Expected(source, original, weights, module.eval(), config.model)
        judge = prove(file, expected, evaluator=evaluator, config=config.export)
        after, changed = judge.evaluate(), len(_differing(file, expected, expected.weights))
        files = [_moved(path, stage, folder) for path in (*beside, file)]  # the model last: it names the others
    write_durably(example_in(folder), judge.example())
    exported = ExportedModel(
        path=files[-1],
        sha256=model_digest(files[-1]),
        beside=tuple(files[:-1]),
        step=checkpoint.step,
        parity=judge.parity,
        before=before,
        after=after,
        changed=changed,
        removed=dict(removed),
        judged_by=judge.by,
    )
    write_record(folder / "model.json", exported)
    return exported


def export_training(run: RunDir, checkpoint: Checkpoint, *, folder: Path) -> None:
    """Write what trains the model on without torch into `folder`: the graph in its training form, these weights.

    Raises UnsupportedModel or ExportRefused; nothing is written then.
    """
    from onward.trainer.export.training.files import write_artifacts

    config = read_config(run)
    source = _unchanged(config.model.path, read_record(run.identity, RunIdentity))
    trainee = open_trainee(config)
    load_weights(trainee.module, checkpoint.weights)
    done = finished(trainee)
    folder.mkdir(parents=True, exist_ok=True)
    with _stage(folder) as stage:
        file, *_ = write_model(done.module, done.model, source, stage / source.name)
        part = judged(onnx.load_model(str(file), load_external_data=False), config.model)
        write_artifacts(folder, part, config, base=stage)


@contextlib.contextmanager
def _stage(folder: Path) -> Iterator[Path]:
    """A directory beside the files to be, for those that are not proven yet; gone afterwards.

    So are those of processes that were killed: one process at a time exports into a directory.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for left in folder.glob(".proving-*"):
        shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".proving-") as stage:
        yield Path(stage)


def _moved(path: Path, stage: Path, folder: Path) -> Path:
    """The proven file in its place: a model names the files beside it by their place relative to its own."""
    place = folder / path.relative_to(stage)
    place.parent.mkdir(parents=True, exist_ok=True)
    path.replace(place)
    fsync(place.parent)
    return place


def _as_stored(trained: ImportedGraph, done: ImportedGraph, model: onnx.ModelProto) -> ImportedGraph:
    """What was trained, its weights rounded in place as a file in half precision rounds them.

    Adapters cannot be rounded as their sum with the weight is: of such a file, what is written is the measure.
    """
    halves = {
        name: ROUNDED[tensor.data_type] for name, tensor in stored_protos(model.graph) if tensor.data_type in ROUNDED
    }
    module = done if halves else trained
    with torch.no_grad():
        for name, weight in named_weights(module).items():
            weight.copy_(weight.to(halves.get(name, weight.dtype)))
    return module


def _beside_its_weights(
    model: onnx.ModelProto, source: Path, stage: Path, config: ModelConfig
) -> Path | onnx.ModelProto:
    """What of a model is judged: the part that is trained, as a file if its weights are in others."""
    part = judged(model, config)
    if not (names := locations(part)):
        return part
    for name in names:
        (stage / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source.parent / name, stage / name)
    (stage / "part.onnx").write_bytes(part.SerializeToString())
    return stage / "part.onnx"


def _unchanged(source: Path, identity: RunIdentity) -> Path:
    """The file the run began with. Raises ExportRefused when it is not there or another one is."""
    found = model_digest(source) if source.is_file() else "gone"
    if found != identity.model_sha256:
        raise ExportRefused(
            f"{source} changed since the run began (SHA-256 {identity.model_sha256[:12]}, now {found[:12]}); "
            "put the original back: its graph is needed to write the weights into"
        )
    return source


# -- the gate


@dataclass(frozen=True)
class Expected:
    """What a written file must be."""

    source: Path
    """The file that came in."""
    model: onnx.ModelProto
    """What goes out, but for the weights: the graph that came in after surgery, in its inference form."""
    weights: Mapping[str, Tensor]
    """The trained tensors, by name; the others are those that came in."""
    module: nn.Module
    """What was trained, with these weights as the file rounds them: adapters, cut, fused calls and all."""
    config: ModelConfig


def prove(file: Path, expected: Expected, *, evaluator: Evaluator, config: ExportConfig) -> Judge:
    """Every check of a written file; returns who judged it. Raises ExportRefused with all that failed."""
    problems = [*file_problems(file, expected), *unwritten(file, expected.weights)]
    subject: Path | onnx.ModelProto = file
    written = onnx.load_model(str(file), load_external_data=False)
    if trains_subgraph(expected.model, expected.config):
        subject = judged(written, expected.config)
        Judge(file, evaluator)  # the whole must load, too, whatever part of it was trained
        if locations(subject):
            beside = file.with_name(f"{file.stem}.part.onnx")  # never the file itself
            beside.write_bytes(subject.SerializeToString())
            subject = beside
    judge = Judge(subject, evaluator)
    different = judge.compare(expected.module, batches=config.parity_batches, tolerance=config.tolerance)
    if different and (names := random_nodes(subject if isinstance(subject, onnx.ModelProto) else written)):
        different.append(
            f"the exported file still draws random numbers ({', '.join(names[:5])}{', ...' if names[5:] else ''}), so "
            "no two runs of it agree; export the model with module.eval()"
        )
    if problems := [*problems, *different]:
        raise ExportRefused(problems)
    return judge


def file_problems(file: Path, expected: Expected) -> list[str]:
    """What onnx.checker says (shapes and types included), and what but the weights is not as in the original."""
    problems = [f"onnx.checker: {complaint}"] if (complaint := _complaint(file)) else []
    if complaint and _complaint(expected.source):
        log.warning("onnx.checker complains of the file that came in, too: %s", complaint)
        problems = []
    written = onnx.load_model(str(file), load_external_data=False)
    was, now = (_parts(model, expected.weights) for model in (expected.model, written))
    for what, parts in was.items():
        if number := sum(a != b for a, b in zip_longest(parts, now[what])):
            problems.append(f"{number} of the original's {len(parts)} {what} are not the same in the exported file")
    frozen = [
        name for name, tensor in stored_protos(written.graph) if is_external(tensor) and name not in expected.weights
    ]
    problems += [
        f"initializer {name!r} was not trained, but is not the original's in the file it is kept in"
        for name in _differing(file, expected, frozen)
    ]
    return problems


def _differing(file: Path, expected: Expected, names: Iterable[str]) -> list[str]:
    """Those of the stored tensors whose bytes are not the ones that came in."""
    was = dict(stored_protos(expected.model.graph)), str(expected.source.parent)
    now = dict(stored_protos(onnx.load_model(str(file), load_external_data=False).graph)), str(file.parent)

    def content(stored: tuple[dict[str, TensorProto], str], name: str) -> bytes:
        return numpy_helper.to_array(stored[0][name], stored[1]).tobytes()

    return [name for name in names if content(was, name) != content(now, name)]


def _parts(model: onnx.ModelProto, weights: Collection[str]) -> dict[str, list[bytes]]:
    """All that training does not change, kind by kind: attributes, frozen tensors and all."""
    rest = onnx.ModelProto()
    rest.CopyFrom(model)
    for name, tensor in stored_protos(rest.graph):
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


def _complaint(file: Path) -> str:
    """What onnx.checker says of a file, shapes and types included; "" if nothing."""
    try:
        onnx.checker.check_model(str(file), full_check=True)
    except Exception as error:  # the checker's, and shape inference's own: they share no base
        return str(error)
    return ""


ROUNDED: dict[int, torch.dtype] = {TensorProto.FLOAT16: torch.float16, TensorProto.BFLOAT16: torch.bfloat16}


def unwritten(file: Path, weights: Mapping[str, Tensor]) -> list[str]:
    """One sentence for each stored tensor that is not the checkpoint's, in the type the file stores it in."""
    problems = []
    stored = dict(stored_protos(onnx.load_model(str(file), load_external_data=False).graph))
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
