"""A run as a batch job of Slurm: its script, what is known of it before it begins, and how it is started again.

onward submit --> sbatch --> script: onward run CONFIG --name NAME --continue
                              |  `onward stop`                    it is saved in its own time, and the job cancelled
                              |  scancel                          it is saved within KillWait of Slurm, the job is over
                              |  time limit, preemption           it is saved, and the job requeued by this process
                              +- lost host, preemption at once    Slurm requeues it; the newest checkpoint counts
"""

from __future__ import annotations

import contextlib
import shlex
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from onward.flows.run_state.runs import holder_of, is_running, stop_limit_s
from onward.flows.run_state.slurm_submission import Submission, is_stopped, note_submission, submission_of
from onward.flows.running.named_run import NAME
from onward.infra.job import slurm_jobs
from onward.infra.job.slurm_jobs import SlurmError, SlurmJob
from onward.tasks.attempts.retry_policy import newest_checkpoint
from onward.tasks.checks.machine_check import num_ranks
from onward.trainer.config.sections.ranks import LaunchConfig, ParallelConfig
from onward.trainer.errors import ConfigError, OnwardError, RuntimeUnavailable, say, shown
from onward.trainer.run.directory import RunDir, onward_home
from onward.trainer.run.names import owner_of

SCRIPT = """\
#!/bin/bash
#SBATCH --job-name={name}
#SBATCH --nodes={nodes}
#SBATCH --ntasks={ranks}
#SBATCH --output=%x-%j.out
#SBATCH --open-mode=append
# two minutes before the time limit: save, end, and begin again
#SBATCH --signal=B:TERM@120
#SBATCH --requeue
{options}export ONWARD_HOME={home}
# the tasks of an array are runs of their own
exec {command} --name {name}"${{SLURM_ARRAY_TASK_ID:+-$SLURM_ARRAY_TASK_ID}}" --continue
"""


NEAR_END_S = 150.0
"""A job with no more time left than this, and what its ranks get to save, was signalled because of its time limit."""


def script_of(
    name: str,
    launch: LaunchConfig,
    parallel: ParallelConfig,
    words: Sequence[str],
    *,
    nodes: int = 1,
    options: Sequence[str] = (),
) -> str:
    """Return the script of the run NAME. words: CONFIG and what follows it. Raises ConfigError.

    options: of sbatch, such as time=2:00:00, which are written below those of Onward, and win.
    """
    if not NAME.fullmatch(name):
        raise ConfigError(
            f"--name is {shown(repr(name))}; each job needs one, and a name has up to 100 letters, digits, dots, "
            "hyphens and underscores"
        )
    ranks = num_ranks(parallel, launch)
    if nodes > ranks:
        raise ConfigError(f"--nodes {nodes}: the run has {ranks} rank{'s' * (ranks > 1)}, and each host needs one")
    if launch.hostfile:
        raise ConfigError("launch.hostfile names hosts, and those of a job are chosen by Slurm; leave it out")
    for option in options:
        # a further line of the script would be a further option, or a command
        if not option.strip("-") or set(option) & set("\n\r#"):
            raise ConfigError(f"--sbatch {shown(repr(option))} is no option of sbatch, such as time=2:00:00")
    command = [sys.executable, "-m", "onward.flows.cli", "run", *words]
    return SCRIPT.format(
        name=name,
        nodes=nodes,
        ranks=ranks,
        options="".join(f"#SBATCH --{each.lstrip('-')}\n" for each in options),
        home=shlex.quote(str(onward_home())),
        command=shlex.join(command),
    )


def send(name: str, script: str) -> SlurmJob:
    """Send a script to Slurm, and return its job. Raises ConfigError if NAME waits or runs, else RuntimeUnavailable."""
    if (known := submitted(name)) and not known.has_ended:
        raise ConfigError(
            f"{name} is submitted already: {known}; `scancel {known.job}` ends it, or choose another --name"
        )
    try:
        job = slurm_jobs.send(script, folder=str(Path.cwd()))
    except SlurmError as error:
        raise RuntimeUnavailable(str(error)) from None
    note_submission(name, Submission(job=job))
    # a Slurm that is too busy to answer has taken the job all the same
    return slurm_jobs.find(job) or SlurmJob(job, "sent")


def submitted(name: str) -> SlurmJob | None:
    """Return the newest job that was sent for the run NAME; None if there is none, or Slurm has forgotten it."""
    known = submission_of(name) if NAME.fullmatch(name) else None
    return slurm_jobs.find(known.job) if known else None


def job_of(run: RunDir, name: str) -> SlurmJob | None:
    """Return the job that runs a run, or will go on with it; None if there is none."""
    if is_running(run):
        holder = holder_of(run)
        # a run that was started in a shell belongs to no job
        return slurm_jobs.find(holder["slurm_job"]) if holder and holder["slurm_job"] else None
    waiting = submitted(name)
    return None if waiting is None or waiting.has_ended else waiting


@contextlib.contextmanager
def requeued(name: str) -> Iterator[None]:
    """Let Slurm start its batch job again, of which this process is the script, if SIGTERM ends the run NAME inside.

    Not if somebody has stopped the run, and not if its time was too short to train anything, which would repeat itself
    for ever. Raises RuntimeUnavailable in a job that was stopped, which Slurm has started again after a lost host.
    """
    if (job := slurm_jobs.batch_job()) and is_stopped(job):
        raise RuntimeUnavailable(
            f"`onward stop` has ended {name} in job {job} of Slurm; another job, by `onward submit`, goes on with it"
        )
    # compared at the end with what is saved then, to see whether this job has got on
    saved = _saved(name)
    try:
        yield
    except SystemExit as ended:
        found = slurm_jobs.find(job) if job and ended.code == 128 + signal.SIGTERM else None
        # of a job that was cancelled the state is another one
        if found and found.state == "RUNNING":
            _end_or_requeue(name, job, has_saved=_saved(name) != saved)
        raise


def _end_or_requeue(name: str, job: str, *, has_saved: bool) -> None:
    """Cancel a job that somebody has stopped, leave one whose time is too short, and requeue any other."""
    run = _run_of(name)
    try:
        # the ranks are asked to end before the job does, as long as they may take to save
        near_end_s = NEAR_END_S + (stop_limit_s(run) if run else 0.0)
        if is_stopped(job):
            slurm_jobs.cancel(job)  # all is saved; its state says then that somebody has ended it
        # a job that was preempted long before its limit may get further the next time
        elif not has_saved and slurm_jobs.ends_at() - time.time() < near_end_s:
            say(f"the time of job {job} of Slurm is too short: no step was saved in it")
        else:
            say(f"job {job} of Slurm is put back into the queue, and goes on from there")
            slurm_jobs.requeue(job)
    except (SlurmError, OnwardError) as error:
        say(f"{error}; send it again to go on")


def _run_of(name: str) -> RunDir | None:
    run_id = owner_of(name)
    return RunDir(onward_home() / "runs" / run_id) if run_id else None


def _saved(name: str) -> int:
    """Return the step of the newest checkpoint of the run NAME; 0 without one."""
    run = _run_of(name)
    return newest_checkpoint(run) if run else 0
