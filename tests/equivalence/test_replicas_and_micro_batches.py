"""Promises 1 and 2: how a batch is divided, over replicas or over time, changes nothing but rounding."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from onward.trainer.run.directory import RunDir
from tests.support.cases import both_cases
from tests.support.runs import assert_close, events, final_tensors, losses, train_run

Make = Callable[..., RunDir]
TRAIN = {"global_batch_size": 12, "num_epochs": 1.5, "seed": 3}  # 12 does not divide the rows: the last step is ragged
SGD = {"name": "sgd", "learning_rate": 0.1, "momentum": 0.9}  # Adam would turn rounding into sign changes


@both_cases(slow="conv-net")
@pytest.mark.mpi
def test_two_replicas_equal_one_with_twice_the_batch(make: Make) -> None:
    one = make("one", train=TRAIN, optimizer=SGD, parallel={"data": 1})
    two = make("two", train=TRAIN, optimizer=SGD, parallel={"data": 2})
    assert train_run(one).samples_seen == train_run(two).samples_seen
    assert_close(final_tensors(two), final_tensors(one), 2e-5)
    assert losses(two) == pytest.approx(losses(one), rel=1e-5)
    assert losses(one)[1] > losses(one)[max(losses(one))], "nothing was learned, so nothing was compared"


@both_cases(slow="transformer")
@pytest.mark.mpi
def test_three_micro_batches_equal_one_batch_three_times_as_large(make: Make) -> None:
    whole = make("whole", train=TRAIN, optimizer=SGD)
    parts = make("parts", train=TRAIN | {"gradient_accumulation_steps": 3}, optimizer=SGD)
    train_run(whole)
    train_run(parts)
    assert_close(final_tensors(parts), final_tensors(whole), 2e-5)
    assert losses(parts) == pytest.approx(losses(whole), rel=1e-5)


@both_cases(slow="conv-net")
@pytest.mark.mpi
def test_ignored_labels_do_not_make_the_division_matter(make: Make) -> None:
    """The mean is over the labels that count, of all replicas: a mean of the replicas' means would differ."""
    settings = {"train": TRAIN, "optimizer": SGD, "model": {"ignore_index": 2}}
    one, two = make("one", **settings), make("two", **settings, parallel={"data": 2})
    train_run(one)
    train_run(two)
    assert_close(final_tensors(two), final_tensors(one), 2e-5)


@both_cases(slow="transformer")
@pytest.mark.mpi
def test_evaluation_is_exact_to_the_last_sample_on_any_number_of_ranks(make: Make) -> None:
    found = []
    for ranks in (1, 2, 3):
        settings = TRAIN | {"num_epochs": 0, "num_steps": 1, "evaluation_batch_size": 3}
        run = make(f"{ranks}", train=settings, optimizer=SGD, parallel={"data": ranks})
        train_run(run)
        found.append(events(run, "evaluation")[0].values)
    assert found[1] == pytest.approx(found[0], rel=1e-6)
    assert found[2] == pytest.approx(found[0], rel=1e-6)
