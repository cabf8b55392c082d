"""The records that one task leaves for the next: frozen pydantic models, JSON on disk."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from onward.trainer import errors
from onward.trainer.errors import OnwardError
from onward.trainer.run.durable_files import write_durably


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


def own_error(refusal: Refusal) -> OnwardError:
    """The error of another process, to be raised again here."""
    kind: type[OnwardError] = getattr(errors, refusal.kind)
    return kind(refusal.problems) if issubclass(kind, errors.Refused) else kind("\n".join(refusal.problems))


R = TypeVar("R", bound=BaseModel)


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
