"""Read the status of a run from its directory: its state, and how it ended."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Iterator

import numpy as np

from onward.flows.run_state.costs import bits_per_byte, cost_line
from onward.flows.run_state.run_index import State as State
from onward.flows.run_state.runs import identity_of, identity_or_error, is_running, reference_to
from onward.flows.run_state.why_run_ended import Cause, cause_of
from onward.infra.mlflow.mlflow_store import file_of
from onward.tasks.attempts.log_damage import damage_of_log
from onward.tasks.shown.class_tables import class_table
from onward.trainer.bounds import RECORD_BYTES, read_bounded
from onward.trainer.checkpoint.retention import announced, describe_exported
from onward.trainer.config.sections.metrics import StopConfig
from onward.trainer.config.sections.results import CheckpointConfig
from onward.trainer.data.label_units import describe_label_units
from onward.trainer.data.reading.sources import locate
from onward.trainer.data.storage.opened_shards import open_evaluated
from onward.trainer.data.storage.shards import ShardManifest
from onward.trainer.data.text.masking import describe_masks
from onward.trainer.errors import OnwardError
from onward.trainer.events import ConfusionMatrix, Started, read_events
from onward.trainer.run.directory import RunDir, read_config
from onward.trainer.run.history import RunHistory
from onward.trainer.run.kept_settings import accepted_changes, edited_settings
from onward.trainer.run.outcomes.attempt_endings import endings
from onward.trainer.run.outcomes.run_ending import ending_of
from onward.trainer.run.outcomes.stopping import command_to_go_on, reason_to_end
from onward.trainer.run.recorded.sweep_records import membership
from onward.trainer.run.records import (
    AttemptResult,
    ExportedModel,
    MetricsSummary,
    RankError,
    Record,
    Rehearsal,
    RunIdentity,
    TrainResult,
    Variant,
    read_record,
    record_if_written,
)
from onward.trainer.run.remote.stored_run import Sending, record_in

WORST = 3
"""Classes that a status names for each loss."""


class RunStatus(Record):
    """The status of a run, read from its directory alone."""

    run_id: str
    name: str
    config_name: str
    """The configuration's name, the first part of `name`."""
    state: State
    """`interrupted`: its process was killed; `onward resume` continues it, and a stopped or failed one. `damaged`: a
    record in its directory cannot be read; `error` names it."""
    created_at: str
    """ISO 8601, UTC."""
    attempts: int
    """Times that the training job was started."""
    step: int
    """The last weight update in the event log."""
    num_steps: int
    """Weight updates of the whole run; 0 as long as it is not known."""
    values: dict[str, float]
    """The last value of each metric."""
    ended_early: str
    """Why the run was done before its last step ([stop]); else ""."""
    to_go_on: str
    """The command that continues such a run with a higher limit; else ""."""
    worst_classes: tuple[str, ...]
    """The classes with the least F1 in the last evaluation, where a confusion matrix is kept."""
    remarks: tuple[str, ...]
    """What its records do not show: settings that were edited in config.json, and what is gone of the event log."""
    rehearsal: str
    """What was rehearsed before the run was launched, in one line; "" for a run of an earlier version."""
    trial: str
    """The number of the trial and its sweep; "" for a run that is no trial."""
    error: str
    """Why it has no result: the error of the first rank that failed in the last attempt, else that of the flow, or who
    has killed it; "" for other runs. Of a damaged run, the file's."""
    kind: str
    """The class of that cause, such as `rank_lost`, `storage` or `power_loss`; "" without one."""
    to_do: str
    """What to do about it, with the command that goes on, and the step at which it does; "" without one."""
    ending: str
    """How the newest attempt that has ended did so: its kind, what happened, and what followed; "" before that."""
    data: str
    """What was computed of the data's columns when it was read, such as the ids of class names; "" if nothing was."""
    metric: str
    """The metric by which checkpoints are compared (checkpoint.best_metric); "" if it is not known."""
    value: float | None
    """Its last value; None before the first evaluation."""
    elapsed_s: float
    """Wall time of the training loops of the attempts that have ended with a result."""
    layout: str
    """Such as `data 2 x tensor 1 x pipeline 1`, short `2x1x1`; "" as long as it is not chosen."""
    directory: str
    model: str
    """The trained ONNX file; "" as long as it is not exported."""
    store: str
    """Where another machine can go on with it (`checkpoint.store`), and the steps whose checkpoints are there; else "".
    """
    report: str
    """Its report, an HTML file; "" as long as there is none."""
    mlflow_run_id: str
    tracking_uri: str
    prefect_url: str


class RunOutcome(RunStatus):
    """How a finished run ended: what `onward run --json` prints."""

    bits_per_byte: dict[str, float]
    """Of the model and of two compressors on the same held-out bytes; {} unless the data is text."""
    before: dict[str, float]
    """The evaluation under onnxruntime of the file that came in."""
    after: dict[str, float]
    """The evaluation under onnxruntime of the trained file."""
    exported: str
    """The step whose weights were exported, with its metric, and that of the last step."""
    test: dict[str, float]
    """Its evaluation on `data.test_source`; {} without one."""
    parity: float
    """Greatest difference of onnxruntime from the trained module, relative to the largest output."""
    rounding: float
    """What onnxruntime's kernels round of it, of a file with quantized weights (`ExportedModel.rounding`)."""
    sha256: str
    """Digest of the trained file."""
    variants: tuple[Variant, ...]
    promotion: str
    """What became of `export.alias`, and why; "" without an alias."""
    registered: str
    """Name and version in MLflow's model registry; "" if it is not registered."""
    throughput: str = ""
    """What the training has cost: samples, tokens and FLOPs in a second, MFU, memory, data wait, checkpoint stall."""


def describe(run: RunDir) -> RunStatus:
    """Return the status of a run, read from its directory alone."""
    identity = identity_or_error(run)
    error = run.first_error(run.current_attempt)
    state = state_of(run)
    config = read_config(run) if run.config.exists() else None
    metric = config.checkpoint.best_metric if config else ""
    ended = None if state == "running" else ending_of(run)
    # also of a run whose file is exported, and not registered
    failed = state in ("failed", "interrupted") or bool(ended and ended.status == "failed")
    cause = cause_of(run) if failed or state == "stopped" else None
    # the log of a long run has many megabytes
    history = RunHistory.of_tail(run.events)
    newest = _newest_result(run)
    # a resumed run goes on, so its former end does not count while it runs
    ended_early = newest.ended_early if newest and state != "running" else ""
    to_go_on = ""
    if config and newest and ended_early:
        to_go_on = command_to_go_on(newest.stop, config.stop, config.checkpoint, reference_to(run))
    layout = ""
    if config:
        parallel = config.parallel
        zero = f" zero {parallel.zero}" * bool(parallel.zero)
        layout = f"{parallel.data}x{parallel.tensor}x{parallel.pipeline}{zero}"
    elapsed_s = sum(result.elapsed_s for result in _results(run))
    return RunStatus(
        run_id=identity.run_id,
        name=identity.name,
        config_name=identity.config_name or identity.name,
        state=state,
        created_at=identity.created_at,
        attempts=run.current_attempt,
        step=history.step,
        num_steps=history.num_steps or _num_steps(run),
        values=history.values,
        ended_early=ended_early,
        to_go_on=to_go_on,
        worst_classes=tuple(_worst(history.confusions.values(), run)),
        remarks=remarks_of(run),
        **_why(error, cause, failed=failed),
        **_texts_of_records(run),
        data=_data(run),
        metric=metric,
        value=history.values.get(metric),
        elapsed_s=elapsed_s,
        layout=layout,
        directory=str(run.root),
        mlflow_run_id=identity.mlflow_run_id,
        tracking_uri=identity.tracking_uri,
        prefect_url=identity.prefect_url,
    )


def _why(error: RankError | None, cause: Cause | None, *, failed: bool) -> dict[str, str]:
    """Return the fields that say why a run has no result: `error`, `kind` and `to_do`."""
    texts = {"error": "", "kind": "", "to_do": ""}
    if cause:
        texts["kind"] = cause.kind
        texts["to_do"] = cause.to_do
        if failed:  # a run that was stopped has a cause, too, and that is no error
            texts["error"] = cause.sentence
    # what a rank wrote of itself is more exact than what the flow concluded
    if error:
        texts["error"] = f"rank {error.rank} on {error.host}, step {error.step}: {error.cause}"
    return texts


def _texts_of_records(run: RunDir) -> dict[str, str]:
    """Return the fields that are of records which a run may not have yet; "" for an absent one."""
    texts = dict.fromkeys(("rehearsal", "trial", "ending", "model", "report", "store"), "")
    if rehearsal := record_if_written(run.rehearsal, Rehearsal):
        texts["rehearsal"] = rehearsal.summary
    if trial := membership(run):
        texts["trial"] = f"{trial.number} of sweep {trial.sweep_id}"
    if attempts := endings(run):
        texts["ending"] = f"{attempts[-1].kind}: {attempts[-1]}"
    if exported := record_if_written(run.exported, ExportedModel):
        texts["model"] = str(exported.path)
    if run.report.exists():
        texts["report"] = str(run.report)
    if sending := record_if_written(record_in(run), Sending):
        texts["store"] = f"{sending.url}, checkpoints of steps: {', '.join(map(str, sending.stored)) or 'none'}"
    return texts


def described_run(run: RunDir) -> RunStatus:
    """Return the status of a run in a list, in which a damaged one must not hide the others."""
    try:
        return describe(run)
    except (OnwardError, OSError) as error:
        identity = identity_of(run)
        # fields that are added later get an empty value here without anybody thinking of it
        texts = {name: "" for name, field in RunStatus.model_fields.items() if field.annotation is str}
        known = {"run_id": run.root.name, "directory": str(run.root), "state": "damaged", "error": str(error)}
        if identity:
            known |= {"name": identity.name, "created_at": identity.created_at}
            known["config_name"] = identity.config_name or identity.name
        numbers = {"attempts": 0, "step": 0, "num_steps": 0, "values": {}, "elapsed_s": 0.0}
        numbers |= {"value": None, "worst_classes": (), "remarks": ()}
        return RunStatus.model_validate(texts | numbers | known)


def outcome_of(run: RunDir, exported: ExportedModel) -> RunOutcome:
    """Return how a run with an exported file ended."""
    config = read_config(run)
    # the log is read from its tail alone, and the record of the training has the sums over all attempts
    trained = read_record(run.train, TrainResult)
    # of text without a tokenizer the targets are its bytes
    reads_bytes = [loss.is_plain for loss in config.losses] == [True] and not config.data.text
    # a copy of a finished run has no shards
    text = held_out_text(run) if reads_bytes and run.shards.exists() else b""
    bits = bits_per_byte(exported.after["evaluation/loss"], text) if text else {}
    promotion = f"{exported.promotion.status}: {exported.promotion.reason}" if exported.promotion else ""
    metrics = record_if_written(run.metrics, MetricsSummary)
    known = dict(describe(run)) | {"step": trained.step, "attempts": trained.attempts, "elapsed_s": trained.elapsed_s}
    return RunOutcome(
        **known,
        bits_per_byte=bits,
        before=exported.before,
        after=exported.after,
        exported=describe_exported(exported.step, announced(run), trained, config.checkpoint),
        test=exported.test,
        parity=exported.parity,
        rounding=exported.rounding,
        sha256=exported.sha256,
        variants=exported.variants,
        promotion=promotion,
        throughput=cost_line(metrics),
        registered=f"{exported.registered_as} version {exported.version}" if exported.registered_as else "",
    )


def remarks_of(run: RunDir) -> tuple[str, ...]:
    """Return sentences about what was done to the records of a run from outside."""
    edited = []
    with contextlib.suppress(OnwardError):  # whoever reads the record says that it is damaged
        edited = edited_settings(run)
    not_accepted = f"config.json was edited, and is refused until it is accepted: {'; '.join(edited)}" if edited else ""
    return tuple(filter(None, (*map(str, accepted_changes(run)), not_accepted, str(damage_of_log(run)))))


def _data(run: RunDir) -> str:
    """Return what the manifest of the shards says of computed columns; "" as long as there are no shards."""
    manifest = record_if_written(run.shards / "manifest.json", ShardManifest)
    if manifest is None:
        return ""
    said = (
        manifest.preprocessing,
        describe_masks(read_config(run).data, manifest.fitted),
        describe_label_units(read_config(run).losses, manifest.fitted),
    )
    return "; ".join(filter(None, said))


def state_of(run: RunDir) -> State:
    """Return running, exported, trained, stopped, failed, or interrupted (the process was killed)."""
    # first, because a resumed run still has the files of its earlier attempts
    return "running" if is_running(run) else ended_state(run)


def ended_state(run: RunDir) -> State:
    """Return the state of a run that no flow works on, or whose flow has recorded its ending."""
    ending = ending_of(run)
    # Not from train.json: after a resume it still describes an earlier attempt.
    newest = _newest_result(run)
    # a run that ended early has an exported file, and may go on
    if run.exported.exists() and newest and newest.status == "done":
        return "exported"
    if ending and ending.status == "failed":
        return "failed"
    if newest or ending:
        return "trained" if newest and newest.status == "done" else "stopped"
    return "failed" if run.first_error(run.current_attempt) else "interrupted"


def is_finished(run: RunDir, stop: StopConfig, checkpoint: CheckpointConfig) -> bool:
    """Return whether nothing is left to do: no step within these limits, and nothing to send.

    A flow that could not send all to MLflow has ended, too, and a resume sends the rest.
    """
    if is_running(run) or not is_trained_to_end(run, stop, checkpoint):
        return False
    # a finished run from a store, which this machine does not send, has its history in MLflow where it was trained
    is_copy = checkpoint.store and not record_in(run).exists()
    return bool(is_copy) or _is_sent(run)


def is_trained_to_end(run: RunDir, stop: StopConfig, checkpoint: CheckpointConfig) -> bool:
    """Return whether the flow of a run has completed, and no step is left to train within these limits."""
    newest = _newest_result(run)
    ending = ending_of(run)
    has_completed = ending and ending.status == "completed"
    if ended_state(run) != "exported" or not has_completed or newest is None:
        return False
    # a higher limit than before lets a run go on that had ended by it
    return not newest.ended_early or bool(reason_to_end(newest.stop, stop, checkpoint))


def _is_sent(run: RunDir) -> bool:
    """Return whether MLflow has the whole event log, as the monitor's cursor says (tasks/shown/event_shipping.py)."""
    try:
        cursor = json.loads(read_bounded(run.cursor, RECORD_BYTES))
        file = file_of(read_record(run.identity, RunIdentity).tracking_uri)
        # the cursor also names the database, because a removed one has lost what was sent to it
        return bool(cursor["offset"] == run.events.stat().st_size and cursor["file"] in (file, ""))
    except (OnwardError, OSError, ValueError, KeyError, TypeError, RecursionError):
        return False


def _results(run: RunDir) -> Iterator[AttemptResult]:
    for path in run.attempts.glob("*/result.json"):
        with contextlib.suppress(OnwardError):
            yield read_record(path, AttemptResult)


def _newest_result(run: RunDir) -> AttemptResult | None:
    """Return the result of the newest attempt; None if it left none."""
    return record_if_written(run.result(run.current_attempt), AttemptResult)


def _worst(confusions: Iterable[ConfusionMatrix], run: RunDir) -> Iterator[str]:
    """Yield a clause for each of the worst classes of each loss; nothing where all targets are found."""
    for event in confusions:
        table = class_table(event, run)
        # of a class with an F1 of 1 every target is found, and nothing else
        imperfect = [row for row in table.worst if row.f1 != 1]
        for row in imperfect[:WORST]:
            of = f"{table.loss} " if table.loss else ""
            yield f"{of}{row.name}: F1 {row.f1:.3f}, recall {row.recall:.3f} of {row.targets} targets"


def _num_steps(run: RunDir) -> int:
    """Return the number of steps that the start of the event log says; 0 without a log."""
    return next((event.num_steps for event, _ in read_events(run.events) if isinstance(event, Started)), 0)


def held_out_text(run: RunDir) -> bytes:
    """Return the bytes that a text run's evaluation predicts, in the order of the files; b"" for other data, also for
    tokens."""
    config = read_config(run)
    data = config.data
    label = config.losses[0].label if config.losses else ""
    if not label or data.text:
        return b""
    if locate(data.source, data).format != "text" or not isinstance(label, str):
        return b""
    shards = open_evaluated(run.shards, data)
    windows = shards.read(np.arange(shards.num_rows))[label]
    return np.asarray(windows, dtype=np.uint8).tobytes()
