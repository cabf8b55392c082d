"""Say which git commit a directory holds, for the record of a run."""

from __future__ import annotations

import subprocess
from pathlib import Path

LIMIT_S = 5.0


def commit_of(folder: Path) -> str:
    """Return the commit that a working directory holds, " with changes" if tracked files differ; "" outside of git."""
    commit = _git(folder, "rev-parse", "HEAD")
    if not commit:
        return ""
    changed = _git(folder, "status", "--porcelain", "--untracked-files=no")
    return f"{commit} with changes" if changed else commit


def _git(folder: Path, *words: str) -> str:
    """Return what a command of git prints; "" if it fails, is slow, or is not installed."""
    # a repository may name a program that watches its files
    command = ["git", "-c", "core.fsmonitor=false", "--no-optional-locks", "-C", str(folder), *words]
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, errors="replace", timeout=LIMIT_S)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return "" if done.returncode else done.stdout.strip()
