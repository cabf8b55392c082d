"""A rank that hangs is named, with the line in which it is, and the stacks of all ranks are saved. Real mpirun."""

from __future__ import annotations

import re
import signal
import threading
import time
from pathlib import Path

import psutil
import pytest

from onward.tasks.attempts.attempt_failure import host_of
from onward.tasks.train import train
from onward.trainer.errors import TrainingFailed
from onward.trainer.events import last_beat
from onward.trainer.run.directory import RunDir, read_config
from onward.trainer.run.outcomes.attempt_endings import endings
from onward.trainer.run.records import RuntimeReport, TrainResult, write_record
from tests.support.graphs import tiny_conv_net
from tests.support.quotes import assert_quoted
from tests.support.runs import make_run, tiny_images

pytestmark = pytest.mark.mpi

OWN_LOSS = """
import os, time
import torch

calls, mode = 0, {mode!r}


def endless_loop_in_python():
    while True:
        pass


def endless_loop_in_c():
    sum(iter(int, 1))  # holds the GIL


def slow_disk(rows):
    time.sleep(1000)


def loss(output, labels):
    global calls
    calls += torch.is_grad_enabled()
    if calls == 4 and os.environ.get("PMIX_RANK") == "1" and mode != "none":
        if mode == "data":
            from onward.trainer.data.storage.shards import Shards
            Shards.read = lambda shards, rows: slow_disk(rows)
        else:
            globals()["endless_loop_in_" + mode]()
    return torch.nn.functional.cross_entropy(output, labels, reduction="sum")
"""


def hanging_run(folder: Path, mode: str, *, steps: int = 400, heartbeat_s: float = 26.0) -> RunDir:
    """A run of two replicas of which rank 1 hangs in the fourth step."""
    (folder / "own.py").write_text(OWN_LOSS.format(mode=mode))
    return make_run(
        folder,
        tiny_conv_net(),
        tiny_images(80),
        parallel={"data": 2},
        train={"global_batch_size": 8, "num_steps": steps, "evaluation_period": 0},
        loss={"name": "file", "file": f"{folder / 'own.py'}:loss", "label": "label", "label_type": "int64"},
        launch={"heartbeat_timeout_s": heartbeat_s},
    )


@pytest.mark.parametrize(
    ("mode", "place"),
    [
        pytest.param("python", r"is in endless_loop_in_python \(\S*own\.py:\d+\)", marks=pytest.mark.slow),
        pytest.param(
            "c", r"is in endless_loop_in_c \(\S*own\.py:\d+\): `sum\(iter\(int, 1\)\)", marks=pytest.mark.slow
        ),
        pytest.param("data", r"waits for a thread of its own, which is in slow_disk \(", marks=pytest.mark.slow),
    ],
)
def test_the_rank_that_does_not_wait_for_the_others_is_named_with_its_line(
    tmp_path: Path, mode: str, place: str
) -> None:
    run = hanging_run(tmp_path, mode)
    expected = rf"rank 1 on \S+, step \d+: Hang: the job made no progress: it {place}"
    with pytest.raises(TrainingFailed, match=expected) as hung:
        train.fn(run)
    assert "; rank 0 waits for it. The stacks of all ranks: " in str(hung.value)
    assert endings(run)[0].kind == "hang"
    if mode == "c":
        assert_quoted(str(endings(run)[0]), "attempt 1 ended at step ")
    stacks = run.stacks(1).read_text()
    assert "== rank 0: waits for other ranks: is in " in stacks
    assert "== rank 1: " in stacks
    assert "own.py" in stacks


@pytest.mark.slow
def test_a_stopped_rank_goes_on_long_before_a_collective_times_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = hanging_run(tmp_path, "none", steps=300, heartbeat_s=120)
    stopping = threading.Thread(target=stop_rank_one, args=(run,), daemon=True)
    stopping.start()
    result = train.fn(run)
    assert isinstance(result, TrainResult)
    assert (result.status, result.attempts) == ("done", 1)
    assert re.search(r"rank 1 \(process \d+\) has been stopped by a signal \(SIGSTOP\) for 1\d s", caplog.text)


@pytest.mark.slow
def test_a_stopped_rank_is_named_where_a_collective_times_out_before(tmp_path: Path) -> None:
    run = hanging_run(tmp_path, "none", steps=100_000, heartbeat_s=9)  # less than a stopped rank is waited for
    stopping = threading.Thread(target=stop_rank_one, args=(run,), daemon=True)
    stopping.start()
    with pytest.raises(
        TrainingFailed, match=r"rank 1 on \S+, step \d+: .* its process \d+ was stopped by a signal \(SIGSTOP\)"
    ):
        train.fn(run)
    assert "== rank 1: " in run.stacks(1).read_text()


@pytest.mark.slow
def test_a_rank_that_is_killed_a_few_seconds_after_another_was_stopped_is_lost_and_nothing_hung(tmp_path: Path) -> None:
    run = hanging_run(tmp_path, "none", steps=100_000, heartbeat_s=50)

    def stop_and_kill() -> None:
        stop_rank_one(run)
        time.sleep(3)
        signal_rank(run, 0, signal.SIGKILL)

    disturbing = threading.Thread(target=stop_and_kill, daemon=True)
    disturbing.start()
    with pytest.raises(TrainingFailed, match=r"rank 0 on \S+, step \d+: SIGKILL"):
        train.fn(run)
    disturbing.join()
    assert endings(run)[0].kind == "rank_lost"


def stop_rank_one(run: RunDir) -> None:
    """Stop rank 1 after a few steps."""
    while last_beat(run.heartbeat).step < 5:
        time.sleep(0.02)
    signal_rank(run, 1, signal.SIGSTOP)


def signal_rank(run: RunDir, rank: int, number: signal.Signals) -> None:
    for process in psutil.process_iter(["cmdline", "environ"]):
        environment = process.info["environ"] or {}
        if str(run.root) in (process.info["cmdline"] or ()) and environment.get("PMIX_RANK") == str(rank):
            process.send_signal(number)


def test_a_rank_of_another_host_is_named_with_that_host_unless_hosts_were_lost_since(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("h0 slots=1\nh1 slots=1\n")
    sections = {"train": {"global_batch_size": 8, "num_steps": 1}, "launch": {"hostfile": str(tmp_path / "hosts")}}
    run = make_run(tmp_path, tiny_conv_net(), tiny_images(80), parallel={"data": 2}, **sections)
    config = read_config(run)
    found = {"world_size": 2, "expected_world_size": 2, "pid": 1, "device": "cpu", "versions": {}, "memory_bytes": 1}
    ranks = [{**found, "rank": rank, "host": f"h{rank}", "all_reduce": 1, "all_reduce_expected": 1} for rank in (0, 1)]
    assert host_of(run, 1, config.launch) == "unknown host"
    write_record(run.runtime, RuntimeReport.model_validate({"ranks": ranks, "launch_s": 1, "disk_free_bytes": 1}))
    assert [host_of(run, rank, config.launch) for rank in (0, 1, 2)] == ["h0", "h1", "unknown host"]
    left = config.model_copy(update={"launch": config.launch.model_copy(update={"hostfile": "hosts-left"})})
    assert host_of(run, 1, left.launch) == "unknown host"
