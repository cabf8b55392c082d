"""The command line and environment of mpirun, and what it prints about the end of a job."""

from __future__ import annotations

import shlex
import signal
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from onward.infra.job.launcher import LauncherEnding, LaunchError, RankEnding, Ranks
from onward.infra.job.mpirun import SETTINGS, Mpirun, environment_of_ranks

ALONE = Ranks(module=("onward.trainer", "train", "/run"), num_ranks=2)
WIDE = Ranks(module=("onward.trainer",), num_ranks=8, hostfile="/etc/hosts.mpi")
FOLDER = Path("/tmp/onward-0")


def command_line(ranks: Ranks, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(Mpirun, "program", lambda launcher: Path("/venv/bin/mpirun"))
    return shlex.join(Mpirun().arguments(ranks, ["/venv/bin/python"], environment))


def test_the_command_line_on_one_host(monkeypatch: pytest.MonkeyPatch) -> None:
    assert command_line(ALONE, {"HOME": "/root", "NCCL_DEBUG": "INFO"}, monkeypatch) == (
        "/venv/bin/mpirun -n 2 --bind-to none --map-by :OVERSUBSCRIBE /venv/bin/python -m onward.trainer train /run"
    )


def test_other_hosts_get_only_the_environment_variables_that_they_need(monkeypatch: pytest.MonkeyPatch) -> None:
    environment = {"HOME": "/root", "AWS_SECRET_ACCESS_KEY": "x", "NCCL_DEBUG": "INFO"}
    assert command_line(WIDE, environment, monkeypatch) == (
        "/venv/bin/mpirun -n 8 --bind-to none --hostfile /etc/hosts.mpi -x NCCL_DEBUG -x ONWARD_RUN_TAG "
        "-x PYTHONFAULTHANDLER -x PYTHONUNBUFFERED -x PYTORCH_ALLOC_CONF /venv/bin/python -m onward.trainer"
    )


def test_what_the_user_has_set_of_gpu_memory_is_kept_by_either_name() -> None:
    name, former = "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"
    assert environment_of_ranks({})[name] == "expandable_segments:True"
    assert environment_of_ranks({name: "backend:native"})[name] == "backend:native"
    found = environment_of_ranks({former: "backend:native"})
    assert name not in found
    assert found[former] == "backend:native"


def test_ranks_of_one_host_send_nothing_over_a_network_unless_a_scheduler_or_the_user_says_so() -> None:
    alone = Mpirun().environment(ALONE, {}, FOLDER)
    assert alone["OMPI_MCA_btl"].split(",")[-1] == "tcp"
    assert alone["OMPI_MCA_btl"].startswith("^")
    for users in ({"SLURM_JOB_ID": "7"}, {"OMPI_MCA_btl": "tcp,self"}):
        found = Mpirun().environment(ALONE, users, FOLDER)
        assert found["OMPI_MCA_btl"] == environment_of_ranks(users)["OMPI_MCA_btl"]
    several = Mpirun().environment(WIDE, {}, FOLDER)
    assert several["OMPI_MCA_btl"] == SETTINGS["OMPI_MCA_btl"]


def test_files_of_ranks_go_to_the_folder_of_the_job_unless_other_hosts_lack_it() -> None:
    assert Mpirun().environment(ALONE, {"TMPDIR": "/scratch"}, FOLDER)["TMPDIR"] == str(FOLDER)
    assert Mpirun().environment(WIDE, {"TMPDIR": "/scratch"}, FOLDER)["TMPDIR"] == "/scratch"


def test_without_mpirun_the_error_says_where_it_was_searched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(LaunchError, match=rf"neither {tmp_path}/bin/mpirun nor in PATH; install Open MPI"):
        Mpirun().program()


KILLED = "prterun noticed that process rank 1 with PID 6074 on node h0 exited on signal 6 (Aborted)."
EXITED = """
--------------------------------------------------------------------------
The first process to do so was:

   Process name: [prterun-h0-6106@1,1]
   Exit code:    3
"""
LOST = "PRTE has lost communication with a remote daemon.\n  Remote daemon: [prterun@0,2] on node h1"


def test_mpi_uses_the_networks_of_ssh_unless_the_user_has_chosen() -> None:
    ranks = replace(WIDE, networks=("10.1.0.0/24", "10.2.0.0/24"))
    found = Mpirun().environment(ranks, {}, FOLDER)
    assert found["OMPI_MCA_btl_tcp_if_include"] == found["PRTE_MCA_prte_if_include"] == "10.1.0.0/24,10.2.0.0/24"
    found = Mpirun().environment(ranks, {"OMPI_MCA_btl_tcp_if_exclude": "lo,docker0"}, FOLDER)
    assert "OMPI_MCA_btl_tcp_if_include" not in found
    assert found["PRTE_MCA_prte_if_include"] == "10.1.0.0/24,10.2.0.0/24"
    assert not [name for name in Mpirun().environment(WIDE, {}, FOLDER) if "_if_" in name]


@pytest.mark.parametrize(
    ("output", "returncode", "ending"),
    [
        ("", 0, LauncherEnding("mpirun")),
        (KILLED, 134, LauncherEnding("mpirun", RankEnding(1, "h0", "SIGABRT", 134))),
        (EXITED, 1, LauncherEnding("mpirun", RankEnding(1, "", "", 3))),
        (LOST, 0, LauncherEnding("mpirun", lost_host="h1")),
        ("ssh: connect to host h1 port 22: No route", 213, LauncherEnding("mpirun", lost_host="")),
        ("", -signal.SIGKILL, LauncherEnding("mpirun", signal="SIGKILL")),
        ("rank 0: a line\n", 1, LauncherEnding("mpirun", signal="SIGTERM, SIGINT or SIGHUP")),
        ("-----\nsomething else\n-----\n", 1, LauncherEnding("mpirun")),
    ],
)
def test_what_mpirun_says_about_the_end_of_a_job(output: str, returncode: int, ending: LauncherEnding) -> None:
    assert Mpirun().read_ending(output, returncode) == ending
