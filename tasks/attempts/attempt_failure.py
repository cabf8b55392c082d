"""Turn a failed attempt into the error to raise, from the records of its ranks, its log and what the launcher said."""

from __future__ import annotations

import re
import socket

from onward.infra.job.job import now_ms
from onward.infra.job.launcher import RankEnding
from onward.tasks.launching.jobs import launcher_of
from onward.trainer.config.sections.ranks import LaunchConfig
from onward.trainer.errors import OnwardError, OutOfMemory, TrainingFailed
from onward.trainer.events import last_beat
from onward.trainer.run.directory import RunDir, read_config
from onward.trainer.run.outcomes.attempt_endings import AttemptEnding
from onward.trainer.run.outcomes.ending_kinds import PEER_LOST, PRINTED_ERROR, SIGNED, Cause, explain
from onward.trainer.run.outcomes.refusals import recorded_error
from onward.trainer.run.records import RankError, RuntimeReport, read_record, write_record

TAIL_LINES = 20
TAIL_BYTES = 1 << 16
"""How much of the log's end is searched for the cause."""

_SIGNALS = {
    "SIGSEGV": "a crash in native code",
    "SIGBUS": "a crash in native code, or /dev/shm or a file system that is full",
    "SIGABRT": "native code aborted",
    "SIGILL": "native code for another processor",
    "SIGTERM": "asked to end from outside",
}


def failure(run: RunDir, ending: AttemptEnding, described: str) -> OnwardError:
    """Return the error to raise for a failed attempt: the first rank's own, or TrainingFailed with the log's end.

    described: how the job ended, from `Attempt.described`.
    """
    first = run.first_error(ending.attempt)
    if first:
        # `cause` is "ClassName: message", as the rank's exception hook has written it.
        kind, _, message = first.cause.partition(": ")
        where = f"rank {first.rank} on {first.host}, step {first.step}: "
        own = recorded_error(kind, message.splitlines(), where=where)
        # an error that a retry would repeat is raised as it is; where a retry follows, TrainingFailed asks for it
        if own and not ending.retry and not isinstance(own, TrainingFailed):
            return own
    at = f"rank {first.rank} on {first.host}, step {first.step}: {first.cause}; {described}" if first else described
    # who has only lost another rank is not who failed, and the sentence says it
    if first and first.secondary:
        at = f"step {first.step}: {ending.sentence}; {described}"
    # the end of the log often has the native error that no record could hold
    lines = log_tail(run, ending.attempt).splitlines()[-TAIL_LINES:]
    said = f"attempt {ending.attempt}: {at} ({ending.kind}: {ending.action}). The end of {run.log(ending.attempt)}:"
    return TrainingFailed("\n  | ".join([said, *lines]), again=ending.retry > 0)


def record_first_ending(
    run: RunDir, attempt: int, launch: LaunchConfig, output: str, *, oom_kills: int, advice: str
) -> None:
    """Write the error record of the first rank that ended, if a signal ended it or its output explains its status.

    output: the end of the log. oom_kills: processes that the out-of-memory killer ended on this host meanwhile.
    advice: what to change where memory was too small.
    """
    ending = launcher_of(launch).read_ending(output).first_rank
    if ending is None or not ending.signal:
        _record_printed(run, attempt, launch, output)
    if ending is None or run.rank_error(attempt, ending.rank).exists():
        return
    dump = run.traceback(attempt, ending.rank)
    traceback = dump.read_text(errors="replace") if dump.exists() else ""
    # SIGKILL comes from outside, and what the rank printed before says nothing about it
    cause = explain(traceback + _lines_of(ending.rank, output)) if ending.signal != "SIGKILL" else None
    if not ending.signal and cause is None:
        return  # it printed what happened, and the log's end shows it
    sentence = _sentence(ending, cause, advice, traceback, oom_kills=oom_kills)
    write_error(run, attempt, ending.rank, launch, cause=sentence, traceback=traceback, host=ending.host)


def _record_printed(run: RunDir, attempt: int, launch: LaunchConfig, output: str) -> None:
    """Write the error record of the first rank that has printed an error of its own, but could not write it."""
    printed = list(PRINTED_ERROR.finditer(output))
    # an error about a lost peer follows from the error of that peer
    causes = [error for error in printed if not PEER_LOST.search(error["cause"])]
    # records that exist say more than a consequence that was only printed
    if not printed or (not causes and run.ranks_with_errors(attempt)):
        return
    first = (causes or printed)[0]
    if not run.rank_error(attempt, rank := int(first["rank"])).exists():
        texts = {"cause": first["cause"], "traceback": first["text"]}
        write_error(run, attempt, rank, launch, **texts, secondary=not causes)


def write_error(
    run: RunDir,
    attempt: int,
    rank: int,
    launch: LaunchConfig,
    *,
    cause: str,
    traceback: str,
    host: str = "",
    secondary: bool = False,
) -> None:
    """Write the error record of a rank that could not do so. host: "" = as the preflight found it."""
    error = RankError(
        attempt=attempt,
        rank=rank,
        host=host or host_of(run, rank, launch),
        step=last_beat(run.heartbeat).step,
        cause=cause,
        traceback=traceback,
        at_ms=now_ms(),
        secondary=secondary,
    )
    write_record(run.rank_error(attempt, rank), error)


def _sentence(ending: RankEnding, cause: Cause | None, advice: str, traceback: str, *, oom_kills: int) -> str:
    how = ending.signal or f"status {ending.status}"
    if cause:
        # the class name first, if it decides about a retry
        decided = f"{cause.kind.__name__}: " if cause.kind is not TrainingFailed else ""
        return f"{decided}{how}: {cause.sentence}" + f". {advice}" * (cause.kind is OutOfMemory)
    if ending.signal == "SIGKILL":
        return f"{how}: " + (
            f"the kernel's out-of-memory killer ended {oom_kills} process{'es' * (oom_kills > 1)} on this host "
            "meanwhile: the host has too little memory for its ranks"
            if oom_kills
            else "killed from outside: by a person, a job scheduler, or the out-of-memory killer of another host or "
            "container"
        )
    # the innermost line of Python code, of the thread that was running; the file has all threads
    running = traceback[max(0, traceback.find("Current thread")) :]
    where = re.search(r'File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<name>\S+)', running)
    place = f", in {where['name']} ({where['file']}:{where['line']})" if where else ""
    return f"{how}: {_SIGNALS.get(ending.signal, 'ended by a signal')}{place}"


def _lines_of(rank: int, output: str) -> str:
    """Return the output without the lines that another rank has signed, as NCCL's watchdog and error records do."""
    kept = []
    for line in output.splitlines():
        signature = SIGNED.match(line)
        if signature is None or int(signature[1] or signature[2]) == rank:
            kept.append(line)
    return "\n".join(kept)


def host_of(run: RunDir, rank: int, launch: LaunchConfig) -> str:
    """Return the host of a rank: over several hosts, as the preflight of the same hostfile found it."""
    if not launch.hostfile:
        return socket.gethostname()
    if launch.hostfile == read_config(run, "given").launch.hostfile and run.runtime.exists():
        hosts = {each.rank: each.host for each in read_record(run.runtime, RuntimeReport).ranks}
        return hosts.get(rank, "unknown host")
    return "unknown host"  # hosts were lost since, and the ranks are others


def log_tail(run: RunDir, attempt: int) -> str:
    """Return the end of an attempt's log."""
    if not run.log(attempt).exists():
        return ""
    with run.log(attempt).open("rb") as log:
        # a rank in a loop of warnings may have written gigabytes
        log.seek(max(0, log.seek(0, 2) - TAIL_BYTES))
        return log.read().decode(errors="replace")
