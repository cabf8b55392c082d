"""Find the run directories under Onward's home, lock one, and describe its state."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from onward.infra.service_state import try_lock
from onward.infra.tracking import Status, Tracker, TrackingError
from onward.trainer.checkpoint.manifest import announced, newest_whole
from onward.trainer.data.shards import open_shards
from onward.trainer.data.sources import locate
from onward.trainer.errors import CheckpointError, ConfigError
from onward.trainer.events import read_events
from onward.trainer.run.directory import RunDir, onward_home, read_config
from onward.trainer.run.records import AttemptResult, ExportedModel, RunIdentity, TrainResult, read_record

TAIL_BYTES = 1 << 16
"""Bytes at the end of the event log that are read for the newest values."""


def run_directory_of(flow_run_id: object, parameters: Mapping[str, Any]) -> RunDir:
    """Return the run directory of a flow run: named after its id, or after the run that it resumes."""
    return RunDir(onward_home() / "runs" / (parameters.get("resume") or str(flow_run_id)))


@contextlib.contextmanager
def locked(run: RunDir, *, timeout_s: float = 60.0) -> Iterator[None]:
    """Hold the run directory's lock, so that only one flow works on a run.

    The lock is a flock, which the kernel releases however the process ends. Waits up to `timeout_s` for a flow that is
    just ending. Raises ConfigError when another flow still holds the lock.
    """
    run.root.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + timeout_s
    with run.lock.open("wb") as file:
        while not try_lock(file):
            if time.monotonic() > deadline:
                raise ConfigError(
                    f"another flow has been running {run.root} for over {timeout_s:g} s; `onward status "
                    f"{run.root.name[:8]}` shows its step; wait for its end, or stop it first"
                )
            time.sleep(0.2)
        yield


def is_running(run: RunDir) -> bool:
    """Return whether a flow process on this host holds the run directory's lock."""
    if not run.lock.exists():
        return False
    with run.lock.open("rb") as file:
        return not try_lock(file)


def end_mlflow_run(run: RunDir, status: Status) -> None:
    """Set the final status of the run's MLflow run, if there is one and MLflow can be reached."""
    if run.identity.exists():
        identity = read_record(run.identity, RunIdentity)
        with contextlib.suppress(TrackingError):  # Prefect and the run directory have the state too
            Tracker(identity.tracking_uri, identity.mlflow_run_id).set_status(status)


def all_runs() -> list[RunDir]:
    """Return the runs under the home directory, newest first."""
    found = [RunDir(path.parent) for path in (onward_home() / "runs").glob("*/identity.json")]
    return sorted(found, key=lambda run: read_record(run.identity, RunIdentity).created_at, reverse=True)


def find_run(text: str) -> RunDir:
    """Return the run that `text` names: a directory, `last`, the first characters of an id, or a run's name.

    Of several runs with the same name it returns the newest. Raises ConfigError, which lists the newest runs.
    """
    if (path := Path(text)).is_dir() and RunDir(path).config.exists():
        return RunDir(path.resolve())
    runs = all_runs()
    if text == "last" and runs:
        return runs[0]
    if len(by_id := [run for run in runs if run.root.name.startswith(text)]) == 1:
        return by_id[0]
    if by_name := [run for run in runs if read_record(run.identity, RunIdentity).name == text]:
        return by_name[0]
    newest = ", ".join(f"{run.root.name[:8]} ({read_record(run.identity, RunIdentity).name})" for run in runs[:5])
    problem = f"no run has the name or id {text!r}"
    if by_id:
        problem = f"the ids of {len(by_id)} runs begin with {text!r}; type more of it"
    hint = f"the newest runs are {newest}" if newest else f"there are no runs under {onward_home()}"
    raise ConfigError(f"{problem}; {hint}")


def find_checkpoint(text: str) -> tuple[RunDir, Path]:
    """Return the run and the checkpoint that `text` names: a checkpoint directory, or a run as in `find_run`.

    Of a run it is the checkpoint that `export.checkpoint` selects. Raises ConfigError when there is no such run,
    CheckpointError when the run has no complete checkpoint.
    """
    path = Path(text).resolve()
    if (path / "manifest.json").is_file() and path.parent.name == "checkpoints":
        return RunDir(path.parents[1]), path
    run = find_run(text)
    known = announced(run)
    best = [each.path for each in known if each.best and read_config(run).export.checkpoint == "best"]
    chosen = best[0] if best else newest_whole(run)
    if chosen is None:
        raise CheckpointError(
            f"{run.root.name} has no complete checkpoint yet; `onward resume {run.root.name[:8]}` continues training"
        )
    return run, chosen


def held_out_text(run: RunDir) -> bytes:
    """Return the bytes that a text run's evaluation predicts, in the order of the files; b"" for other data."""
    data = read_config(run).data
    if locate(data.source, data).format != "text" or not isinstance(data.label, str):
        return b""
    shards = open_shards(run.shards, "evaluation")
    windows = shards.read(np.arange(shards.num_rows))[data.label]
    return np.asarray(windows, dtype=np.uint8).tobytes()


def describe(run: RunDir) -> dict[str, Any]:
    """Return the state of a run as JSON-able values, read from its files alone."""
    identity = read_record(run.identity, RunIdentity)
    error = run.first_error(run.current_attempt)
    step, num_steps, values = _progress(run)
    return {
        "run_id": identity.run_id,
        "name": identity.name,
        "state": _state(run),
        "created_at": identity.created_at,
        "attempts": run.current_attempt,
        "step": step,
        "num_steps": num_steps,
        "values": values,
        "error": f"rank {error.rank} on {error.host}, step {error.step}: {error.cause}" if error else "",
        "directory": str(run.root),
        "model": str(read_record(run.exported, ExportedModel).path) if run.exported.exists() else "",
        "mlflow_run_id": identity.mlflow_run_id,
        "tracking_uri": identity.tracking_uri,
        "prefect_url": identity.prefect_url,
    }


def _state(run: RunDir) -> str:
    """Return running, exported, trained, stopped, failed, or interrupted (the process was killed)."""
    if is_running(run):
        return "running"
    if run.exported.exists():
        return "exported"
    if run.train.exists():
        return "trained" if read_record(run.train, TrainResult).status == "done" else "stopped"
    if run.current_attempt and run.result(run.current_attempt).exists():
        return "trained" if read_record(run.result(run.current_attempt), AttemptResult).status == "done" else "stopped"
    return "failed" if run.first_error(run.current_attempt) else "interrupted"


def _progress(run: RunDir) -> tuple[int, int, dict[str, float]]:
    """Return (last step, number of steps, newest value of each metric) from the start and the end of the event log."""
    # Only the two ends are read: the log of a long run has many megabytes.
    step = 0
    values: dict[str, float] = {}
    num_steps = next((event.fields["num_steps"] for event, _ in read_events(run.events) if event.kind == "start"), 0)
    size = run.events.stat().st_size if run.events.exists() else 0
    for event, _ in read_events(run.events, max(0, size - TAIL_BYTES)):
        step = event.step
        values |= event.fields.get("values", {})
    return step, num_steps, values
