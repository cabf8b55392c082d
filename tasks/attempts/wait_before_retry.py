"""Wait until a retry can succeed: for its pause, for space on the disk, for hosts that answer.

None of this counts as an attempt. It runs before the attempt begins, so Prefect shows the task as retrying meanwhile.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from onward.infra.job.hosts import is_here, read_hostfile, silence, silent_hosts
from onward.tasks.attempts.layout_for_hosts import use_hosts
from onward.tasks.checks.host_table import ask_hosts, files_of_ranks
from onward.tasks.launching.own_homes import note_own_homes
from onward.trainer.checkpoint.retention import list_checkpoints
from onward.trainer.errors import RuntimeUnavailable, StorageUnavailable
from onward.trainer.run.directory import RunDir, read_config
from onward.trainer.run.outcomes.attempt_endings import endings
from onward.trainer.run.outcomes.storage import storage_problem
from onward.trainer.run.records import read_record
from onward.trainer.run.remote.local_copies import LocalCopies, with_copies

log = logging.getLogger(__name__)

STORAGE_WAIT_S = 600.0
"""How long a disk may stay full or failed: long enough for a person, or a clean-up at night, to make room."""
POLL_S = 2.0
"""Seconds between two looks at a full disk."""
LEAST_BYTES = 1 << 20
HOST_POLL_S = 5.0
"""Seconds before hosts that did not answer are asked again."""
KNOWN_S = 30.0
"""How long what the hosts said at the end of an attempt is true."""


def wait_until_ready(run: RunDir) -> None:
    """Wait for what the newest attempt failed for, if a retry of it is planned.

    Raises StorageUnavailable when the disk, and RuntimeUnavailable when the hosts are not usable within their limits.
    """
    # of a flow that was killed the newest attempt has no record: it was no planned retry
    if not run.ending(run.current_attempt).exists() or not (found := endings(run)) or not found[-1].retry:
        return
    last = found[-1]
    due_ms = last.ended_ms + 1000 * last.delay_s
    # a clock that was set back must not prolong the pause
    time.sleep(min(last.delay_s, max(0.0, due_ms / 1000 - time.time())))
    if last.kind == "storage":
        wait_for_storage(run)
    if read_config(run, "given").launch.hostfile:
        is_new = 0 <= time.time() - last.ended_ms / 1000 <= KNOWN_S
        wait_for_hosts(run, known=last.silent_hosts if is_new else {})


def wait_for_storage(run: RunDir) -> None:
    """Wait until the run directory takes a file, and has room for a checkpoint like the newest one."""
    newest = list_checkpoints(run)[-1:]
    needed = LEAST_BYTES + sum(file.stat().st_size for path in newest for file in path.iterdir())
    deadline = time.monotonic() + STORAGE_WAIT_S
    said = False
    while problem := storage_problem(run.root, needed):
        if time.monotonic() > deadline:
            raise StorageUnavailable(
                f"{problem}, then `onward resume`; waited for {STORAGE_WAIT_S:g} s. Earlier checkpoints are unchanged"
            )
        if not said:
            log.warning("%s: waiting up to %g s for that to change", problem, STORAGE_WAIT_S)
            said = True
        time.sleep(POLL_S)
    if said:
        log.warning("%s can be written again", run.root)


def wait_for_hosts(run: RunDir, *, known: Mapping[str, str] = MappingProxyType({})) -> None:
    """Wait until every host of the hostfile is ready; with `launch.on_host_lost = "fewer"` go on without the others.

    known: hosts that have not answered just now, with what ssh said; those that need not be there are not asked again.
    Raises RuntimeUnavailable if the hosts that are ready are too few.
    """
    launch = read_config(run, "given").launch
    hosts = hosts_of(run)
    may_go_on = launch.on_host_lost == "fewer"
    lost = {host: known[host] for host in hosts.keys() & known.keys()} if may_go_on else {}
    silent = {**lost, **unready_hosts(run, [host for host in hosts if host not in lost])}
    deadline = time.monotonic() + launch.host_wait_s
    said = ""
    while silent and launch.on_host_lost == "wait" and time.monotonic() < deadline:
        # the reasons change while a host starts
        if silence(silent) != said:
            said = silence(silent)
            log.warning("%s; waiting up to %g s (launch.host_wait_s)", said, launch.host_wait_s)
        time.sleep(HOST_POLL_S)
        # hosts may be taken out of the file, or added, meanwhile
        hosts = hosts_of(run)
        silent = unready_hosts(run, list(hosts))
    left = {host: slots for host, slots in hosts.items() if host not in silent}
    if silent and launch.on_host_lost == "wait":
        raise RuntimeUnavailable(
            f"{silence(silent)}; waited for {launch.host_wait_s:g} s (launch.host_wait_s); bring them back and resume; "
            "a run with launch.on_host_lost = 'fewer' goes on with the hosts that answer"
        )
    use_hosts(run, left, lost=silence(silent) if silent else "")


def unready_hosts(run: RunDir, hosts: Sequence[str]) -> dict[str, str]:
    """Return the hosts that do not answer, or cannot be used yet: one that has just started may lack its file systems.

    Each with the reason.
    """
    silent = silent_hosts(hosts)
    answering = [host for host in hosts if host not in silent]
    # the versions of this host, from which the ranks are started, are the right ones
    here = [] if any(map(is_here, answering)) else ["localhost"]
    config = read_config(run)
    asked = [*here, *answering]
    has_store = bool(config.checkpoint.store)
    table = ask_hosts(config.launch, run.root, files_of_ranks(config), hosts=asked, has_store=has_store)
    note_own_homes(run, table.own_homes)
    unready = {host: why for host, why in table.unready().items() if host not in here}
    return {**silent, **unready}


def hosts_of(run: RunDir) -> dict[str, int]:
    """Return the hosts of the configured hostfile, or of the local copy of one that a URL names, with their slots.

    Raises RuntimeUnavailable if it cannot be read.
    """
    config = read_config(run, "given")
    if run.remote.exists():
        config = with_copies(config, read_record(run.remote, LocalCopies))
    try:
        return read_hostfile(Path(config.launch.hostfile))
    except (OSError, UnicodeDecodeError) as error:
        raise RuntimeUnavailable(
            f"launch.hostfile: {config.launch.hostfile} cannot be read: {error}; put the file there, then "
            "`onward resume`"
        ) from error
