"""Why a run ended without a result, of which class that is, and what to do: read from its directory alone.

what is in RUN_DIR                                    class                                cause
the newest attempt ended in this flow, and failed     its kind, such as rank_lost          its sentence
ending.json: failed                                   by the error: storage, machine ...   its sentences
ending.json: cancelled                                stopped                              its sentence
no ending.json, and no process holds the lock         killed, or power_loss                from `lock`: who held it
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

import psutil

from onward.flows.runs import holder_of, how_to_continue
from onward.infra.job.job import LAUNCHERS
from onward.infra.job.process_identity import boot_id
from onward.trainer.run.attempt_endings import AttemptEnding, endings
from onward.trainer.run.directory import RunDir
from onward.trainer.run.ending import RunEnding, ending_of
from onward.trainer.run.storage import MAKE_ROOM, says_storage, shows_broken_storage

CLASS_OF: Mapping[str, str] = {
    "ConfigError": "user_error",
    "UnsupportedModel": "user_error",
    "Refused": "user_error",
    "DataError": "data_error",
    "DeviceAssertion": "data_error",
    "RuntimeUnavailable": "machine",
    "StorageUnavailable": "storage",
    "CheckpointError": "checkpoint",
    "RecordError": "checkpoint",
    "ExportRefused": "export_refused",
    "Diverged": "non_finite",
    "OutOfMemory": "out_of_memory",
    "Hang": "hang",
    "ReplicasDiffer": "rank_lost",
    "Fenced": "fenced",
    "Stopped": "stopped",
}
"""Error that ended a flow -> its class, unless its text says more."""
SERVERS = ("MLflow", "Prefect")
TO_DO: Mapping[str, str] = {
    "user_error": "correct what is listed. A run keeps the configuration that it began with: start a new run",
    "data_error": "correct the rows that are named, and start a new run",
    "out_of_memory": "change what the message lists, and start a new run; where more memory is free, {goes_on}",
    "non_finite": "it would diverge again: lower optimizer.learning_rate, set train.clip_norm, or look at the rows "
    "that are named; start a new run",
    "hang": "look at the line that is named (`onward logs` shows the stacks of all ranks); {goes_on}",
    "rank_lost": "{goes_on}",
    "host_lost": "start the host again, or take it out of launch.hostfile; {goes_on}",
    "preempted": "{goes_on}",
    "storage": f"{MAKE_ROOM} or repair the disk; {{goes_on}}",
    "server": "start the server again (`onward up`); {goes_on}",
    "machine": "correct what is listed; {goes_on}",
    "checkpoint": "if a disk failed, replace it; {goes_on}",
    "export_refused": "the checkpoints are unchanged: read which check failed, and by how much; {goes_on}",
    "fenced": "nothing: a newer attempt has the run",
    "stopped": "{goes_on}",
    "killed": "{goes_on}",
    "power_loss": "{goes_on}",
    "unknown": "the traceback is in flow.log (`onward logs`); {goes_on}",
}
"""Class -> what to do; `goes_on` is the command that continues the run, with the step at which it does."""


@dataclass(frozen=True)
class Cause:
    """Why a run ended."""

    kind: str
    """Its class, a key of TO_DO."""
    sentence: str
    to_do: str


def cause_of(run: RunDir) -> Cause:
    """Return why a run that does not run has no result."""
    kind, sentence = _kind_and_sentence(run)
    goes_on = how_to_continue(run)
    return Cause(kind, sentence, TO_DO[kind].format(goes_on=goes_on))


def _kind_and_sentence(run: RunDir) -> tuple[str, str]:
    ending, attempt = ending_of(run), _failed_attempt(run)
    if ending is None:
        return _of_a_killed_flow(run)
    sentence = "; ".join(ending.problems)
    if ending.status in ("cancelled", "suspended"):
        return "stopped", sentence or "it was stopped"
    if attempt is not None:
        return attempt.kind, attempt.sentence
    return _class_of_error(ending, sentence), sentence


def _failed_attempt(run: RunDir) -> AttemptEnding | None:
    """Return how the newest attempt ended, if it failed and the newest flow has started it."""
    newest = next(iter(endings(run)[-1:]), None)
    began_s = run.lock.stat().st_mtime if run.lock.exists() else 0.0  # when the newest flow took the lock
    if newest is None or newest.kind in ("done", "stopped") or newest.ended_ms < 1000 * began_s:
        return None
    return newest


def _class_of_error(ending: RunEnding, sentence: str) -> str:
    kind = CLASS_OF.get(ending.error, "unknown")
    if says_storage(sentence):
        return "storage"
    if kind != "machine":
        return kind
    lost_host = any(launcher.read_ending(sentence).lost_host is not None for launcher in LAUNCHERS.values())
    if lost_host or "not answer:" in sentence:
        return "host_lost"
    return "server" if any(f"{name} " in sentence and "cannot be reached" in sentence for name in SERVERS) else kind


def _of_a_killed_flow(run: RunDir) -> tuple[str, str]:
    """Return the class and the cause of a run whose flow has recorded nothing about its end."""
    if broken := shows_broken_storage(run.root):
        return "storage", f"its process has left no record of its end, and none can be written now: {broken}"
    holder = holder_of(run)
    if holder is None:
        return "killed", "its process has left no record of its end: it was killed, or the machine lost power"
    process = f"process {holder['pid']} on {holder['host']}"
    if holder["host"] != socket.gethostname():
        return "killed", f"{process} has left no record of its end: it was killed, or that machine lost power"
    if holder["boot"] != boot_id():
        at = datetime.fromtimestamp(psutil.boot_time(), UTC).isoformat(timespec="minutes")
        return (
            "power_loss",
            f"the machine was started again ({at}) while the run was going on: it lost power, or restarted",
        )
    attempt = ""
    with contextlib.suppress(IndexError):
        attempt = f"; {endings(run)[-1]}" if endings(run)[-1].ended_ms > 1000 * run.lock.stat().st_mtime else ""
    return "killed", f"{process} was killed from outside, by a person or by the kernel for want of memory{attempt}"
