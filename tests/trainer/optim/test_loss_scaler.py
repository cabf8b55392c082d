"""The loss scaler follows the rule of ORT training."""

from __future__ import annotations

import pytest

from onward.trainer.config.sections.training import PrecisionConfig
from onward.trainer.optim.loss_scaler import GROWTH_INTERVAL, MAX_SCALE, MOST_SKIPS, LossScaler


def grown(scaler: LossScaler, updates: int) -> LossScaler:
    for _ in range(updates):
        scaler.grow()
    return scaler


def test_2000_finite_updates_double_the_scale_and_one_overflow_halves_it() -> None:
    scaler = LossScaler(PrecisionConfig(compute="fp16"))
    assert grown(scaler, 1999).scale == 65536
    assert grown(scaler, 1).scale == 131072
    assert scaler.overflow() == "again"
    assert scaler.scale == 65536


def test_an_overflow_starts_the_count_anew() -> None:
    scaler = grown(LossScaler(PrecisionConfig(compute="fp16")), 1999)
    scaler.overflow()
    assert grown(scaler, 1999).scale == 32768
    assert grown(scaler, 1).scale == 65536


def test_the_scale_stays_between_1_and_its_cap() -> None:
    scaler = LossScaler(PrecisionConfig(compute="fp16"))
    assert grown(scaler, 20 * GROWTH_INTERVAL).scale == 2**24
    assert [scaler.overflow() for _ in range(26)] == ["again"] * 24 + ["none"] * 2
    assert scaler.scale == 1


@pytest.mark.parametrize(
    ("config", "scale"),
    [
        (PrecisionConfig(compute="fp32"), 1.0),
        (PrecisionConfig(compute="bf16"), 1.0),
        (PrecisionConfig(compute="fp16", loss_scale=128), 128.0),
    ],
    ids=["fp32", "bf16", "static"],
)
def test_a_scale_that_is_not_dynamic_never_moves(config: PrecisionConfig, scale: float) -> None:
    scaler = LossScaler(config)
    assert scaler.overflow() != "again"
    assert grown(scaler, 4001).scale == scale
    scaler.restore({"scale": 7.0, "finite_updates": 3.0})
    assert scaler.scale == scale


def test_a_restored_scaler_goes_on_counting() -> None:
    first = LossScaler(PrecisionConfig(compute="fp16"))
    first.overflow()
    second = LossScaler(PrecisionConfig(compute="fp16"))
    second.restore(grown(first, 1500).state())
    assert second.state() == {"scale": 32768.0, "finite_updates": 1500.0}
    assert grown(second, 500).scale == 65536


@pytest.mark.parametrize("state", [{}, {"scale": 1.0, "finite_updates": 0.0}], ids=["now", "format 1"])
def test_fp16_that_goes_on_from_fp32_begins_at_its_own_scale(state: dict[str, float]) -> None:
    assert LossScaler(PrecisionConfig(compute="fp32")).state() == {}
    scaler = LossScaler(PrecisionConfig(compute="fp16"))
    scaler.restore(state)
    assert scaler.scale == 65536


def test_a_restored_scale_is_at_most_the_greatest() -> None:
    scaler = LossScaler(PrecisionConfig(compute="fp16", loss_scale=("dynamic", 512)))
    scaler.restore({"scale": 2.0**30, "finite_updates": 5.0})
    assert scaler.scale == MAX_SCALE


def test_a_static_scale_skips_overflows_but_not_for_ever() -> None:
    scaler = LossScaler(PrecisionConfig(compute="fp16", loss_scale=128))
    assert [scaler.overflow() for _ in range(MOST_SKIPS)] == ["skip"] * (MOST_SKIPS - 1) + ["none"]
    assert grown(scaler, 1).overflow() == "skip"


@pytest.mark.parametrize("compute", ["fp32", "bf16"])
def test_without_a_scale_nothing_mends_an_overflow(compute: str) -> None:
    assert LossScaler(PrecisionConfig.model_validate({"compute": compute})).overflow() == "none"
