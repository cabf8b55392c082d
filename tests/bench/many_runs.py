"""Processor time of the commands that look at all runs, in a home with thousands of finished runs.

    python -m tests.bench.many_runs [RUN_DIR] [--runs 2000] [--rounds 3]       some minutes on 2 cores

RUN_DIR: a finished run, which is copied; without one, a run is made first. Each figure is the median over the rounds,
in seconds of processor time. The first command makes the index of the runs, and is shown by itself.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from onward.flows.run_state.run_index import SETTLED_S
from tests.bench.command_costs import ONWARD, processor_s
from tests.support.workshop import Workshop

COMMANDS = {
    "import of the command line": ["-c", "import onward.flows.cli"],
    "runs": [*ONWARD, "runs"],
    "runs --json": [*ONWARD, "runs", "--json"],
    "runs --all --json": [*ONWARD, "runs", "--all", "--json"],
    "status last": [*ONWARD, "status", "last"],
    "gc": [*ONWARD, "gc", "--what", "run"],
    "ui, whose servers run": [*ONWARD, "ui"],
}


def copied(source: Path, home: Path, number: int) -> None:
    """Copy a finished run under another id and name, a minute older than the one before it."""
    run_id = f"{number:08x}-0000-7000-8000-{number:012x}"
    target = home / "runs" / run_id
    shutil.copytree(source, target, symlinks=True)
    path = target / "identity.json"
    created_at = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC) + datetime.timedelta(minutes=number)
    names = {"run_id": run_id, "name": f"mlp-{number}", "created_at": created_at.isoformat()}
    path.write_text(json.dumps({**json.loads(path.read_text()), **names}))


def finished_run(folder: Path) -> Path:
    """Return the directory of a run that `onward run` has made."""
    workshop = Workshop.made(folder)
    run = workshop.onward("run", str(folder / "config.toml"), "train.num_steps=200", "parallel.data=1")
    return Path(run["directory"])


def main() -> None:
    """Print a line for each command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("run", nargs="?", type=Path)
    parser.add_argument("--runs", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        source = options.run or finished_run(Path(name))
        home = Path(name) / "many"
        for number in range(1, options.runs + 1):
            copied(source, home, number)
        os.environ["ONWARD_HOME"] = str(home)
        time.sleep(SETTLED_S)  # younger entries are not kept in the index
        print(f"{'runs, the first time':30} {processor_s(COMMANDS['runs']):6.2f} s", flush=True)
        subprocess.run([sys.executable, *ONWARD, "ui"], capture_output=True, check=True)
        for command, words in COMMANDS.items():
            found = statistics.median(processor_s(words) for _ in range(options.rounds))
            print(f"{command:30} {found:6.2f} s", flush=True)
        listed = subprocess.run([sys.executable, *ONWARD, "runs", "--json"], capture_output=True, text=True, check=True)
        assert json.loads(listed.stdout)["total"] == options.runs
        subprocess.run([sys.executable, *ONWARD, "down"], capture_output=True, check=True)


if __name__ == "__main__":
    main()
