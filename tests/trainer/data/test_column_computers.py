"""Computers run one after the other, and transforms know rows and positions, which are the same for any layout."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from onward.trainer.config.sections.data import DataConfig
from onward.trainer.data.batches import batches as batches_module
from onward.trainer.data.batches.batches import Batches, evaluation_batches
from onward.trainer.data.schema.batch_transforms import Samples
from onward.trainer.data.schema.columns import Array, Column, ColumnType, Values
from onward.trainer.data.schema.signature import read_training_signature
from onward.trainer.data.storage.opened_shards import open_shards
from onward.trainer.run.directory import read_config
from tests.support.graphs import tiny_conv_net
from tests.support.runs import make_run
from tests.support.shards import make_shards


class Times:
    """Computes `result` = factor x `source`; has no result for one value."""

    file_only: frozenset[str] = frozenset()
    summary = "multiplied"
    pad_values: Mapping[str, float] = {}

    def __init__(self, source: str, result: str, factor: int, *, consumed: str = "", refuses: int = -1) -> None:
        self.digest = f"{source} {result} {factor}"
        self.columns: tuple[Column, ...] = ()
        self.consumed = frozenset({consumed} - {""})
        self._source, self._result, self._factor, self._refuses = source, result, factor, refuses

    def describe(self, values: Mapping[str, Values]) -> None:
        assert self._source in values
        self.columns = (Column(name=self._result, dtype="int64"),)

    def compute(self, rows: Mapping[str, Values], count: int) -> tuple[dict[str, Values], dict[int, str]]:
        given = np.asarray(rows[self._source])
        assert len(given) == count
        failed = {int(at): "is refused" for at in np.flatnonzero(given == self._refuses)}
        return {self._result: given * self._factor}, failed


def test_computers_see_the_results_of_those_before_and_rows_without_a_result_are_left_out(tmp_path: Path) -> None:
    np.savez(tmp_path / "data.npz", a=np.arange(40), b=np.arange(40) + 100)
    data = DataConfig(source=str(tmp_path / "data.npz"), bad_rows="skip", evaluation_fraction=0.25)
    computers = [Times("a", "a", 2, consumed="a"), Times("a", "c", 10, refuses=6)]
    kinds = {"a": ColumnType("int64", ()), "b": ColumnType("int64", ())}
    directory, manifest, _ = make_shards(data, kinds, tmp_path / "cache", computers=computers)
    assert sorted(manifest.table) == ["a", "b", "c"]
    assert (manifest.skipped, manifest.rows("train"), manifest.rows("evaluation")) == (1, 29, 10)
    rows = open_shards(directory, "train").read(np.arange(29))
    assert (np.asarray(rows["c"]) == 10 * np.asarray(rows["a"])).all()
    assert (np.asarray(rows["a"]) == 2 * (np.asarray(rows["b"]) - 100)).all()
    assert 103 not in np.asarray(rows["b"])
    # other computers give other shards
    again, *_ = make_shards(data, kinds, tmp_path / "cache", computers=[Times("a", "a", 3, consumed="a")])
    assert again != directory


def test_transforms_get_the_positions_of_the_stream_whatever_the_number_of_replicas(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(
        tmp_path,
        tiny_conv_net(),
        {"image": np.zeros((20, 3, 8, 8), np.float32), "label": np.arange(20) % 4},
        train={"global_batch_size": 8, "gradient_accumulation_steps": 2, "num_epochs": 2.25},
    )
    seen: list[tuple[int, int]] = []

    def transform(values: Mapping[str, Values], samples: Samples) -> dict[str, Values]:
        if samples.positions is None:
            return dict(values)
        assert samples.read is not None
        seen.extend(zip(samples.positions.tolist(), samples.rows.tolist(), strict=True))
        partner: Array = np.asarray(samples.read(samples.positions ^ 1)["label"])
        return {**values, "label": 100 * np.asarray(values["label"]) + partner}

    def labels(replicas: int) -> list[int]:
        seen.clear()
        found: list[int] = []
        config = read_config(run)
        config = config.model_copy(update={"parallel": config.parallel.model_copy(update={"data": replicas})})
        signature = read_training_signature(config.model)
        shards = open_shards(run.shards, "train")
        for position in range(0, 36, 8):
            for replica in range(replicas):
                share: dict[str, Any] = {"replica": replica, "num_replicas": replicas, "device": torch.device("cpu")}
                batches = Batches(shards, config, signature, **share)
                for batch in batches.take(position, min(8, 36 - position)):
                    if not batch.is_padding:
                        found += np.ravel(batch.labels).tolist()
                batches.close()
        held_out = open_shards(run.shards, "evaluation")
        for batch in evaluation_batches(held_out, config, signature, **share):
            assert batch.size
        return found

    monkeypatch.setattr(batches_module, "open_batch_transforms", lambda config, signature, fitted: [transform])
    alone = labels(1)
    pairs = dict(seen)
    assert len(alone) == 36
    assert labels(2) == alone
    assert dict(seen).items() >= pairs.items()
