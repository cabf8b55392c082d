"""Soaks: `onward chaos` over four layouts, and the table of what was found.

    python -m tests.bench.soaks --faults 50 --folder DIR

Each layout trains a tiny convolutional net, again and again until its faults were injected. `DIR` keeps the accounts; a
layout whose account is there is not run again. The exit status is 0 only if all is right.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path

from onward.flows.chaos.account import Account, Times, times
from onward.flows.chaos.kinds import KINDS
from onward.trainer.run.records import read_record
from tests.support.ranks import ROOT
from tests.support.workshop import Workshop

LAYOUTS: dict[str, tuple[str, ...]] = {
    "one rank": ("train.num_steps=6000",),
    "two ranks": ("train.num_steps=1000", "parallel.data=2"),
    "2x1x2": (
        *("train.num_steps=800", "parallel.data=2", "parallel.pipeline=2"),
        "train.gradient_accumulation_steps=2",
    ),
    "two ranks, ZeRO 2": ("train.num_steps=1000", "parallel.data=2", "parallel.zero=2"),
}
SETTINGS = (
    "parallel.data=1",
    "launch.rehearsal='off'",
    "launch.heartbeat_timeout_s=20",
    "launch.collective_timeout_s=18",
    "train.log_period=10",
    "train.evaluation_period=500",
    "checkpoint.period=100",
    "monitor.report_to=[]",
)


def soak(name: str, folder: Path, *, faults: int, kinds: str, mtbf: str, seed: int) -> Account:
    """Run one soak, unless its account is there."""
    place = folder / name.replace(" ", "-").replace(",", "")
    if not (place / "home" / "account.json").exists():
        place.mkdir(parents=True)
        Workshop.made(place)
        words = ("chaos", str(place / "config.toml"), *SETTINGS, *LAYOUTS[name], "--kinds", kinds, "--mtbf", mtbf)
        subprocess.run(
            [
                *(sys.executable, "-m", "onward.flows.cli", *words, "--seed", str(seed), "--faults", str(faults)),
                *("--home", str(place / "home")),
            ],
            cwd=ROOT,
            env={**os.environ, "GOMP_SPINCOUNT": "0"},
            stdout=subprocess.DEVNULL,
            check=False,  # its account says what is not right
        )
    return read_record(place / "home" / "account.json", Account)


def tables(found: dict[str, Account]) -> str:
    """Return the figures as Markdown: one row for each layout, the confusion matrix, and one row for each kind."""
    lines = [
        "| layout | faults of kinds | runs, same bits | detected: median, 95 % | works again: median, 95 % "
        "| steps again | processes left | points lost, doubled | not right |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, account in found.items():
        same = [(each.weights, each.model) == _bits(account) for each in account.rounds]
        kinds = len({fault.kind for fault in account.faults})
        points = [sum(getattr(each, what) for each in account.rounds) for what in ("points_lost", "points_doubled")]
        lines.append(
            f"| {name} | {len(account.faults)} of {kinds} | {sum(same)} of {len(same)} | {_times(account.detection)} "
            f"| {_times(account.recovery)} | {account.lost} | {account.orphans} | {points[0]}, {points[1]} "
            f"| {len(account.problems)} |"
        )
    confusion: dict[str, Counter[str]] = defaultdict(Counter)
    for account in found.values():
        for right, said in account.confusion.items():
            confusion[right].update(said)
    said = sorted({each for row in confusion.values() for each in row})
    lines += ["", f"| class injected | {' | '.join(said)} |", "|---|" + "---|" * len(said)]
    lines += [f"| {right} | {' | '.join(str(row[each]) for each in said)} |" for right, row in confusion.items()]
    lines += ["", "| kind | faults | detected: median, 95 % | works again: median, 95 % |", "|---|---|---|---|"]
    for kind in KINDS:
        faults = [fault for account in found.values() for fault in account.faults if fault.kind == kind]
        if faults:
            detected = times(each.detected_s for each in faults if KINDS[kind].ends != "nothing")
            recovered = times(each.recovered_s for each in faults)
            lines.append(f"| `{kind}` | {len(faults)} | {_times(detected)} | {_times(recovered)} |")
    return "\n".join(lines)


def _bits(account: Account) -> tuple[str, str]:
    return account.undisturbed.weights, account.undisturbed.model


def _times(found: Times | None) -> str:
    return f"{found.median:.1f} s, {found.p95:.1f} s" if found else ""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--faults", type=int, default=50, help="faults for each layout")
    parser.add_argument("--kinds", default="all")
    parser.add_argument("--mtbf", default="1s")
    parser.add_argument("--seed", type=int, default=1, help="of the first layout; the next ones count on")
    parser.add_argument("--layouts", nargs="+", default=list(LAYOUTS), choices=list(LAYOUTS))
    parser.add_argument("--folder", type=Path, help="keeps the accounts; default: a temporary directory")
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as temporary:
        folder, found = given.folder or Path(temporary), dict[str, Account]()
        for seed, name in enumerate(given.layouts, start=given.seed):
            options = {"faults": given.faults, "kinds": given.kinds, "mtbf": given.mtbf, "seed": seed}
            found[name] = soak(name, folder, **options)
            print(tables(found), flush=True)
    problems = [f"{name}: {problem}" for name, account in found.items() for problem in account.problems]
    print("\n".join(problems), file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
