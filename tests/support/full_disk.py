"""A small disk that a test fills up: a tmpfs in a namespace of its own, which needs no right but that to make one.

python -m tests.support.full_disk MODULE:FUNCTION FOLDER 2m     calls the function with FOLDER, a disk of 2 MB
"""

from __future__ import annotations

import contextlib
import importlib
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from tests.support.ranks import ROOT

NAMESPACE = ("unshare", "--map-root-user", "--mount")


def may_mount() -> bool:
    """Return whether this user may mount a tmpfs in a namespace of its own."""
    return subprocess.run([*NAMESPACE, "mount", "-t", "tmpfs", "none", "/mnt"], capture_output=True).returncode == 0


def on_a_small_disk(
    role: Callable[[Path], None], folder: Path, *, size: str = "2m"
) -> subprocess.CompletedProcess[str]:
    """Call a function of a module in a process of its own, with a disk of some size as its argument."""
    name = f"{role.__module__}:{role.__name__}"
    path = os.pathsep.join([str(ROOT), str(ROOT / ".package")])
    return subprocess.run(
        [*NAMESPACE, sys.executable, "-m", "tests.support.full_disk", name, str(folder), size],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )


def mount(folder: Path, size: str) -> None:
    """Mount a tmpfs."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "none", str(folder)], check=True)


def fill(folder: Path) -> Path:
    """Take all the room that is left, to the last byte; return the file that has it."""
    ballast = folder / "ballast"
    with ballast.open("ab", buffering=0) as file:
        for size in (1 << 20, 1 << 12, 1):
            with contextlib.suppress(OSError):
                while file.write(bytes(size)):
                    pass
    return ballast


if __name__ == "__main__":
    module, _, function = sys.argv[1].partition(":")
    mount(Path(sys.argv[2]), sys.argv[3])
    getattr(importlib.import_module(module), function)(Path(sys.argv[2]))
