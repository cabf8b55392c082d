"""What srun is told, and what it says: the sentences are those of Slurm 22.05."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from onward.infra.job.launcher import RankEnding, Ranks
from onward.infra.job.srun import Srun

FAILED = """\
srun: error: h1: task 1: Exited with exit code 70
srun: launch/slurm: _step_signal: Terminating StepId=4.0
slurmstepd-h0: error: *** STEP 4.0 ON h0 CANCELLED AT 2026-11-29T07:54:12 ***
srun: error: h0: task 0: Terminated
"""
ABORTED = "srun: error: h2: tasks 2-3: Aborted (core dumped)\nsrun: error: h0: task 0: Terminated\n"
CANCELLED = """\
srun: forcing job termination
srun: Job step aborted: Waiting up to 32 seconds for job step to finish.
"""


@pytest.mark.parametrize(
    ("output", "first"),
    [
        (FAILED, RankEnding(1, "h1", "", 70)),
        (ABORTED, RankEnding(2, "h2", "SIGABRT", 134)),
        ("rank 0 says: task 1: Killed\nsrun: error: h0: task 0: Killed\n", RankEnding(0, "h0", "SIGKILL", 137)),
        ("srun: error: h0: task 0: Out Of Memory\n", RankEnding(0, "h0", "SIGKILL", 137)),
        ("srun: error: h1: task 5: Segmentation fault\n", RankEnding(5, "h1", "SIGSEGV", 139)),
        (CANCELLED, None),
    ],
)
def test_the_rank_that_ended_first_is_read(output: str, first: RankEnding | None) -> None:
    assert Srun().read_ending(output, 1).first_rank == first


def test_a_signal_of_srun_and_a_lost_host_are_read() -> None:
    assert Srun().read_ending(CANCELLED, 137).signal == "SIGTERM"
    assert Srun().read_ending("", -9).signal == "SIGKILL"
    assert Srun().read_ending(FAILED, 70).lost_host is None
    assert Srun().read_ending("srun: error: Node failure on h1\n", 1).lost_host == "h1"
    by_step = "slurmstepd-h0: error: *** STEP 5.0 ON h0 CANCELLED AT 2026-11-29T08:00:00 DUE TO NODE FAILURE ***\n"
    assert Srun().read_ending(by_step, 1).lost_host == ""


@pytest.fixture
def slurms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An srun that knows PMIx, alone in PATH."""
    program = tmp_path / "srun"
    program.write_text("#!/bin/sh\necho '\tpmix\n\tnone'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    return program


def test_what_is_asked_for_more_than_the_job_has_is_refused_with_the_numbers(slurms: Path) -> None:
    srun = Srun()
    assert "is in no job of Slurm" in srun.problems(Ranks(num_ranks=2), {})[0]
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_CPUS_PER_NODE": "4(x2),1"}
    assert srun.problems(Ranks(num_ranks=9), job) == []
    (said,) = srun.problems(Ranks(num_ranks=10), job)
    assert said.startswith("job 7 of Slurm has 9 CPUs, but the job needs 10 ranks; ask sbatch for --ntasks=10")
    slurms.unlink()
    assert "there is no srun in PATH" in srun.problems(Ranks(num_ranks=2), job)[0]


def test_pmix_is_used_where_it_is_and_the_whole_environment_reaches_the_ranks(slurms: Path, tmp_path: Path) -> None:
    ranks = Ranks(num_ranks=3, module=("onward.trainer", "train"))
    words = Srun().arguments(ranks, [sys.executable], {})
    assert {"--ntasks=3", "--mpi=pmix", "--kill-on-bad-exit=1"} <= {*words}
    slurms.write_text("#!/bin/sh\necho '\tpmi2\n\tnone' >&2\n")
    assert "--mpi=none" in Srun().arguments(ranks, [sys.executable], {})
    users = {"SLURM_EXPORT_ENV": "NONE", "SLURM_CPUS_PER_TASK": "4", "PYTHONUNBUFFERED": "0"}
    found = Srun().environment(ranks, users, tmp_path)
    assert (found["SLURM_EXPORT_ENV"], found["SRUN_CPUS_PER_TASK"], found["PYTHONUNBUFFERED"]) == ("ALL", "4", "0")


def test_a_pmix_that_is_listed_and_has_no_library_is_not_used(slurms: Path) -> None:
    refusal = "srun: error: Invalid MPI type 'pmix', --mpi=list for acceptable types"
    slurms.write_text(f'#!/bin/sh\n[ "$1" = --mpi=list ] && echo pmix && exit\necho "{refusal}" >&2\nexit 1\n')
    assert "--mpi=none" in Srun().arguments(Ranks(num_ranks=3, module=("x",)), [sys.executable], {})
