"""The columns of a source, of wide tables in linear time."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from onward.trainer.config.sections.data import DataConfig
from onward.trainer.data.formats.table_readers import csv_blocks
from onward.trainer.data.reading.inferred_schema import infer_schema
from onward.trainer.errors import DataError


def test_columns_of_numbers_are_taken_out_together_and_stay_what_they_are(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("i,text,f,gaps,b,j\n1,a,0.5,,True,3\n2,b,1,4,False,4\n")
    (block,) = csv_blocks(path, None)
    assert list(block.cells) == ["i", "text", "f", "gaps", "b", "j"]
    kinds = {name: cells.dtype.kind for name, cells in block.cells.items() if isinstance(cells, np.ndarray)}
    assert kinds == {"i": "i", "f": "f", "gaps": "f", "b": "b", "j": "i"}
    assert [list(block.cells[name]) for name in ("i", "text", "f", "b", "j")] == [
        [1, 2],
        ["a", "b"],
        [0.5, 1.0],
        [True, False],
        [3, 4],
    ]


def test_json_rows_whose_keys_are_all_different_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("".join(f'{{"k{row}": 1}}\n' for row in range(5000)))
    with pytest.raises(DataError, match=r"lines 1 to 5000: 5,000 rows have 5,000 different keys.*the limit of 16,777,"):
        infer_schema(DataConfig(source=str(path)))
