"""Hosts that fall silent, over an agent that stands in for ssh: the bytes come from real processes."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from onward.infra.job import host_beats
from onward.infra.job.host_beats import ECHO, HostBeats
from tests.support.workshop import until

AGENT = """#!/bin/sh
# stands in for ssh: agent -o option... host command
while [ "$1" = -o ]; do shift 2; done
echo "$*" >> "$0.log"
[ -e "$0.$1" ] && sleep 60
shift
exec sh -c "$*"
"""


@pytest.fixture
def agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    path = tmp_path / "agent"
    path.write_text(AGENT)
    path.chmod(0o755)
    monkeypatch.setenv("PATH", "/bin:/usr/bin")
    monkeypatch.setenv("PRTE_MCA_plm_ssh_agent", str(path))
    monkeypatch.setattr(host_beats, "PERIOD_S", 0.1)
    monkeypatch.setattr(host_beats, "SILENT_S", 1.0)
    monkeypatch.setattr(host_beats, "ASKED_S", 1)
    yield path
    until(lambda: not echoes(), limit_s=10)


def echoes() -> list[psutil.Process]:
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            found += [process] * (ECHO in process.cmdline())
    return found


def test_a_host_that_neither_echoes_nor_answers_is_lost(agent: Path) -> None:
    beats = HostBeats(["h1", "localhost"])
    with beats.watched():
        (echo,) = until(echoes, limit_s=20)
        until(lambda: agent.with_name("agent.log").exists(), limit_s=10)
        time.sleep(1.5)
        assert beats.lost() == {}
        agent.with_name("agent.h1").touch()
        began_at = time.monotonic()
        echo.send_signal(signal.SIGSTOP)
        lost = until(beats.lost, limit_s=20)
        assert lost == {"h1": "silent for 1 s; no answer in 2 s"}
        assert time.monotonic() - began_at > 1.0
        # the job goes on, so it was not the host
        agent.with_name("agent.h1").unlink()
        beats.watch_again()
        until(echoes, limit_s=20)
        assert beats.lost() == {}


def test_a_host_that_is_silent_but_answers_is_listened_to_again(agent: Path) -> None:
    beats = HostBeats(["h1"])
    with beats.watched():
        (first,) = until(echoes, limit_s=20)
        time.sleep(0.5)
        first.send_signal(signal.SIGSTOP)
        until(lambda: [each for each in echoes() if each.pid != first.pid], limit_s=20)
        assert beats.lost() == {}
        assert not first.is_running() or first.status() == psutil.STATUS_ZOMBIE


def test_a_host_that_does_not_allow_the_program_is_not_watched(agent: Path) -> None:
    agent.write_text(AGENT.replace('exec sh -c "$*"', '[ "$1" = true ]'))
    with HostBeats(["h1"]).watched():
        log = agent.with_name("agent.log")
        until(lambda: log.exists() and log.read_text().count("h1 true") == 3, limit_s=20)
        time.sleep(0.5)
        assert log.read_text().count("h1 exec") == 3


def test_hosts_are_many_or_none_without_a_connection(agent: Path) -> None:
    with HostBeats([f"h{number}" for number in range(65)]).watched(), HostBeats([]).watched():
        time.sleep(0.5)
    assert not agent.with_name("agent.log").exists()
