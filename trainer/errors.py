"""The errors that Onward raises on purpose, with the exit status of the command line.

    OnwardError                  1
    ├── ConfigError              2   the configuration contradicts itself or the files it names
    ├── DataError                2   a row, a column or a file of the data cannot be used
    ├── UnsupportedModel         2   the ONNX file contains something that cannot be trained
    ├── RuntimeUnavailable       3   no MPI, wrong world size, no device, not enough memory or disk
    │   ├── ServerUnavailable    3   a server of data does not answer; a retry may find it again
    │   └── StorageUnavailable   3   a disk is full, has no inodes, is mounted read-only, or fails
    ├── CheckpointError          4   a checkpoint is damaged, absent or of another model
    ├── RecordError              4   a record of a run, of a sweep or of shards is damaged or absent
    ├── ExportRefused            5   the trained file failed one of its checks
    ├── Diverged                 6   the loss or a gradient is not finite; a retry would repeat it
    ├── OutOfMemory              7   a rank asked its device for more memory than is free; a retry would repeat it
    ├── DeviceAssertion          8   a GPU kernel was given an index out of range; a retry would repeat it
    ├── TrainingFailed          70   the job failed; a retry resumes from the newest checkpoint
    │   ├── Hang                70   a rank made no progress, and the others waited for it
    │   └── ReplicasDiffer      70   ranks that must hold the same weights do not; the newest checkpoint is good
    ├── Fenced                  72   a newer attempt of the run has begun
    └── Stopped                 75   stopped on request, with a checkpoint (EX_TEMPFAIL)

Each message says what happened, with the numbers, and what to do.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Sequence


def few(names: Iterable[object], most: int = 5) -> str:
    """Return the first names in one line, and how many more there are."""
    listed = list(map(str, names))
    more = f" and {len(listed) - most:,} more" if len(listed) > most else ""
    return ", ".join(listed[:most]) + more


def first_lines(lines: Iterable[str], most: int = 20) -> list[str]:
    """Return the first lines, and one that says how many more there are."""
    listed = [*lines]
    more = [f"... and {len(listed) - most:,} more"] if len(listed) > most else []
    return [*listed[:most], *more]


def reason_of(error: Exception) -> str:
    """Return the type of an error and the first line of its text: torch appends its C++ stack and general advice."""
    first, *_ = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {first}"


class OnwardError(Exception):
    """The base of all errors that Onward raises on purpose."""

    exit_code = 1

    @property
    def problems(self) -> tuple[str, ...]:
        """One sentence for each thing that is wrong."""
        return (str(self),)


class Refused(OnwardError):
    """Input was refused; `problems` has one sentence for each thing that is wrong."""

    exit_code = 2

    def __init__(self, problems: str | Iterable[str]) -> None:
        self._problems: tuple[str, ...] = (problems,) if isinstance(problems, str) else tuple(problems)
        super().__init__("\n".join(self._problems))

    @property
    def problems(self) -> tuple[str, ...]:
        """One sentence for each thing that is wrong."""
        return self._problems


class ConfigError(Refused):
    """The configuration contradicts itself, the model or the data."""


class DataError(Refused):
    """A row, a column or a file of the data cannot be used; each problem names file and line."""


class UnsupportedModel(Refused):
    """The ONNX file has nodes or weights that cannot be imported; all are listed."""


class UnsupportedNode(Exception):
    """Why one node cannot be imported, as a clause after "because"; the import collects them in UnsupportedModel."""


class RuntimeUnavailable(Refused):
    """The machine cannot run the job: launcher, world size, device, memory or disk."""

    exit_code = 3


class ServerUnavailable(RuntimeUnavailable):
    """A server whose data is trained on does not answer."""


class StorageUnavailable(RuntimeUnavailable):
    """A disk is full, without a free inode, mounted read-only, or its device fails."""


class CheckpointError(OnwardError):
    """A checkpoint is damaged, absent, or belongs to another model."""

    exit_code = 4


class RecordError(OnwardError):
    """A record of a run, of a sweep or of shards is damaged or absent."""

    exit_code = 4


class ExportRefused(Refused):
    """The exported file failed a check; each problem says which check, and by how much."""

    exit_code = 5


class Diverged(OnwardError):
    """The loss or a gradient is not finite and a smaller loss scale does not help; a retry would repeat it."""

    exit_code = 6


class OutOfMemory(OnwardError):
    """A rank asked its device for more memory than is free. Retried once, and not in the first steps."""

    exit_code = 7


class DeviceAssertion(OnwardError):
    """A GPU kernel was given an index out of range, such as a label beyond the classes; a retry would repeat it."""

    exit_code = 8


class TrainingFailed(OnwardError):
    """The job failed before its result was written. A retry resumes from the newest checkpoint, or from step 0."""

    exit_code = 70

    def __init__(self, message: str = "", *, again: bool = True) -> None:
        super().__init__(message)
        self.again = again
        """Whether a retry follows by itself."""


class Hang(TrainingFailed):
    """A rank made no progress, and the others waited for it. A retry resumes from the newest checkpoint."""


class ReplicasDiffer(TrainingFailed):
    """Ranks hold different bits of the same weight. A retry resumes from the newest checkpoint, where they agreed."""


class Fenced(OnwardError):
    """A newer attempt of the run has begun; this one must not write to the run directory."""

    exit_code = 72


class Stopped(OnwardError):
    """The job stopped on request, after it had saved a checkpoint."""

    exit_code = 75


# -- texts of files and users in messages

_UNPRINTABLE = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters, which a terminal obeys; marks that change the order of letters; parts of names that are not
UTF-8."""
MAX_SHOWN = 200
"""Characters of a name or a value that a message shows."""


def printable(text: str, keep: str = "") -> str:
    """Return a text as every terminal and file takes it. keep: control characters that stay, such as line ends."""
    return _UNPRINTABLE.sub(lambda found: found[0] if found[0] in keep else ascii(found[0])[1:-1], text)


def shown(value: object) -> str:
    """Return a name or a value as messages show it: printable, and shortened if it is long."""
    text = printable(str(value))
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}... ({len(text):,} characters)"


MAX_PROBLEMS = 100
MAX_PROBLEM = 4000
"""Problems that a command prints, and characters of one of them."""
_LONG_WORD = re.compile(r"\S{1000,}")


def printed(problems: Sequence[str]) -> list[str]:
    """Return what a command prints of problems: the first ones, with long words and texts shortened."""
    lines = []
    for problem in problems[:MAX_PROBLEMS]:
        text = _LONG_WORD.sub(lambda word: shown(word[0]), problem)
        lines.append(text if len(text) <= MAX_PROBLEM else f"{text[:MAX_PROBLEM]}... ({len(text):,} characters)")
    more = len(problems) - len(lines)
    return [*lines, f"... and {more:,} more"] if more else lines


def say(text: str) -> None:
    """Print a line on stderr: what a command does, or has found."""
    print(f"onward: {text}", file=sys.stderr, flush=True)
