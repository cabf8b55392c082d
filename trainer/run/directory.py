"""RunDir: every path of a run has a name here, and every record that one task leaves for the next.

Flow, tasks and ranks meet in this directory and nowhere else:

    RUN_DIR/
        config.json             RunConfig                      configure
        identity.json           RunIdentity                    configure
        runtime.json            RuntimeReport                  init runtime
        preflight/              preflight.log, a RankReport of each rank        init runtime
        job.json                the job started last: its tag, command and start (infra/mpirun.py)
        shards/manifest.json    ShardManifest (a link into the shard cache)     shard data
        attempt                 the number of the attempt that owns the directory (the fence)   train
        attempts/001/           train.log, result.json (AttemptResult)          train, rank 0
        errors/001-rank-00003.json   RankError                 a rank that failed
        heartbeat               touched by rank 0 as long as the job moves
        events.jsonl            the append-only event log      rank 0
        closed                  there while nothing more will be written to it  the flow
        checkpoints/step-000000100/   manifest.json, rank-00000.safetensors     all ranks
        checkpoints/announced.json    CheckpointInfo of each verified one       checkpoint
        train.json              TrainResult                    train
        metrics.json            MetricsSummary                 monitor
        cursor.json             how far the event log is shipped                monitor
        tensorboard/            a view of the event log        monitor
        export/                 the trained ONNX file, model.json (ExportedModel), example.npz, export.log; or
                                refused.json (Refusal)         export
        export/variant-int8_static.json   Variant, beside its file     export
        export/training/        what trains the model without torch    export

Durable files are written under a temporary name, fsynced and renamed: they are whole or absent.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from onward.trainer.config.run_config import RunConfig
from onward.trainer.errors import ConfigError, Fenced
from onward.trainer.run.durable_files import write_durably
from onward.trainer.run.records import RankError, read_record


def onward_home() -> Path:
    """Where runs, caches and local servers live: ONWARD_HOME, else ~/.onward."""
    return Path(os.environ.get("ONWARD_HOME") or "~/.onward").expanduser().resolve()


@dataclass(frozen=True)
class RunDir:
    """A run directory: the paths of one run, and nothing else."""

    root: Path

    @property
    def config(self) -> Path:
        return self.root / "config.json"

    @property
    def identity(self) -> Path:
        return self.root / "identity.json"

    @property
    def runtime(self) -> Path:
        return self.root / "runtime.json"

    @property
    def shards(self) -> Path:
        return self.root / "shards"

    @property
    def fence(self) -> Path:
        return self.root / "attempt"

    @property
    def lock(self) -> Path:
        return self.root / "lock"

    @property
    def attempts(self) -> Path:
        return self.root / "attempts"

    @property
    def errors(self) -> Path:
        return self.root / "errors"

    @property
    def heartbeat(self) -> Path:
        return self.root / "heartbeat"

    @property
    def events(self) -> Path:
        return self.root / "events.jsonl"

    @property
    def closed(self) -> Path:
        return self.root / "closed"

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    @property
    def announced(self) -> Path:
        return self.checkpoints / "announced.json"

    @property
    def train(self) -> Path:
        return self.root / "train.json"

    @property
    def metrics(self) -> Path:
        return self.root / "metrics.json"

    @property
    def cursor(self) -> Path:
        return self.root / "cursor.json"

    @property
    def tensorboard(self) -> Path:
        return self.root / "tensorboard"

    @property
    def export(self) -> Path:
        return self.root / "export"

    @property
    def exported(self) -> Path:
        return self.export / "model.json"

    def attempt(self, number: int) -> Path:
        return self.attempts / f"{number:03d}"

    def log(self, attempt: int) -> Path:
        return self.attempt(attempt) / "train.log"

    def result(self, attempt: int) -> Path:
        return self.attempt(attempt) / "result.json"

    def rank_error(self, attempt: int, rank: int) -> Path:
        return self.errors / f"{attempt:03d}-rank-{rank:05d}.json"

    def checkpoint(self, step: int) -> Path:
        return self.checkpoints / f"step-{step:09d}"

    # -- the log: those who follow it must know when nothing more will come

    def open_log(self) -> None:
        """Before training: more will be written, follow."""
        self.closed.unlink(missing_ok=True)

    def close_log(self) -> None:
        """After training, however it ended: nothing more will be written."""
        self.closed.touch()

    # -- the fence: one attempt owns the directory

    @property
    def current_attempt(self) -> int:
        """The attempt that owns the directory; 0 before the first."""
        try:
            return int(self.fence.read_text())
        except FileNotFoundError:
            return 0

    def begin_attempt(self) -> int:
        """Take the directory over from the attempt before; returns this attempt's number, from 1."""
        number = self.current_attempt + 1
        self.attempt(number).mkdir(parents=True, exist_ok=True)
        write_durably(self.fence, str(number).encode())
        return number

    def check_fence(self, attempt: int) -> None:
        """Raises Fenced when a newer attempt owns the directory. Call before every commit."""
        if (current := self.current_attempt) != attempt:
            raise Fenced(f"attempt {attempt} found attempt {current} in {self.fence}; leaving {self.root} to it")

    def first_error(self, attempt: int) -> RankError | None:
        """The root cause of a failed attempt: its earliest error that is not an echo of another rank's."""
        errors = [read_record(path, RankError) for path in sorted(self.errors.glob(f"{attempt:03d}-rank-*.json"))]
        return min(errors, key=lambda error: (error.secondary, error.at_ms), default=None)


# -- what an exporting process leaves in its folder, besides the file and its model.json


def example_in(export: Path) -> Path:
    """One real evaluation row: input name -> array."""
    return export / "example.npz"


def variant_in(folder: Path, kind: str) -> Path:
    """Where the record of a variant goes, beside the exported file."""
    return folder / f"variant-{kind}.json"


def refusal_in(export: Path) -> Path:
    """There instead of all else when a check failed."""
    return export / "refused.json"


def read_config(run: RunDir) -> RunConfig:
    """The resolved configuration of a run. Raises ConfigError if it is absent or was edited into nonsense."""
    try:
        return RunConfig.model_validate_json(run.config.read_bytes())
    except FileNotFoundError:
        raise ConfigError(f"{run.root} is not a run directory: it has no config.json") from None
    except ValidationError as error:
        raise ConfigError(f"{run.config} is not a valid configuration: {error}") from None
