"""The run directories under Onward's home: who owns one, which one a person means, how it stands."""

from __future__ import annotations

import contextlib
import fcntl
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np

from onward.infra.tracking import Status, Tracker, TrackingError
from onward.trainer.checkpoint.manifest import announced, newest_whole
from onward.trainer.data.shards import open_shards
from onward.trainer.data.sources import locate
from onward.trainer.errors import CheckpointError, ConfigError
from onward.trainer.events import read_events
from onward.trainer.run.directory import RunDir, onward_home, read_config
from onward.trainer.run.records import AttemptResult, ExportedModel, RunIdentity, TrainResult, read_record

TAIL_BYTES = 1 << 16
"""How much of the event log's end is read for the last values."""


def run_of(flow_run_id: object, parameters: Mapping[str, Any]) -> RunDir:
    """The directory of a flow run: named after it, or after the run it resumes."""
    return RunDir(onward_home() / "runs" / (parameters.get("resume") or str(flow_run_id)))


@contextlib.contextmanager
def exclusively(run: RunDir, *, patience_s: float = 60.0) -> Iterator[None]:
    """Own a run directory inside; the kernel lets go of it however the process ends.

    Waits up to `patience_s` for an owner that is just leaving. Raises ConfigError when it stays.
    """
    run.root.mkdir(parents=True, exist_ok=True)
    give_up_at = time.monotonic() + patience_s
    with run.lock.open("wb") as file:
        while not _lock(file):
            if time.monotonic() > give_up_at:
                raise ConfigError(f"another flow has been working on {run.root} for over {patience_s:g} s")
            time.sleep(0.2)
        yield


def is_owned(run: RunDir) -> bool:
    """Whether a living flow works on the run, on this host."""
    if not run.lock.exists():
        return False
    with run.lock.open("rb") as file:
        return not _lock(file)


def _lock(file: IO[bytes]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def close_mlflow(run: RunDir, status: Status) -> None:
    """Say in MLflow how a run ended, if it got as far as having an MLflow run and MLflow answers."""
    if run.identity.exists():
        identity = read_record(run.identity, RunIdentity)
        with contextlib.suppress(TrackingError):  # Prefect has the state, and the files have everything
            Tracker(identity.tracking_uri, identity.mlflow_run_id).set_status(status)


def all_runs() -> list[RunDir]:
    """Every run under the home directory, the newest first."""
    found = [RunDir(path.parent) for path in (onward_home() / "runs").glob("*/identity.json")]
    return sorted(found, key=lambda run: read_record(run.identity, RunIdentity).created_at, reverse=True)


def find_run(text: str) -> RunDir:
    """The run meant by a directory, `last`, the beginning of an id, or a name (then its newest run).

    Raises ConfigError with the runs there are.
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
    some = ", ".join(f"{run.root.name[:8]} ({read_record(run.identity, RunIdentity).name})" for run in runs[:5])
    what = f"{len(by_id)} runs begin with {text!r}" if by_id else f"no run is called {text!r}"
    raise ConfigError(f"{what}; " + (f"the newest are {some}" if some else f"there are none under {onward_home()}"))


def find_checkpoint(text: str) -> tuple[RunDir, Path]:
    """The checkpoint meant by its directory, or by a run (the one its config exports), and its run.

    Raises ConfigError, CheckpointError.
    """
    path = Path(text).resolve()
    if (path / "manifest.json").is_file() and path.parent.name == "checkpoints":
        return RunDir(path.parents[1]), path
    run = find_run(text)
    known = announced(run)
    best = [each.path for each in known if each.best and read_config(run).export.checkpoint == "best"]
    chosen = best[0] if best else newest_whole(run)
    if chosen is None:
        raise CheckpointError(f"{run.root.name} has no whole checkpoint yet; `onward resume` goes on with it")
    return run, chosen


def held_out_text(run: RunDir) -> bytes:
    """The bytes that the evaluation of a text run predicts, in the order of the files; b"" for other data."""
    data = read_config(run).data
    if locate(data.source, data).format != "text" or not isinstance(data.label, str):
        return b""
    shards = open_shards(run.shards, "evaluation")
    windows = shards.read(np.arange(shards.num_rows))[data.label]
    return np.asarray(windows, dtype=np.uint8).tobytes()


def describe(run: RunDir) -> dict[str, Any]:
    """How a run stands, as JSON-able values; read from its files alone."""
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
    """running, exported, trained, stopped, failed, or interrupted (killed; `onward resume` goes on)."""
    if is_owned(run):
        return "running"
    if run.exported.exists():
        return "exported"
    if run.train.exists():
        return "trained" if read_record(run.train, TrainResult).status == "done" else "stopped"
    if run.current_attempt and run.result(run.current_attempt).exists():
        return "trained" if read_record(run.result(run.current_attempt), AttemptResult).status == "done" else "stopped"
    return "failed" if run.first_error(run.current_attempt) else "interrupted"


def _progress(run: RunDir) -> tuple[int, int, dict[str, float]]:
    """(last step, steps in all, the last value of each metric), from the beginning and the end of the event log."""
    step = 0
    values: dict[str, float] = {}
    num_steps = next((event.fields["num_steps"] for event, _ in read_events(run.events) if event.kind == "start"), 0)
    size = run.events.stat().st_size if run.events.exists() else 0
    for event, _ in read_events(run.events, max(0, size - TAIL_BYTES)):
        step = event.step
        values |= event.fields.get("values", {})
    return step, num_steps, values
