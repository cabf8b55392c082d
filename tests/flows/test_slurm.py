"""Runs as jobs of a real Slurm, on hosts that are namespaces: whatever ends a job, its run goes on with equal bits."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from onward.trainer.run.directory import RunDir
from onward.trainer.run.outcomes.attempt_endings import endings
from onward.trainer.run.outcomes.run_ending import ending_of
from tests.support.machines import machines
from tests.support.runs import assert_equal_bits, final_tensors
from tests.support.slurm import Slurm, missing, slurm
from tests.support.workshop import Workshop, reached, until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.mpi,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(bool(missing()), reason=missing()),
]
ONWARD = (sys.executable, "-m", "onward.flows.cli")
SETTINGS = (
    *("launch.rehearsal='off'", "launch.heartbeat_timeout_s=60", "launch.start_timeout_s=900"),
    *("monitor.report_to=[]", "train.log_period=5", "train.evaluation_period=0", "checkpoint.period=250"),
)
SERVER = "http://h0:4200/api"
"""A Prefect server of the user, which all hosts use."""
LIMIT_S = 900
"""Of each thing that is waited for, on a busy machine."""


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workshop]:
    workshop = Workshop.made(tmp_path_factory.mktemp("slurm"))
    yield workshop
    workshop.close()


@pytest.fixture(scope="module")
def site(workshop: Workshop) -> Iterator[Slurm]:
    (workshop.home / "prefect").mkdir(parents=True)
    with machines(workshop.root / "machines", 3) as cluster, slurm(cluster) as found:
        words = [sys.executable, "-m", "prefect", "server", "start", "--host", "h0", "--port", "4200"]
        database = f"sqlite+aiosqlite:///{workshop.home}/prefect/prefect.db"
        environment = {**workshop.environment, "PREFECT_API_DATABASE_CONNECTION_URL": database}
        server = cluster.start(words, environment, workshop.root / "server.log")
        connects = ("bash", "-c", "exec 3<>/dev/tcp/h0/4200")
        until(lambda: found.call(*connects).returncode == 0, limit_s=LIMIT_S)
        yield found
        server.terminate()
        server.wait(60)


@pytest.fixture(scope="module")
def by_mpirun(workshop: Workshop, site: Slurm) -> RunDir:
    words = ("run", str(workshop.root / "config.toml"), *SETTINGS, "train.num_steps=5000", "--json")
    ended = site.call(*ONWARD, *words, environment=environment_of(workshop), limit_s=LIMIT_S)
    assert ended.returncode == 0, ended.stderr
    return RunDir(Path(json.loads(ended.stdout)["directory"]))


def environment_of(workshop: Workshop) -> dict[str, str]:
    return {**workshop.environment, "PREFECT_API_URL": SERVER}


class Job:
    """A run that was sent by `onward submit`, or by a script of one's own."""

    def __init__(self, workshop: Workshop, site: Slurm, name: str, script: str = "", *words: str) -> None:
        self.site = site
        self.workshop = workshop
        self.name = name
        if script:
            path = workshop.root / f"{name}.sh"
            path.write_text(script)
            sent = site.call("sbatch", "--parsable", *words, str(path), environment=environment_of(workshop))
        else:
            config = str(workshop.root / "config.toml")
            output = f"output={workshop.root}/%x-%j.out"
            words = ("submit", config, *SETTINGS, "--name", name, "--sbatch", output, *words)
            sent = site.call(*ONWARD, *words, environment=environment_of(workshop), limit_s=LIMIT_S)
        assert sent.returncode == 0, sent.stderr
        self.id = sent.stdout.split()[0 if script else 3]

    @property
    def run(self) -> RunDir:
        """Its run, once it has begun."""
        return RunDir(until(self._run, limit_s=LIMIT_S))

    def _run(self) -> Path | None:
        for path in (self.workshop.home / "runs").glob("*/identity.json"):
            if f'"name": "{self.name}"' in path.read_text():
                return path.parent
        return None

    @property
    def state(self) -> str:
        return self.site.state(self.id)

    def begin_now(self) -> None:
        """Wait until it waits, and do not let it wait for the two minutes that Slurm gives to requeued jobs.

        A host refuses a job in the second in which it has ended ("already killed"): Slurm counts whole seconds there.
        """
        self.until("PENDING")
        self.site.call("scontrol", "update", f"JobId={self.id}", "StartTime=now+3")

    def until(self, state: str) -> None:
        """Wait until it is in a state; fail if it is over in another one."""
        found = until(
            lambda: (now := self.state) in (state, "COMPLETED", "FAILED", "CANCELLED") and now, limit_s=LIMIT_S
        )
        assert found == state

    def until_step(self, step: int, attempt: int) -> None:
        run = self.run
        until(lambda: reached(run, step, attempt=attempt), limit_s=LIMIT_S)

    def onward(self, *words: str, host: str = "h0") -> str:
        done = self.site.call(*ONWARD, *words, environment=environment_of(self.workshop), host=host, limit_s=LIMIT_S)
        return done.stdout + done.stderr


def test_a_run_goes_on_after_a_preemption_its_time_limit_and_a_lost_host_with_the_bits_of_mpirun(
    workshop: Workshop, site: Slurm, by_mpirun: RunDir
) -> None:
    job = Job(workshop, site, "long", "", "train.num_steps=5000", "--nodes", "2", "--sbatch", "exclusive")
    job.until_step(50, 1)
    assert f"job {job.id} of Slurm is RUNNING on h[0-1]" in job.onward("status", "long", host="h2")
    assert "long is submitted already" in job.onward("submit", str(workshop.root / "config.toml"), "--name", "long")
    # a job that needs the hosts
    site.call("sbatch", "--exclusive", "-p", "urgent", "-N3", "--wrap", "sleep 5", "-o", "/dev/null")
    until(lambda: endings(job.run), limit_s=LIMIT_S)
    job.until("PENDING")
    assert f"job {job.id} of Slurm is PENDING" in job.onward("status", "long", host="h2")
    job.begin_now()
    job.until_step(endings(job.run)[0].checkpoint + 50, 2)
    # a limit that is nearer than the time of --signal
    minutes = site.said("squeue", "-h", "-j", job.id, "-o", "%M").split(":")[0]
    site.call("scontrol", "update", f"JobId={job.id}", f"TimeLimit={int(minutes) + 2}")
    until(lambda: len(endings(job.run)) == 2, limit_s=LIMIT_S)
    job.begin_now()
    site.call("scontrol", "update", f"JobId={job.id}", "TimeLimit=50")
    job.until_step(endings(job.run)[1].checkpoint + 50, 3)
    site.cluster.crash("h1")
    job.begin_now()
    site.cluster.boot(1)
    site.join("h1")
    job.until("COMPLETED")
    kinds = [ending.kind for ending in endings(job.run)]
    assert kinds[:2] == ["preempted", "stopped"], kinds
    assert kinds[-1] == "done"
    assert all(ending.step == ending.checkpoint for ending in endings(job.run)[:2])
    assert_equal_bits(final_tensors(job.run), final_tensors(by_mpirun))
    assert set(workshop.prefect_states().values()) <= {"COMPLETED", "CANCELLED", "CRASHED"}
    (recorded,) = workshop.mlflow_runs(job.run)
    assert recorded.info.status == "FINISHED"


def test_a_cancelled_job_is_saved_and_over_and_two_jobs_at_once_share_a_home_one_without_pmix(
    workshop: Workshop, site: Slurm, by_mpirun: RunDir
) -> None:
    words = ("train.num_steps=5000", "--nodes", "2")
    first = Job(workshop, site, "first", "", *words)
    # an srun without PMIx, found before the real one
    folder = workshop.root / "without-pmix"
    folder.mkdir()
    real = site.said("bash", "-c", "command -v srun").strip()
    (folder / "srun").write_text(f'#!/bin/bash\n[ "$1" = --mpi=list ] && echo none || exec {real} "$@"\n')
    (folder / "srun").chmod(0o755)
    config = workshop.root / "config.toml"
    script = f"#!/bin/bash\nexport PATH={folder}:$PATH\nexec {' '.join(ONWARD)} run {config} --name plain --continue"
    quoted = " ".join(f'"{word}"' for word in (*SETTINGS, "train.num_steps=5000"))
    own = ("-N2", "-n2", "-o", str(workshop.root / "plain.out"), "--signal=B:TERM@120", "--open-mode=append")
    plain = Job(workshop, site, "plain", f"{script} {quoted}\n", *own)
    first.until_step(50, 1)
    plain.until_step(50, 1)
    site.call("scancel", first.id)
    first.until("CANCELLED")
    assert endings(first.run)[-1].step == endings(first.run)[-1].checkpoint >= 50
    ended = ending_of(first.run)
    assert ended is not None
    assert ended.status == "cancelled"
    assert workshop.prefect_states()[ended.flow_run_id] == "CANCELLED"
    (recorded,) = workshop.mlflow_runs(first.run)
    assert recorded.info.status == "KILLED"
    # the same name is continued by a job of its own, and stopped from another host
    again = Job(workshop, site, "first", "", *words)
    again.until_step(endings(first.run)[-1].checkpoint + 20, 2)
    assert "stopped" in again.onward("stop", "first", host="h2")
    again.until("CANCELLED")
    last = Job(workshop, site, "first", "", *words)
    for job in (plain, last):
        job.until("COMPLETED")
        assert_equal_bits(final_tensors(job.run), final_tensors(by_mpirun))
    assert "--mpi=none" in (plain.run.root / "job.json").read_text()
    assert "--mpi=pmix" in (last.run.root / "job.json").read_text()


def test_a_run_whose_script_asks_for_no_signal_is_saved_before_the_time_of_its_job_is_over(
    workshop: Workshop, site: Slurm
) -> None:
    config = workshop.root / "config.toml"
    words = " ".join(f'"{word}"' for word in (*SETTINGS, "train.num_steps=100000", "launch.stop_grace_s=5"))
    script = f"#!/bin/bash\nexec {' '.join(ONWARD)} run {config} --name short --continue {words}\n"
    own = ("-N1", "-n2", "-o", str(workshop.root / "short.out"), "--time=3", "--open-mode=append", "--no-requeue")
    job = Job(workshop, site, "short", script, *own)
    until(lambda: endings(job.run), limit_s=LIMIT_S)
    (ending,) = endings(job.run)
    assert (ending.kind, ending.step) == ("preempted", ending.checkpoint)
    assert ending.sentence == f"the ranks were asked to end before job {job.id} of Slurm does; they saved first"
    # Slurm was told not to start it again
    job.until("FAILED")


def test_a_run_that_is_stopped_saves_and_its_job_is_cancelled_and_not_requeued(workshop: Workshop, site: Slurm) -> None:
    job = Job(workshop, site, "halted", "", "train.num_steps=100000", "--nodes", "2")
    job.until_step(50, 1)
    assert "stopped" in job.onward("stop", "halted", host="h2")
    job.until("CANCELLED")
    (ending,) = endings(job.run)
    assert (ending.kind, ending.step) == ("stopped", ending.checkpoint)
