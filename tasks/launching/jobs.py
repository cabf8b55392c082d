"""Build the jobs that run commands of the trainer on ranks: the one place that turns [launch] into a launcher."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from onward.infra.job.hosts import with_slots
from onward.infra.job.job import LAUNCHERS, Job
from onward.infra.job.launcher import Launcher, Ranks
from onward.trainer.config.sections.ranks import LaunchConfig
from onward.trainer.events import Heartbeat
from onward.trainer.run.directory import RunDir
from onward.trainer.run.records import Networks, read_record


def launcher_of(launch: LaunchConfig) -> Launcher:
    """Return what starts the ranks."""
    return LAUNCHERS[chosen_launcher(launch)[0]]


def chosen_launcher(launch: LaunchConfig) -> tuple[str, str]:
    """Return the name of the launcher and why it was chosen; "" where there was no choice."""
    if launch.launcher != "auto":
        return launch.launcher, f"launch.launcher is {launch.launcher!r}"
    job = os.environ.get("SLURM_JOB_ID")
    if job is None:
        return "mpirun", ""
    if launch.hostfile:
        return "mpirun", f"launch.hostfile names hosts, also in job {job} of Slurm"
    if shutil.which("srun") is None:
        return "mpirun", f"job {job} of Slurm has no srun on this host"
    return "slurm", f"this is job {job} of Slurm, whose signals then reach the ranks themselves"


def ranks_of(launch: LaunchConfig, num_ranks: int, module: Sequence[str] = ()) -> Ranks:
    """Return what the launcher starts."""
    return Ranks(
        module=tuple(module),
        num_ranks=num_ranks,
        hostfile=launch.hostfile,
        device=launch.device,
        ranks_per_gpu=launch.ranks_per_gpu,
        threads=launch.threads_per_rank,
    )


def job_of(
    launch: LaunchConfig,
    module: Sequence[str],
    *,
    num_ranks: int,
    run_dir: Path,
    log: Path,
    heartbeat: Path | None = None,
) -> Job:
    """Return the job that runs a module with its arguments on ranks. heartbeat, log: as of `Job`.

    With a hostfile it uses the networks that are written in `run_dir` (tasks/checks/host_table.py).
    """
    hostfile = str(with_slots(Path(launch.hostfile), run_dir / "hosts")) if launch.hostfile else ""
    known = RunDir(run_dir).networks
    networks = read_record(known, Networks).networks if launch.hostfile and known.exists() else ()
    return Job(
        ranks=replace(ranks_of(launch, num_ranks, module), hostfile=hostfile, networks=networks),
        launcher=launcher_of(launch),
        run_dir=run_dir,
        log=log,
        heartbeat=heartbeat,
        start_timeout_s=launch.start_timeout_s,
        silence_timeout_s=launch.heartbeat_timeout_s + Heartbeat.MARGIN_S,
        grace_s=launch.stop_grace_s,
    )
