"""train: one attempt after the other under mpirun, until the last step is made or the job is stopped.

Runs in the flow's main thread, the only one that gets signals: a cancellation or Ctrl-C raises inside
`MpiJob.run`, which lets the ranks save before it goes on. Each attempt resumes from the newest whole checkpoint;
what proves its success is the result file that rank 0 wrote for this attempt, never an exit status.
"""

from __future__ import annotations

import logging
from typing import Any

from prefect import State, Task, task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import TaskRun
from prefect.states import Cancelled

from onward.infra import mpirun
from onward.trainer import errors
from onward.trainer.config.run_config import RunConfig
from onward.trainer.errors import OnwardError, Refused, RuntimeUnavailable, TrainingFailed
from onward.trainer.run.directory import RunDir, read_config
from onward.trainer.run.records import AttemptResult, RankError, TrainResult, read_record, write_record

log = logging.getLogger(__name__)

RANK = ("onward.trainer", "train")
"""The module that every rank runs, and its command."""

TAIL_LINES = 20


def worth_retrying(task: Task[..., Any], task_run: TaskRun, state: State[Any]) -> bool:
    """Only a job that died: the same wrong configuration, data or device would be refused again."""
    try:
        state.result()
    except TrainingFailed:
        return True
    except Exception:
        return False
    return False


@task(name="train", task_run_name="train", cache_policy=NO_CACHE, retry_condition_fn=worth_retrying)
def train(run: RunDir) -> TrainResult | State[Any]:
    """Run the next attempt; leaves `train.json`. A run whose training is done is left alone.

    Returns a Cancelled state when the job was stopped: what it saved is kept, and `train` goes on from there.
    Raises TrainingFailed with the first rank's error, which a retry may mend, and what cannot be mended by one
    as what the rank raised: Refused, Diverged, Fenced, CheckpointError; RuntimeUnavailable without a mpirun.
    """
    config = read_config(run)
    before = _result(run, run.current_attempt)
    if before is not None and before.status == "done":
        return _leave_record(run, before)
    try:
        mpirun.wait_until_free(run.root)
        attempt = run.begin_attempt()
        log.info("attempt %d: %d ranks, log in %s", attempt, config.world_size, run.log(attempt))
        outcome = job(run, config, attempt=attempt).run()
    except mpirun.LaunchError as error:
        raise RuntimeUnavailable(str(error)) from error
    result = _result(run, attempt)
    record = _leave_record(run, result) if result is not None else None
    if record is not None and record.status == "done":
        return record
    if record is not None:
        return Cancelled(message=f"stopped after step {record.step}, which is saved")
    if outcome.reason == "stopped":
        grace_s = config.launch.stop_grace_s
        return Cancelled(message=f"stopped before it could save within {grace_s:g} s; what was saved before is kept")
    raise failure(run, attempt, ending=describe(outcome, config))


def job(run: RunDir, config: RunConfig, *, attempt: int) -> mpirun.MpiJob:
    """The attempt as mpirun will start it."""
    return mpirun.MpiJob(
        module=(*RANK, str(run.root)),
        num_ranks=config.world_size,
        run_dir=run.root,
        log=run.log(attempt),
        heartbeat=run.heartbeat,
        start_timeout_s=config.launch.start_timeout_s,
        silence_timeout_s=config.launch.heartbeat_timeout_s + 2,  # the ranks' own watchdogs print tracebacks first
        grace_s=config.launch.stop_grace_s,
        hostfile=config.launch.hostfile,
    )


def describe(outcome: mpirun.Outcome, config: RunConfig) -> str:
    """How the job ended, when no rank could say it."""
    start, silence = config.launch.start_timeout_s, config.launch.heartbeat_timeout_s
    return {
        "exited": f"mpirun ended with status {outcome.returncode}, without a result",
        "stopped": "it was stopped",
        "silent": f"no heartbeat for {silence:g} s (launch.heartbeat_timeout_s), so it was killed",
        "start_timeout": f"no heartbeat in the first {start:g} s (launch.start_timeout_s), so it was killed",
    }[outcome.reason]


def failure(run: RunDir, attempt: int, *, ending: str) -> OnwardError:
    """The error to raise for a failed attempt: the first rank's own, or TrainingFailed with the log's last lines."""
    first = run.first_error(attempt)
    if first is not None and (own := _own_error(first)) is not None:
        return own
    cause = f"rank {first.rank} on {first.host}, step {first.step}: {first.cause}; {ending}" if first else ending
    lines = run.log(attempt).read_text(errors="replace").splitlines()[-TAIL_LINES:]
    return TrainingFailed("\n  | ".join([f"attempt {attempt}: {cause}. The end of {run.log(attempt)}:", *lines]))


def _own_error(error: RankError) -> OnwardError | None:
    """An error of Onward's tree as the rank raised it; None for any other exception."""
    name, _, sentence = error.cause.partition(": ")
    kind = getattr(errors, name, None)
    if not (isinstance(kind, type) and issubclass(kind, OnwardError)):
        return None
    where = f"rank {error.rank} on {error.host}, step {error.step}: "
    return kind(sentence.splitlines()) if issubclass(kind, Refused) else kind(where + sentence)


def _result(run: RunDir, attempt: int) -> AttemptResult | None:
    path = run.result(attempt)
    return read_record(path, AttemptResult) if path.exists() else None


def _leave_record(run: RunDir, last: AttemptResult) -> TrainResult:
    attempts = [_result(run, number) for number in range(1, run.current_attempt + 1)]
    record = TrainResult(
        status=last.status,
        attempts=run.current_attempt,
        step=last.step,
        samples_seen=last.samples_seen,
        metrics=last.metrics,
        elapsed_s=sum(attempt.elapsed_s for attempt in attempts if attempt is not None),
    )
    write_record(run.train, record)
    return record
