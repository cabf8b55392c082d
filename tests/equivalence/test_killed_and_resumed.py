"""Promise 4: killed and resumed equals never interrupted, bit for bit: weights, optimizer, dropout, samples."""

from __future__ import annotations

import signal
from collections.abc import Callable

import pytest

from tests.runs import (
    assert_equal_bits,
    events,
    final_tensors,
    losses,
    train_run,
    train_until,
)
from trainer.run import AttemptResult, RunDir, read_record

Make = Callable[..., RunDir]
SETTINGS = {
    "train": {"global_batch_size": 8, "num_steps": 24, "evaluation_period": 10, "seed": 5},
    "optimizer": {"name": "adamw", "learning_rate": 3e-3, "weight_decay": 0.1},
    "schedule": {"mode": "cosine", "warmup_ratio": 0.2},
    "parallel": {"data": 2},
    "checkpoint": {"period": 5},
}


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
    last = [[e.fields["values"] for e in events(run, "evaluation")][-1] for run in (killed, undisturbed)]
    assert last[0] == last[1]


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
    for name, train in {"smaller": {"global_batch_size": 4}, "shorter": {"num_steps": 10}}.items():
        wrong = make(name, **SETTINGS | {"checkpoint": {"load": start}, "train": SETTINGS["train"] | train})
        with pytest.raises(AssertionError, match="is at step 20 after 160 samples, but this run makes"):
            train_run(wrong)
