"""The lock of a run whose host does not renew it any more is freed for one other host."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from onward.flows.run_state import lease
from onward.flows.run_state.lease import free_abandoned
from onward.infra.servers.service_state import try_lock
from tests.support.workshop import until

HOLDER = """
import socket, sys, time
from pathlib import Path
if sys.argv[2]:
    socket.gethostname = lambda: sys.argv[2]
from onward.flows.run_state import lease
from onward.flows.run_state.flow_log import flow_log
from onward.infra.servers.service_state import try_lock
from onward.trainer.run.directory import RunDir
lease.RENEW_S = 0.1
path = Path(sys.argv[1])
with path.open("ab") as lock, flow_log(RunDir(path.with_name("run"))):
    assert try_lock(lock)
    with lease.renewed(lock, path):
        path.with_name("held").touch()
        time.sleep(60)
"""


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "LEASE_S", 3.0)
    monkeypatch.setattr(lease, "LOOK_S", 0.1)


@contextlib.contextmanager
def held(path: Path, host: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process that says to be of a host holds a lock."""
    with subprocess.Popen([sys.executable, "-c", HOLDER, str(path), host], stderr=subprocess.PIPE) as process:
        try:
            until(path.with_name("held").exists, limit_s=60)
            yield process
        finally:
            process.kill()


@pytest.mark.usefixtures("quick")
def test_a_lock_that_another_host_renews_or_that_is_held_here_is_not_freed(tmp_path: Path) -> None:
    with held(tmp_path / "lock", "other"):
        assert free_abandoned([tmp_path / "lock", tmp_path / "absent", tmp_path]) == []
    # the process has ended, and the kernel has freed its lock
    began_at = time.monotonic()
    assert free_abandoned([tmp_path / "lock"]) == []
    (tmp_path / "held").unlink()
    with held(tmp_path / "lock", "") as process:
        process.send_signal(signal.SIGSTOP)
        assert free_abandoned([tmp_path / "lock"]) == []
        assert time.monotonic() - began_at < 60


def test_a_host_that_stood_still_while_another_one_took_the_run_over_takes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, claim, stamp = tmp_path / "lock", tmp_path / ".lock-1-1-0", (1, 1)
    path.write_text("of the other host")

    def taken_over(_: Path) -> lease.Stamp:
        claim.unlink()
        return stamp

    monkeypatch.setattr(lease, "_stamp_of_other_host", taken_over)
    assert not lease._replace(path, stamp, claim)
    assert path.read_text() == "of the other host"


@pytest.mark.slow
@pytest.mark.usefixtures("quick")
def test_of_several_hosts_one_frees_an_abandoned_lock_and_its_holder_ends_when_it_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with held(path, "other") as process:
        since = path.stat().st_mtime_ns
        until(lambda: path.stat().st_ctime_ns > since + 10**8, limit_s=20)
        assert path.stat().st_mtime_ns == since, "when the lock was taken"
        process.send_signal(signal.SIGSTOP)
        with path.open("ab") as lock:
            assert not try_lock(lock), "the kernel still holds it"
        until(lambda: psutil.Process(process.pid).status() == psutil.STATUS_STOPPED, limit_s=20)
        # of a host that died before it could replace the lock
        found = path.stat()
        path.with_name(f".lock-{found.st_ino}-{found.st_ctime_ns}-0").touch()
        with ThreadPoolExecutor(4) as takers:
            freed = [*takers.map(lambda _: free_abandoned([path]), range(4))]
        assert sorted(map(len, freed)) == [0, 0, 0, 1]
        with path.open("ab") as lock:
            assert try_lock(lock)
            process.send_signal(signal.SIGCONT)
            assert process.wait(20) == 72
        assert process.stderr
        assert b"another host has taken " in process.stderr.read(), "on the terminal, and not in the log of a run alone"
    assert sorted(each.name for each in tmp_path.iterdir()) == ["held", "lock", "run"]
