"""From a button of Prefect's page to freed ranks: Suspend, Cancel and `onward stop` of a run behind a worker.

    python -m tests.bench.suspend_time [--rounds 3] [--json]

Real servers, a real worker, two ranks of a tiny model that train. The first time is from the answer of Prefect's server
to the button's request until no rank is left, the second until the process of the flow has ended, too. In between lie a
checkpoint, the last metrics, and the report of the run.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from onward.flows.run_state.runs import holder_of
from onward.trainer.run.directory import RunDir
from tests.flows.test_suspended_and_retried import CANCEL, suspend
from tests.support.workshop import Workshop, api, ranks_of, reached, signed_in, until

LIMIT_S = 300.0


def send_suspend(workshop: Workshop, server: str, begun: str) -> None:
    assert api(server, f"/flow_runs/{begun}/set_state", suspend(force=False))["status"] == "ACCEPT"


def send_cancel(workshop: Workshop, server: str, begun: str) -> None:
    assert api(server, f"/flow_runs/{begun}/set_state", CANCEL)["status"] == "ACCEPT"


def send_stop(workshop: Workshop, server: str, begun: str) -> None:
    workshop.start("stop", begun)


BUTTONS: dict[str, Callable[[Workshop, str, str], None]] = {
    "Suspend": send_suspend,
    "Cancel": send_cancel,
    "`onward stop`": send_stop,
}


def times(workshop: Workshop, server: str, deployment: str, press: Callable[[Workshop, str, str], None]) -> list[float]:
    """Return [seconds until no rank is left, seconds until the flow's process has ended] of one run."""
    begun = api(server, f"/deployments/{deployment}/create_flow_run", {"state": {"type": "SCHEDULED"}})["id"]
    run = RunDir(workshop.home / "runs" / begun)
    until(lambda: reached(run, 100), limit_s=LIMIT_S)
    holder = holder_of(run)
    assert holder is not None
    process = psutil.Process(holder["pid"])
    press(workshop, server, begun)
    pressed_at = time.monotonic()
    until(lambda: not ranks_of(run), limit_s=LIMIT_S)
    freed_at = time.monotonic()
    until(lambda: not process.is_running(), limit_s=LIMIT_S)
    return [freed_at - pressed_at, time.monotonic() - pressed_at]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="onward-buttons-") as folder:
        workshop = Workshop.made(Path(folder))
        try:
            server = signed_in(workshop.onward("up")["prefect"], workshop.home)
            words = (str(workshop.root / "config.toml"), "train.num_steps=100000", "launch.rehearsal='off'")
            deployment = workshop.onward("deploy", *words, "--name", "buttons")["deployment_id"]
            found = {
                name: [times(workshop, server, deployment, press) for _ in range(given.rounds)]
                for name, press in BUTTONS.items()
            }
        finally:
            workshop.onward("down")
            workshop.close()
    if given.json:
        print(json.dumps(found))
        return
    for name, rounds in found.items():
        freed, ended = (statistics.median(column) for column in zip(*rounds, strict=True))
        print(f"{name}: {freed:.1f} s until no rank is left, {ended:.1f} s until the process has ended")


if __name__ == "__main__":
    main()
