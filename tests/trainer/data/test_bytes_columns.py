"""Columns of encoded content: cells of bytes, of paths, and of both, stored as they are and read by number."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from onward.trainer.config.sections.data import DataConfig
from onward.trainer.data.reading.inferred_schema import infer_schema
from onward.trainer.data.schema.columns import BYTES, ColumnType
from onward.trainer.data.storage.opened_shards import open_shards
from onward.trainer.errors import DataError
from tests.support.shards import make_shards

COLUMNS = {"image": ColumnType(BYTES), "label": ColumnType("int64", ())}
CONTENTS = [bytes([number]) * (number + 1) + b"\0\xff" for number in range(256)]


def stored(data: DataConfig, cache: Path) -> dict[int, bytes]:
    """All rows of both splits: label -> image."""
    directory, manifest, _ = make_shards(data, COLUMNS, cache)
    found: dict[int, bytes] = {}
    for split in ("train", "evaluation"):
        shards = open_shards(directory, split)  # type: ignore[arg-type]
        values = shards.read(np.arange(manifest.rows(split))[::-1])  # type: ignore[arg-type]
        found |= dict(zip(np.asarray(values["label"]).tolist(), values["image"], strict=True))
    return found


def test_bytes_of_a_parquet_file_are_stored_as_they_are(tmp_path: Path) -> None:
    contents = CONTENTS[:200]
    pq.write_table(pa.table({"image": contents, "label": range(200)}), tmp_path / "data.parquet")
    data = DataConfig(source=str(tmp_path / "data.parquet"))
    assert infer_schema(data)["image"].dtype == BYTES
    assert stored(data, tmp_path / "cache") == dict(enumerate(contents))


def test_structs_of_bytes_and_path_are_read_from_whichever_is_there(tmp_path: Path) -> None:
    (tmp_path / "odd.bin").write_bytes(b"from the file")
    structs = [
        {"bytes": CONTENTS[at], "path": None} if at % 2 else {"bytes": None, "path": "odd.bin"} for at in range(20)
    ]
    pq.write_table(pa.table({"image": structs, "label": range(20)}), tmp_path / "data.parquet")
    found = stored(DataConfig(source=str(tmp_path / "data.parquet")), tmp_path / "cache")
    assert found == {at: CONTENTS[at] if at % 2 else b"from the file" for at in range(20)}


def test_paths_of_a_table_are_relative_to_the_table(tmp_path: Path) -> None:
    folder = tmp_path / "table"
    (folder / "images").mkdir(parents=True)
    for at in range(256):
        (folder / "images" / f"{at}.bin").write_bytes(CONTENTS[at])
    # more rows than are read at a time
    pd.DataFrame({"image": [f"images/{at % 256}.bin" for at in range(600)], "label": range(600)}).to_csv(
        folder / "data.csv", index=False
    )
    found = stored(DataConfig(source=str(folder / "data.csv")), tmp_path / "cache")
    assert found == {at: CONTENTS[at % 256] for at in range(600)}


def test_a_file_that_is_missing_is_a_bad_row(tmp_path: Path) -> None:
    (tmp_path / "0.bin").write_bytes(b"content")
    rows = ["0.bin" if at % 10 else "absent.bin" for at in range(300)]
    pd.DataFrame({"image": rows, "label": range(300)}).to_csv(tmp_path / "data.csv", index=False)
    data = DataConfig(source=str(tmp_path / "data.csv"))
    with pytest.raises(
        DataError, match=r"data.csv, line 2: image names a file that cannot be read.*absent.bin"
    ) as refusal:
        stored(data, tmp_path / "cache")
    assert "30 bad rows" in str(refusal.value)
    assert not [each for each in (tmp_path / "cache").iterdir() if not each.name.startswith(".")]
    found = stored(data.model_copy(update={"bad_rows": "skip"}), tmp_path / "cache")
    assert sorted(found) == [at for at in range(300) if at % 10]


def test_empty_cells_are_bad_rows(tmp_path: Path) -> None:
    pq.write_table(pa.table({"image": [b"", None, *CONTENTS[:30]], "label": range(32)}), tmp_path / "data.parquet")
    with pytest.raises(DataError, match="2 bad rows"):
        stored(DataConfig(source=str(tmp_path / "data.parquet")), tmp_path / "cache")
