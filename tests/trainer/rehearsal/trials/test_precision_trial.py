"""Whether bf16 is chosen on a CPU, and when its choice is warned of, depends on the time of a micro-batch alone."""

from __future__ import annotations

import pytest

from onward.trainer.rehearsal.trials.precision_trial import PrecisionTimes


@pytest.mark.parametrize(("bf16_s", "faster"), [(0.5, "bf16"), (0.9, "bf16"), (0.95, "fp32"), (1.6, "fp32")])
def test_bf16_is_chosen_where_it_takes_nine_tenths_of_the_time_or_less(bf16_s: float, faster: str) -> None:
    assert PrecisionTimes(1.0, bf16_s).faster == faster


def test_a_slower_bf16_is_warned_of_with_both_times() -> None:
    assert PrecisionTimes(0.02, 0.0205).warnings() == []
    (warning,) = PrecisionTimes(0.02, 0.032).warnings()
    assert "a micro-batch took 32 ms, and 20 ms in fp32 (1.60 times as long)" in warning.what
    assert warning.remedy == "precision.compute = 'fp32', or 'auto'"
