"""Write and read the results of the examination: one line of JSON for each check, flushed as soon as it is known.

    {"step": "operators", "check": "...", "status": "passed", "reason": "", "values": {...}, "seconds": 1.2,
     "at": "2026-11-22 09:30", "rehearsal": false, "commit": "...", "device": "...", "versions": {...}}

A process that is killed leaves the lines that it has written. A check whose line has the present commit, device and
versions is finished: `is_finished`. Needs neither torch nor a GPU.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
import math
import os
import platform
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RESULTS = Path(os.environ.get("ONWARD_GPU_RESULTS") or ROOT / "build" / "gpu" / "results.jsonl")
STEP, IDENTITY, AGAIN = "ONWARD_GPU_STEP", "ONWARD_GPU_IDENTITY", "ONWARD_GPU_AGAIN"
"""Environment of a step: its name; commit, device and versions as JSON; a number of seconds since 1970: results that
are older do not count as finished."""
WHOLE_STEP = "(the whole step)"
"""The check that a step has ended by itself; its values are the numbers of checks."""
PACKAGES = ("torch", "triton", "onnx", "onnxruntime", "numpy")
Line = dict[str, Any]


LOST_DEVICE = 75
"""Exit status of a step whose process cannot use the GPU any more; it is started again for the checks that are left."""


class Skip(Exception):
    """A check cannot be made here; the message is the reason."""


# -- writing


def record(check: str, *, status: str = "passed", reason: str = "", seconds: float = 0.0, **values: object) -> None:
    """Append the line of one check. `status`: passed, failed or skipped, the last two with a reason.

    `values`: what was found or measured, with units in the names.
    """
    line = {
        "step": os.environ.get(STEP, "by hand"),
        "check": check,
        "status": status,
        "reason": reason.replace(f"{ROOT}/", "")[-4000:],
        "values": _as_json(values),
        "seconds": round(seconds, 3),
        "at": time.strftime("%Y-%m-%d %H:%M", time.gmtime()),
        "since_1970_s": round(time.time(), 3),
        **identity(),
    }
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    with RESULTS.open("a+b") as file:
        # a process that was killed while it wrote may have left half a line
        damaged = file.seek(0, os.SEEK_END) and file.seek(-1, os.SEEK_END) is not None and file.read(1) != b"\n"
        file.write(b"\n" * bool(damaged) + json.dumps(line, allow_nan=False).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())


def attempt(check: str, measure: Callable[[], Mapping[str, object]]) -> bool:
    """Make one check and record it, unless it is finished; return whether it did not fail.

    What `measure` returns are the values. Skip and any other exception end this check alone.
    """
    if is_finished(check):
        return True
    started_at = time.monotonic()
    try:
        values = measure()
    except Skip as why:
        record(check, status="skipped", reason=str(why), seconds=time.monotonic() - started_at)
    except Exception as error:
        traceback.print_exc()
        reason = f"{type(error).__name__}: {error}"
        record(check, status="failed", reason=reason, seconds=time.monotonic() - started_at)
        leave_a_lost_device(reason)
        return False
    else:
        record(check, seconds=time.monotonic() - started_at, **values)
    return True


def leave_a_lost_device(reason: str) -> None:
    """End this process after an error that leaves the CUDA context unusable, such as a device-side assert.

    Every later check of the process would fail with the same message.
    """
    if "CUDA error" in reason:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(LOST_DEVICE)


def _as_json(value: Any) -> Any:
    """Numbers that JSON does not have become text, and so does any object."""
    if isinstance(value, Mapping):
        return {str(key): _as_json(each) for key, each in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_as_json(each) for each in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    return value if value is None or isinstance(value, bool | int | str) else str(value)


# -- reading


def read(path: Path | None = None) -> tuple[list[Line], int]:
    """Return the lines of a results file, RESULTS by default, and how many were damaged. A missing file has none."""
    path, lines, damaged = path or RESULTS, [], 0
    for text in path.read_bytes().splitlines() if path.exists() else ():
        try:
            line = json.loads(text)
            assert isinstance(line, dict)
            assert {"step", "check", "status", "commit", "device", "versions", "rehearsal"} <= line.keys()
        except (ValueError, AssertionError):
            damaged += bool(text.strip())
        else:
            lines.append(line)
    return lines, damaged


def newest(lines: Iterable[Line]) -> dict[tuple[str, str], Line]:
    """Return (step, check) -> its last line, in the order of the first ones."""
    found: dict[tuple[str, str], Line] = {}
    for line in lines:
        found[line["step"], line["check"]] = line
    return found


def present(lines: Iterable[Line]) -> list[Line]:
    """Return the lines of the present commit, device and versions, without those that `--again` makes anew."""
    mine, since = identity(), float(os.environ.get(AGAIN, "0"))
    return [
        line for line in lines if all(line[key] == mine[key] for key in mine) and line.get("since_1970_s", 0) >= since
    ]


def is_finished(check: str) -> bool:
    """Return whether the check of this step has a line for the present commit, device and versions."""
    return (os.environ.get(STEP, "by hand"), check) in newest(present(read()[0]))


# -- what a line belongs to


@functools.cache
def identity() -> Line:
    """Return commit, device, versions and whether this is a rehearsal. Raises RuntimeError where there is no device."""
    if given := os.environ.get(IDENTITY):
        found: Line = json.loads(given)
        return found
    rehearsal = os.environ.get("ONWARD_GPU_REHEARSAL") == "1"
    described = {"device": "CPU (rehearsal)"} if rehearsal else _described()
    versions = {"Python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    device = described.pop("device")
    return {"rehearsal": rehearsal, "commit": commit(), "device": device, "versions": {**versions, **described}}


def _described() -> dict[str, str]:
    """In a process of its own: one that has used the GPU keeps hundreds of MiB of its memory."""
    program = [sys.executable, "-m", "tests.gpu.device"]
    ended = subprocess.run(program, cwd=ROOT, capture_output=True, text=True, timeout=300)
    if ended.returncode:
        raise RuntimeError(ended.stderr.strip().splitlines()[-1] if ended.stderr.strip() else "torch does not start")
    found: dict[str, str] = json.loads(ended.stdout.splitlines()[-1])
    return found


def commit() -> str:
    """Return the commit of the sources, with their digest where they are changed or are no repository.

    The variable COMMIT names the commit of a copy that came without its repository.
    """
    try:
        git = functools.partial(subprocess.run, cwd=ROOT, capture_output=True, text=True, check=True)
        head = git(["git", "rev-parse", "--short=12", "HEAD"]).stdout.strip()
        if not git(["git", "status", "--porcelain", "--", "*.py", "*.toml"]).stdout.strip():
            return head
    except (OSError, subprocess.CalledProcessError):
        head = os.environ.get("COMMIT", "")[:12] or "unknown commit"
    digest = hashlib.sha256()
    for part in ("flows", "tasks", "trainer", "infra", "tests"):
        for path in sorted((ROOT / part).rglob("*.py")):
            digest.update(str(path.relative_to(ROOT)).encode() + path.read_bytes())
    return f"{head} + {digest.hexdigest()[:8]}"
