"""export: write a checkpoint's weights into an ONNX file in a process of its own, and register the verified file.

    checkpoint -> process `export` -> export/model.onnx, model.json, example.npz, preprocessing.json
                  (or refused.json), and README.md, the model card
                  process `variant`, one per other variant -> variant-KIND.json and its file
                  process `training`, of the variant `training` -> training/
                  -> MLflow's model registry, and a copy at export.path
                  promotion.py: whether export.alias moves to the new version

The exported file stays whatever happens to MLflow afterwards; `onward resume` registers it later.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from prefect import task
from prefect.cache_policies import NO_CACHE

from onward.infra.job.temporary_folders import owned_folder
from onward.infra.mlflow.mlflow_store import TrackingError, registering_prepared
from onward.infra.mlflow.model_package import ModelFile, Port
from onward.infra.mlflow.tracking import Tracker
from onward.tasks.checks.subprocesses import run_module
from onward.tasks.promotion.promotion import promote
from onward.tasks.shown.metric_points import only_of_file, points_of_file, points_of_step
from onward.tasks.shown.mlflow_outages import Outage, tries_within
from onward.tasks.shown.mlflow_tags import result_tags, version_tags
from onward.tasks.shown.model_card import CARD, write_card
from onward.tasks.shown.prefect_results import show_result
from onward.tasks.shown.raw_prediction import raw_prediction_of
from onward.tasks.shown.task_logger import IN_RESULT
from onward.trainer.checkpoint.retention import describe_exported
from onward.trainer.config.sections.model import ModelConfig
from onward.trainer.config.sections.results import ExportConfig
from onward.trainer.config.urls import redacted, url_of
from onward.trainer.data.reading.fetching import restore_copies
from onward.trainer.data.schema.signature import TensorInfo, model_digest, read_signature
from onward.trainer.diagnostics.export_conflicts import export_conflicts, files_in_the_way
from onward.trainer.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    ExportRefused,
    RuntimeUnavailable,
    StorageUnavailable,
)
from onward.trainer.onnx_graph.files.whole_models import FOLDER_PREFIX, copies_under, data_file_of, stale_data
from onward.trainer.run.directory import RunDir, read_config
from onward.trainer.run.durable_files import durable_file, remove_partials
from onward.trainer.run.export_folder import changes_in, example_in, samples_in, variant_in
from onward.trainer.run.history import RunHistory
from onward.trainer.run.outcomes.refusals import refusal_in, refusal_of
from onward.trainer.run.outcomes.storage import says_storage, storage_error
from onward.trainer.run.recorded.exported_files import not_ours, remember, variant_beside
from onward.trainer.run.records import (
    CheckpointInfo,
    ExportedModel,
    RunIdentity,
    TrainResult,
    Variant,
    read_record,
    write_record,
)
from onward.trainer.run.remote.stores import upload

log = logging.getLogger(__name__)

PROCESS = ("onward.trainer",)
"""The module that exports and makes variants."""
PATIENCE_S = 15.0
"""Longest time for which an outage of MLflow is waited out."""


@task(name="export", task_run_name="export", cache_policy=NO_CACHE)
def export(run: RunDir, result: TrainResult, checkpoints: Sequence[CheckpointInfo]) -> ExportedModel:
    """Export the selected checkpoint, register it, copy it to `export.path` if set; write `export/model.json`.

    A file that was verified before is not verified again. Raises ExportRefused with all failed checks, CheckpointError
    without a checkpoint, RuntimeUnavailable when MLflow cannot be reached or the copy cannot be written. Both are tried
    even if one of them fails, and the exported file is in the run directory then.
    """
    config = read_config(run)
    chosen = choose(checkpoints, config.export.checkpoint)
    log.info("exporting %s", describe_exported(chosen.step, checkpoints, result, config.checkpoint))
    # the imports for the registration take about a second, which passes while the process exports
    with registering_prepared(read_record(run.identity, RunIdentity).tracking_uri):
        exported = _verified_before(run, chosen) or export_file(run, chosen.path)
    tags = {"step": str(exported.step), "checkpoint": chosen.path.name, "attempts": str(result.attempts)}
    # Registry and copy are independent: an error of one must not prevent the other.
    failed = []
    try:
        exported = promote(run, register(run, exported, tags=tags))
    except RuntimeUnavailable as error:
        failed.append(error)
    try:
        if config.export.path:
            local = read_config(run, "local")
            _deliver(local.export, local.model, exported)
    except RuntimeUnavailable as error:
        failed.append(error)
    show_result(run, exported, result)
    for each in failed:
        # a full disk is the reason behind the others, and its class decides about the ending of the run
        if isinstance(each, StorageUnavailable):
            raise each
    if failed:
        raise RuntimeUnavailable(problem for each in failed for problem in each.problems)
    return exported


def choose(checkpoints: Sequence[CheckpointInfo], which: str) -> CheckpointInfo:
    """Return the best checkpoint, or the last one, also when none was evaluated. Raises CheckpointError without one."""
    if not checkpoints:
        raise CheckpointError("there is no checkpoint to export; train first, with `onward run` or `onward resume`")
    if which == "best":
        for info in checkpoints:
            if info.best:
                return info
    return max(checkpoints, key=lambda info: info.step)


def export_file(
    run: RunDir, checkpoint: Path, out: Path | None = None, *, extras: ExportConfig | None = None
) -> ExportedModel:
    """Export one checkpoint of a run to `out`, by default into the run directory. Needs neither Prefect nor MLflow.

    `extras`: which variants and training files to write; default: those of the run's configuration. Raises ConfigError
    if `out` cannot or must not be written, ExportRefused with all failed checks (nothing is written then), or the
    exporting process's own error.
    """
    restore_copies(run)
    extras = extras or read_config(run).export
    source = read_config(run, "local").model.path
    if out and (problems := export_conflicts(out.absolute(), source, extras.kinds)):
        raise ConfigError(problems)  # before the export, which takes minutes for a large model
    if out and not extras.overwrite and (problems := files_in_the_way(out.absolute(), extras.kinds)):
        raise ConfigError(problems)
    if out is None:
        return _run_process(run, checkpoint, run.export, extras)
    # Exported in a temporary directory first, so that a refused export leaves an existing `out` unchanged.
    with owned_folder("onward-export-") as folder:
        exported = _run_process(run, checkpoint, folder, extras)
        return copy_to(out.absolute(), exported, source=source, overwrite=extras.overwrite)


def register(run: RunDir, exported: ExportedModel, *, tags: dict[str, str]) -> ExportedModel:
    """Register an exported file in MLflow with signature and example; return its record with name and version.

    Raises RuntimeUnavailable when MLflow refuses, or cannot be reached in several attempts.
    """
    config = read_config(run)
    identity = read_record(run.identity, RunIdentity)
    signature = read_signature(exported.path)
    average = config.exports_average
    # metrics that the run has sent already are named again by the same points, so that MLflow stores them once
    sent = points_of_file(points_of_step(RunHistory.of(run.events, series=()), exported.step), average=average)
    parity = {"exported/parity": exported.parity}
    cards = [exported.card] if exported.card else []
    documents = (*exported.preprocessing, *cards, *_optimized(exported))
    names = {info.name for info in signature.inputs}
    with np.load(example_in(run.export), allow_pickle=False) as example:
        file = ModelFile(
            path=exported.path,
            sha256=exported.sha256,
            beside=exported.beside,
            documents=documents,
            inputs=tuple(map(_port, signature.inputs)),
            outputs=tuple(map(_port, signature.outputs)),
            step=exported.step,
            # it is an example of the part of the graph that was trained, which may have other inputs than the file
            example=dict(example) if set(example) == names else {},
            metrics={**only_of_file(exported.after, sent, average=average), **exported.test, **parity},
            points=sent,
            tags=version_tags(run, exported) | tags,
            raw=raw_prediction_of(exported),
        )
    name = config.registered_name
    tracker = Tracker(identity.tracking_uri, identity.mlflow_run_id)
    version = _register_with_retries(tracker, file, name)
    is_chosen = name in (config.name, config.export.register_as)
    chosen = "" if is_chosen else ", the name of the model's file; export.register_as sets another"
    log.info("registered %s as version %s of %s%s", exported.path, version, name, chosen, extra=IN_RESULT)
    registered = exported.model_copy(update={"registered_as": name, "version": version})
    write_record(run.exported, registered)
    _show_result(run, registered, tracker)
    return registered


def _show_result(run: RunDir, exported: ExportedModel, tracker: Tracker) -> None:
    """Write the result to the page of the run in MLflow. An outage leaves the page as it is."""
    try:
        tracker.set_tags(result_tags(run, exported))
        for record in (run.exported, exported.path.with_name("preprocessing.json"), exported.path.with_name(CARD)):
            if record.exists():
                tracker.log_file(record, "export")
    except TrackingError as error:
        log.warning("the result is not on the run's page in MLflow: %s", error)


def _register_with_retries(tracker: Tracker, file: ModelFile, name: str) -> str:
    outage = Outage(log, begins="the exported file is registered when MLflow is back: %s")
    tries = 0
    for _ in tries_within(PATIENCE_S):
        if outage.is_waiting():
            continue
        tries += 1
        try:
            with outage.noticed():
                return tracker.register_model(file, name=name)
        except TrackingError as error:
            raise RuntimeUnavailable(f"{error}. The exported file is verified and complete at {file.path}") from error
        if says_storage(str(outage.error)):  # a full disk stays full
            break
    raise RuntimeUnavailable(
        f"{outage.error}; tried {tries} times. The exported file is verified and complete at {file.path}: "
        "`onward resume` registers it when MLflow is back"
    ) from outage.error


def _optimized(exported: ExportedModel) -> Iterator[Path]:
    """Yield the variant that runs faster with the same results, if it was made: it is registered with the file."""
    for variant in exported.variants:
        if variant.kind == "optimized" and variant.path:
            yield from filter(None, (variant.path, variant.data))


def _port(info: TensorInfo) -> Port:
    dtype = {"bfloat16": "float32", "string": "str"}.get(info.dtype, info.dtype)  # numpy's names
    # MLflow writes -1 for any length; a tensor of unknown rank, or of rank 0, gets one such axis
    shape = info.shape or (None,)
    return Port(info.name, dtype, tuple(-1 if dim is None else dim for dim in shape))


def _verified_before(run: RunDir, chosen: CheckpointInfo) -> ExportedModel | None:
    """Return the record of this checkpoint's exported file if it is complete: a repeated task only registers it."""
    if not run.exported.exists():
        return None
    known = read_record(run.exported, ExportedModel)
    # a killed export may have left some of its files, and a file that was edited is not the verified one
    complete = known.path.exists() and example_in(run.export).exists() and model_digest(known.path) == known.sha256
    return known if complete and known.step == chosen.step else None


def _deliver(export: ExportConfig, model: ModelConfig, exported: ExportedModel) -> None:
    """Copy the exported file to `export.path`. Raises RuntimeUnavailable when it cannot be written."""
    url = url_of(export.path)
    if not url:
        copy_to(Path(export.path), exported, source=model.path, overwrite=export.overwrite)
        return
    with owned_folder("onward-export-") as folder:
        # first a copy in a directory of this machine, with the names and the layout that the store is to have
        copied = copy_to(folder / url.rpartition("/")[2], exported, source=model.path, temporary=True)
        written = (path for path in folder.rglob("*") if path.is_file())
        files = sorted(file for file in written if file != copied.path)
        try:
            for file in (*files, copied.path):  # the model itself last: when it is there, all its files are
                upload(file, url.rpartition("/")[0] + "/" + file.relative_to(folder).as_posix())
        except DataError as error:
            raise RuntimeUnavailable(f"export.path: {problem}" for problem in error.problems) from error
    log.info("copied the exported file to %s", redacted(url))


def copy_to(
    target: Path, exported: ExportedModel, *, source: Path, overwrite: bool = False, temporary: bool = False
) -> ExportedModel:
    """Copy an exported file and the files written with it to `target` and beside it; return the record with new paths.

    `source`: the original model; neither it nor weight files of other models are overwritten. `overwrite`: whether
    other files are that no export has written. `temporary`: the copy is not to be found again by a later export. Raises
    RuntimeUnavailable when a file cannot or must not be written. A variant in two files whose copy is cut off may be
    absent then, but is never a model beside the data of another.
    """
    folder = target.parent
    written = [variant for variant in exported.variants if variant.path]
    # all targets are checked before the first byte is written
    if problems := export_conflicts(target, source, [variant.kind for variant in written]):
        raise RuntimeUnavailable(f"cannot write the exported file to {target}: {why}" for why in problems)
    # everything beside the file is named after it, so that several exported files can share a directory
    places = {variant.kind: variant_beside(target, variant.kind) for variant in written}
    copies = {file: folder / file.relative_to(exported.path.parent) for file in exported.beside}
    copies |= {file: target.with_name(f"{target.stem}.training") / file.name for file in exported.training}
    copies |= {file: target.with_name(f"{target.stem}.preprocessing") / file.name for file in exported.preprocessing}
    copies |= {exported.card: target.with_name(f"{target.stem}.{CARD}")} if exported.card else {}
    with owned_folder("onward-variants-") as renamed:
        copied_variants = dict[Path, Path]()
        for variant in written:
            assert variant.path is not None
            copied_variants |= copies_under(places[variant.kind], variant.path, variant.data, folder=renamed)
        all_copies = {**copied_variants, **copies}
        if not overwrite and (problems := files_in_the_way(target, others=all_copies.values())):
            raise RuntimeUnavailable(f"the exported file stays at {exported.path}: {why}" for why in problems)
        models = {data_file_of(places[variant.kind]): places[variant.kind] for variant in written if variant.data}
        # found now, while the former variants are there, and removed when nothing needs them
        former = [stale_data(places[each.kind], each.path) for each in written if each.path]
        stale = {path for path in former if path}
        # The model itself last: when it is there, all its files are.
        for file, place in {**all_copies, exported.path: target}.items():
            _copy(file, place, temporary=temporary, model=models.get(place))
    # data of variants that were replaced by one without: no model names it any more, so that a file that cannot be
    # removed takes space, and does no other harm
    for unused in stale.difference(all_copies.values()):
        with contextlib.suppress(OSError):
            if not not_ours([unused]):
                unused.unlink()

    def copied(files: Sequence[Path]) -> tuple[Path, ...]:
        return tuple(copies[file] for file in files)

    # a variant that was refused has no file, and keeps its reason
    variants = []
    for variant in exported.variants:
        data = copied_variants[variant.data] if variant.data else None
        variants.append(variant.model_copy(update={"path": places.get(variant.kind), "data": data}))
    moved = {
        "path": target,
        "beside": copied(exported.beside),
        "training": copied(exported.training),
        "preprocessing": copied(exported.preprocessing),
        "card": copies[exported.card] if exported.card else None,
        "variants": tuple(variants),
    }
    return exported.model_copy(update=moved)


def _copy(file: Path, place: Path, *, temporary: bool, model: Path | None) -> None:
    """Copy a file to `place`. model: the one whose data file that is, None if it is no data file."""
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        if not temporary:
            # before the copy: a copy that is cut off must be known as ours, to be replaced the next time
            remember(place, file)
        remove_partials(place)
        with durable_file(place) as partial:
            shutil.copyfile(file, partial)
            # not earlier than needed: beside the new data the old model would load with wrong weights
            if model:
                model.unlink(missing_ok=True)
    except OSError as error:
        why = f"cannot write the exported file to {place}: {error}"
        raise (storage_error(error, place) or RuntimeUnavailable(why)) from error


def _run_process(run: RunDir, checkpoint: Path, folder: Path, extras: ExportConfig) -> ExportedModel:
    """Export in a process of its own, then make each variant in one; return the record or raise the process's error."""
    folder.mkdir(parents=True, exist_ok=True)
    record = folder / "model.json"
    # the records of an earlier export would be taken for those of this one
    partial = folder.glob(".*.partial")  # of a killed process
    named = (folder / "preprocessing.json", folder / CARD, samples_in(folder), changes_in(folder))
    for former in (record, refusal_in(folder), *named, *partial):
        former.unlink(missing_ok=True)
    for unfinished in folder.glob(f"{FOLDER_PREFIX}*"):
        shutil.rmtree(unfinished, ignore_errors=True)
    # Native code of onnxruntime may crash; in a process of its own it ends only the export.
    ending = _run_trainer("export", run, str(checkpoint.absolute()), folder)
    if refusal := refusal_of(folder):
        raise refusal
    if ending or not record.exists():
        raise ExportRefused(f"the exporting process {ending or 'left no record'}")
    # The variants are made from the verified file, each in a process with a fresh memory.
    exported = read_record(record, ExportedModel)
    # helper nodes that cost something are removed in a variant of their own, also if nobody has asked for it
    kinds = (*extras.kinds, *(("optimized",) if exported.helpers else ()))
    variants = tuple(_variant(kind, run, folder) for kind in dict.fromkeys(kinds))
    exported = exported.model_copy(update={"variants": variants})
    if extras.training:
        exported = exported.model_copy(update=_training_files(run, checkpoint, folder))
    exported = exported.model_copy(update={"card": write_card(run, exported, folder)})
    write_record(record, exported)
    return exported


def _training_files(run: RunDir, checkpoint: Path, folder: Path) -> dict[str, Any]:
    """Write the ONNX graphs that train the model without torch. A failure is recorded; the exported file stays."""
    place = folder / "training"
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir()
    ending = _run_trainer("training", run, str(checkpoint.absolute()), place)
    if not ending:
        return {"training": tuple(sorted(file for file in place.iterdir() if file.suffix != ".log"))}
    refused = f"its process {ending}"
    if error := refusal_of(place):
        if isinstance(error, StorageUnavailable):
            raise error
        refused = "; ".join(error.problems)
    log.warning("export.variants: no training files were written: %s", refused)
    return {"training_refused": refused}


def _variant(kind: str, run: RunDir, folder: Path) -> Variant:
    """Make one variant. A failure is recorded; the exported file stays."""
    record = variant_in(folder, kind)
    record.unlink(missing_ok=True)
    ending = _run_trainer("variant", run, kind, folder)
    if ending or not record.exists():
        refused = f"its process {ending or 'left no record'}"
        made = Variant(kind=kind, path=None, bytes=0, size_ratio=0, latency_ratio=0, metrics={}, refused=refused)
        write_record(record, made)
    made = read_record(record, Variant)
    if made.refused:
        log.warning("variant %s was not written: %s", kind, made.refused)
    return made


def _run_trainer(command: str, run: RunDir, what: str, folder: Path) -> str:
    """Run one command of the trainer; return "" on success, else how it ended with the last lines of its log."""
    arguments = (command, str(run.root.absolute()), what, "--folder", str(folder.absolute()))
    return run_module(*PROCESS, *arguments, folder=folder, log=folder / f"{command}.log")
