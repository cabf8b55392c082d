"""export: a checkpoint becomes an ONNX file in a process of its own, and only a proven file gets into MLflow.

The exporting process (trainer/export/export.py) leaves the file, its record and an example, or why it refused. Whatever
happens to MLflow afterwards, the file stays; `onward resume` registers it later.
"""

from __future__ import annotations

import logging
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from prefect import task
from prefect.cache_policies import NO_CACHE

from onward.infra.tracking import ModelFile, Port, Tracker, TrackingError, TrackingUnavailable
from onward.trainer.config.run_config import RunConfig
from onward.trainer.config.sections import ExportConfig
from onward.trainer.data.signature import TensorInfo, model_digest, read_signature
from onward.trainer.diagnostics.config_check import in_the_way
from onward.trainer.errors import CheckpointError, ConfigError, ExportRefused, RuntimeUnavailable
from onward.trainer.run.directory import RunDir, example_in, read_config, refusal_in, variant_in
from onward.trainer.run.durable_files import durable_file
from onward.trainer.run.records import (
    CheckpointInfo,
    ExportedModel,
    Refusal,
    RunIdentity,
    TrainResult,
    Variant,
    own_error,
    read_record,
    write_record,
)

log = logging.getLogger(__name__)

PROCESS = ("onward.trainer",)
"""The module that exports and makes variants."""
PAUSES_S = (1.0, 3.0, 10.0)
"""Between two tries to reach MLflow."""
TAIL_LINES = 20


@task(name="export", task_run_name="export", cache_policy=NO_CACHE)
def export(run: RunDir, result: TrainResult, checkpoints: Sequence[CheckpointInfo]) -> ExportedModel:
    """Export the chosen checkpoint, register it, copy the file to `export.path` if set; leaves `export/model.json`.

    A file that was proven before is not proven again. Raises ExportRefused with every failed check, CheckpointError
    without a checkpoint, RuntimeUnavailable when MLflow stays away or the copy cannot be written, each tried
    whatever became of the other: the file is there then, whole.
    """
    config = read_config(run)
    chosen = choose(checkpoints, config.export.checkpoint)
    exported = _proven(run, chosen) or export_file(run, chosen.path)
    tags = {"step": str(exported.step), "checkpoint": chosen.path.name, "attempts": str(result.attempts)}
    problems: list[str] = []
    try:
        exported = register(run, exported, tags=tags)
    except RuntimeUnavailable as error:
        problems += error.problems
    try:
        if config.export.path:
            copy_to(Path(config.export.path), exported, source=config.model.path)
    except RuntimeUnavailable as error:
        problems += error.problems
    if problems:
        raise RuntimeUnavailable(problems)
    return exported


def choose(checkpoints: Sequence[CheckpointInfo], which: str) -> CheckpointInfo:
    """The best checkpoint, or the last one: also when none was evaluated. Raises CheckpointError if there is none."""
    if not checkpoints:
        raise CheckpointError("there is no checkpoint to export; train first")
    best = [info for info in checkpoints if info.best and which == "best"]
    return best[0] if best else max(checkpoints, key=lambda info: info.step)


def export_file(
    run: RunDir, checkpoint: Path, out: Path | None = None, *, extras: ExportConfig | None = None
) -> ExportedModel:
    """Export one checkpoint of a run to `out`, or else into the run directory; needs neither Prefect nor MLflow.

    `extras`: says which variants, and whether the training files too, if not the run's own config. Raises
    ConfigError if `out` cannot be written or is not to be, ExportRefused with every failed check (and nothing is
    written), or what else stopped the exporting process.
    """
    extras = extras or read_config(run).export
    source = read_config(run).model.path
    if out and (problems := in_the_way(out.absolute(), source, extras.variants)):
        raise ConfigError(problems)  # before the work, not after it
    if out is None:
        return _run_process(run, checkpoint, run.export, extras)
    with tempfile.TemporaryDirectory(prefix="onward-export-") as folder:
        exported = _run_process(run, checkpoint, Path(folder), extras)
        return copy_to(out.absolute(), exported, source=source)


def register(run: RunDir, exported: ExportedModel, *, tags: dict[str, str]) -> ExportedModel:
    """Register an exported file in MLflow with signature, example and alias; the record says as what.

    Raises RuntimeUnavailable when MLflow does not answer after some patience.
    """
    config, identity = read_config(run), read_record(run.identity, RunIdentity)
    signature = read_signature(exported.path)
    with np.load(example_in(run.export), allow_pickle=False) as example:
        file = ModelFile(
            path=exported.path,
            sha256=exported.sha256,
            beside=exported.beside,
            inputs=tuple(map(_port, signature.inputs)),
            outputs=tuple(map(_port, signature.outputs)),
            step=exported.step,
            example=dict(example) if set(example) == {info.name for info in signature.inputs} else {},  # a part's
            metrics={**exported.after, "parity": exported.parity},
            tags=tags,
        )
    name = config.export.register_as or config.name
    version = _patiently(Tracker(identity.tracking_uri, identity.mlflow_run_id), file, name, config)
    log.info("registered %s as version %s of %s", exported.path, version, name)
    registered = exported.model_copy(update={"registered_as": name, "version": version})
    write_record(run.exported, registered)
    return registered


def _patiently(tracker: Tracker, file: ModelFile, name: str, config: RunConfig) -> str:
    for pause_s in (*PAUSES_S, None):
        try:
            return tracker.register_model(file, name=name, alias=config.export.alias)
        except TrackingUnavailable as error:
            if pause_s is None:
                raise RuntimeUnavailable(
                    f"{error}; tried {len(PAUSES_S) + 1} times. The exported file is proven and whole at {file.path}: "
                    f"`onward resume` registers it once MLflow is back"
                ) from error
            log.warning("%s; trying again in %g s", error, pause_s)
            time.sleep(pause_s)
        except TrackingError as error:
            raise RuntimeUnavailable(f"{error}. The exported file is proven and whole at {file.path}") from error
    raise AssertionError("the last try returns or raises")


def _port(info: TensorInfo) -> Port:
    dtype = {"bfloat16": "float32", "string": "str"}.get(info.dtype, info.dtype)  # as numpy knows them
    return Port(info.name, dtype, tuple(-1 if dim is None else dim for dim in info.shape or (None,)))


def _proven(run: RunDir, chosen: CheckpointInfo) -> ExportedModel | None:
    """The exported file of this checkpoint if it is there and whole: a repeated task only registers it."""
    if not run.exported.exists():
        return None
    known = read_record(run.exported, ExportedModel)
    whole = known.path.exists() and example_in(run.export).exists() and model_digest(known.path) == known.sha256
    return known if whole and known.step == chosen.step else None


def copy_to(target: Path, exported: ExportedModel, *, source: Path) -> ExportedModel:
    """Copy an exported file, and all that was written with it, to `target` and beside it; says where it is then.

    `source`: the file that came in; neither it nor any weights it does not own are written over. Raises
    RuntimeUnavailable.
    """
    folder = target.parent
    made = [variant for variant in exported.variants if variant.path]
    if problems := in_the_way(target, source, [variant.kind for variant in made]):
        raise RuntimeUnavailable(f"cannot write the exported file to {target}: {why}" for why in problems)
    places = {variant.kind: target.with_name(f"{target.stem}.{variant.kind}.onnx") for variant in made}
    copies = {file: folder / file.relative_to(exported.path.parent) for file in exported.beside}
    copies |= {variant.path: places[variant.kind] for variant in made if variant.path}
    copies |= {file: target.with_name(f"{target.stem}.training") / file.name for file in exported.training}
    for file, place in {**copies, exported.path: target}.items():  # the file itself last
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            with durable_file(place) as partial:
                shutil.copyfile(file, partial)
        except OSError as error:
            raise RuntimeUnavailable(f"cannot write the exported file to {place}: {error}") from error
    moved = {
        "path": target,
        "beside": tuple(copies[file] for file in exported.beside),
        "training": tuple(copies[file] for file in exported.training),
        "variants": tuple(
            variant.model_copy(update={"path": places.get(variant.kind)}) for variant in exported.variants
        ),
    }
    return exported.model_copy(update=moved)


# -- the exporting process


def _run_process(run: RunDir, checkpoint: Path, folder: Path, extras: ExportConfig) -> ExportedModel:
    """Export in a process of its own, then make each variant in one; returns the record or raises the error."""
    folder.mkdir(parents=True, exist_ok=True)
    record, refusal = folder / "model.json", refusal_in(folder)
    for former in (record, refusal, *folder.glob(".*.partial")):  # a killed process leaves those
        former.unlink(missing_ok=True)
    ending = _in_process("export", run, str(checkpoint.absolute()), folder)
    if refusal.exists():
        raise own_error(read_record(refusal, Refusal))
    if ending or not record.exists():
        raise ExportRefused(f"the exporting process {ending or 'left no record'}")
    exported = read_record(record, ExportedModel)
    variants = tuple(_variant(kind, run, folder) for kind in dict.fromkeys(extras.variants))
    exported = exported.model_copy(update={"variants": variants})
    if extras.training:
        exported = exported.model_copy(update=_training_files(run, checkpoint, folder))
    write_record(record, exported)
    return exported


def _training_files(run: RunDir, checkpoint: Path, folder: Path) -> dict[str, Any]:
    """What trains the model on without torch, or why there is none; the exported file stands either way."""
    place = folder / "training"
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir()
    ending = _in_process("training", run, str(checkpoint.absolute()), place)
    if not ending:
        return {"training": tuple(sorted(file for file in place.iterdir() if file.suffix != ".log"))}
    known = refusal_in(place)
    refused = "; ".join(read_record(known, Refusal).problems) if known.exists() else f"its process {ending}"
    log.warning("the files that train it without torch are refused: %s", refused)
    return {"training_refused": refused}


def _variant(kind: str, run: RunDir, folder: Path) -> Variant:
    """One variant; whatever becomes of it, the exported file stands."""
    record = variant_in(folder, kind)
    record.unlink(missing_ok=True)
    ending = _in_process("variant", run, kind, folder)
    if ending or not record.exists():
        refused = f"its process {ending or 'left no record'}"
        made = Variant(kind=kind, path=None, bytes=0, size_ratio=0, latency_ratio=0, metrics={}, refused=refused)
        write_record(record, made)
    made = read_record(record, Variant)
    if made.refused:
        log.warning("%s: refused: %s", kind, made.refused)
    return made


def _in_process(command: str, run: RunDir, what: str, folder: Path) -> str:
    """Run one command of the trainer to its end; "" if it went well, else how it ended, with its last lines."""
    output = folder / f"{command}.log"
    arguments = [str(run.root.absolute()), what, "--folder", str(folder.absolute())]
    with output.open("wb") as log_file:
        ended = subprocess.run(
            [sys.executable, "-m", *PROCESS, command, *arguments],
            cwd=folder,  # a directory of Onward's own: `-m` looks for modules in the working directory first
            stdin=subprocess.DEVNULL,
            stdout=log_file,
            stderr=subprocess.STDOUT,
            check=False,
        )
    if not ended.returncode:
        return ""
    lines = output.read_text(errors="replace").splitlines()[-TAIL_LINES:]
    how = f"signal {-ended.returncode}" if ended.returncode < 0 else f"status {ended.returncode}"
    return "\n  | ".join([f"ended with {how}, without a result. Its last lines:", *lines])
