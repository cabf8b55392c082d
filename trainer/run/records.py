"""The records that one task leaves for the next: frozen pydantic models, JSON on disk."""

from __future__ import annotations

import datetime
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ValidationError

from onward.trainer.bounds import RECORD_BYTES, read_bounded
from onward.trainer.config.sections.model import FixedBatch
from onward.trainer.errors import RecordError
from onward.trainer.run.durable_files import write_durably
from onward.trainer.run.record_base import Former, first_problem
from onward.trainer.run.record_base import Record as Record
from onward.trainer.run.recorded.promotion_records import Comparison as Comparison
from onward.trainer.run.recorded.promotion_records import Promotion as Promotion
from onward.trainer.run.recorded.rehearsal_parts import Guard as Guard
from onward.trainer.run.recorded.rehearsal_parts import Needs as Needs


class RunIdentity(Record):
    """The names of this run in Prefect, MLflow and the run list."""

    run_id: str
    """Name of the run directory: the Prefect flow run's id, so that a retry finds it."""
    name: str
    config_name: str = ""
    """`mlp` of `mlp-14`, which no other run has; "" for a run of an earlier version, whose name others may have."""
    created_at: str
    """ISO 8601, UTC."""
    model_sha256: str
    """SHA-256 of the ONNX file that the run began with; resuming with a changed file is refused."""
    code_sha256: Mapping[str, str] = {}
    """Path -> SHA-256 of each file of `loss.file` and `model.converters` that the run began with, likewise."""
    mlflow_run_id: str = ""
    mlflow_url: str = ""
    prefect_url: str = ""
    tracking_uri: str = ""
    git_commit: str = ""
    """Of the working directory when the run began, " with changes" if files differed; "" outside of git."""


class RankReport(Record):
    """What one rank measured in the preflight."""

    rank: int
    world_size: int
    expected_world_size: int
    host: str
    address: str = ""
    """By which gloo of other ranks reaches it; "" in a report of an earlier version."""
    pid: int
    device: str
    gpu: str = ""
    """The GPU's name; empty for a CPU."""
    backend: str = "gloo"
    """What sends tensors of the device: "nccl" or "gloo"."""
    versions: dict[str, str]
    """torch, mpi4py, MPI library, Python, a digest of Onward's source; CUDA and NCCL on a GPU."""
    memory_bytes: int
    """Memory free on the device (RAM for CPU)."""
    all_reduce: float
    """Sum of all rank numbers by all-reduce; correct if equal to `all_reduce_expected`."""
    all_reduce_expected: float


class Networks(Record):
    """The networks by which the hosts of a hostfile reach each other, as ssh has used them, and who shares the home."""

    networks: tuple[str, ...]
    """Such as "10.0.0.0/24"; () if they are not known, or there is one host."""
    own_homes: tuple[str, ...] = ()
    """The hosts with a home of their own, which get the run from its store."""


class RuntimeReport(Record):
    """What the preflight found: the ranks, their devices and the free disk space."""

    ranks: tuple[RankReport, ...]
    launch_s: float
    """From starting the launcher until every rank had reported."""
    disk_free_bytes: int


class StopState(Record):
    """What decides whether a run ends before its last step ([stop]); a part of every checkpoint."""

    best: float | None = None
    """The value of the metric that the next one is compared with; None before the first evaluation."""
    latest: float | None = None
    """The value of the last evaluation that counts."""
    evaluations_since: int = 0
    """Evaluations without improvement since `best`."""
    trained_s: float = 0.0
    """Seconds of training over all attempts; counted only if there is a limit, `stop.max_hours`."""


class AttemptResult(Record):
    """How one attempt ended, written by rank 0. Without this file the attempt failed, whatever its exit status."""

    attempt: int
    status: Literal["done", "stopped"]
    step: int
    """The last step; its checkpoint is on disk."""
    samples_seen: int
    metrics: dict[str, float]
    """The last evaluation."""
    elapsed_s: float
    """Wall time of this attempt's loop."""
    ended_early: str = ""
    """Why the run is done before its last step ([stop]); else empty."""
    stop: StopState = StopState()
    """What has decided that."""


class RankError(Record):
    """Why a rank failed."""

    attempt: int
    rank: int
    host: str
    step: int
    cause: str
    """The exception's type and message."""
    traceback: str
    at_ms: int
    secondary: bool = False
    """Whether this rank failed only because another rank had failed before."""


class TrainResult(Record):
    """How training ended, over all attempts."""

    status: Literal["done", "stopped"]
    attempts: int
    step: int
    samples_seen: int
    metrics: dict[str, float]
    elapsed_s: float
    """Wall time of the training loop, summed over attempts."""
    ended_early: str = ""
    """Why the run is done before its last step ([stop]); else empty."""


class CheckpointInfo(Record):
    """One checkpoint that was read back and verified."""

    step: int
    path: Path
    bytes: int
    digest: str
    """SHA-256 of its manifest, which holds the digests of its files."""
    metrics: dict[str, float]
    best: bool = False
    certificate: Former = None
    """Of earlier versions; it has no meaning any more."""


class MetricsSummary(Record):
    """What the monitor sent to MLflow, and the first and last evaluation."""

    status: Literal["FINISHED", "FAILED", "KILLED"]
    step: int
    num_events: int
    first: dict[str, float]
    """The evaluation before the first step."""
    last: dict[str, float]
    samples_per_s: float
    data_wait: float = 0.0  # both are medians over the lines of the event log, those of `costs` as well
    costs: dict[str, float] = {}
    """tokens_per_s, tflops, mfu, if known; the greatest memory_bytes; checkpoint_stall_s, which attempts waited."""
    ended_early: str = ""
    """Why the run was done before its last step ([stop]); else empty."""


class CudaCheck(Record):
    """What onnxruntime's CUDA provider gave, where there is one; its matrix products are computed without TF32."""

    difference: float = math.nan
    """The greatest difference from the outputs on the CPU, relative to the output's largest value."""
    latency_ratio: float = math.nan
    """Of a variant: its time for an evaluation batch over the exported file's, both on the GPU."""
    metrics: dict[str, float] = {}
    """Of a variant: its metrics on all evaluation data."""
    not_run: str = ""
    """Why it was not run there; else empty."""


class Variant(Record):
    """A further file made of the exported one, and its size, speed and metrics beside it."""

    kind: str
    """One of `export.variants`."""
    path: Path | None
    """None if the variant was refused."""
    data: Path | None = None
    """The file of its weights, if they do not fit into `path`."""
    bytes: int
    size_ratio: float
    """Its size over the exported file's."""
    latency_ratio: float
    """Its time for a batch over that of the exported file without helper nodes; NaN if it was noise (latency.py)."""
    metrics: dict[str, float]
    """Its metrics on all evaluation data."""
    refused: str = ""
    """The reason if the variant was refused; else empty."""
    cuda: CudaCheck | None = None
    """Of a variant that computes in half precision, on a GPU; None without one."""


class ExportedModel(Record):
    """The trained ONNX file and the results of its verification."""

    path: Path
    sha256: str
    step: int
    parity: float
    """Greatest difference of onnxruntime from the trained module, relative to the output's largest value."""
    neighbours: float = 0.0
    """Of a file that rounds to integers: the share of elements that are rounded to others than the module's."""
    rounding: float = 0.0
    """What onnxruntime's kernels round in a file with quantized weights, if `parity` is above `export.tolerance`."""
    before: dict[str, float]
    """Metrics of the original file on all evaluation data."""
    after: dict[str, float]
    """Metrics of the exported file on all evaluation data, under onnxruntime."""
    file_not_measured: str = ""
    """Why `after` has no `file/map` of what a detector's file itself returns; empty if it has, and of other models."""
    objects: dict[str, Any] | None = None
    """Of a detector: `Objects` of preprocessing.json."""
    baselines: dict[str, dict[str, float]] = {}
    """What can be predicted without a model, such as "the mean of the labels" -> its metrics on the same data."""
    test: dict[str, float] = {}
    """Its metrics on `data.test_source`, by which nothing was chosen; {} without one."""
    fp32: dict[str, float] = {}
    """With `quantize.aware`: metrics of the float file. `before` are those of static quantization, without training."""
    kernels: dict[str, int] = {}
    """With `quantize.aware`: the operators on integers that onnxruntime runs for the exported file, with numbers."""
    helpers: str = ""
    """What its helper nodes cost (helper_nodes.py), in words; then `optimized` is made beside it. Empty: too little."""
    changed: int
    """Number of initializers whose bytes differ from the original file."""
    removed: dict[str, int] = {}
    """Nodes that only training needs and that were removed: kind -> number."""
    judged_by: str = "onnxruntime"
    """The runtime that evaluated the file."""
    as_given: float = 0.0
    """How far its training form is off this inference form, of the output's largest value; 0 = it came in as this."""
    cuda: CudaCheck | None = None
    """The same file on a GPU; None where onnxruntime has no CUDA provider."""
    beside: tuple[Path, ...] = ()
    """Its external data files."""
    variants: tuple[Variant, ...] = ()
    """Its variants for deployment, including the refused ones."""
    training: tuple[Path, ...] = ()
    """The files that continue training without torch; training.json lists them."""
    training_refused: str = ""
    """The reason if those files could not be made; else empty."""
    preprocessing: tuple[Path, ...] = ()
    """preprocessing.json, and the tokenizer if there is one."""
    preprocessing_refused: str = ""
    """The reason if they could not be written; else empty."""
    card: Path | None = None  # the model card; an earlier version wrote none
    registered_as: str = ""
    version: str = ""
    promotion: Promotion | None = None
    """What became of `export.alias`; None as long as the file is not registered, and without an alias."""


class ExporterWarning(Record):
    """Something that is allowed but perhaps not intended."""

    key: str
    """Its name, such as "merged", by which `model.accept` accepts it."""
    what: str
    remedy: str
    changes_training: bool = False
    """Whether other weights are trained than was probably meant: to be accepted, or its cause removed, before a run."""


class RehearsedBatch(Record):
    """One micro-batch of the first rows of the data, run through the graph before the training."""

    what: Literal["training", "evaluation", "padding"]
    """`evaluation`: forward alone. `padding`: both passes in evaluation mode, as by a replica that has no rows left."""
    rows: int
    loss: float
    """Per target; NaN if no label of these rows is a target."""
    elapsed_s: float


class CompileTrial(Record):
    """What was chosen for `graph.compile` "auto", and why; the times are 0 if nothing was compiled."""

    compiles: bool
    text: str
    """Why, as a clause with the times."""
    eager_s: float = 0.0
    """Of a step's forward and backward passes on one rank."""
    compiled_s: float = 0.0
    compile_s: float = 0.0
    start_s: float = 0.0
    """Of compiling with the code that was kept, as each start of the ranks does."""
    steps: int = 0
    """Of the run."""
    break_even: int | None = None
    """Steps that pay for a start; None if compiled code is not faster."""


class Rehearsal(Record):
    """What was run of the graph before anything was launched, and what it showed."""

    batches: tuple[RehearsedBatch, ...] = ()
    trained: int = 0
    """Number of weights to train."""
    numbers: tuple[int, int] = (0, 0)
    """How many numbers are trained, and how many the file stores as weights, statistics and constants."""
    without_gradient: tuple[str, ...] = ()
    """The weights among them whose gradient is zero on these rows, or that the loss does not depend on."""
    parity: float = math.nan
    """Difference of onnxruntime from the imported module, of the output's largest value; NaN if not compared."""
    judged_by: str = ""
    """The runtime that ran the file, and what its kernels round (`ExportedModel.rounding`)."""
    warnings: tuple[ExporterWarning, ...] = ()
    """What `onward doctor` warns of, for the graph as configured."""
    fixed_batch: FixedBatch = "auto"
    """The `model.fixed_batch` that was chosen for a file that declares a fixed batch."""
    output_units: tuple[Literal["auto", "standardised", "label"], ...] = ()
    units: tuple[str, ...] = ()
    """What was chosen for `loss.output_units` of each loss, and why; () if no loss standardises its label."""
    compute: Literal["", "fp32", "bf16"] = ""
    """What was chosen for `precision.compute` "auto" on a CPU, by the time of a micro-batch; "" if nothing was."""
    compile: CompileTrial | None = None
    """None if `graph.compile` was given."""
    not_rehearsed: tuple[str, ...] = ()
    """What was left out, and why."""
    needs: Needs | None = None
    """None if the graph was not opened."""
    guard: Guard | None = None
    """None if the file was not compared with the module that is trained (`not_rehearsed` says why)."""
    elapsed_s: float = 0.0
    """Wall time of the process, with starting it and opening the model."""

    @property
    def summary(self) -> str:
        """Return it in one line."""
        if not self.batches:
            return "not rehearsed: " + "; ".join(self.not_rehearsed)
        sizes = []
        for what in dict.fromkeys(batch.what for batch in self.batches):
            rows = " and ".join(str(batch.rows) for batch in self.batches if batch.what == what)
            sizes.append(f"{rows} rows ({what})")
        weights = f"{self.trained - len(self.without_gradient)} of {self.trained} weights with a gradient"
        if self.numbers[1]:
            weights += f", trained {self.numbers[0]:,} of {self.numbers[1]:,} numbers"
        parts = [f"micro-batches of {', '.join(sizes)}", weights]
        if not math.isnan(self.parity):
            parts.append(f"{self.judged_by} differs by {self.parity:.2g}")
        if self.guard:
            parts.append(self.guard.summary)
        if self.compute:
            parts.append(f"precision.compute 'auto' is {self.compute}")
        if self.compile:
            parts.append(f"graph.compile 'auto' is {str(self.compile.compiles).lower()}")
        return f"rehearsed in {self.elapsed_s:.1f} s: " + "; ".join([*parts, *self.units])


R = TypeVar("R", bound=BaseModel)


def write_record(path: Path, record: BaseModel) -> None:
    """Write a record durably."""
    write_durably(path, record.model_dump_json(indent=2).encode())


def read_record(path: Path, kind: type[R]) -> R:
    """Read a record. Raises RecordError with the path if the file is absent or holds another kind of record."""
    try:
        return kind.model_validate_json(read_bounded(path, RECORD_BYTES))
    except FileNotFoundError:
        raise RecordError(f"{path} does not exist: the step that writes it has not finished") from None
    except OSError as error:
        raise RecordError(f"{path} cannot be read: {error.strerror}") from None
    except ValidationError as error:
        raise RecordError(f"{path} is not a {kind.__name__}, or it is damaged: {first_problem(error)}") from None


def utc_now() -> str:
    """Return the time as records have it: ISO 8601, UTC."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def record_if_written(path: Path, kind: type[R]) -> R | None:
    """Read a record; None as long as its file is absent. Raises RecordError for a damaged one."""
    return read_record(path, kind) if path.exists() else None
