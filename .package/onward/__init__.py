"""ONNX in, trained ONNX out, at scale.

    import onward

    outcome = onward.run("config.toml", train={"num_steps": 1000})
    print(outcome.model, outcome.after)

The functions are those behind the command line: each returns the record that the command prints with `--json`.
`import onward` is quick: torch, Prefect and MLflow are imported by the functions that need them.
"""

import os

# Since 1.29 onnxruntime's Linux builds report models to their vendor, with file names and digests, and keep a database
# in ~/.cache, from the moment they are imported. This package's import comes before that in every process of a run.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

from onward.flows.api import config, examine, origins, plan, promote, resume, run, runs, status
from onward.flows.first_config import init
from onward.flows.model_api import diff, doctor, to_module, write
from onward.flows.predict import evaluate, predict
from onward.flows.run_reports.report_api import report
from onward.flows.run_state.exports import bundle, export
from onward.flows.running.verify_run import replay, verify
from onward.flows.sweeps.sweep_api import resume_sweep, sweep, sweeps
from onward.trainer.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    DeviceAssertion,
    Diverged,
    ExportRefused,
    Fenced,
    Hang,
    OnwardError,
    OutOfMemory,
    RecordError,
    Refused,
    ReplicasDiffer,
    RuntimeUnavailable,
    ServerUnavailable,
    Stopped,
    StorageUnavailable,
    TrainingFailed,
    UnsupportedModel,
)

__version__ = "0.1.0"

__all__ = [
    "CheckpointError",
    "ConfigError",
    "DataError",
    "DeviceAssertion",
    "Diverged",
    "ExportRefused",
    "Fenced",
    "Hang",
    "OnwardError",
    "OutOfMemory",
    "RecordError",
    "Refused",
    "ReplicasDiffer",
    "RuntimeUnavailable",
    "ServerUnavailable",
    "Stopped",
    "StorageUnavailable",
    "TrainingFailed",
    "UnsupportedModel",
    "__version__",
    "bundle",
    "config",
    "diff",
    "doctor",
    "evaluate",
    "examine",
    "export",
    "init",
    "origins",
    "plan",
    "predict",
    "promote",
    "replay",
    "report",
    "resume",
    "resume_sweep",
    "run",
    "runs",
    "status",
    "sweep",
    "sweeps",
    "to_module",
    "verify",
    "write",
]
