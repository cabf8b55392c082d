"""A run that is sent to a real S3 server, through 40 kills of machines, cuts of connections and kills of the server."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import s3fs

from onward.flows.running import from_store
from onward.flows.running.from_store import fetch_run
from onward.trainer.checkpoint.retention import list_checkpoints
from onward.trainer.checkpoint.verification import verify
from onward.trainer.events import read_events
from onward.trainer.run.directory import RunDir
from onward.trainer.run.records import read_record
from onward.trainer.run.remote.stored_run import Sending, StoredRun, record_in
from tests.support.s3_server import Faults, S3Server, faulty_proxy, s3_server
from tests.support.stored_runs import RUN_ID, holds_its_values, make_stored_run

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(3600),
    pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"),
]

KILLS = int(os.environ.get("ONWARD_STORE_KILLS", "40"))
STORE = "s3://bucket/runs"
SIZE = 60_000
STORED = re.compile(r"step (\d+): \S+ is stored in ")
FAULTS = ("kill", "kill", "cut", "cut", "down", "server", "stop")


class Programs:
    """Processes that train and send, each a fork of one that has imported everything."""

    def __init__(self) -> None:
        words = [sys.executable, "-m", "tests.support.stored_runs"]
        self._parent = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def start(self, run: RunDir, first: int) -> int:
        assert self._parent.stdin is not None
        assert self._parent.stdout is not None
        print(run.root, first, first + 200, SIZE, file=self._parent.stdin, flush=True)
        return int(self._parent.stdout.readline())

    def close(self) -> None:
        self._parent.kill()
        self._parent.communicate()


def saved_lines(run: RunDir) -> int:
    log = run.root / "program.log"
    return log.read_text().count("saved ") if log.exists() else 0


def until_gone(pid: int, where: str) -> None:
    deadline = time.monotonic() + 600
    while Path(f"/proc/{pid}").exists():
        assert time.monotonic() < deadline, where
        time.sleep(0.1)


def inflict(fault: str, faults: Faults, server: S3Server, dice: random.Random) -> None:
    """Let something happen for a random time; the sender goes on behind it."""
    if fault == "cut":
        faults.cut_after = dice.choice([1_000, 20_000, 200_000, 600_000])
        time.sleep(dice.uniform(0.5, 3))
        faults.cut_after = dice.choice([0, 300_000])
    elif fault == "down":
        faults.is_down = True
        time.sleep(dice.uniform(0.2, 3))
        faults.is_down = False
    elif fault == "server":
        server.kill()
        time.sleep(dice.uniform(0, 1))
        server.start()
    time.sleep(dice.uniform(0, 3))


def test_no_checkpoint_loads_wrong_and_none_that_was_announced_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(from_store, "SILENT_S", 0.0)
    monkeypatch.chdir(Path(__file__).parents[3])
    seed = int(os.environ.get("ONWARD_STORE_SEED", str(time.time_ns() % 10**6)))
    dice = random.Random(seed)
    counts: dict[str, int] = {}
    frozen: list[tuple[int, RunDir]] = []
    with s3_server(tmp_path / "s3", monkeypatch) as server, faulty_proxy(server.ports["s3.port"]) as faults:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{faults.port}")
        s3fs.S3FileSystem.clear_instance_cache()
        programs = Programs()
        monkeypatch.setenv("ONWARD_HOME", str(tmp_path / "home-0"))
        run = make_stored_run(tmp_path / "home-0", STORE)
        step = took_over = promised = 0
        for number in range(1, KILLS + 1):
            fault = dice.choice(FAULTS)
            counts[fault] = counts.get(fault, 0) + 1
            where = f"seed {seed}, round {number}, {fault}: {run.root}"
            wanted = saved_lines(run) + dice.randint(1, 4)
            process = programs.start(run, step + 1)
            deadline = time.monotonic() + 300
            while saved_lines(run) < wanted:
                assert time.monotonic() < deadline, where
                time.sleep(0.05)
            inflict(fault, faults, server, dice)
            os.kill(process, signal.SIGSTOP if fault == "stop" else signal.SIGKILL)
            if fault == "stop":
                frozen.append((process, run))
            else:
                until_gone(process, where)
            # not what store.json says, which a fault of the sender might empty; a fetched run has its own log
            promised = max([promised, *map(int, STORED.findall((run.root / "program.log").read_text()))])
            faults.cut_after, faults.is_down = 0, False
            if not promised and fault == "stop":
                os.kill(frozen.pop()[0], signal.SIGKILL)
                until_gone(process, where)
            if not promised or (fault != "stop" and dice.random() < 0.3):
                # the machine comes back with its disk
                step = max((verify(path).info.step for path in list_checkpoints(run)), default=0)
                continue
            # the disk is lost, or another machine takes over from one that is only frozen
            monkeypatch.setenv("ONWARD_HOME", str(tmp_path / f"home-{number}"))
            run = fetch_run(f"{STORE}/{RUN_ID}")
            took_over += 1
            step = max(verify(path).info.step for path in list_checkpoints(run))
            assert step >= promised, where
            assert all(holds_its_values(run, verify(path).info.step, SIZE) for path in list_checkpoints(run)), where
            steps = {event.step for event, _ in read_events(run.events)}
            assert set(range(1, step + 1)) <= steps, where
            # a machine that wakes up finds that it has been replaced, and ends
            if frozen and dice.random() < 0.7:
                waked, its_run = frozen.pop()
                os.kill(waked, signal.SIGCONT)
                until_gone(waked, where)
                assert "goes on with the run since" in (its_run.root / "program.log").read_text(), where
        for process, _ in frozen:
            os.kill(process, signal.SIGKILL)
        programs.close()
        stored = StoredRun(f"{STORE}/{RUN_ID}")
        assert stored.newest_sender() == read_record(record_in(run), Sending).number == took_over + 1
    print(f"seed {seed}: {KILLS} faults {counts}, {took_over} times from the store, {faults.cuts} connections cut")
