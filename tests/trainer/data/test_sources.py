# ruff: noqa: E501 - tables of sentences
"""Every format gives the same rows, and what is wrong with a row is said with its file and line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import numpy as np
import onnx
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from onward.trainer.bounds import Limit
from onward.trainer.config.sections.data import DataConfig
from onward.trainer.data.formats import arrow_files as arrowfile
from onward.trainer.data.formats import table_readers as tables
from onward.trainer.data.formats import tensorproto_files as protofile
from onward.trainer.data.formats import text_files
from onward.trainer.data.formats.format_table import FORMATS
from onward.trainer.data.reading import sources
from onward.trainer.data.reading.held_out_rows import held_out
from onward.trainer.data.reading.inferred_schema import infer_schema
from onward.trainer.data.schema.columns import Column, ColumnType, Values
from onward.trainer.data.storage.opened_shards import open_shards
from onward.trainer.data.storage.shards import ShardManifest
from onward.trainer.errors import DataError
from tests.support.shards import make_shards

X = np.arange(200, dtype=np.float32).reshape(100, 2) / 4
Y = np.arange(100) % 3


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that small files take many pieces."""
    monkeypatch.setattr(tables, "BLOCK_BYTES", 300)
    monkeypatch.setattr(text_files, "BLOCK_BYTES", 300)
    monkeypatch.setattr(arrowfile, "BLOCK_BYTES", 300)
    monkeypatch.setattr(protofile, "BLOCK_BYTES", 300)


def shard(
    folder: Path, source: Path | str, wants: dict[str, ColumnType] | None = None, **settings: Any
) -> tuple[dict[str, Values], ShardManifest]:
    """All rows of a source in their order, through shards: the source is its own evaluation source, too."""
    data = DataConfig(source=str(source), **{"evaluation_source": str(source), **settings})
    directory, manifest, _ = make_shards(data, wants, folder / "cache")
    rows = open_shards(directory, "train")
    return rows.read(np.arange(rows.num_rows)), manifest


def refusal(folder: Path, source: Path | str, wants: dict[str, ColumnType] | None = None, **settings: Any) -> str:
    with pytest.raises(DataError) as caught:
        shard(folder, source, wants, evaluation_source="", **settings)
    return str(caught.value).replace(str(folder) + "/", "")


def write_csv(path: Path) -> None:
    path.write_text("a,b,name,y\n" + "".join(f"{a},{b},row,{y}\n" for (a, b), y in zip(X, Y, strict=True)))


def write_quoted_csv(path: Path) -> None:
    rows = "".join(f'"{a}",{b},"say ""hi"",\nrow",{y}\r\n' for (a, b), y in zip(X, Y, strict=True))
    path.write_text('"a", b,name,y\r\n' + rows, newline="")


def write_jsonl(path: Path) -> None:
    path.write_text("".join(json.dumps({"x": x.tolist(), "y": int(y)}) + "\n" for x, y in zip(X, Y, strict=True)))


def write_parquet(path: Path) -> None:
    pq.write_table(pa.table({"x": X.tolist(), "y": Y}), path, row_group_size=37)


def write_npz(path: Path) -> None:
    np.savez(path, x=X, y=Y)


def write_compressed_npz(path: Path) -> None:
    np.savez_compressed(path, x=X, y=Y)


@pytest.mark.parametrize(
    ("write", "name"),
    [
        (write_csv, "t.csv"),
        (write_quoted_csv, "t.csv"),
        (write_jsonl, "t.jsonl"),
        (write_parquet, "t.parquet"),
        (write_npz, "t.npz"),
        (write_compressed_npz, "t.npz"),
    ],
)
def test_every_format_gives_the_same_rows(tmp_path: Path, write: Callable[[Path], None], name: str) -> None:
    write(tmp_path / name)
    columns = ("a", "b") if name.endswith("csv") else ("x",)
    wants = {c: ColumnType("float32", () if len(columns) > 1 else (2,)) for c in columns} | {
        "y": ColumnType("int64", ())
    }
    rows, manifest = shard(tmp_path, tmp_path / name, wants)
    got = np.stack([rows["a"], rows["b"]], axis=1) if "a" in rows else rows["x"]
    np.testing.assert_array_equal(got, X)
    np.testing.assert_array_equal(rows["y"], Y)
    assert [c.dtype for c in manifest.columns] == ["float32"] * len(columns) + ["int64"]


def test_shards_are_a_source_again(tmp_path: Path) -> None:
    write_npz(tmp_path / "t.npz")
    wants = {"x": ColumnType("float32", (2,)), "y": ColumnType("int64", ())}
    data = DataConfig(source=str(tmp_path / "t.npz"), rows_per_shard=30)
    directory, _, _ = make_shards(data, wants, tmp_path / "first")
    rows, _ = shard(tmp_path, directory / "*.arrow", wants, rows_per_shard=30)
    order = np.argsort(rows["x"][:, 0])
    np.testing.assert_array_equal(rows["x"][order], X)
    np.testing.assert_array_equal(rows["y"][order], Y)


def test_every_format_that_can_be_set_has_a_record() -> None:
    assert set(get_args(DataConfig.model_fields["format"].annotation)) == {"auto", *FORMATS}


def test_a_directory_and_a_glob_are_read_file_after_file(tmp_path: Path) -> None:
    for part, rows in enumerate(np.split(np.arange(100), 4)):
        np.savez(tmp_path / f"part-{part}.npz", x=X[rows])
    (tmp_path / ".hidden.npz").write_bytes(b"not mine")
    (tmp_path / "README.md").write_text("not data")
    for source in (tmp_path, tmp_path / "part-*.npz"):
        np.testing.assert_array_equal(shard(tmp_path / "out", source)[0]["x"], X)


def test_formats_are_not_mixed_and_unknown_ones_not_guessed(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    write_csv(tmp_path / "d" / "a.csv")
    write_npz(tmp_path / "d" / "b.npz")
    assert "several formats (1 csv, 1 npz)" in refusal(tmp_path, tmp_path / "d")
    (tmp_path / "t.xlsx").write_bytes(b"PK")
    assert "of 1 files none can be read as they are: 1 .xlsx: spreadsheets; save" in refusal(
        tmp_path, tmp_path / "t.xlsx"
    )
    assert "of 0 files none are csv" in refusal(tmp_path, tmp_path / "*.tsv", format="csv")


# -- bad rows


CSV = 'a,b,y\n1,2,0\n1,two,0\n\n1,2\n1,,0\n"1",inf,0\n1,2,0.5\n1,2,0,9\n2,3,1\n3,4,0\n'
BAD_CSV = [
    "t.csv, line 3: b is 'two', not a number",
    "t.csv, line 5: has 2 fields, not 3",
    "t.csv, line 6: b is missing",
    "t.csv, line 7: b holds inf",
    "t.csv, line 8: y holds 0.5, which is not of type int64",
    "t.csv, line 9: has 4 fields, not 3",
]
JSONL = """{"x": [1, 2], "y": 0}
{"x": [1, 2, 3], "y": 0}
{"x": [1, 2]
[1, 2]

{"x": [1, null], "y": 0}
{"y": 0}
{"x": ["one", 2], "y": 0}
{"x": [3, 4], "y": true}
{"x": [3, 4], "y": NaN}
{"x": [5, 6.5], "y": 1}
{"x": [5, 6.5], "y": 1}
{"x": [5, 6.5], "y": 1}
{"x": [5, 6.5], "y": 1}
"""
BAD_JSONL = [
    "t.jsonl, line 2: x has shape [3], not [2]",
    "t.jsonl, line 3: is not JSON: Expecting ',' delimiter: line 1 column 13 (char 12)",
    "t.jsonl, line 4: is not a JSON object but '[1, 2]'",
    "t.jsonl, line 6: x is not a list of numbers of one shape",
    "t.jsonl, line 7: x is missing",
    "t.jsonl, line 8: x is not a list of numbers of one shape",
    "t.jsonl, line 10: y is missing",
]
WANTS = {
    "t.csv": {"a": ColumnType("float32", ()), "b": ColumnType("float32", ()), "y": ColumnType("int64", ())},
    "t.jsonl": {"x": ColumnType("float32", (2,)), "y": ColumnType("int64", ())},
}


@pytest.mark.parametrize("whole", [True, False], ids=["one piece", "many pieces"])
@pytest.mark.parametrize(("name", "text", "bad"), [("t.csv", CSV, BAD_CSV), ("t.jsonl", JSONL, BAD_JSONL)])
def test_bad_rows_are_named_with_file_and_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, text: str, *, bad: list[str], whole: bool
) -> None:
    monkeypatch.setattr(tables, "BLOCK_BYTES", 1 << 20 if whole else 16)
    (tmp_path / name).write_text(text)
    *named, total = refusal(tmp_path, tmp_path / name, WANTS[name]).split("\n")
    assert named == bad
    assert total.startswith(f"{len(bad)} bad rows: correct them, or set data.bad_rows = 'skip'")


@pytest.mark.parametrize(("name", "text", "bad"), [("t.csv", CSV, BAD_CSV), ("t.jsonl", JSONL, BAD_JSONL)])
def test_bad_rows_are_left_out_and_counted_on_request(tmp_path: Path, name: str, text: str, bad: list[str]) -> None:
    (tmp_path / name).write_text(text)
    (tmp_path / f"good.{name}").write_text(text)
    rows, manifest = shard(
        tmp_path, tmp_path / name, WANTS[name], bad_rows="skip", evaluation_source=str(tmp_path / f"good.{name}")
    )
    assert manifest.skipped == 2 * len(bad)
    assert [row.replace(f"{tmp_path}/", "") for row in manifest.skipped_rows][: len(bad)] == bad
    assert rows["y"].tolist() == ([0, 1, 0] if name == "t.csv" else [0, 1, 1, 1, 1, 1])  # type: ignore[union-attr]


def test_a_thousand_bad_rows_are_counted_and_twenty_named(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("a,y\n" + "1,0\nx,0\n" * 1000 + "1,0\n")
    lines = refusal(tmp_path, tmp_path / "t.csv", {"a": ColumnType("float32", ())}).split("\n")
    assert (len(lines), lines[19], lines[20]) == (22, "t.csv, line 41: a is 'x', not a number", "... and 980 more")
    assert lines[21].startswith("1,000 bad rows")


def test_a_quote_that_is_never_closed_is_found_before_memory_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables, "CSV_ROW_BYTES", Limit("bytes in a row", 1000))
    (tmp_path / "t.csv").write_text("a,y\n1,0\n" + '"1,0\n' + "1,0\n" * 1000)
    assert "t.csv, line 3: the row does not end" in refusal(tmp_path, tmp_path / "t.csv")


def test_columns_nobody_reads_may_hold_anything(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("a,y\n" + "1,0\nx,0\n" * 20)
    assert shard(tmp_path, tmp_path / "t.csv", {"y": ColumnType("int64", ())})[1].skipped == 0


@pytest.mark.parametrize(
    ("array", "reason"),
    [
        (np.array([0.0, np.nan, 1.0]), "row 2: x is missing"),
        (np.array([[0.0, 1], [np.inf, 1], [0, 1]]), "row 2: x holds inf"),
        (np.array([1e3, 1e300, 1]), "row 2: x holds 1e+300"),
    ],
)
def test_what_is_not_finite_in_the_type_it_is_read_as_is_bad(tmp_path: Path, array: Any, reason: str) -> None:
    np.savez(tmp_path / "t.npz", x=array)
    assert f"t.npz, {reason}" in refusal(tmp_path, tmp_path / "t.npz", {"x": ColumnType("float32", array.shape[1:])})


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("t.csv", b"", "holds no row"),
        ("t.csv", b"1,2\n3,4\n", "line 1: '1,2' are not column names; add a header line"),
        ("t.csv", b"a,b,a\n3,4,5\n", "line 1: column 'a' is there more than once"),
        ("t.jsonl", b"{\n{\n", "line 1: is not JSON"),
        ("t.parquet", b"", "is empty (0 bytes)"),
        ("t.parquet", b"PAR1 nonsense", "t.parquet cannot be read"),
        ("t.arrow", b"ARROW1 nonsense", "t.arrow cannot be read"),
        ("t.npz", b"nonsense", "t.npz cannot be read: File is not a zip file"),
        ("t.pb", b"\x05\0\0\0ab", "t.pb is cut off: the sample at byte 0 is not whole; its 5 bytes end at byte 9, the file at 6"),
        ("t.pb", b"\x05\0", "t.pb is cut off: the sample at byte 0 is not whole; its length takes 4 bytes, the file at 2"),
        ("t.pb", b"\x06\0\0\0\x09\0\0\0ab", "the tensor at byte 4 reaches beyond its sample, which ends at byte 10"),
        ("t.pb", b"\x06\0\0\0\x02\0\0\0\xff\xff", "byte 8 does not begin a tensor of 2 bytes"),
    ],
)  # fmt: skip
def test_files_that_are_not_what_they_are_called_are_named(
    tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    (tmp_path / name).write_bytes(content)
    assert message in refusal(tmp_path, tmp_path / name)


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (
            onnx.TensorProto(
                name="x",
                data_type=onnx.TensorProto.UINT8,
                dims=[6],
                data_location=onnx.TensorProto.EXTERNAL,
                external_data=[onnx.StringStringEntryProto(key="location", value="private.txt")],
            ),
            "tensor 'x' names another file for its data",
        ),
        (onnx.TensorProto(name="x", data_type=1, dims=[-1], float_data=[1, 2]), "tensor 'x' has shape [-1]"),
        (onnx.TensorProto(name="x", data_type=1, dims=[3], raw_data=b"12345678"), "does not begin a tensor of"),
        (onnx.TensorProto(name="x", data_type=99, dims=[1]), "has data_type 99"),
    ],
)
def test_a_shard_of_tensors_reads_no_other_file_and_no_tensor_of_a_wrong_size(
    tmp_path: Path, tensor: onnx.TensorProto, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "private.txt").write_text("secret")
    feature = tensor.SerializeToString()
    sample = len(feature).to_bytes(4, "little") + feature
    (tmp_path / "t.pb").write_bytes(len(sample).to_bytes(4, "little") + sample)
    refused = refusal(tmp_path, tmp_path / "t.pb")
    assert message in refused
    assert "secret" not in refused


def test_arrays_of_different_lengths_and_objects_are_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "t.npz", x=X, y=Y[:-1])
    assert "different numbers of rows: x 100, y 99" in refusal(tmp_path, tmp_path / "t.npz")
    np.savez(tmp_path / "o.npz", x=np.array([{}, {}]))
    assert "o.npz: x is Python objects" in refusal(tmp_path, tmp_path / "o.npz")


# -- columns


def test_the_first_rows_tell_type_shape_and_range(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("f,i,gap,flag,text\n1.5,1,3,True,a\n-2,7,,False,b\n0,5,1,True,c\n")
    assert infer_schema(DataConfig(source=str(tmp_path / "t.csv"))) == {
        "f": Column(name="f", dtype="float64", extremes=(-2.0, 1.5)),
        "i": Column(name="i", dtype="int64", extremes=(1, 5, 7)),
        "gap": Column(name="gap", dtype="int64", extremes=(1, 3)),
        "flag": Column(name="flag", dtype="bool", extremes=(0, 1)),
        "text": Column(name="text", dtype="str"),
    }


def test_lists_become_tensors_or_rows_of_varying_length(tmp_path: Path) -> None:
    lines = [{"m": [[i, 0], [0, i]], "v": list(range(i % 4 + 1)), "y": 0} for i in range(40)]
    (tmp_path / "t.jsonl").write_text("\n".join(map(json.dumps, lines)))
    rows, manifest = shard(tmp_path, tmp_path / "t.jsonl")
    assert rows["m"].shape == (40, 2, 2)  # type: ignore[union-attr]
    assert [row.tolist() for row in rows["v"]] == [line["v"] for line in lines]
    assert manifest.table["v"] == Column(name="v", dtype="int64", shape=(4,), variable=True, extremes=(0, 1, 2, 3))


def test_the_graph_decides_whether_lists_may_grow_later(tmp_path: Path) -> None:
    lines = [{"v": [1, 2]}] * 99 + [{"v": [1, 2, 3]}]
    (tmp_path / "t.jsonl").write_text("\n".join(map(json.dumps, lines)))
    assert len(shard(tmp_path, tmp_path / "t.jsonl", {"v": ColumnType("int64", (None,))})[0]["v"][99]) == 3
    assert "line 100: v has shape [3], not [2]" in refusal(
        tmp_path, tmp_path / "t.jsonl", {"v": ColumnType("int64", (2,))}
    )


def test_small_types_stay_small_for_a_graph_that_takes_floats(tmp_path: Path) -> None:
    np.savez(tmp_path / "t.npz", x=np.arange(20, dtype=np.uint8))
    wants = {"x": ColumnType("float32", ())}
    assert shard(tmp_path, tmp_path / "t.npz", wants)[1].columns[0].dtype == "uint8"


def test_digits_are_the_1797_images_standardised(tmp_path: Path) -> None:
    data = DataConfig(source="digits", image_size=16)
    directory, manifest, _ = make_shards(data, None, tmp_path)
    assert (manifest.rows("train") + manifest.rows("evaluation"), manifest.rows("evaluation")) == (1797, 179)
    images = open_shards(directory, "train").read(np.arange(1618))["image"]
    assert isinstance(images, np.ndarray)
    assert images.shape == (1618, 3, 16, 16)
    assert abs(images.mean()) < 0.01
    assert 0.8 < images.std() < 1.0  # interpolation smooths a little
    known = infer_schema(data)
    assert {name: (c.dtype, c.shape) for name, c in known.items()} == {
        c.name: (c.dtype, c.shape) for c in manifest.columns
    }


# -- text


def test_text_windows_touch_and_each_byte_is_labelled_with_the_next(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    texts = {"b.py": b"second" * 200, "a.py": b"first!" * 99, "sub/c.py": b"third"}
    for name, text in texts.items():
        (tmp_path / "d" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "d" / name).write_bytes(text)
    (tmp_path / "d" / "notes.md").write_bytes(b"not read")
    rows, _ = shard(tmp_path, tmp_path / "d", sequence_length=7)
    stream = b"\0".join([texts["a.py"], texts["b.py"], texts["sub/c.py"]]) + b"\0"
    count = (len(stream) - 1) // 7
    assert np.concatenate(list(rows["input_ids"])).tobytes() == stream[: count * 7]
    assert np.concatenate(list(rows["label"])).tobytes() == stream[1 : count * 7 + 1]


def test_held_out_text_is_whole_files(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    for number in range(20):
        (tmp_path / "d" / f"{number:02d}.py").write_bytes(bytes([65 + number]) * 50)
    directory, _, _ = make_shards(DataConfig(source=str(tmp_path / "d"), sequence_length=10), None, tmp_path / "c")
    seen = [
        {*np.unique(open_shards(directory, split).read(np.arange(9))["input_ids"]).tolist()} - {0}  # type: ignore[arg-type]
        for split in ("evaluation", "train")
    ]
    assert len(seen[0]) == 2
    assert not seen[0] & seen[1]


def test_the_standard_library_is_there_and_leaves_out_what_was_installed() -> None:
    files = sources.locate("stdlib", DataConfig(source="stdlib")).files
    names = [name for name, _ in files]
    assert {"os.py", "json/decoder.py"} <= set(names)
    assert not [name for name in names if "site-packages" in name or "/test/" in f"/{name}"]
    assert names == sorted(names)


# -- what is held out


@pytest.mark.parametrize("fraction", [0.01, 0.1, 0.3, 0.5, 0.9])
def test_the_held_out_share_is_exact_to_a_row(fraction: float) -> None:
    for count in (100, 1797, 100_000):
        held = held_out("a.csv", np.arange(count), fraction)
        assert abs(int(held.sum()) - fraction * count) <= 1.5


def test_appended_rows_move_no_row_to_the_other_side() -> None:
    before = held_out("a.csv", np.arange(1000), 0.1)
    np.testing.assert_array_equal(held_out("a.csv", np.arange(5000), 0.1)[:1000], before)


def test_held_out_rows_are_not_the_same_in_every_file_nor_periodic() -> None:
    rows = np.flatnonzero(held_out("a.csv", np.arange(1000), 0.1))
    assert not np.array_equal(rows, np.flatnonzero(held_out("b.csv", np.arange(1000), 0.1)))
    assert set((rows % 10).tolist()) == set(range(10))


@pytest.mark.parametrize("source", ["*.csv", "", "caf\udce9.csv"], ids=["pattern", "directory", "file"])
def test_a_file_whose_name_is_not_utf8_is_refused_however_it_is_named(source: str, tmp_path: Path) -> None:
    (tmp_path / "caf\udce9.csv").write_text("x,y\n1,2\n")
    with pytest.raises(DataError, match=r"the name of file 'caf\\udce9.csv' is not UTF-8; rename it"):
        sources.locate(str(tmp_path / source), DataConfig(source="rows.csv"))
