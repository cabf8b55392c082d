"""The hosts of a hostfile, and which of them answer over the agent that mpirun uses."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
from pathlib import Path

import pytest

from onward.infra.job.hosts import (
    MOST_BYTES,
    Answer,
    ask_programs,
    is_here,
    read_hostfile,
    silence,
    silent_hosts,
    with_slots,
    write_hostfile,
)

AGENT = """#!/bin/sh
# stands in for ssh: agent -o option... host command
while [ "$1" = -o ]; do shift 2; done
[ "$1" = h1 ] && { echo "ssh: connect to host h1 port 22: No route to host" >&2; exit 255; }
[ "$2" = true ]
"""


def test_a_hostfile_is_read_and_written_with_its_slots(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("# two machines\nh0 slots=2\nh1 slots = 4 max_slots=8 # new\n\nh0 slots=1\nh2\n")
    hosts = read_hostfile(tmp_path / "hosts")
    assert hosts == {"h0": 3, "h1": 4, "h2": 1}, "a line without a number is one rank"
    write_hostfile(tmp_path / "left", hosts)
    assert (tmp_path / "left").read_text() == "h0 slots=3\nh1 slots=4\nh2 slots=1\n"


def test_mpirun_is_told_the_slots_of_each_line(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text("h0 slots=2 max_slots=4 # h1\n")
    assert with_slots(path, tmp_path / "copy") == path, "as it is, with what else it says"
    path.write_text("h0\nh1 slots=2\nh0\n")
    assert with_slots(path, tmp_path / "copy").read_text() == "h0 slots=2\nh1 slots=2\n"


def test_a_file_too_large_for_a_hostfile_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "hosts").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(OSError, match=f"at most {MOST_BYTES:,} bytes"):
        read_hostfile(tmp_path / "hosts")


@pytest.mark.parametrize(
    "name", ["-oProxyCommand=touch${IFS}executed", "me@-oProxyCommand=x", "$(touch", "a;touch", "-h"]
)
def test_what_ssh_would_take_for_an_option_is_no_host(name: str, tmp_path: Path) -> None:
    """A line of a hostfile could start a program: ssh executes the ProxyCommand that an option names."""
    (tmp_path / "hosts").write_text(f"h0 slots=2\n{name} slots=2\n")
    with pytest.raises(OSError, match=r"line 2 names no host: '"):
        silent_hosts(list(read_hostfile(tmp_path / "hosts")))


def test_a_file_that_waits_for_content_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "hosts")
    writer = os.open(tmp_path / "hosts", os.O_RDWR)
    with contextlib.suppress(OSError):
        assert read_hostfile(tmp_path / "hosts") == {}
    os.close(writer)


@pytest.mark.parametrize("line", ["rank 0=-Fname", "h1 /*x*/ -Fname", "h1 slots=-2", "h1 h2", "h1 slots=2 -h"])
def test_a_line_with_words_that_mpirun_takes_for_a_host_is_refused(line: str, tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text(f"h0 slots = 2 max_slots=4\n{line}\n")
    with pytest.raises(OSError, match=r"line 2 is no HOST KEY=VALUE"):
        read_hostfile(tmp_path / "hosts")


def test_names_and_addresses_of_hosts_are_read(tmp_path: Path) -> None:
    names = ["node-1.cluster", "10.0.0.1", "me@node_2", "[fe80::1]", "fe80::1", "localhost"]
    (tmp_path / "hosts").write_text("\n".join(names))
    assert list(read_hostfile(tmp_path / "hosts")) == names


def test_hosts_that_do_not_answer_are_named_with_what_the_agent_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = tmp_path / "agent"
    agent.write_text(AGENT)
    agent.chmod(0o755)
    monkeypatch.setenv("PATH", "/bin")
    monkeypatch.setenv("PRTE_MCA_plm_ssh_agent", f"{agent} : rsh")
    silent = silent_hosts(["h0", "h1", socket.gethostname()])
    assert silent == {"h1": "ssh: connect to host h1 port 22: No route to host"}
    assert silence(silent) == "1 host does not answer: h1 (ssh: connect to host h1 port 22: No route to host)"
    monkeypatch.setenv("PRTE_MCA_plm_ssh_agent", str(tmp_path / "absent"))
    assert silent_hosts(["h0"]) == {"h0": f"{tmp_path}/absent cannot be started: No such file or directory"}


def test_this_host_is_known_by_its_names_and_addresses() -> None:
    assert all(map(is_here, ("localhost", "me@localhost", "127.0.0.1", "127.0.0.2", socket.gethostname())))
    assert not any(map(is_here, ("192.0.2.1", "h1", f"{socket.gethostname()}.invalid", "10.0.0")))


PROGRAM = """
import json, os, socket, sys
print("Welcome to " + os.environ["HOST"])
print(sys.stdin.readline().strip(), file=sys.stderr)
if os.environ["HOST"] == "h3":
    sys.exit("No module named onward")
with socket.create_server(("127.0.0.1", 0)) as listening:
    port = listening.getsockname()[1]
    if os.environ["HOST"] == "h2":
        listening.close()
    print("line " + json.dumps({"address": "127.0.0.1", "head": "127.0.0.1", "port": port}), flush=True)
    asked = int(sys.stdin.readline())
    socket.create_connection(("127.0.0.1", asked)).close()
    print("line " + ("refused" if os.environ["HOST"] == "h4" else ""), flush=True)
    sys.stdin.read()
"""


def test_a_program_on_each_host_answers_and_is_reached_at_another_port(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = tmp_path / "agent"
    run_there = 'HOST="$1"; export HOST; shift; exec sh -c "$*"\n'
    agent.write_text(AGENT.rpartition('[ "$2"')[0] + run_there)
    agent.chmod(0o755)
    monkeypatch.setenv("PATH", "/bin:/usr/bin")
    monkeypatch.setenv("PRTE_MCA_plm_ssh_agent", str(agent))
    hosts = ["h0", "h1", "h2", "h3", "h4"]
    answers = ask_programs(hosts, [sys.executable, "-c", PROGRAM], "who are you?", "line ")
    assert list(answers) == hosts
    assert answers["h1"].problem == "ssh: connect to host h1 port 22: No route to host"
    assert not answers["h1"].has_no_program
    assert (answers["h0"].problem, answers["h0"].to_host, answers["h0"].to_head) == ("", "", "")
    assert json.loads(answers["h0"].report)["address"] == "127.0.0.1"
    assert "refused" in answers["h2"].to_host
    assert answers["h3"] == Answer("who are you? No module named onward", has_no_program=True)
    assert answers["h4"].to_head == "refused"
