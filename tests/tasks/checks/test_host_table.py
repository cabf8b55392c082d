"""The table of the hosts of a hostfile, asked through an agent that stands in for ssh; see also test_hosts_asked.py."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from onward.infra.job.hosts import silence
from onward.tasks.checks import host_table
from onward.tasks.checks.host_table import HostRow, HostTable, ask_hosts, host_problems
from onward.trainer.config.sections.ranks import LaunchConfig
from onward.trainer.run.machine.host_report import HostQuestion, HostReport, network_of, report

AGENT = """#!/bin/sh
# stands in for ssh: agent -o option... host command
while [ "$1" = -o ]; do shift 2; done
host="$1"; shift
[ "$host" = h9 ] && { echo "Permission denied (publickey)." >&2; exit 255; }
echo "Welcome to $host"
SSH_CONNECTION="127.0.0.1 1024 127.0.0.1 22" exec sh -c "$*"
"""


@pytest.fixture
def launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LaunchConfig:
    (tmp_path / "agent").write_text(AGENT)
    (tmp_path / "agent").chmod(0o755)
    (tmp_path / "home").mkdir()
    # of a user who is logged in to this host by ssh
    monkeypatch.setenv("SSH_CONNECTION", "203.0.113.9 50022 192.0.2.2 22")
    monkeypatch.setenv("PRTE_MCA_plm_ssh_agent", str(tmp_path / "agent"))
    monkeypatch.setenv("ONWARD_HOME", str(tmp_path / "home"))
    return LaunchConfig(hostfile=str(tmp_path / "hosts"))


def test_all_problems_of_all_hosts_are_found_at_once(launch: LaunchConfig, tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("h0\nlocalhost slots=2\nh9\n")
    table = ask_hosts(launch, tmp_path / "home", {"model.path": str(tmp_path / "m.onnx")})
    reports = [row.report for row in table.rows]
    assert [report and report.address for report in reports] == ["127.0.0.1", "", None]
    assert table.networks == ("127.0.0.0/8",)
    lacks = (
        f"cannot read {tmp_path}/m.onnx (model.path: No such file or directory); all hosts need it under the same path"
    )
    assert table.problems == (
        f"h0 {lacks}",
        f"localhost {lacks}",
        "h9 does not answer: Permission denied (publickey).; make `ssh h9 true` work here without a password",
    )
    assert list((tmp_path / "home").iterdir()) == [], "nothing is left in the shared directory"
    assert str(table.rows[0]).startswith("h0 at 127.0.0.1: Python 3.")
    assert "; clock +0.0 s" in str(table.rows[0]) or "; clock -0.0 s" in str(table.rows[0])


def test_a_host_without_this_environment_is_told_from_one_that_does_not_answer(
    launch: LaunchConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "hosts").write_text("h0\n")
    monkeypatch.setattr(host_table, "PROGRAM", (f"{tmp_path}/python", "-m", "onward"))
    (problem,) = host_problems({"launch": launch})
    assert problem.startswith("h0 cannot run Onward (")
    assert problem.endswith(f"; make the same environment there, at {sys.prefix}")
    assert host_problems({"launch": LaunchConfig()}) == ()
    assert host_problems({"launch": LaunchConfig(hostfile=str(tmp_path / "absent"))}) == ()
    assert host_problems({}) == ()


def row(host: str, skew_s: float = 0.0, **known: Any) -> HostRow:
    report = HostReport(name=host, problems=(), clock=0.0, **{"versions": {"torch": "2.13.0"}} | known)
    return HostRow(host=host, problems=(), report=report, skew_s=skew_s)


def test_other_versions_and_clocks_are_named_with_their_hosts() -> None:
    other = row("h1", -3600, versions={"torch": "2.12.1", "MPI": "mpirun (Open MPI) 5.0.11"})
    table = HostTable(rows=(row("h0"), other, row("h2", 1.0)))
    assert table.problems == (
        "the hosts have different versions of torch: 2.13.0 on h0, h2; 2.12.1 on h1; install the same one on all hosts",
    )
    (warning,) = table.warnings
    assert warning.startswith("the clock of h1 differs by -3600.0 s; synchronise it")


def test_a_host_that_is_not_ready_yet_is_left_out_with_the_reason() -> None:
    other = row("h1", versions={"torch": "2.12.1"})
    unmounted = row("h2").model_copy(update={"problems": ("h2 does not see what the first host has written",)})
    unready = HostTable(rows=(row("h0"), other, unmounted)).unready()
    assert list(unready) == ["h2", "h1"]
    assert unready["h2"] == "it answers, but does not see what the first host has written"
    assert unready["h1"].startswith(
        "it answers, but the hosts have different versions of torch: 2.13.0 on h0; 2.12.1 on"
    )
    remote = row("h1", versions={"torch": "2.12.1"}, address="10.1.0.7")
    assert list(HostTable(rows=(remote, row("h0"))).unready()) == ["h1"], "the versions of this host are the right ones"
    assert silence({"h2": unready["h2"]}) == f"1 host cannot be used: h2 ({unready['h2']})"


def test_networks_are_passed_on_only_where_all_are_known() -> None:
    known = {"address": "10.1.0.7", "network": "10.1.0.0/24", "head": "127.0.0.1"}
    assert HostTable(rows=(row("h0"), row("h1", **known))).networks == ("10.1.0.0/24", "127.0.0.0/8")
    behind_a_router = {"address": "192.0.2.1", "network": "", "head": "127.0.0.1"}
    assert HostTable(rows=(row("h1", **known), row("h2", **behind_a_router))).networks == ()
    assert HostTable(rows=(row("h0"),)).networks == (), "this host alone"
    assert (network_of("127.0.0.1"), network_of("192.0.2.1"), network_of("")) == ("127.0.0.0/8", "", "")


def test_a_directory_that_is_not_shared_or_not_writable_is_said(tmp_path: Path) -> None:
    (tmp_path / "nonce").write_text("this")
    settings = {"folder": str(tmp_path), "name": "nonce", "files": {}, "launcher": "", "daemon": "/absent/prted"}
    unshared, daemon = report(HostQuestion(nonce="other", **settings), "", "", 0).problems
    assert "the directory is not shared; put ONWARD_HOME on a file system" in unshared
    assert daemon.startswith("has no /absent/prted, which mpirun starts there")
    assert report(HostQuestion(nonce="this", **settings | {"daemon": ""}), "", "", 0).problems == ()
    read_only = settings | {"folder": "/proc", "name": "sys/kernel/ostype", "daemon": ""}
    (problem,) = report(HostQuestion(nonce="Linux\n", **read_only), "", "", 0).problems
    assert problem.startswith("cannot write to /proc (")


def test_a_host_that_takes_no_temporary_files_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", "/proc")
    question = HostQuestion(folder=str(tmp_path), nonce="", name="", files={}, launcher="", daemon="")
    (problem,) = report(question, "", "", 0).problems
    assert problem == (
        "cannot write temporary files to /proc (no such file or directory); make room there, or set another TMPDIR"
    )


def test_a_host_with_a_full_home_of_its_own_is_named(tmp_path: Path) -> None:
    settings = {"nonce": "other", "name": "nonce", "files": {}, "launcher": "", "daemon": "", "has_store": True}
    (problem,) = report(HostQuestion(folder="/proc/absent", **settings), "", "", 0).problems
    assert problem.startswith("cannot write to /proc (no such file or directory); make room there")
    assert report(HostQuestion(folder=str(tmp_path / "absent"), **settings), "", "", 0).problems == ()
