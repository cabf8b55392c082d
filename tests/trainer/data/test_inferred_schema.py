"""The columns of a source: inferred once while its files are unchanged; of wide tables in linear time."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onward.trainer.config.sections.data import DataConfig
from onward.trainer.data.formats.tables import csv_blocks
from onward.trainer.data.reading import sources
from onward.trainer.data.reading.inferred_schema import infer_schema
from onward.trainer.errors import DataError


def write(path: Path, text: str, *, age_s: float = 10.0) -> None:
    """Write a file that was changed some time ago."""
    path.write_text(text)
    changed_ns = path.stat().st_mtime_ns - int(age_s * 1e9)
    os.utime(path, ns=(changed_ns, changed_ns))


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The sources of which rows were read."""
    found, first_blocks = list[str](), sources.first_blocks

    def noted(data: DataConfig, *arguments: Any, **named: Any) -> Any:
        found.append(data.source)
        return first_blocks(data, *arguments, **named)

    monkeypatch.setattr(sources, "first_blocks", noted)
    return found


def test_the_columns_of_a_source_are_inferred_once_whatever_inputs_and_label_are(
    tmp_path: Path, reads: list[str]
) -> None:
    write(tmp_path / "a.csv", "x,y\n1,2\n")
    data = DataConfig(source=str(tmp_path / "a.csv"))
    found = infer_schema(data)
    other = data.model_copy(update={"inputs": {"in": ("x",)}, "label": "y"})
    assert infer_schema(other) == found == infer_schema(data)
    assert len(reads) == 1
    infer_schema(data.model_copy(update={"bad_rows": "skip"}))
    assert len(reads) == 2


def test_the_columns_of_a_changed_file_are_inferred_again(tmp_path: Path, reads: list[str]) -> None:
    data = DataConfig(source=str(tmp_path))
    write(tmp_path / "a.csv", "x,y\n1,2\n")
    assert list(infer_schema(data)) == ["x", "y"]
    write(tmp_path / "a.csv", "x,z\n1,2\n", age_s=5)
    assert list(infer_schema(data)) == ["x", "z"]
    write(tmp_path / "b.csv", "x,z\n1,2\n")
    infer_schema(data)
    assert len(reads) == 3


def test_columns_of_a_file_that_was_written_just_now_are_not_kept(tmp_path: Path, reads: list[str]) -> None:
    data = DataConfig(source=str(tmp_path / "a.csv"))
    write(tmp_path / "a.csv", "x,y\n1,2\n", age_s=-1e6)  # of a clock that is ahead: its age is known
    infer_schema(data), infer_schema(data)
    assert len(reads) == 1
    for _ in range(2):
        write(tmp_path / "a.csv", "x,z\n1,2\n", age_s=0)
        assert list(infer_schema(data)) == ["x", "z"]
    assert len(reads) == 3


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
