"""The soaks that are measured: a tiny convolutional net in four layouts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from onward.trainer.run.records import read_record
from tests.soak.account import Account
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
    "train.log_period=10",
    "train.evaluation_period=500",
    "checkpoint.period=100",
    "monitor.report_to=[]",
)


def soak_of_layout(name: str, folder: Path, *, faults: int, kinds: str, mtbf: str, seed: int) -> Account:
    """Run the soak of a layout in a process of its own, unless its account is there, and return its account."""
    place = folder / name.replace(" ", "-").replace(",", "")
    if not (place / "home" / "account.json").exists():
        place.mkdir(parents=True)
        Workshop.made(place)
        words = (str(place / "config.toml"), *SETTINGS, *LAYOUTS[name], "--home", str(place / "home"))
        drawn = ("--kinds", kinds, "--mtbf", mtbf, "--seed", str(seed), "--faults", str(faults))
        subprocess.run(
            [sys.executable, "-m", "tests.soak", *words, *drawn],
            cwd=ROOT,
            env={**os.environ, "GOMP_SPINCOUNT": "0"},
            stdout=subprocess.DEVNULL,
            check=False,  # its account says what is not right
        )
    return read_record(place / "home" / "account.json", Account)
