"""What the fork server gains: a small run from start to end, and from the kill of a rank to the next logged step.

    python -m tests.bench.fork_server [--turns 3]          about 5 minutes on 2 idle cores

Each turn makes both runs with the server and without it (in a TMPDIR whose path is too long for a socket), one after
the other. A turn gives one ratio for each: with the server, over without it.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path

from tests.support.runs import events
from tests.support.workshop import Workshop, finished, ranks_of, reached, until

SHORT = ("train.num_steps=40", "train.evaluation_period=20", "checkpoint.period=10", "parallel.data=2", "export.alias=")
LONG = ("train.num_steps=2000", "train.evaluation_period=0", "checkpoint.period=50", "train.log_period=1")
LONGEST_SOCKET = 108


def run_s(workshop: Workshop) -> float:
    """The seconds of a run of two ranks, from the command to its end, beside a Prefect server that runs already."""
    began = time.monotonic()
    workshop.onward("run", str(workshop.root / "config.toml"), *SHORT)
    return time.monotonic() - began


def kill_to_step_s(workshop: Workshop) -> float:
    """The seconds from the kill of a rank to the first step of the next attempt, with a pause of half a second."""
    process = workshop.start("run", str(workshop.root / "config.toml"), *LONG)
    run = workshop.new_run()
    until(lambda: reached(run, 100), limit_s=600)
    killed_ms = time.time_ns() // 1_000_000
    ranks_of(run)[1].kill()
    finished(process)
    first = next(event for event in events(run, "scalars") if event.attempt == 2)
    return (first.at_ms - killed_ms) / 1e3


FIGURES = {"a small run": run_s, "kill to step": kill_to_step_s}


def main() -> None:
    """Take turns; print a line for each figure."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--turns", type=int, default=3)
    turns, found = parser.parse_args().turns, dict[tuple[str, bool], list[float]]()
    # a server may still be writing its last lines
    with tempfile.TemporaryDirectory(prefix="forks-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        places = {True: folder / "t", False: folder / ("t" * LONGEST_SOCKET)}
        for place in (*places.values(), folder / "w"):
            place.mkdir()
        workshop = Workshop.made(folder / "w")
        with workshop.server():
            workshop.onward("run", str(workshop.root / "config.toml"), *SHORT)  # makes databases and shards
            for turn in range(turns):
                for figure, measure in FIGURES.items():
                    for forked in (True, False) if turn % 2 else (False, True):
                        os.environ["TMPDIR"] = str(places[forked])
                        found.setdefault((figure, forked), []).append(measure(workshop))
    for figure in FIGURES:
        ours, without = found[figure, True], found[figure, False]
        ratios = [mine / other for mine, other in zip(ours, without, strict=True)]
        print(
            f"{figure}: {statistics.median(ours):.1f} s, without the server {statistics.median(without):.1f} s; ",
            end="",
        )
        print(f"ratio {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f}, {turns} turns)")


if __name__ == "__main__":
    main()
