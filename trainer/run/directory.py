"""RunDir: the paths of one run directory, and which attempt may write to it.

Flow, tasks and ranks exchange files in this directory and nothing else. After each file: its content, and its writer.

    RUN_DIR/
        lock                    the process of the flow that works on the run, which holds a flock on it        the flow
        flow.log                log of the flow, with tracebacks       the flow
        ending.json             RunEnding: how the newest flow of the run ended; absent while it runs, or if it was
                                killed. `reserved` holds its space meanwhile    the flow
        config.json             RunConfig                      configure
        accepted.json           KeptSettings: the settings with which the run may go on      configure
        origins.json            Origins: which file, profile or override has set each setting     onward run
        adjusted.json           Adjustments: what a retry has changed of the configuration      train
        code.json               AllowedCode: the Python files that processes of the run may execute    configure
        remote.json             LocalCopies: where the copies are of files that config.json names by URL    configure
        rehearsal.json          Rehearsal                      configure
        identity.json           RunIdentity                    configure
        trial.json              Membership: of which sweep the run is a trial    the sweep
        pruned.json             Pruned: why the trial ends early       monitor
        runtime.json            RuntimeReport                  init runtime
        quantized/              the model with QuantizeLinear, quantized.json (Quantized)  configure
        networks.json           Networks: by which networks the hosts of the hostfile reach each other, and which have a
                                home of their own    init runtime, train
        own_home                exists in the copy of such a host (trainer/attempt/own_home.py)    train
        preflight/              preflight.log, one RankReport per rank          init runtime
        job.json                the newest job: its tag, command and start time (infra/job/job.py)
        shards/manifest.json    ShardManifest (a link into the shard cache)     shard data
        began_with.json         ShardManifest that the run had on the machine from which it came; store.json: Sending,
                                inputs/: the files that its settings named there (remote/stored_run.py)    onward resume
        teacher/                what the teacher computes of each row (teacher.cache)    all ranks
        resolved.json           ResolvedSettings: the settings that the data has completed    shard data
        attempt                 the number of the attempt that owns the directory (the fence)   train
        attempts/001/           train.log, result.json (AttemptResult)          train, rank 0
        attempts/001/ending.json  AttemptEnding: how it ended, and what followed    train
        attempts/001/rank-00003.reserved    space for the rank's error record, while it runs; `ending.reserved` likewise
        attempts/001/rank-00003.traceback   Python tracebacks of a rank that a signal or its watchdog ended; else empty
        attempts/001/rank-00003.stack   Python stacks of a rank at the time at which mpirun ended it; else empty
        attempts/001/stacks.txt after a hang: where every rank was                      train
        errors/001-rank-00003.json   RankError                 the rank that failed, or train if a signal ended it
        heartbeat               Beat, written by rank 0 while the job makes progress
        events.jsonl            the append-only event log      rank 0
        phases.jsonl            when each phase of the flow began (phases.py)   the flow
        nodes/rank-00000.jsonl  what the job uses of the node with this first rank     that rank
        nodes/rank-00000.cursor how much of it is in MLflow             monitor
        profile/rank-00000.json StepProfile: where the time of `monitor.profile_steps` went, by node     that rank
        profile/rank-00000.csv, rank-00000.trace.json.gz    the same as a table; the trace, for Perfetto    that rank
        memory/001-rank-00003.pickle    torch's record of the allocations of a rank whose GPU memory ran out, for
                                pytorch.org/memory_viz         that rank
        closed                  exists once nothing more is written to the log  the flow
        checkpoints/step-000000100/   manifest.json, rank-00000.safetensors     all ranks
        checkpoints/announced.json    CheckpointInfo of each verified checkpoint     checkpoint
        train.json              TrainResult                    train
        metrics.json            MetricsSummary                 monitor
        classes/                classes.json, confusion.csv, objects.csv, ...: the last evaluation    monitor
        packages.txt            the Python packages with their versions        init runtime
        cursor.json             how much of the event log is in MLflow          monitor
        tensorboard/, wandb/    views of the event log (`monitor.report_to`)    monitor
        export/                 the trained ONNX file, model.json (ExportedModel), example.npz, export.log; or
                                refused.json (Refusal)         export
        export/preprocessing.json     Preprocessing: what raw data became before the graph; tokenizer.json   export
        export/README.md        the model card                 export
        export/variant-int8_static.json   Variant, beside its file     export
        export/samples.json     Samples: the evaluation rows on which the exported file is worst      export
        export/changes.json     Difference: what distinguishes it from the original     export
        export/comparison.json  Comparison: the exported file beside the served one     export
        export/training/        the files that continue training without torch    export
        report.html             the report of the run           the flow at its end, onward report

Durable files are written under a temporary name, fsynced and renamed: they are complete or absent.
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from onward.trainer.bounds import RECORD_BYTES, NotAFile, read_bounded
from onward.trainer.config.run_config import RunConfig
from onward.trainer.errors import ConfigError, Fenced, RecordError
from onward.trainer.run.adjustments import adjusted
from onward.trainer.run.durable_files import write_durably
from onward.trainer.run.home import onward_home as onward_home  # from here for whoever reads run directories
from onward.trainer.run.record_base import first_problem
from onward.trainer.run.records import RankError, read_record
from onward.trainer.run.remote.local_copies import LocalCopies, with_copies

_CLOSED: set[Path] = set()
"""Runs whose log this process has closed: the tasks that wait for that are its threads, and the disk may be full."""


class PathInside:
    """An attribute of a directory with a `root`: the path of this name inside of it."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, directory: Any, kind: type) -> Path:
        path: Path = directory.root / self._name
        return path


@dataclass(frozen=True)
class RunDir:
    """The paths of one run directory."""

    root: Path

    config = PathInside("config.json")
    accepted = PathInside("accepted.json")
    code = PathInside("code.json")
    origins = PathInside("origins.json")
    adjusted = PathInside("adjusted.json")
    remote = PathInside("remote.json")
    rehearsal = PathInside("rehearsal.json")
    quantized = PathInside("quantized")
    identity = PathInside("identity.json")
    trial = PathInside("trial.json")
    pruned = PathInside("pruned.json")
    runtime = PathInside("runtime.json")
    networks = PathInside("networks.json")
    own_home = PathInside("own_home")
    shards = PathInside("shards")
    began_with = PathInside("began_with.json")
    resolved = PathInside("resolved.json")
    teacher = PathInside("teacher")
    fence = PathInside("attempt")
    lock = PathInside("lock")
    flow_ending = PathInside("ending.json")
    reserved = PathInside("reserved")
    attempts = PathInside("attempts")
    errors = PathInside("errors")
    heartbeat = PathInside("heartbeat")
    events = PathInside("events.jsonl")
    phases = PathInside("phases.jsonl")
    report = PathInside("report.html")
    nodes = PathInside("nodes")
    profile = PathInside("profile")
    closed = PathInside("closed")
    checkpoints = PathInside("checkpoints")
    announced = PathInside("checkpoints/announced.json")
    train = PathInside("train.json")
    metrics = PathInside("metrics.json")
    classes = PathInside("classes")
    packages = PathInside("packages.txt")
    cursor = PathInside("cursor.json")
    tensorboard = PathInside("tensorboard")
    export = PathInside("export")
    exported = PathInside("export/model.json")
    memory = PathInside("memory")

    def usage_of(self, rank: int) -> Path:
        return self.nodes / f"rank-{rank:05d}.jsonl"

    def attempt(self, number: int) -> Path:
        return self.attempts / f"{number:03d}"

    def log(self, attempt: int) -> Path:
        return self.attempt(attempt) / "train.log"

    def result(self, attempt: int) -> Path:
        return self.attempt(attempt) / "result.json"

    def ending(self, attempt: int) -> Path:
        return self.attempt(attempt) / "ending.json"

    def traceback(self, attempt: int, rank: int) -> Path:
        return self.attempt(attempt) / f"rank-{rank:05d}.traceback"

    def reserved_for(self, attempt: int, rank: int | None = None) -> Path:
        """The space for the error record of a rank, or for the record of how the attempt ended."""
        return self.attempt(attempt) / ("ending.reserved" if rank is None else f"rank-{rank:05d}.reserved")

    def stack(self, attempt: int, rank: int) -> Path:
        return self.attempt(attempt) / f"rank-{rank:05d}.stack"

    def stacks(self, attempt: int) -> Path:
        return self.attempt(attempt) / "stacks.txt"

    def rank_error(self, attempt: int, rank: int) -> Path:
        return self.errors / f"{attempt:03d}-rank-{rank:05d}.json"

    def checkpoint(self, step: int) -> Path:
        return self.checkpoints / f"step-{step:09d}"

    # -- the event log: the file `closed` exists once it is complete

    def open_log(self) -> None:
        """Mark the event log as growing. Call before training."""
        _CLOSED.discard(self.root)
        self.closed.unlink(missing_ok=True)

    def close_log(self) -> None:
        """Mark the event log as complete. Call after training, however it ended. A broken disk is no error."""
        _CLOSED.add(self.root)
        with contextlib.suppress(OSError):
            self.closed.touch()

    def wait_for_end(self, limit_s: float = 0.0) -> bool:
        """Return whether the event log is complete, after waiting for that at most `limit_s`."""
        deadline = time.monotonic() + limit_s
        while not (closed := self.root in _CLOSED or self.closed.exists()) and time.monotonic() < deadline:
            time.sleep(0.05)
        return closed

    # -- the fence: an attempt that was replaced must not write any more

    @property
    def current_attempt(self) -> int:
        """The number of the newest attempt, which alone may write; 0 before the first."""
        try:
            text = read_bounded(self.fence, RECORD_BYTES).decode(errors="replace")
        except FileNotFoundError:
            return 0
        except NotAFile as error:
            raise RecordError(f"{self.fence} cannot be read: {error.strerror}") from None
        if not (text.isascii() and text.isdigit() and len(text) < 10):
            raise RecordError(f"{self.fence} holds {text[:40]!r}, which is not the number of an attempt")
        return int(text)

    def begin_attempt(self) -> int:
        """Make the next attempt the one that may write; returns its number, from 1."""
        number = self.current_attempt + 1
        self.attempt(number).mkdir(parents=True, exist_ok=True)
        write_durably(self.fence, str(number).encode())
        return number

    def check_fence(self, attempt: int) -> None:
        """Raise Fenced when a newer attempt has begun. Call before every rename of a durable file."""
        if (current := self.current_attempt) != attempt:
            raise Fenced(f"attempt {attempt} found attempt {current}, which writes to {self.root} now: this one stops")

    def first_error(self, attempt: int) -> RankError | None:
        """Return the earliest error of an attempt, if possible one that no other rank's failure caused; else None."""
        errors = [read_record(path, RankError) for path in sorted(self.errors.glob(f"{attempt:03d}-rank-*.json"))]
        # clocks of hosts may differ, so an error that only reports a lost peer comes after every other one
        return min(errors, key=lambda error: (error.secondary, error.at_ms), default=None)

    def ranks_with_errors(self, attempt: int) -> tuple[int, ...]:
        """Return the ranks that have an error record of an attempt."""
        names = (path.stem for path in self.errors.glob(f"{attempt:03d}-rank-*.json"))
        return tuple(sorted(int(name.rpartition("-")[2]) for name in names))


State = Literal["given", "local", "configured"]
"""config.json as it is; with changes of retries and local copies for URLs; and with the model of `quantize.aware`."""


def read_config(run: RunDir, state: State = "configured", *, given: RunConfig | None = None) -> RunConfig:
    """Read the configuration of a run, which `trainer/data/resolve.py` completes from the data.

    given: config.json as it is, if it was read. Raises ConfigError if none is valid, RecordError for damaged records.
    """
    try:
        config = given or RunConfig.model_validate_json(read_bounded(run.config, RECORD_BYTES))
    except FileNotFoundError:
        raise ConfigError(f"{run.root} is not a run directory: it has no config.json") from None
    except ValidationError as error:
        raise ConfigError(f"{run.config} cannot be used: {first_problem(error)}") from None
    if state == "given":
        return config
    config = adjusted(config, run.adjusted) if run.adjusted.exists() else config
    if run.remote.exists():
        config = with_copies(config, read_record(run.remote, LocalCopies))
    if state == "local" or not config.quantize.aware:
        return config
    path = run.quantized / config.model.path.name
    if not path.is_file():
        raise ConfigError(f"{path} is gone: the run trains this file, which was made when it began; put it back")
    return config.model_copy(update={"model": config.model.model_copy(update={"path": path})})
