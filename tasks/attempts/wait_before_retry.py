"""Wait until a retry can succeed: for its pause, for space on the disk, for hosts that answer.

None of this counts as an attempt. It runs before the attempt begins, so Prefect shows the task as retrying meanwhile.
"""

from __future__ import annotations

import logging
import time
from pathlib import Path

from onward.infra.job.hosts import read_hostfile, silence, silent_hosts, write_hostfile
from onward.tasks.attempts.retry_policy import adjustments
from onward.trainer.checkpoint.retention import list_checkpoints
from onward.trainer.errors import RuntimeUnavailable, StorageUnavailable
from onward.trainer.run.adjustments import fewer_replicas
from onward.trainer.run.directory import RunDir, read_config
from onward.trainer.run.outcomes.attempt_endings import endings
from onward.trainer.run.outcomes.storage import storage_problem
from onward.trainer.run.records import write_record

log = logging.getLogger(__name__)

STORAGE_WAIT_S = 600.0
"""How long a disk may stay full or failed: long enough for a person, or a clean-up at night, to make room."""
POLL_S = 2.0
"""Seconds between two looks at a full disk."""
LEAST_BYTES = 1 << 20
HOST_PAUSES_S = (2.0, 10.0, 60.0)
"""Pauses before hosts that did not answer are asked again."""


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
        wait_for_hosts(run)


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


def wait_for_hosts(run: RunDir) -> None:
    """Wait until every host of the hostfile answers; with `launch.on_host_lost = "fewer"` go on without the others."""
    config = read_config(run, "given")
    hosts = read_hostfile(Path(config.launch.hostfile))
    silent = silent_hosts(list(hosts))
    for pause_s in HOST_PAUSES_S:
        if not silent:
            break
        log.warning("%s; asking again in %g s", silence(silent), pause_s)
        time.sleep(pause_s)
        silent = silent_hosts(list(hosts))
    changes = adjustments(run)
    if not silent:
        if changes.data:
            log.warning("all %d hosts answer again: the layout is the configured one", len(hosts))
            write_record(run.adjusted, changes.model_copy(update={"data": 0, "hostfile": ""}))
        return
    if config.launch.on_host_lost == "wait":
        raise RuntimeUnavailable(
            f"{silence(silent)}; bring them back and resume; a run with launch.on_host_lost = 'fewer' goes on with the "
            "hosts that answer"
        )
    # a host without a number of slots takes its part of the ranks
    part = -(-config.world_size // len(hosts))
    answering = [host for host in hosts if host not in silent]
    left = {host: hosts[host] or part for host in answering}
    hostfile = run.root / "hosts-left"
    fewer = fewer_replicas(config, changes, ranks=sum(left.values()), hostfile=str(hostfile)) if left else None
    if fewer is None:
        raise RuntimeUnavailable(
            f"{silence(silent)}; the {sum(left.values())} slots that are left take no layout of this run: it needs "
            f"{config.parallel.tensor * config.parallel.pipeline} ranks for one replica, and replicas that divide a "
            f"batch of {config.train.global_batch_size} into micro-batches of {config.micro_batch_size}"
        )
    write_hostfile(hostfile, left)
    write_record(run.adjusted, fewer)
    log.warning(
        "%s; going on with %d of %d replicas on %s (launch.on_host_lost)",
        *(silence(silent), fewer.data, config.parallel.data, ", ".join(left)),
    )
