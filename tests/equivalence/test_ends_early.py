"""A run that [stop] ends does so at the same step and with the same bits, however often it was killed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from onward.tasks.train import train
from onward.trainer.checkpoint.verification import newest_complete
from onward.trainer.run.directory import RunDir, read_config
from onward.trainer.run.records import AttemptResult, TrainResult, read_record, write_record
from tests.support import graphs
from tests.support.runs import assert_equal_bits, events, final_tensors, make_run, tiny_images, train_run, train_until

pytestmark = [pytest.mark.mpi, pytest.mark.usefixtures("forked")]
SETTINGS: dict[str, Any] = {
    "train": {"global_batch_size": 8, "num_steps": 40, "evaluation_period": 4, "seed": 5},
    "optimizer": {"name": "adamw", "learning_rate": 3e-3},
    "schedule": {"mode": "cosine"},
    "parallel": {"data": 2},
    "checkpoint": {"period": 5},
}


def made(folder: Path, **sections: Any) -> RunDir:
    return make_run(folder, graphs.tiny_conv_net(), tiny_images(80), **SETTINGS | sections)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    run = made(tmp_path_factory.mktemp("undisturbed"))
    assert train_run(run).ended_early == ""
    return run


def loss_at(run: RunDir, step: int) -> float:
    (found,) = {e.values["evaluation/loss"] for e in events(run, "evaluation") if e.step == step}
    return float(found)


def test_patience_ends_the_run_at_the_same_step_with_the_same_bits_although_it_was_killed_around_it(
    tmp_path: Path,
) -> None:
    stop = {"patience": 3, "minimum_gain": 100.0}  # no gain is enough: steps 4, 8 and 12 count
    first = made(tmp_path / "first", stop=stop)
    result = train_run(first)
    assert (result.status, result.step) == ("done", 12)
    assert result.ended_early.startswith("stop.patience = 3: evaluation/loss did not improve on ")
    assert events(first, "end")[-1].ended_early == result.ended_early
    newest = newest_complete(first)
    assert newest is not None
    assert newest.manifest.state.metrics == result.metrics, "the last checkpoint was evaluated at its own step"

    killed = made(tmp_path / "killed", stop=stop)
    for moment in (("scalars", 7), ("evaluation", 8), ("scalars", 11)):
        train_until(killed, moment)
    again = train_run(killed)
    assert (again.attempt, again.status, again.step, again.stop) == (4, "done", 12, result.stop)
    assert again.ended_early == result.ended_early
    assert_equal_bits(final_tensors(killed), final_tensors(first))

    # killed after the last checkpoint and before its result
    killed.result(4).unlink()
    once_more = train_run(killed)
    assert (once_more.attempt, once_more.step, once_more.ended_early) == (5, 12, result.ended_early)
    assert_equal_bits(final_tensors(killed), final_tensors(first))


def test_a_target_ends_the_run_at_the_evaluation_that_reaches_it(tmp_path: Path, undisturbed: RunDir) -> None:
    target = max(loss_at(undisturbed, step) for step in range(8, 41, 4))
    reached = next(step for step in range(4, 41, 4) if loss_at(undisturbed, step) <= target)
    result = train_run(made(tmp_path, stop={"target": target}))
    assert (result.status, result.step) == ("done", reached)
    assert result.ended_early.startswith("stop.target = ")


def test_out_of_time_a_run_evaluates_saves_and_goes_on_with_the_same_bits_when_the_limit_is_raised(
    tmp_path: Path, undisturbed: RunDir
) -> None:
    run = made(tmp_path, stop={"max_hours": 1e-6, "patience": 3, "minimum_gain": -0.0})
    result = train.fn(run)
    assert isinstance(result, TrainResult)
    assert (result.status, result.step) == ("done", 1), "no step takes less than 4 ms with starting"
    assert result.ended_early.startswith("stop.max_hours = 1e-06: ")
    newest = newest_complete(run)
    assert newest is not None
    state = newest.manifest.state
    assert (state.step, state.evaluated_at, state.stop.evaluations_since) == (1, 1, 0), "evaluated, not counted"
    assert train.fn(run).step == 1, "without a higher limit there is nothing to do"
    assert run.current_attempt == 1

    set_hours(run, 1.0)
    on = train.fn(run)
    assert isinstance(on, TrainResult)
    assert (on.status, on.attempts, on.step, on.ended_early) == ("done", 2, 40, "")
    assert read_record(run.result(2), AttemptResult).stop.trained_s > state.stop.trained_s, "hours add up"
    assert_equal_bits(final_tensors(run), final_tensors(undisturbed))


@pytest.mark.slow
@pytest.mark.parametrize("kills", [[("scalars", 9)], [("evaluation", 8), ("checkpoint", 10)], [("scalars", 11)] * 3])
def test_a_target_ends_the_run_with_the_same_bits_although_it_was_killed_at_other_steps(
    kills: list[tuple[str, int]], tmp_path: Path, undisturbed: RunDir
) -> None:
    target = min(loss_at(undisturbed, step) for step in (4, 8, 12, 16))
    first = made(tmp_path / "first", stop={"target": target})
    result = train_run(first)
    assert (result.status, result.step) == (
        "done",
        next(n for n in (4, 8, 12, 16) if loss_at(undisturbed, n) <= target),
    )
    killed = made(tmp_path / "killed", stop={"target": target})
    for number, (kind, step) in enumerate(kills):
        if step < result.step:
            at = (kind, step)
            train_until(killed, lambda event, at=at: (event.kind, event.step) == at, rank=number % 2)
    again = train_run(killed)
    assert again.attempt > 1, "it was killed"
    assert (again.step, again.ended_early) == (result.step, result.ended_early)
    assert_equal_bits(final_tensors(killed), final_tensors(first))


@pytest.mark.slow
def test_hours_add_up_over_kills_and_out_of_time_the_run_goes_on_with_the_same_bits(
    tmp_path: Path, undisturbed: RunDir
) -> None:
    """Each attempt that is killed at step 8 has trained 5 steps which count; the limit ends a later one."""
    run = made(tmp_path, stop={"max_hours": 1.0})
    train_until(run, lambda event: (event.kind, event.step) == ("scalars", 8))
    newest = newest_complete(run)
    assert newest is not None
    counted_s = newest.manifest.state.stop.trained_s
    assert counted_s > 0

    set_hours(run, counted_s * 1.001 / 3600)  # one more step takes longer
    result = train_run(run)
    assert (result.status, result.step) == ("done", newest.manifest.state.step + 1)
    assert result.ended_early.startswith("stop.max_hours = ")
    assert result.stop.trained_s > counted_s
    last = newest_complete(run)
    assert last is not None
    assert (last.manifest.state.step, last.manifest.state.stop) == (result.step, result.stop), "it leaves a checkpoint"

    set_hours(run, 1.0)
    train_until(run, lambda event: (event.kind, event.step) == ("scalars", 13), rank=0)
    on = train_run(run)
    assert (on.step, on.ended_early) == (40, "")
    assert_equal_bits(final_tensors(run), final_tensors(undisturbed))


def set_hours(run: RunDir, hours: float) -> None:
    """Change `stop.max_hours`, as `onward resume` does."""
    config = read_config(run)
    write_record(run.config, config.model_copy(update={"stop": config.stop.model_copy(update={"max_hours": hours})}))


def test_another_run_that_starts_from_the_checkpoint_counts_from_there(tmp_path: Path, undisturbed: RunDir) -> None:
    stop = {"patience": 1, "minimum_gain": 100.0}
    result = train_run(made(tmp_path, checkpoint={"load": str(undisturbed.checkpoint(20))}, stop=stop))
    assert result.step == 28, "step 24 is what step 28 does not improve on"
