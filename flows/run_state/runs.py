"""Find the run directories under Onward's home, and lock one."""

from __future__ import annotations

import contextlib
import datetime
import json
import operator
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from onward.flows.run_state.lease import renewed
from onward.flows.run_state.run_index import listed_runs
from onward.infra.mlflow.mlflow_store import TrackingError
from onward.infra.mlflow.tracking import Status, Tracker
from onward.infra.servers.service_state import try_lock
from onward.trainer import bounds
from onward.trainer.bounds import NotAFile
from onward.trainer.checkpoint.retention import announced, discard, list_checkpoints, list_damaged
from onward.trainer.checkpoint.verification import all_damaged, newest_complete
from onward.trainer.data.storage.shard_cache import ShardCache
from onward.trainer.errors import CheckpointError, ConfigError, OnwardError, few, say
from onward.trainer.events import last_beat
from onward.trainer.run.directory import RunDir, read_config
from onward.trainer.run.home import download_cache, onward_home, streamed_files
from onward.trainer.run.names import name_given_to, owner_of, short_id
from onward.trainer.run.recorded.sweep_records import SweepDir, membership
from onward.trainer.run.records import RunIdentity, read_record
from onward.trainer.run.remote.download_cleaning import Cleaned, clean
from onward.trainer.run.remote.local_copies import LocalCopies

T = TypeVar("T")


def run_directory_of(flow_run_id: object, parameters: Mapping[str, Any]) -> RunDir:
    """Return the run directory of a flow run: named after its id, or after the run that it resumes.

    Of a sweep's flow run it is the sweep's directory, which has a lock and an identity.json, too. Raises ConfigError
    for a `resume` that is no name, such as an absolute path.
    """
    if sweep := parameters.get("sweep"):
        return RunDir(SweepDir.of(sweep).root)
    name = str(parameters.get("resume") or flow_run_id)
    # the parameter of a deployment may come from anyone who can reach the server
    if name in (".", "..") or Path(name).name != name:
        raise ConfigError(f"resume is {name[:80]!r}, but must be the name of a directory in {onward_home() / 'runs'}")
    return RunDir(onward_home() / "runs" / name)


def command_to_continue(run: RunDir) -> str:
    """Return the command that continues a run, or the sweep of which it is a trial, or a sweep."""
    # a sweep has a directory of the same form as a run, and trials go on with their sweep only
    if SweepDir(run.root).sweep.exists():
        return f"onward sweep --resume {run.root.name}"
    trial = membership(run)
    return f"onward sweep --resume {trial.sweep_id}" if trial else f"onward resume {reference_to(run)}"


def reference_to(run: RunDir) -> str:
    """Return what a command takes to find a run: its name, or its id if its name may be that of others, too."""
    identity = identity_of(run)
    # runs of earlier versions may share a name
    return identity.name if identity and identity.config_name else run.root.name


def how_to_continue(run: RunDir) -> str:
    """Return a clause with the command that continues a run or a sweep, and the step at which it goes on."""
    command = command_to_continue(run)
    saved = list_checkpoints(run)
    # a sweep finds the steps of its trials itself
    if not command.startswith("onward resume"):
        return f"to continue: {command}"
    if not has_begun(run):
        return "nothing is trained yet: start it again"
    if not saved:
        return f"no checkpoint is saved, so that it begins again at step 0: {command}"
    return f"to continue from step {int(saved[-1].name.removeprefix('step-'))}: {command}"


def how_to_train_further(run: RunDir) -> str:
    """Return a clause with the settings of a new run that begins where a run is, which may change everything else."""
    saved = list_checkpoints(run)
    ways = [f"model.path={run.export / read_config(run, 'given').model.path.name}"] if run.exported.exists() else []
    ways += [f"checkpoint.load={saved[-1]}"] if saved else []
    if not ways:
        return "start a new run: `onward run CONFIG SECTION.KEY=VALUE`"
    which = "exported file" if run.exported.exists() else "newest checkpoint"
    other = f"; or with {ways[1]} (its newest checkpoint)" if len(ways) > 1 else ""
    command = f"`onward run CONFIG {ways[0]} SECTION.KEY=VALUE` (its {which})"
    return f"start a new run that begins with its weights: {command}{other}"


@contextlib.contextmanager
def locked(run: RunDir, *, timeout_s: float = 60.0) -> Iterator[None]:
    """Hold the run directory's lock, so that only one flow works on a run.

    The lock is a flock, which the kernel releases however the process ends. Waits up to `timeout_s` for a flow that is
    just ending. Raises ConfigError when another flow still holds the lock.
    """
    run.root.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + timeout_s
    with run.lock.open("ab") as file:  # the content is that of the process which holds the lock
        # polled in place of a blocking flock, which could not end at the time limit
        while not try_lock(file):
            if time.monotonic() > deadline:
                raise ConfigError(
                    f"another flow has been running {run.root} for over {timeout_s:g} s; `onward status "
                    f"{reference_to(run)}` shows its step; wait for its end, or stop it first"
                )
            time.sleep(0.2)
        with renewed(file, run.lock):
            yield


def holder_of(run: RunDir) -> dict[str, Any] | None:
    """Return the process (infra/job/process_identity.py) that holds the lock, or was the last to; None if not known.

    `slurm_job` is the id of the job of Slurm of whose script it is a part, else "".
    """
    try:
        found = json.loads(bounds.read_bounded(run.lock, bounds.RECORD_BYTES))
        known = {"host": str(found["host"]), "boot": str(found["boot"])}
        known["slurm_job"] = str(found.get("slurm_job", ""))
        return known | {"pid": int(found["pid"]), "started": float(found["started"])}
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def is_running(run: RunDir) -> bool:
    """Return whether a flow process on this host holds the run directory's lock."""
    if not run.lock.exists():
        return False
    # a lock that can be taken is free; closing the file gives it back at once
    try:
        with bounds.opened(run.lock) as file:
            return not try_lock(file)
    except NotAFile:
        return False


def end_mlflow_run(run: RunDir, status: Status) -> None:
    """Set the final status of the run's MLflow run, and upload the report, if MLflow can be reached."""
    if run.identity.exists() and (identity := identity_of(run)) and identity.mlflow_run_id:
        # Prefect and the run directory have the state too; a signal may have interrupted the import of MLflow
        with contextlib.suppress(TrackingError, ImportError, AttributeError):
            tracker = Tracker(identity.tracking_uri, identity.mlflow_run_id)
            tracker.set_status(status)
            if run.report.exists():
                tracker.log_file(run.report)


def all_runs() -> list[RunDir]:
    """Return the runs under the home directory, newest first; those whose identity cannot be read come last."""
    return [RunDir(onward_home() / "runs" / name) for name, _ in listed_runs()]


def has_begun(run: RunDir) -> bool:
    """Return whether a run or a sweep has a name or settings: before that it was killed, or refused."""
    return run.identity.exists() or run.config.exists()


def identity_or_error(run: RunDir) -> RunIdentity:
    """Return the run's identity; of a run whose identity.json is absent what is known of it without that file.

    So is one that was killed before the file was written, or whose file was deleted. Raises RecordError when the file
    is damaged.
    """
    if run.identity.exists() or not run.root.exists():
        return read_record(run.identity, RunIdentity)
    name, config_name = name_given_to(run.root.name) or (run.root.name, "")
    # the configuration is written once when the run begins, so its time is about that of the beginning
    record = run.config if run.config.exists() else run.root
    created_at = datetime.datetime.fromtimestamp(record.stat().st_mtime, datetime.UTC).isoformat(timespec="seconds")
    return RunIdentity(run_id=run.root.name, name=name, config_name=config_name, created_at=created_at, model_sha256="")


def identity_of(run: RunDir) -> RunIdentity | None:
    """Return the run's identity; None if it is damaged, which must not hide the other runs."""
    try:
        return identity_or_error(run)
    except (OnwardError, OSError):
        return None


def clean_downloads(days: float) -> Cleaned:
    """Delete the local copies of remote files that were not used for some days; not those of runs that can go on.

    Of the shard files of servers only those stay that are being read.
    """
    needed = []
    for run in all_runs():
        if run.remote.exists() and not run.exported.exists():
            needed += [copy.path for copy in read_record(run.remote, LocalCopies).copies]
    cleaned = clean(download_cache(), needed, days)
    if not streamed_files().is_dir():
        return cleaned
    streamed = ShardCache(streamed_files(), limit=0).clean(days)
    return Cleaned(*map(operator.add, astuple(cleaned), astuple(streamed)))


def find_run(text: str) -> RunDir:
    """Return the run that `text` names: a directory, `last`, its name, the end of its id, or a configuration's name.

    Of several runs of a configuration it returns the newest, and says so on stderr. Raises ConfigError, which lists
    what `text` could mean, or the newest runs.
    """
    # A directory first: it may be a run of another home, which `status` and `export` accept.
    path = Path(text)
    with contextlib.suppress(OSError, ValueError):  # a name of more than 255 letters, or with a null character
        if path.is_dir() and RunDir(path).config.exists():
            return RunDir(path.resolve())
    runs = onward_home() / "runs"
    known = [Named(RunDir(runs / key), key, status["name"], status["config_name"]) for key, status in listed_runs()]
    # one that was killed before it had settings is not listed, but its name and its directory were printed
    printed = owner_of(text) or Path(text).name
    if not {text, printed} & {name for each in known for name in (each.run_id, each.name)}:
        with contextlib.suppress(OSError, ValueError):
            if printed.strip(".") and (runs / printed / "phases.jsonl").is_file():
                return RunDir(runs / printed)
    return chosen(text, known, kind="run")


@dataclass(frozen=True)
class Named(Generic[T]):
    """A run or a sweep, and how it may be called."""

    what: T
    run_id: str
    name: str
    """"" if its identity is damaged."""
    config_name: str

    def __str__(self) -> str:
        return f"{self.name or 'damaged'} ({short_id(self.run_id)})"

    def is_called(self, text: str) -> bool:
        """Return whether `text` is the whole id, or a name that is not also the configuration's."""
        return text == self.run_id or (text == self.name and self.name != self.config_name)

    def has_in_id(self, text: str) -> bool:
        """Return whether the id begins or ends with `text`."""
        return self.run_id.endswith(text) or self.run_id.startswith(text)


def chosen(text: str, known: Sequence[Named[T]], *, kind: str) -> T:
    """Return what `text` names: `last`, a name, a part of an id, or a configuration's name, of which it is the newest.

    known: the newest first. Raises ConfigError if nothing or several things are meant, and lists them. What is chosen
    by a configuration's name is said on stderr.
    """
    if text == "last" and known:
        return known[0].what
    of_configuration = [candidate for candidate in known if text == candidate.config_name]
    if exact := [candidate for candidate in known if candidate.is_called(text)]:
        if others := [candidate for candidate in of_configuration if candidate is not exact[0]]:
            say(f"{text}: {exact[0]}; it is also a configuration's name, of {few(others)}")
        return exact[0].what
    by_id = []
    by_name = []
    if text:  # every id begins with ""
        by_id = [candidate for candidate in known if candidate.has_in_id(text)]
        by_name = of_configuration
    # of several runs of a configuration the newest is meant, but an id that begins so makes it ambiguous
    meant = [*by_id, *by_name[:1]]
    if len(meant) == 1:
        if by_name:
            of = f"the newest of {len(by_name)}" if len(by_name) > 1 else "the only one"
            say(f"{text}: {meant[0]}, {of} of that name")
        return meant[0].what
    if meant:
        raise ConfigError(
            f"{text!r} may be {few(meant)}: give a name, or more of the id ({len(by_id)} ids begin or end with it"
            f"{f', and it is the name of a configuration with {len(by_name)} {kind}s' if by_name else ''})"
        )
    none = f"there are no {kind}s under {onward_home()}"
    newest = f"the newest {kind}s are {few(known)}" if known else none
    raise ConfigError(f"no {kind} has the name or id {text!r}; {newest}")


def discard_damaged(run: RunDir) -> None:
    """Let a run that has damaged checkpoints only begin again at step 0; they are renamed and kept.

    Raises ConfigError when one of them is complete.
    """
    if newest := newest_complete(run):
        kind = "sweep" if membership(run) else "run"
        raise ConfigError(
            f"{newest.path} is complete, so `{command_to_continue(run)}` goes on from step {newest.info.step}, and "
            f"needs no --from-start; to train from step 0 without it, start a new {kind}"
        )
    discard(run)


def checkpoint_at(text: str) -> tuple[RunDir | None, Path] | None:
    """Return the checkpoint directory that `text` names, and its run; None when it names none.

    The run of a checkpoint that was copied elsewhere is None.
    """
    path = Path(os.path.realpath(text))  # Path.resolve raises an error for a link to itself
    if not (path / "manifest.json").is_file() or (path / "config.json").exists():
        return None
    run = RunDir(path.parents[1]) if path.parent.name == "checkpoints" else None
    return (run if run and run.config.exists() else None), path


def find_checkpoint(text: str) -> tuple[RunDir, Path]:
    """Return the run and the checkpoint that `text` names: a checkpoint directory, or a run as in `find_run`.

    Of a run it is the checkpoint that `export.checkpoint` selects. Raises ConfigError when there is no such run,
    CheckpointError when the run has no complete checkpoint.
    """
    if (found := checkpoint_at(text)) and found[0]:
        return found[0], found[1]
    run = find_run(text)
    # The same choice as the task `export`; a run that was interrupted may have no announced checkpoint yet.
    known = announced(run)
    best = [info.path for info in known if info.best]
    if best and read_config(run).export.checkpoint == "best":
        return run, best[0]
    if newest := newest_complete(run):
        return run, newest.path
    if damaged := [path.name for path in (*list_checkpoints(run), *list_damaged(run))]:
        raise all_damaged(run, sorted({name.removesuffix(".damaged") for name in damaged}, reverse=True))
    raise CheckpointError(
        f"{reference_to(run)} has no complete checkpoint yet; `{command_to_continue(run)}` continues training"
    )


def stop_limit_s(run: RunDir) -> float:
    """Return how long the ranks of a run get to finish a step and to save when they are asked to stop."""
    grace_s = read_config(run).launch.stop_grace_s if run.config.exists() else 0.0
    return grace_s + 2.0 * last_beat(run.heartbeat).step_s
