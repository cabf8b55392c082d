"""Directories of Hugging Face `datasets`: read without the package, caches left out, splits named."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from onward.trainer.config.sections.data import DataConfig
from onward.trainer.data.reading.inferred_schema import infer_schema
from onward.trainer.data.reading.sources import first_blocks, read
from onward.trainer.data.schema.columns import ColumnType
from onward.trainer.data.storage.opened_shards import open_shards
from onward.trainer.errors import DataError
from tests.support.shards import make_shards


def save(directory: Path, tables: list[pa.Table], **state: object) -> Path:
    """What `Dataset.save_to_disk` writes: streams without a footer, and state.json."""
    directory.mkdir(parents=True, exist_ok=True)
    names = [f"data-{number:05d}-of-{len(tables):05d}.arrow" for number in range(len(tables))]
    for name, table in zip(names, tables, strict=True):
        with pa.OSFile(str(directory / name), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
            writer.write_table(table, max_chunksize=3)
    files = [{"filename": name} for name in names]
    (directory / "state.json").write_text(json.dumps({"_data_files": files, "_format_columns": None, **state}))
    (directory / "dataset_info.json").write_text("{}")
    return directory


def table(first: int, count: int) -> pa.Table:
    numbers = list(range(first, first + count))
    return pa.table(
        {
            "ids": pa.array([[n, n + 1, n + 2] for n in numbers], pa.list_(pa.int32())),
            "text": [f"row {n}" for n in numbers],
            "image": pa.array(
                [{"bytes": bytes([n]), "path": None} for n in numbers],
                pa.struct({"bytes": pa.binary(), "path": pa.string()}),
            ),
            "label": pa.array([n % 4 for n in numbers], pa.int64()),
        }
    )


def test_a_saved_dataset_becomes_shards_in_the_order_of_its_files(tmp_path: Path) -> None:
    save(tmp_path / "set", [table(0, 10), table(10, 7)])
    (tmp_path / "set" / "cache-1a2b.arrow").write_bytes(b"the result of map, which is no part of the data")
    data = DataConfig(source=str(tmp_path / "set"), evaluation_fraction=0.2)
    columns = {"ids": ColumnType("int64", (3,)), "label": ColumnType("int64", ())}
    directory, manifest, _ = make_shards(data, columns, tmp_path / "cache")
    found = [open_shards(directory, split).read(np.arange(manifest.rows(split))) for split in ("train", "evaluation")]  # type: ignore[arg-type]
    ids = np.concatenate([rows["ids"] for rows in found])
    assert sorted(ids[:, 0].tolist()) == list(range(17))
    assert np.concatenate([rows["label"] for rows in found]).tolist() == (ids[:, 0] % 4).tolist()


def test_its_columns_are_numbers_lists_text_and_encoded_images(tmp_path: Path) -> None:
    data = DataConfig(source=str(save(tmp_path / "set", [table(0, 10)])))
    schema = infer_schema(data)
    assert {name: column.dtype for name, column in schema.items() if name != "image"} == {
        "ids": "int32",
        "text": "str",
        "label": "int64",
    }
    block = next(first_blocks(data))
    assert block.cells["image"][1] == {"bytes": b"\x01", "path": None}


def test_a_dataset_with_splits_is_refused_with_their_names(tmp_path: Path) -> None:
    for split in ("train", "test"):
        save(tmp_path / "set" / split, [table(0, 10)])
    (tmp_path / "set" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with pytest.raises(DataError, match=r"holds the splits train, test of a Hugging Face dataset; name one of them"):
        list(read(DataConfig(source=str(tmp_path / "set")), None))
    both = DataConfig(source=str(tmp_path / "set/train"), evaluation_source=str(tmp_path / "set/test"))
    assert sum(len(block.index) for block, _ in read(both, None)) == 20


def test_damaged_datasets_are_refused(tmp_path: Path) -> None:
    folder = save(tmp_path / "set", [table(0, 10), table(10, 10)])
    data = DataConfig(source=str(folder))
    whole = (folder / "data-00001-of-00002.arrow").read_bytes()
    for cut in (len(whole) // 2, len(whole) - 8):  # the second is between two batches
        (folder / "data-00001-of-00002.arrow").write_bytes(whole[:cut])
        with pytest.raises(DataError, match="ends in the middle"):
            list(read(data, None))
    (folder / "data-00001-of-00002.arrow").unlink()
    with pytest.raises(DataError, match=r"names files that are not there: data-00001-of-00002.arrow"):
        list(read(data, None))
    save(folder, [table(0, 10)], _indices_data_files=[{"filename": "indices.arrow"}])
    with pytest.raises(DataError, match="flatten_indices"):
        list(read(data, None))
    (folder / "state.json").write_text("not JSON")
    with pytest.raises(DataError, match=r"state.json cannot be read"):
        list(read(data, None))
