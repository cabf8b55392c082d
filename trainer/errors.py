"""Every error Onward raises on purpose, with the exit code a shell sees.

    OnwardError                  1
    ├── ConfigError              2   the configuration contradicts itself or the files it names
    ├── DataError                2   a row, a column or a file of the data cannot be used
    ├── UnsupportedModel         2   the ONNX file holds something that cannot be trained
    ├── RuntimeUnavailable       3   no MPI, wrong world, no device, not enough memory or disk
    ├── CheckpointError          4   a checkpoint is damaged, absent or of another model
    ├── ExportRefused            5   the trained file failed one of its checks
    ├── Diverged                 6   the loss or a gradient is not finite; a retry would do the same again
    ├── TrainingFailed          70   the job died; a retry resumes from the newest checkpoint
    ├── Fenced                  72   a newer attempt owns the run directory
    └── Stopped                 75   asked to stop; a checkpoint was kept (EX_TEMPFAIL)

Each carries a sentence that says what, with the numbers, and what to do about it.
"""

from __future__ import annotations

from collections.abc import Iterable


class OnwardError(Exception):
    """The root: catch this to catch everything Onward refuses or gives up on."""

    exit_code = 1


class Refused(OnwardError):
    """Several things wrong at once; `problems` has one sentence for each."""

    exit_code = 2

    def __init__(self, problems: str | Iterable[str]) -> None:
        self.problems: tuple[str, ...] = (problems,) if isinstance(problems, str) else tuple(problems)
        super().__init__("\n".join(self.problems))


class ConfigError(Refused):
    """The configuration contradicts itself, the model or the data."""


class DataError(Refused):
    """A row, a column or a file of the data cannot be used; each problem names file and line."""


class UnsupportedModel(Refused):
    """The ONNX file holds nodes or weights that cannot be imported; every one is listed."""


class RuntimeUnavailable(Refused):
    """The machine cannot run the job: launcher, world, device, memory or disk."""

    exit_code = 3


class CheckpointError(OnwardError):
    """A checkpoint is damaged, absent, or belongs to another model."""

    exit_code = 4


class ExportRefused(Refused):
    """The trained file failed a check; each problem says which, and by how much."""

    exit_code = 5


class Diverged(OnwardError):
    """The loss or a gradient is not finite and no loss scale can mend it; retrying would repeat it."""

    exit_code = 6


class TrainingFailed(OnwardError):
    """The job died before its result was written. Retrying resumes from the newest checkpoint."""

    exit_code = 70


class Fenced(OnwardError):
    """Another, newer attempt owns the run directory; this one must not write to it."""

    exit_code = 72


class Stopped(OnwardError):
    """The job was asked to stop and did so after writing a checkpoint."""

    exit_code = 75
