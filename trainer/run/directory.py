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

import contextlib
import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from onward.trainer import errors
from onward.trainer.config.sections import RunConfig
from onward.trainer.errors import ConfigError, Fenced, OnwardError


class Record(BaseModel):
    """What one task leaves for the next: frozen, and JSON on disk."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, ser_json_inf_nan="constants")


class RunIdentity(Record):
    """Who this run is, in every system that shows it."""

    run_id: str
    """Name of the run directory: the Prefect flow run's id, so that a retry finds it."""
    name: str
    created_at: str
    """ISO 8601, UTC."""
    model_sha256: str
    """Digest of the ONNX file that the run began with; a changed file is refused on resume."""
    mlflow_run_id: str = ""
    mlflow_url: str = ""
    prefect_url: str = ""
    tracking_uri: str = ""


class RankReport(Record):
    """What one rank found in the preflight."""

    rank: int
    world_size: int
    expected_world_size: int
    host: str
    pid: int
    device: str
    versions: dict[str, str]
    """torch, mpi4py, MPI library, Python."""
    memory_bytes: int
    """Memory free on the device (RAM for CPU)."""
    all_reduce: float
    """Result of summing every rank's number; right when equal to `all_reduce_expected`."""
    all_reduce_expected: float


class RuntimeReport(Record):
    """The machine as the job will find it."""

    ranks: tuple[RankReport, ...]
    launch_s: float
    """From starting the launcher until every rank had reported."""
    disk_free_bytes: int


class AttemptResult(Record):
    """How one attempt ended; written by rank 0 alone. No file, no success, whatever the exit status."""

    attempt: int
    status: Literal["done", "stopped"]
    step: int
    """The last step made; its checkpoint is on disk."""
    samples_seen: int
    metrics: dict[str, float]
    """The last evaluation."""
    elapsed_s: float
    """Wall time of this attempt's loop."""


class RankError(Record):
    """Why a rank failed, as data."""

    attempt: int
    rank: int
    host: str
    step: int
    cause: str
    """The exception's type and sentence."""
    traceback: str
    at_ms: int
    secondary: bool = False
    """True when this rank only noticed that another one was gone."""


class TrainResult(Record):
    """How training ended, over all attempts."""

    status: Literal["done", "stopped"]
    attempts: int
    step: int
    samples_seen: int
    metrics: dict[str, float]
    elapsed_s: float
    """Wall time of the training loop, summed over attempts."""


class CheckpointInfo(Record):
    """One checkpoint that was read back, verified and announced."""

    step: int
    path: Path
    bytes: int
    digest: str
    """SHA-256 of its manifest, which holds the digests of its files."""
    metrics: dict[str, float]
    best: bool = False


class MetricsSummary(Record):
    """What was shipped, and how it went."""

    status: Literal["FINISHED", "FAILED", "KILLED"]
    step: int
    num_events: int
    first: dict[str, float]
    """The evaluation before the first step."""
    last: dict[str, float]
    samples_per_s: float


class Variant(Record):
    """A further file made of the exported one, and what it gained and lost by it."""

    kind: str
    """One of `export.variants`."""
    path: Path | None
    """None: it was refused."""
    bytes: int
    size_ratio: float
    """Its size over the exported file's."""
    latency_ratio: float
    """Its time on an evaluation batch over the exported file's, both on the CPU and measured in turns."""
    metrics: dict[str, float]
    """Its evaluation, over the whole evaluation data."""
    refused: str = ""
    """Why there is none."""


class ExportedModel(Record):
    """The trained ONNX file, and the proof that it is right."""

    path: Path
    sha256: str
    step: int
    parity: float
    """Greatest difference of onnxruntime from the trained module, relative to the output's largest value."""
    before: dict[str, float]
    """Evaluation of the file that came in."""
    after: dict[str, float]
    """Evaluation of the file that goes out, by onnxruntime, over the whole evaluation data."""
    changed: int
    """Initializers whose bytes differ from the file that came in."""
    removed: dict[str, int] = {}
    """What only training needs and the file has no more: kind -> number of nodes."""
    judged_by: str = "onnxruntime"
    """Who computed the file's side of parity and evaluation."""
    beside: tuple[Path, ...] = ()
    """Files next to it that it keeps weights in."""
    variants: tuple[Variant, ...] = ()
    """What was made of it for deployment, the refused ones included."""
    training: tuple[Path, ...] = ()
    """What trains it on without torch: training.json names the files beside it."""
    training_refused: str = ""
    """Why there is none of that."""
    registered_as: str = ""
    version: str = ""


class Refusal(Record):
    """Why there is no exported file: the error of the exporting process, as data."""

    kind: str
    """Its class, one of trainer/errors.py."""
    problems: tuple[str, ...]


R = TypeVar("R", bound=BaseModel)


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


def own_error(refusal: Refusal) -> OnwardError:
    """The error of another process, to be raised again here."""
    kind: type[OnwardError] = getattr(errors, refusal.kind)
    return kind(refusal.problems) if issubclass(kind, errors.Refused) else kind("\n".join(refusal.problems))


def refusal_in(export: Path) -> Path:
    """There instead of all else when a check failed."""
    return export / "refused.json"


# -- files that are whole or absent


@contextlib.contextmanager
def durable_file(path: Path) -> Iterator[Path]:
    """A temporary path beside `path` to write to; on leaving it is fsynced and renamed to `path`.

    After an exception nothing is left: neither a partial `path` nor the temporary file.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        yield partial
        fsync(partial)
        partial.replace(path)
        fsync(path.parent)
    finally:
        partial.unlink(missing_ok=True)


def write_durably(path: Path, content: bytes) -> None:
    """Replace `path` by `content`: whole or not at all, also across a power cut."""
    with durable_file(path) as partial:
        partial.write_bytes(content)


def fsync(path: Path) -> None:
    """Flush a file or a directory to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_record(path: Path, record: BaseModel) -> None:
    """Leave a record on disk, whole or not at all."""
    write_durably(path, record.model_dump_json(indent=2).encode())


def read_record(path: Path, kind: type[R]) -> R:
    """Read a record back. Raises OnwardError, naming the file, when it is absent or of another kind."""
    try:
        return kind.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        raise OnwardError(f"{path} does not exist: the step that writes it has not finished") from None
    except ValidationError as error:
        raise OnwardError(f"{path} is not a {kind.__name__}: {error}") from None


def read_config(run: RunDir) -> RunConfig:
    """The resolved configuration of a run. Raises ConfigError if it is absent or was edited into nonsense."""
    try:
        return RunConfig.model_validate_json(run.config.read_bytes())
    except FileNotFoundError:
        raise ConfigError(f"{run.root} is not a run directory: it has no config.json") from None
    except ValidationError as error:
        raise ConfigError(f"{run.config} is not a valid configuration: {error}") from None


def sha256(path: Path) -> str:
    """Hex digest of a file, read in pieces."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
