"""Quantities are written in one way everywhere."""

from __future__ import annotations

import pytest

from onward.trainer.quantities import duration, gib, mb, shown_shape, shown_size


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (0.0123, "12.3 ms"),
        (0.25, "250 ms"),
        (3.44, "3.44 s"),
        (59.99, "60 s"),
        (65, "1 min 05 s"),
        (320.4, "5 min 20 s"),
        (11_100, "3 h 05 min"),
        (187_200, "2 d 04 h"),
        (-90, "-1 min 30 s"),
    ],
)
def test_times_are_read_at_a_glance(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_sizes_have_a_unit() -> None:
    assert [shown_size(n) for n in (12, 1500, 2.5e9)] == ["12 bytes", "1.5 kB", "2.5 GB"]
    assert (mb(1.2e9), gib(3 << 30)) == ("1,200 MB", "3 GiB")


def test_a_length_that_is_not_known_is_a_question_mark() -> None:
    assert shown_shape((8, None, 3)) == "[8, ?, 3]"
    assert shown_shape(()) == "[]"
    assert shown_shape(None) == "of unknown shape"
