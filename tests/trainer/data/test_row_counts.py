"""The rows of a run are known before it: from shards that exist, by counting a small source, else not at all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from onward.trainer.config.loading import build_config
from onward.trainer.config.run_config import RunConfig
from onward.trainer.data.storage import first_rows, row_counts
from onward.trainer.data.storage.row_counts import count_rows
from onward.trainer.data.storage.sharding import make_training_shards
from tests.support.graphs import tiny_mlp


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    onnx.save(tiny_mlp(), tmp_path / "m.onnx")
    np.savez(tmp_path / "d.npz", features=np.zeros((50, 4), np.float32), label=np.zeros(50, np.int64))
    given: dict[str, Any] = {
        "model": {"path": tmp_path / "m.onnx"},
        "data": {"source": str(tmp_path / "d.npz"), "evaluation_fraction": 0.2, "evaluation_rows": 5},
        "train": {"num_epochs": 1},
    }
    return build_config(given)


def test_a_small_source_is_counted(config: RunConfig, tmp_path: Path) -> None:
    found = count_rows(config, tmp_path / "cache")
    assert (found.train + 10, found.evaluation, found.source) == (50, 5, "counted in the source")
    assert not (tmp_path / "cache").exists()


def test_shards_that_exist_say_it_also_of_a_large_source(
    config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(first_rows, "COUNTED_BYTES", 0)
    unknown = count_rows(config, tmp_path / "cache")
    assert (unknown.train, unknown.evaluation) == (0, 0)
    assert unknown.source == "not known: its 0 MiB are counted while they are sharded, which a run does first"
    directory, manifest, _ = make_training_shards(config, tmp_path / "cache")
    found = count_rows(config, tmp_path / "cache")
    assert (found.train, found.evaluation, found.source) == (40, 5, f"the shards in the cache, {directory}")
    assert found.shard_bytes == sum(file.bytes for file in (*manifest.train, *manifest.evaluation))
    monkeypatch.setattr(row_counts, "DIGESTED_BYTES", 0)
    assert count_rows(config, tmp_path / "cache").train == 0, "a very large source is not read for its key"
