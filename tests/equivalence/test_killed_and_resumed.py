"""Promise 4: killed and resumed equals never interrupted, bit for bit: weights, optimizer, dropout, samples."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from onward.tasks.train import train
from onward.trainer.errors import TrainingFailed
from onward.trainer.events import read_events
from onward.trainer.run.directory import RunDir
from onward.trainer.run.records import AttemptResult, TrainResult, read_record
from tests.support import graphs
from tests.support.cases import both_cases
from tests.support.runs import (
    assert_equal_bits,
    events,
    final_tensors,
    losses,
    make_run,
    tiny_images,
    train_run,
    train_until,
)

Make = Callable[..., RunDir]
SETTINGS = {
    "train": {"global_batch_size": 8, "num_steps": 24, "evaluation_period": 10, "seed": 5},
    "optimizer": {"name": "adamw", "learning_rate": 3e-3, "weight_decay": 0.1},
    "schedule": {"mode": "cosine", "warmup_ratio": 0.2},
    "parallel": {"data": 2},
    "checkpoint": {"period": 5},
}


@both_cases(slow="conv-net")
@pytest.mark.mpi
def test_a_rank_killed_at_any_step_changes_not_one_bit_of_the_end(make: Make, case: str) -> None:
    graph = {"dropout": 0.2} if case == "transformer" else {}
    undisturbed = make("undisturbed", graph=graph, **SETTINGS)
    train_run(undisturbed)
    killed = make("killed", graph=graph, **SETTINGS)
    for step in (3, 5, 17):  # before the first checkpoint, beside one, after several
        train_until(killed, lambda event, step=step: event.step >= step and event.kind == "scalars", rank=step % 2)
        assert not killed.result(killed.current_attempt).exists()
    result = train_run(killed)
    assert (result.attempt, result.status, result.step) == (4, "done", 24)
    assert_equal_bits(final_tensors(killed), final_tensors(undisturbed))
    assert losses(killed) == losses(undisturbed)
    last = [[e.values for e in events(run, "evaluation")][-1] for run in (killed, undisturbed)]
    assert last[0] == last[1]


@both_cases(slow="transformer")
@pytest.mark.mpi
def test_asked_to_stop_it_saves_at_once_and_goes_on_with_the_same_bits(make: Make) -> None:
    undisturbed = make("undisturbed", **SETTINGS)
    train_run(undisturbed)
    stopped = make("stopped", **SETTINGS)
    train_until(stopped, lambda event: event.step >= 7 and event.kind == "scalars", signal.SIGUSR1)
    first = read_record(stopped.result(1), AttemptResult)
    assert first.status == "stopped"
    assert 7 <= first.step < 24
    assert stopped.checkpoint(first.step).is_dir()
    assert train_run(stopped).status == "done"
    assert_equal_bits(final_tensors(stopped), final_tensors(undisturbed))


@both_cases(slow="conv-net")
@pytest.mark.mpi
def test_a_run_may_start_from_another_ones_checkpoint_but_only_where_it_passes_through(make: Make, case: str) -> None:
    first = make("first", **SETTINGS)
    train_run(first)
    start = str(first.checkpoint(20))
    second = make("second", **SETTINGS | {"checkpoint": {"load": start}})
    assert train_run(second).step == 24
    assert_equal_bits(final_tensors(second), final_tensors(first))

    if case == "transformer":
        return
    for name, change in {"smaller": {"global_batch_size": 4}, "shorter": {"num_steps": 10}}.items():
        wrong = make(name, **SETTINGS | {"checkpoint": {"load": start}, "train": SETTINGS["train"] | change})
        with pytest.raises(AssertionError, match=r"is at step 20 after 160 samples, which this .* cannot reach"):
            train_run(wrong)


@pytest.mark.mpi
@pytest.mark.slow  # that a silent job is killed: tests/infra/job/test_job.py
def test_a_job_that_falls_silent_is_killed_and_the_next_attempt_resumes(tmp_path: Path) -> None:
    limits = {"heartbeat_timeout_s": 6}
    settings = SETTINGS | {"train": SETTINGS["train"] | {"num_steps": 600}, "launch": limits}
    run = make_run(tmp_path, graphs.tiny_conv_net(), tiny_images(80), **settings)

    def freeze_after_the_first_checkpoint() -> None:
        while not events(run, "checkpoint"):
            time.sleep(0.005)
        for process in psutil.process_iter(["cmdline", "environ"]):
            # all ranks, so that nobody is left to say anything; mpirun, which would let them go on, is not stopped
            is_rank = "PMIX_RANK" in (process.info["environ"] or {})
            if is_rank and {"onward.trainer", "train", str(run.root)} <= set(process.info["cmdline"] or ()):
                process.send_signal(signal.SIGSTOP)

    freezing = threading.Thread(target=freeze_after_the_first_checkpoint, daemon=True)
    freezing.start()
    with pytest.raises(TrainingFailed, match="killed after 6 s without a heartbeat"):
        train.fn(run)
    freezing.join()
    frozen_at = max(event.step for event, _ in read_events(run.events))
    assert 5 <= frozen_at < 600

    result = train.fn(run)
    assert isinstance(result, TrainResult)
    assert (result.status, result.attempts, result.step) == ("done", 2, 600)
    assert 5 <= events(run, "start")[1].step <= frozen_at
