"""Histograms and norms: of the chosen weights, at the chosen steps, of weight and gradient both."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import pytest
import torch
from torch import Tensor

from onward.trainer.config.sections.results import MonitorConfig
from onward.trainer.events import EventWriter, read_events
from onward.trainer.model.summaries import NUM_BINS, summarise


class Two:
    """Two weights of six values each, as the RankModel of one rank returns them."""

    trained_names = frozenset({"conv.weight", "conv.bias"})

    def full_weights(self, names: Collection[str]) -> dict[str, tuple[Tensor, Tensor]]:
        weights = {"conv.weight": torch.arange(6.0), "conv.bias": torch.arange(6.0) + 1}
        return {name: (weights[name], torch.full((6,), 0.5)) for name in names}


def summaries(
    tmp_path: Path, step: int, *, is_last: bool = False, **config: object
) -> list[tuple[str, dict[str, object]]]:
    writer = EventWriter(tmp_path / "events.jsonl", attempt=1, rank=0)
    try:
        summarise(writer, step, Two(), config=MonitorConfig.model_validate(config), is_last=is_last)
    finally:
        writer.close()
    return [(event.kind, event.model_dump()) for event, _ in read_events(tmp_path / "events.jsonl")]


def test_histograms_count_every_value_of_weight_and_gradient(tmp_path: Path) -> None:
    found = summaries(tmp_path, 200, histograms=["*.weight"])
    assert [fields["name"] for _, fields in found] == ["weight/conv.weight", "gradient/conv.weight"]
    for _, fields in found:
        counts, edges = fields["counts"], fields["edges"]
        assert isinstance(counts, list)
        assert isinstance(edges, list)
        assert sum(counts) == 6
        assert len(edges) == NUM_BINS + 1


def test_norms_are_l2(tmp_path: Path) -> None:
    ((kind, fields),) = summaries(tmp_path, 100, norms=["conv.bias"])
    assert kind == "scalars"
    assert fields["values"] == pytest.approx(
        {"train/weight_norm/conv.bias": 91**0.5, "train/gradient_norm/conv.bias": 1.5**0.5}
    )


def test_between_its_periods_nothing_is_recorded(tmp_path: Path) -> None:
    assert summaries(tmp_path, 150, histograms=["*"], norms=["*"]) == []


def test_the_last_step_is_recorded_too(tmp_path: Path) -> None:
    ((kind, _),) = summaries(tmp_path, 150, norms=["conv.bias"], is_last=True)
    assert kind == "scalars"
