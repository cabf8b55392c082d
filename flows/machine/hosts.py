"""Whether the hosts of a hostfile answer, and their clocks agree with this one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from onward.flows.machine.findings import Finding
from onward.infra.hosts import clock_skews, read_hostfile, silent_hosts

MOST_SKEW_S = 2.0
SYNCHRONISE = "synchronise it (chrony, systemd-timesyncd): times of events, durations and schedules come from it"


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
            yield Finding(check="hosts", level="note", what=what, fix=SYNCHRONISE)
