"""The size of shards is estimated before they are written."""

from __future__ import annotations

import logging
import shutil
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest

from onward.trainer.config.sections.data import DataConfig
from onward.trainer.data.formats.format_table import FORMATS
from onward.trainer.data.storage.recipe import Recipe, stored_columns
from onward.trainer.data.storage.shard_space import shard_bytes
from onward.trainer.errors import DataError, RuntimeUnavailable
from tests.support.shards import make_shards

ROWS, WIDTH = 4000, 24


def sources(folder: Path) -> dict[str, Path]:
    """The same rows in each format."""
    values = np.random.default_rng(0).normal(size=(ROWS, WIDTH)).astype(np.float32)
    table = pd.DataFrame(values, columns=[f"c{number}" for number in range(WIDTH)]).assign(label=np.arange(ROWS) % 3)
    paths = {name: folder / f"data.{name}" for name in ("csv", "jsonl", "parquet", "npz")}
    table.to_csv(paths["csv"], index=False)
    table.to_json(paths["jsonl"], orient="records", lines=True)
    table.to_parquet(paths["parquet"])
    np.savez(paths["npz"], **{name: column.to_numpy() for name, column in table.items()})
    return paths


def test_the_estimate_is_near_the_size_of_the_shards_that_are_written(tmp_path: Path) -> None:
    for path in sources(tmp_path).values():
        data = DataConfig(source=str(path))
        estimate = shard_bytes(Recipe(data, stored_columns(data, None), ()))
        directory, _, _ = make_shards(data, None, tmp_path / "cache")
        written = sum(file.stat().st_size for file in directory.iterdir())
        assert 0.9 < estimate / written < 1.1, path.name


@pytest.mark.parametrize("form", ["npz", "parquet"])
def test_a_damaged_file_cannot_be_counted_and_is_named(tmp_path: Path, form: str) -> None:
    path = tmp_path / f"b.{form}"
    path.write_bytes(b"nothing that can be read")
    with pytest.raises(DataError, match=f"b.{form} cannot be read: "):
        FORMATS[form].count_rows(path)


def test_an_archive_without_arrays_has_no_rows(tmp_path: Path) -> None:
    zipfile.ZipFile(tmp_path / "b.npz", "w").close()
    assert FORMATS["npz"].count_rows(tmp_path / "b.npz") == 0


def test_a_disk_without_room_for_the_shards_is_refused_before_a_byte_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    data = DataConfig(source=str(sources(tmp_path)["csv"]))
    estimate = shard_bytes(Recipe(data, stored_columns(data, None), ()))

    def room(free: int) -> Any:
        monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=free))

    room(estimate // 3)
    with pytest.raises(RuntimeUnavailable, match=r"shards of .*data.csv take about 1 MB, but 0 MB of disk are free"):
        make_shards(data, None, tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []
    room(estimate - 1)
    with caplog.at_level(logging.WARNING):
        make_shards(data, None, tmp_path / "cache")
    assert "make room" in caplog.text
