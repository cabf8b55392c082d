"""The shuffle is a permutation, known at any position, and looks like chance."""

from __future__ import annotations

import numpy as np
import pytest

from onward.trainer.data.schema.permutation import hash_key, keyed_hash, permutation


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 16, 17, 1000, 4097, 65536])
def test_every_row_is_at_exactly_one_position(size: int) -> None:
    assert sorted(permutation(np.arange(size), size, seed=3, epoch=1)) == list(range(size))


def test_a_position_is_known_without_the_others() -> None:
    whole = permutation(np.arange(1000), 1000, seed=0, epoch=7)
    assert [permutation(np.array([at]), 1000, seed=0, epoch=7)[0] for at in (999, 0, 500)] == list(whole[[999, 0, 500]])


def test_seed_and_epoch_give_other_orders() -> None:
    orders = {tuple(permutation(np.arange(50), 50, seed=s, epoch=e)) for s in range(4) for e in range(4)}
    assert len(orders) == 16


def test_every_row_is_equally_likely_everywhere() -> None:
    first = [permutation(np.array([0]), 10, seed=seed, epoch=0)[0] for seed in range(2000)]
    # 200 expected in each; five standard deviations are 67
    assert np.abs(np.bincount(first, minlength=10) - 200).max() < 67


def test_the_order_is_the_same_on_every_machine_and_in_every_version() -> None:
    assert list(permutation(np.arange(8), 8, seed=1, epoch=0)) == [7, 3, 0, 4, 6, 1, 5, 2]
    assert int(keyed_hash(np.array([1], np.uint64), hash_key("held out", "a.csv"))[0]) == 6461866852634087864
