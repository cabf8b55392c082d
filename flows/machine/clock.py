"""Whether the clock can be right, runs evenly, and agrees with that of the home's file system and of other hosts."""

from __future__ import annotations

import datetime
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from onward.flows.machine.findings import Finding
from onward.infra.job.hosts import clock_skews, read_hostfile, silent_hosts
from onward.trainer.run.directory import onward_home

EARLIEST = datetime.datetime(2025, 1, 1, tzinfo=datetime.UTC)
"""Onward is younger than that."""
MOST_SKEW_S, MOST_STEP_S = 2.0, 0.5
SYNCHRONISE = "synchronise it (chrony, systemd-timesyncd): times of events, durations and schedules come from it"


def clock() -> Iterator[Finding]:
    """Compare the clock with the least that it can be, and with the time stamps of the home's file system."""
    now = datetime.datetime.now(datetime.UTC)
    if now < EARLIEST:
        yield Finding(check="clock", level="problem", what=f"the clock says {now:%Y-%m-%d %H:%M}", fix=SYNCHRONISE)
        return
    parent = next(each for each in (onward_home(), *onward_home().parents) if each.exists())
    try:
        with tempfile.NamedTemporaryFile(dir=parent, prefix=".doctor-") as file:
            file.write(b"x")
            file.flush()
            skew_s = Path(file.name).stat().st_mtime - time.time()
    except OSError:
        return  # that the home cannot be written is reported by its own check
    if abs(skew_s) > MOST_SKEW_S:
        what = f"the file system of {parent} is {abs(skew_s):.1f} s {'ahead of' if skew_s > 0 else 'behind'} this clock"
        yield Finding(check="clock", level="note", what=what, fix=SYNCHRONISE, numbers={"file_system_skew_s": skew_s})
    else:
        what = f"{now:%Y-%m-%d %H:%M:%S} UTC; the file system of {parent} agrees within {MOST_SKEW_S:g} s"
        yield Finding(check="clock", level="ok", what=what, numbers={"file_system_skew_s": round(skew_s, 3)})


def steps(wall_s: float, elapsed_s: float) -> Iterator[Finding]:
    """Yield a note if the clock was set meanwhile. wall_s: by the clock; elapsed_s: by one that is never set."""
    if abs(wall_s - elapsed_s) > MOST_STEP_S:
        what = f"the clock was set by {wall_s - elapsed_s:+.1f} s during this examination"
        numbers: dict[str, float | str] = {"step_s": wall_s - elapsed_s}
        yield Finding(check="clock", level="note", what=what, fix=SYNCHRONISE, numbers=numbers)


def hosts(hostfile: str) -> Iterator[Finding]:
    """Ask the hosts of a hostfile over ssh, as mpirun does, and compare their clocks with this one."""
    path = Path(hostfile)
    try:
        found = read_hostfile(path)
    except (OSError, UnicodeDecodeError) as error:
        yield Finding(check="hosts", level="problem", what=f"{path} cannot be read: {error}", fix="name a hostfile")
        return
    if not found:
        fix = "write one in each line, such as `node1 slots=4`"
        yield Finding(check="hosts", level="problem", what=f"{path} names no host", fix=fix)
        return
    silent = silent_hosts(list(found))
    for host, said in silent.items():
        fix = f"make `ssh {host} true` work without a password"
        yield Finding(check="hosts", level="problem", what=f"{host} does not answer: {said}", fix=fix)
    answering = [host for host in found if host not in silent]
    if answering:
        yield Finding(check="hosts", level="ok", what=f"{len(answering)} of {len(found)} hosts answer")
    for host, skew in clock_skews(answering).items():
        if skew is not None and abs(skew.seconds) > MOST_SKEW_S + skew.uncertain_s:
            what = f"the clock of {host} differs by {skew.seconds:+.1f} s (known to {skew.uncertain_s:.1f} s)"
            numbers: dict[str, float | str] = {"skew_s": round(skew.seconds, 3)}
            yield Finding(check="hosts", level="note", what=what, fix=SYNCHRONISE, numbers=numbers)
