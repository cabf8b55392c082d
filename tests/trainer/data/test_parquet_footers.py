"""A Parquet file whose footer ends the process that looks at it is named, and does not end this one."""

from __future__ import annotations

import os
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from onward.trainer.data.storage import parquet_footers
from onward.trainer.data.storage.parquet_footers import check_footers
from onward.trainer.errors import DataError


def test_a_footer_that_ends_its_reader_is_a_data_error_with_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = [tmp_path / f"{name}.parquet" for name in "abc"]
    for path in paths:
        pq.write_table(pa.table({"x": [1, 2, 3]}), path)
    check_footers(paths)
    look = parquet_footers._look

    def look_or_end(reader: object, path: str) -> None:
        os.abort() if path.endswith("b.parquet") else look(reader, path)

    monkeypatch.setattr(parquet_footers, "_look", look_or_end)
    check_footers(paths)  # as they were: not looked at again
    paths[2].write_bytes(paths[2].read_bytes() + b"\0")
    with pytest.raises(DataError, match=r"b\.parquet: its footer is damaged"):
        check_footers(paths)
    check_footers([*paths[::2], tmp_path / "absent.parquet"])
