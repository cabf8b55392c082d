"""Promise: rehearsal and ranks that are forks of one process end, are named and resume as those that are not."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from onward.infra.job import forks
from onward.infra.job.job import running_job
from onward.infra.job.job_guard import members
from onward.tasks.checks import rehearsing
from onward.tasks.train import train
from onward.trainer.errors import ConfigError, TrainingFailed
from onward.trainer.run.directory import RunDir, read_config
from onward.trainer.run.records import TrainResult
from tests.support.graphs import tiny_conv_net
from tests.support.runs import events, make_run, tiny_images

pytestmark = pytest.mark.mpi


def signal_rank_one(run: RunDir, attempt: int, number: signal.Signals, *, forked: bool) -> threading.Thread:
    """Send a signal to rank 1 in the middle of an attempt: to the fork, or to its client under mpirun."""

    def send() -> None:
        while not any(event.attempt == attempt for event in events(run, "checkpoint")):
            time.sleep(0.005)
        job = running_job(run.root)
        assert job is not None
        found = [psutil.Process(pid) for pid in members(job.tag)]
        (client,) = [p for p in found if p.environ().get("PMIX_RANK") == "1"]
        of_forks = [p.pid for p in found if "onward.trainer.fork_server" in p.cmdline()]
        assert len(of_forks) == 2
        pid = next(each for each in of_forks if rank_of(each) == 1) if forked else client.pid
        os.kill(pid, number)

    thread = threading.Thread(target=send, daemon=True)
    thread.start()
    return thread


def rank_of(pid: int) -> int:
    """The rank that a fork is: it has its own files of the attempt open."""
    names = [Path(file.path).name for file in psutil.Process(pid).open_files()]
    return next(int(name[5:10]) for name in names if name.startswith("rank-"))


@pytest.mark.slow
def test_forked_ranks_that_are_killed_or_abort_are_named_and_the_next_attempt_resumes(tmp_path: Path) -> None:
    sections: dict[str, Any] = {"parallel": {"data": 2}, "checkpoint": {"period": 5}}
    step = {"global_batch_size": 8, "num_steps": 600, "evaluation_period": 0}
    run = make_run(tmp_path, tiny_conv_net(), tiny_images(80), train=step, **sections)
    with forks.fork_server():
        assert forks.python()[-2].endswith("socket")
        config = read_config(run)
        absent = config.model_copy(update={"model": config.model.model_copy(update={"output": "absent"})})
        with pytest.raises(ConfigError, match="absent"):
            rehearsing.Preparation(absent).rehearse()

        sending = signal_rank_one(run, 1, signal.SIGKILL, forked=True)
        with pytest.raises(TrainingFailed, match=r"rank 1 on \S+, step \d+: SIGKILL: killed from outside"):
            train.fn(run)
        sending.join()
        sending = signal_rank_one(run, 2, signal.SIGABRT, forked=False)
        with pytest.raises(TrainingFailed, match=r"rank 1 on \S+, step \d+: SIGABRT: native code aborted, in "):
            train.fn(run)
        sending.join()
        result = train.fn(run)
    assert isinstance(result, TrainResult)
    assert (result.status, result.attempts, result.step) == ("done", 3, 600)
    assert running_job(run.root) is None
