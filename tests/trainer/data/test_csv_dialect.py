"""CSV files as people have them are read as pandas reads them; what may be meant in two ways is refused."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from pydantic import ValidationError

from onward.trainer.config.sections.data import DataConfig
from onward.trainer.config.sections.tables import TableConfig
from onward.trainer.data.formats import table_readers as tables
from onward.trainer.data.formats.csv_dialect import dialect_of
from onward.trainer.data.reading.inferred_schema import infer_schema
from onward.trainer.data.reading.sources import locate, read
from onward.trainer.data.schema.columns import BLOCK_BYTES, ColumnType
from onward.trainer.data.storage.opened_shards import open_shards
from onward.trainer.errors import DataError
from tests.support.shards import make_shards

ROWS = 3000


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    assert BLOCK_BYTES > 5000
    monkeypatch.setattr(tables, "BLOCK_BYTES", 5000)


def frame() -> pd.DataFrame:
    random = np.random.default_rng(0)
    return pd.DataFrame(
        {
            "width": random.normal(0, 1e5, ROWS).round(3),
            "count": random.integers(-5, 10**7, ROWS),
            "name": random.choice(["Zürich", "Köln; am Rhein", 'the "big" one', "a\nb"], ROWS),
        }
    )


def cells(path: Path, text: tuple[str, ...] = (), **table: Any) -> dict[str, list[Any]]:
    """Return the cells of every column."""
    data = DataConfig(source=str(path), table=TableConfig(**table))
    found: dict[str, list[Any]] = {}
    index = []
    for block, _ in read(data, None, text):
        assert not block.bad
        index += block.index.tolist()
        for name, values in block.cells.items():
            found.setdefault(name, []).extend(values)
    assert index == list(range(len(index))) or text  # rows of several lines have the number of their first
    return found


@pytest.mark.parametrize(
    ("file", "written", "table"),
    [
        ("a.csv", {"sep": ";"}, {}),
        ("a.csv", {"sep": "|"}, {}),
        ("a.csv", {"sep": "\t"}, {}),
        ("a.tsv", {"sep": "\t"}, {}),
        ("a.tsv.gz", {"sep": "\t"}, {}),
        ("a.csv.gz", {}, {}),
        ("a.csv", {"sep": ";", "decimal": ","}, {"decimal": ","}),
        ("a.csv", {"sep": ";", "encoding": "latin-1"}, {"encoding": "latin-1"}),
        ("a.csv", {"encoding": "utf-16"}, {"encoding": "utf-16"}),
        ("a.csv", {"encoding": "utf-8-sig"}, {}),
        ("a.csv.gz", {"encoding": "cp1252", "sep": ";", "decimal": ","}, {"encoding": "cp1252", "decimal": ","}),
        ("a.csv", {"quotechar": "'"}, {"quote": "'"}),
    ],
)
def test_files_of_other_countries_and_programs_hold_the_same_rows(
    tmp_path: Path, file: str, written: dict[str, Any], table: dict[str, Any]
) -> None:
    rows = frame()
    rows.to_csv(tmp_path / file, index=False, **written)
    assert locate(str(tmp_path / file), DataConfig(source="x")).format == "csv"
    found = cells(tmp_path / file, ("name",), **table)
    assert found["name"] == rows["name"].tolist()
    np.testing.assert_array_equal(found["width"], rows["width"])
    np.testing.assert_array_equal(found["count"], rows["count"])


def test_groups_of_thousands_are_read_and_dates_are_not_taken_for_numbers(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("a;b\n1.234,5;1.2.2020\n-12;31.12.2020\n1.234.567;1.5\n.5;1,5e3\n")
    found = cells(tmp_path / "a.csv", thousands=".", decimal=",")
    assert found["a"][:3] == [1234.5, -12.0, 1234567.0]
    assert found["a"][3] == ".5"  # no number in this notation
    assert found["b"] == ["1.2.2020", "31.12.2020", "1.5", 1500.0]
    # with a decimal comma, a point is part of no number
    assert cells(tmp_path / "a.csv", decimal=",")["a"] == ["1.234,5", -12.0, "1.234.567", ".5"]


@pytest.mark.parametrize("quoted", [False, True])
def test_what_pandas_reads_as_missing_is_missing_in_every_notation(tmp_path: Path, quoted: bool) -> None:
    mark = '"' if quoted else ""
    content = "a;b\n" + "\n".join(f"{mark}{cell}{mark};1" for cell in ("1,5", "NA", "", "null", "nan"))
    (tmp_path / "a.csv").write_text(content)
    found = np.array(cells(tmp_path / "a.csv", decimal=",")["a"], float)
    np.testing.assert_array_equal(found, [1.5, np.nan, np.nan, np.nan, np.nan])


def test_files_without_a_header_have_columns_by_number_and_lines_from_one(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("1,2\n3,4,5\n6,7\n")
    data = DataConfig(source=str(tmp_path / "a.csv"), table=TableConfig(header=False))
    assert list(infer_schema(data)) == ["c0", "c1"]
    (block, _), *_ = read(data, None)
    assert np.asarray(block.cells["c0"]).tolist() == [1, 6]
    assert [block.where(row) for row in block.bad] == [f"{tmp_path / 'a.csv'}, line 2"]
    assert block.where(int(block.index[0])).endswith("line 1")


def test_a_separator_is_only_taken_where_it_is_certain(tmp_path: Path) -> None:
    def separator(content: str, **table: Any) -> str:
        (tmp_path / "a.csv").write_text(content)
        return dialect_of(tmp_path / "a.csv", TableConfig(**table)).separator

    assert separator("a\n1\n2\n") == ","
    assert separator("a;b\n1;2\n") == ";"
    assert separator("a,b;c\n1,2\n3,4\n") == ","
    assert separator('"a;b","c"\n1,2\n') == ","
    assert separator("a;b,c\n1;2,3\n", separator=",") == ","
    with pytest.raises(DataError, match=r"may be ',' \(comma, 2 columns\) or ';' \(semicolon, 2 columns\); set data"):
        separator("a;b,c\n1;2,3\n")
    with pytest.raises(DataError, match=r"'1,5' may be a decimal number .* set data\.table\.decimal = ','"):
        separator("a;b\n1,5;2\n")
    assert separator("a;b\n1,5;2\n", decimal=".") == ";"


def test_files_that_are_read_in_another_way_get_other_shards(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(b"a;b\n" + b"1.250;2\n" * 20)
    means = {}
    for settings in ({}, {"thousands": ".", "decimal": ","}, {"header": False, "separator": ";"}):
        data = DataConfig(source=str(tmp_path / "a.csv"), table=TableConfig(**settings))  # type: ignore[arg-type]
        names = None if settings.get("header", True) else {"c1": ColumnType("float64")}
        if names:
            data = data.model_copy(update={"bad_rows": "skip"})
        directory, *_ = make_shards(data, names, tmp_path / "cache")
        rows = open_shards(directory, "train")
        means[directory] = float(np.mean(next(iter(rows.read(np.arange(rows.num_rows)).values()))))
    assert list(means.values()) == [1.25, 1250.0, 2.0]


def test_damaged_and_wrongly_named_files_are_refused(tmp_path: Path) -> None:
    frame().to_csv(tmp_path / "a.csv", index=False)
    whole = gzip.compress((tmp_path / "a.csv").read_bytes())
    (tmp_path / "cut.csv.gz").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "plain.csv.gz").write_bytes((tmp_path / "a.csv").read_bytes())
    frame().to_csv(tmp_path / "wide.csv", index=False, encoding="utf-16")
    for name, why in (("cut.csv.gz", "ended before"), ("plain.csv.gz", "Not a gzipped"), ("wide.csv", "is UTF-16")):
        with pytest.raises(DataError, match=why):
            cells(tmp_path / name, ("name",))
    (tmp_path / "ascii.csv").write_bytes("a,b\n1,é\n".encode())
    with pytest.raises(DataError, match="is not written in"):
        cells(tmp_path / "ascii.csv", encoding="ascii")
    for settings in ({"encoding": "utf-9"}, {"separator": ",", "decimal": ","}, {"decimal": ",", "thousands": ","}):
        with pytest.raises(ValidationError):
            TableConfig(**settings)  # type: ignore[arg-type]


def test_a_carriage_return_alone_ends_no_row(tmp_path: Path) -> None:
    """pandas took it for the end of a line: the rows below were another row's, with the labels of another."""
    (tmp_path / "rows.csv").write_bytes(b"a,b,text\n1,2,x\r\n3,4,y\rz\r\n5,6,w\n7,\r8,v\n")
    found = cells(tmp_path / "rows.csv", text=("text",))
    assert {name: list(values) for name, values in found.items()} == {
        "a": [1, 3, 5, 7],
        "b": [2, 4, 6, 8],
        "text": ["x", "y\rz", "w", "v"],
    }
