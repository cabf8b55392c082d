"""Time from `pip install` to the first prediction on new rows: images in folders, a table, and texts.

    python -m tests.bench.first_prediction [--jobs images table texts] [--here]          about 15 minutes on 2 cores

A new environment gets Onward by the command of docs/getting-started.md. Then each job is three commands: `onward init`,
`onward run` and `onward predict`, with what init proposes. The model and the data are there before the clock starts.
Each line has seconds by the clock, and processor seconds of the command and of what it has waited for (not of
servers). `--here` leaves the installation out and takes the environment that runs this.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.stories.pictures import PICTURES
from tests.stories.story import Story
from tests.stories.tables import TABLES
from tests.stories.words import WORDS
from tests.support.ranks import ROOT

JOBS: dict[str, tuple[Story, str]] = {
    "images": (PICTURES["images in folders, and a new head"], "digits/val"),
    "table": (TABLES["a table with words and gaps"], "patients/val.csv"),
    "texts": (WORDS["texts"], "docstrings/val.csv"),
}
"""Job -> its files, and the rows that are predicted."""
EXTRAS = "flow,metrics,mpi,sweep,text"


def timed(what: str, words: list[str], folder: Path, environment: dict[str, str]) -> float:
    """Run a command, print its line, and return its seconds. Raises RuntimeError if it fails."""
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    ended = subprocess.run(words, capture_output=True, text=True, cwd=folder, env=environment)
    elapsed_s = time.monotonic() - began
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    used_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    if ended.returncode:
        raise RuntimeError(f"{what} ended with {ended.returncode}: {ended.stderr[-2000:]}")
    print(f"{what:20} {elapsed_s:6.0f} s   {used_s:6.0f} s of processors", flush=True)
    return elapsed_s


def main() -> None:
    """Print a line for each command, and one for each job."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--jobs", nargs="+", choices=JOBS, default=list(JOBS))
    parser.add_argument("--here", action="store_true", help="do not make a new environment")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:  # a server may be ending still
        root, binaries, install_s = Path(name), Path(sys.executable).parent, 0.0
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("PREFECT_", "MLFLOW_"))}
        environment = {**kept, "ONWARD_HOME": str(root / "home")}
        if not options.here:
            environment.pop("PYTHONPATH", None)
            binaries = root / "environment" / "bin"
            install_s = timed("python -m venv", [sys.executable, "-m", "venv", str(binaries.parent)], root, environment)
            pip = [str(binaries / "python"), "-m", "pip", "install", "--quiet", f"{ROOT}[{EXTRAS}]"]
            install_s += timed("pip install", pip, root, environment)
        environment["PATH"] = f"{binaries}{os.pathsep}{environment['PATH']}"
        onward = [str(binaries / "python"), "-m", "onward.flows.cli"]
        for job in options.jobs:
            story, rows = JOBS[job]
            folder = root / job
            folder.mkdir()
            story.write(folder)
            job_s = timed("onward init", [*onward, "init", "model.onnx", story.data], folder, environment)
            job_s += timed("onward run", [*onward, "run", "config.toml"], folder, environment)
            job_s += timed("onward predict", [*onward, "predict", "last", rows, "-o", "new.csv"], folder, environment)
            subprocess.run([*onward, "down"], cwd=folder, env=environment, capture_output=True, check=True)
            print(f"{job}: {job_s / 60:.1f} minutes, with the installation {(install_s + job_s) / 60:.1f}", flush=True)


if __name__ == "__main__":
    main()
