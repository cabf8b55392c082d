"""train: start attempts by the launcher, one after the other, until the training is done or the job is stopped.

The task runs in the flow's main thread, which alone receives signals: a cancellation or Ctrl-C raises an exception
inside `Job.run`, which lets the ranks save a checkpoint and then passes the exception on. Each attempt resumes from
the newest complete checkpoint. An attempt has succeeded when rank 0 has written its result file; an exit status of 0
proves nothing.
"""

from __future__ import annotations

import logging
from typing import Any

from prefect import State, Task, task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import TaskRun
from prefect.exceptions import TerminationSignal
from prefect.states import Cancelled

from onward.infra.job.job import Job, wait_until_free
from onward.infra.job.launcher import LaunchError
from onward.infra.job.slurm_jobs import batch_job
from onward.tasks.attempts.attempt import Attempt, result_of
from onward.tasks.attempts.attempt_failure import failure
from onward.tasks.attempts.returned_hosts import ReturnedHosts
from onward.tasks.attempts.wait_before_retry import wait_for_hosts, wait_until_ready
from onward.tasks.launching.jobs import job_of
from onward.tasks.launching.own_homes import bring_run, leave_hosts
from onward.trainer.errors import RuntimeUnavailable, Stopped, TrainingFailed
from onward.trainer.run.directory import RunDir, read_config
from onward.trainer.run.kept_settings import refuse_edited
from onward.trainer.run.outcomes.stopping import reason_to_end
from onward.trainer.run.records import AttemptResult, TrainResult, write_record

log = logging.getLogger(__name__)

RANK = ("onward.trainer", "train")
"""Module and command that every rank runs."""
BY_SIGTERM = "stopped by SIGTERM"
"""The message of the Cancelled state after SIGTERM, which Prefect's worker sends, too."""


def worth_retrying(task: Task[..., Any], task_run: TaskRun, state: State[Any]) -> bool:
    """Return whether an attempt follows: the record of how the last one ended says so, and the error repeats it."""
    try:
        state.result()
    except TrainingFailed as failed:
        return failed.again
    # a refused configuration, a fenced attempt, a damaged checkpoint: the next attempt would end alike
    except Exception:
        return False
    return False


@task(name="train", task_run_name="train", cache_policy=NO_CACHE, retry_condition_fn=worth_retrying)
def train(run: RunDir) -> TrainResult | State[Any]:
    """Run the next attempt and write `train.json`; return the record at once if training is done already.

    Returns a Cancelled state when the job was stopped, also by SIGTERM; the next `train` continues from its last
    checkpoint. Raises TrainingFailed with the error of the first rank that failed, after which a retry makes sense.
    Raises the rank's own error where it does not: Refused, Diverged, Fenced, CheckpointError, OutOfMemory,
    DeviceAssertion; RuntimeUnavailable without a launcher. How the attempt ended is in its AttemptEnding in every case.
    """
    config = read_config(run)
    # A retry of the flow after training was done repeats this task.
    before = result_of(run, run.current_attempt)
    # a run that had ended early goes on where [stop] was changed since
    goes_on = before and before.ended_early and not reason_to_end(before.stop, config.stop, config.checkpoint)
    if before and before.status == "done" and not goes_on:
        return _write_record(run, before)
    try:
        # Before an attempt begins, which would take the run directory away from a job that is still running.
        wait_until_free(run.root)
        wait_until_ready(run)
        _bring(run)
        refuse_edited(run)
        config = read_config(run)  # a retry, or a host that is lost, may have changed it
        attempt = Attempt.begin(run, config)
        ranks = f"{config.world_size} rank{'s' * (config.world_size > 1)}"
        log.info("attempt %d: %s, log: %s", attempt.number, ranks, run.log(attempt.number))
        returned = ReturnedHosts(run)
        with attempt.recorded_if_interrupted(), returned.watched():
            outcome = job_of_attempt(attempt).run()
    except LaunchError as error:
        raise RuntimeUnavailable(str(error)) from error
    except TerminationSignal:
        # Prefect would take it for a crash of the task; the flow raises it again
        return Cancelled(message=BY_SIGTERM)
    ending = attempt.end(outcome, asked=returned.said)
    # Only the result file counts: mpirun, for one, exits with 0 when a remote host has failed.
    result = result_of(run, attempt.number)
    record = _write_record(run, result) if result else None
    if record and record.status == "done":
        leave_hosts(run)
        return record
    # its scheduler has signalled the ranks, and the flow ends as if it had been signalled, too
    if ending.kind == "preempted" and not returned.said and batch_job():
        return Cancelled(message=BY_SIGTERM)
    # with a record the ranks saved in time; without one only the earlier checkpoints are left
    if ending.kind == "stopped" and record:
        return Cancelled(message=f"stopped; the checkpoint of step {record.step} is saved")
    if ending.kind == "stopped" and outcome.reason == "stopped":
        limit = f"{config.launch.stop_grace_s:g} s (launch.stop_grace_s)"
        return Cancelled(message=f"stopped, but it did not save within {limit}; earlier checkpoints are kept")
    raise failure(run, ending, attempt.described(outcome) if result is None else ending.sentence)


def _bring(run: RunDir) -> None:
    """Let hosts with homes of their own have the run; one that is lost meanwhile is waited for, or left out."""
    try:
        bring_run(run, attempt=run.current_attempt + 1)
    except RuntimeUnavailable as error:
        log.warning("%s", error)
        wait_for_hosts(run)
        bring_run(run, attempt=run.current_attempt + 1)


def job_of_attempt(attempt: Attempt, *options: str) -> Job:
    """Return the job of an attempt. options: further words for the command `train` of the trainer."""
    run = attempt.run
    return job_of(
        attempt.config.launch,
        (*RANK, str(run.root), *options),
        num_ranks=attempt.config.world_size,
        run_dir=run.root,
        log=run.log(attempt.number),
        heartbeat=run.heartbeat,
    )


def train_once(run: RunDir, *arguments: str, if_stopped: str) -> None:
    """Train in one attempt, outside of a run. Raises Stopped with `if_stopped`, and the error of the ranks.

    arguments: further ones of every rank.
    """
    attempt = Attempt.begin(run, read_config(run))
    try:
        outcome = job_of_attempt(attempt, *arguments).run()
    except LaunchError as error:
        raise RuntimeUnavailable(str(error)) from error
    if outcome.reason == "stopped":
        raise Stopped(if_stopped)
    if not run.result(attempt.number).exists():
        raise failure(run, attempt.end(outcome), attempt.described(outcome))


def _write_record(run: RunDir, last: AttemptResult) -> TrainResult:
    attempts = [result_of(run, number) for number in range(1, run.current_attempt + 1)]
    record = TrainResult(
        status=last.status,
        attempts=run.current_attempt,
        step=last.step,
        samples_seen=last.samples_seen,
        metrics=last.metrics,
        elapsed_s=sum(attempt.elapsed_s for attempt in attempts if attempt),
        ended_early=last.ended_early,
    )
    write_record(run.train, record)
    return record
