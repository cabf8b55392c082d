"""Why a run ended without a result, of which class that is, and what to do: read from its directory alone.

what is in RUN_DIR                                    class                                cause
the newest attempt ended in this flow, and failed     its kind, such as rank_lost          its sentence
ending.json: failed                                   by the error: storage, machine ...   its sentences
ending.json: cancelled                                stopped                              its sentence
no ending.json, and no process holds the lock         killed, or power_loss                from `lock`: who held it
"""

from __future__ import annotations

import socket
from dataclasses import dataclass
from datetime import UTC, datetime

import psutil

from onward.flows.run_state.runs import holder_of, how_to_continue
from onward.infra.job.job import LAUNCHERS
from onward.infra.job.process_identity import boot_id
from onward.trainer.run.directory import RunDir
from onward.trainer.run.outcomes.attempt_endings import AttemptEnding, endings
from onward.trainer.run.outcomes.ending_kinds import ENDINGS, SILENT_HOSTS, SILENT_SERVER, has_own_cause, kind_of_error
from onward.trainer.run.outcomes.run_ending import ending_of
from onward.trainer.run.outcomes.storage import says_storage, shows_broken_storage


@dataclass(frozen=True)
class Cause:
    """Why a run ended."""

    kind: str
    """Its class, a key of ENDINGS."""
    sentence: str
    to_do: str


def cause_of(run: RunDir) -> Cause:
    """Return why a run that does not run has no result."""
    kind, sentence = _kind_and_sentence(run)
    goes_on = how_to_continue(run)
    return Cause(kind, sentence, ENDINGS[kind].to_do.format(goes_on=goes_on))


def _kind_and_sentence(run: RunDir) -> tuple[str, str]:
    ending = ending_of(run)
    attempt = _failed_attempt(run)
    if ending is None:
        return _of_a_killed_flow(run)
    sentence = "; ".join(ending.problems)
    if ending.status in ("cancelled", "suspended"):
        return "stopped", sentence or "it was stopped"
    if attempt:
        return attempt.kind, attempt.sentence
    return _kind_of_failed_flow(ending.error, sentence), sentence


def _failed_attempt(run: RunDir) -> AttemptEnding | None:
    """Return how the newest attempt ended, if it failed and the newest flow has started it."""
    newest = next(iter(endings(run)[-1:]), None)
    # an attempt of an earlier flow says nothing about why the newest one ended
    began_s = run.lock.stat().st_mtime if run.lock.exists() else 0.0  # when the newest flow took the lock
    if newest is None or newest.kind in ("done", "stopped") or newest.ended_ms < 1000 * began_s:
        return None
    return newest


def _kind_of_failed_flow(error: str, sentence: str) -> str:
    """Return the class of a run by the class of the error that ended its flow, and by what the error says."""
    kind = kind_of_error(error)
    # a library may have wrapped the error of a disk into one of its own
    if not has_own_cause(error) and says_storage(sentence):
        return "storage"
    if kind != "machine":
        return kind
    lost_host = any(launcher.read_ending(sentence).lost_host is not None for launcher in LAUNCHERS.values())
    if lost_host or SILENT_HOSTS.search(sentence):
        return "host_lost"
    return "server" if SILENT_SERVER.search(sentence) else kind


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
    # the process belongs to a start of the machine that is over
    if holder["boot"] != boot_id():
        at = datetime.fromtimestamp(psutil.boot_time(), UTC).isoformat(timespec="minutes")
        return (
            "power_loss",
            f"the machine was started again ({at}) while the run was going on: it lost power, or restarted",
        )
    began_ms = 1000 * run.lock.stat().st_mtime
    attempt = "".join(f"; {each}" for each in endings(run)[-1:] if each.ended_ms > began_ms)
    return "killed", f"{process} was killed from outside, by a person or by the kernel for want of memory{attempt}"
