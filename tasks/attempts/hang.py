"""Turn a job that was ended because it hung into the error of the rank that the others waited for."""

from __future__ import annotations

from onward.infra.job.job import Outcome
from onward.infra.job.rank_stacks import RankStack, explain_hang, parse_exception, parse_stacks
from onward.tasks.attempts.attempt_failure import write_error
from onward.tasks.launching.jobs import launcher_of
from onward.trainer.config.sections.ranks import LaunchConfig
from onward.trainer.run.directory import RunDir
from onward.trainer.run.durable_files import write_durably
from onward.trainer.run.outcomes.ending_kinds import TIMED_OUT, WATCHDOG
from onward.trainer.run.records import RankError, record_if_written


def record_hang(
    run: RunDir, attempt: int, launch: LaunchConfig, world_size: int, outcome: Outcome, output: str
) -> bool:
    """Write stacks.txt and the error record of the likely cause, if the attempt was ended because it hung; say so.

    It hung if it was silent, or if ranks only report that others did not answer in time. A rank with an error of its
    own, or that a signal ended first, is the cause in any other case. output: the end of the log.
    """
    dumps = {rank: _read(run, attempt, rank) for rank in range(world_size)}
    errors = {rank: record_if_written(run.rank_error(attempt, rank), RankError) for rank in dumps}
    waited_in_vain = set()
    for rank, error in errors.items():
        if error and error.secondary and TIMED_OUT.search(error.cause):
            waited_in_vain.add(rank)
    by_watchdog = [found[1] for text in dumps.values() if (found := WATCHDOG.search(text))]
    # it was asked to end, whatever it did, or it waited for a host
    if outcome.reason in ("stopped", "out_of_time", "host_lost"):
        return False
    silent = outcome.reason in ("silent", "start_timeout")
    timed_out = waited_in_vain or by_watchdog
    if not (silent or timed_out or outcome.stopped_ranks):
        return False
    # a rank with an error of its own is the cause, and the others only waited for it
    if any(error and not error.secondary for error in errors.values()):
        return False
    first = launcher_of(launch).read_ending(output).first_rank
    if outcome.reason == "exited" and first and first.signal:
        # NCCL's watchdog aborts its rank when a collective has timed out
        gave_up = first.rank in waited_in_vain or (first.signal == "SIGABRT" and TIMED_OUT.search(output))
        if not gave_up:
            return False  # the signal is the cause, also if another rank was stopped at that time
    # what each rank did at the end: the one that does not wait in a collective is the suspect
    stacks = {}
    for rank, text in dumps.items():
        error = errors[rank]
        # a rank that raised has ended by itself, and wrote its exception
        stacks[rank] = parse_exception(error.traceback) if error else parse_stacks(text)
    write_durably(run.stacks(attempt), _all_stacks(stacks, dumps, errors).encode())
    hang = explain_hang(stacks, stopped=outcome.stopped_ranks)
    # in place of what it wrote itself, if anything: that it lost the others
    own = errors[hang.rank]
    how_long = f" for {by_watchdog[0]}" if by_watchdog else ""
    cause = f"Hang: the job made no progress{how_long}: {hang.sentence}. The stacks of all ranks: {run.stacks(attempt)}"
    write_error(run, attempt, hang.rank, launch, cause=cause, traceback=own.traceback if own else dumps[hang.rank])
    return True


def _read(run: RunDir, attempt: int, rank: int) -> str:
    """Return what a rank wrote when it was ended; else what its own watchdog wrote."""
    for path in (run.stack(attempt, rank), run.traceback(attempt, rank)):
        if path.exists() and (text := path.read_text(errors="replace")):
            return text
    return ""


def _all_stacks(stacks: dict[int, RankStack], dumps: dict[int, str], errors: dict[int, RankError | None]) -> str:
    states = {
        "waits": "waits for other ranks",
        "computes": "does not wait for other ranks",
        "thread": "waits for a thread of its own",
        "unknown": "wrote no stack",
    }
    parts = []
    for rank, stack in stacks.items():
        error = errors[rank]
        where = f": {stack.place}" if stack.threads else ""
        text = error.traceback if error else dumps[rank]
        parts.append(f"== rank {rank}: {states[stack.state]}{where}\n{text}")
    return "\n".join(parts)
