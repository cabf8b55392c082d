"""A Parquet file whose footer ends the process that looks at it is named, and does not end this one."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from onward.trainer.data.formats import parquet_footers
from onward.trainer.data.formats.parquet_footers import check_footers
from onward.trainer.errors import DataError


def write_damaged(path: Path) -> None:
    """Write a file whose footer says that its column is not optional, while it has statistics of an optional one: one
    bit differs from what pyarrow wrote."""
    pq.write_table(pa.table({"x": [1, 2, 3]}), path, compression="none", store_schema=False)
    written = path.read_bytes()
    # in the schema: the type INT64, OPTIONAL, and the name "x", as the compact protocol of Thrift writes them
    optional, required = b"\x15\x04\x25\x02\x18\x01x", b"\x15\x04\x25\x00\x18\x01x"
    assert written.count(optional) == 1
    path.write_bytes(written.replace(optional, required))


def test_a_footer_that_ends_its_reader_is_a_data_error_with_its_file(tmp_path: Path) -> None:
    paths = [tmp_path / f"{name}.parquet" for name in "abc"]
    for path in paths:
        pq.write_table(pa.table({"x": [1, 2, 3]}), path)
    check_footers(paths)
    write_damaged(paths[1])
    with pytest.raises(DataError, match=r"b\.parquet: its footer is damaged"):
        check_footers(paths)
    check_footers([*paths[::2], tmp_path / "absent.parquet"])


def test_files_that_did_not_change_are_looked_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"x": [1, 2, 3]}), path)
    check_footers([path])
    monkeypatch.setattr(subprocess, "run", None)
    check_footers([path])


def test_a_look_that_takes_too_long_is_ended_and_refuses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_damaged(tmp_path / "a.parquet")
    monkeypatch.setattr(parquet_footers, "LOOK_S", 0.001)
    check_footers([tmp_path / "a.parquet"])
