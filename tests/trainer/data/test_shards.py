"""Shards keep every row, once; the shards of ONNX Runtime's trainer are read, without its bugs."""

from __future__ import annotations

import json
import os
import re
import struct
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest

from onward.trainer.config.sections.data import DataConfig
from onward.trainer.config.sections.tables import OF_COLUMNS, TableConfig
from onward.trainer.data.formats import arrow_shards
from onward.trainer.data.formats.arrow_shards import ArrowFiles, ArrowReader, ArrowWriter, record_batch
from onward.trainer.data.formats.format_table import FORMATS
from onward.trainer.data.formats.tensorproto_files import ProtoFiles, ProtoReader
from onward.trainer.data.schema.columns import Column, ColumnType
from onward.trainer.data.schema.described_columns import extremes
from onward.trainer.data.storage import sharding, shards, split_writer
from onward.trainer.data.storage.opened_shards import damaged_files, open_shards
from onward.trainer.data.storage.sharding import (
    COUNTED_OTHERWISE,
    HARMLESS,
    IN_EVERY_KEY,
    counted_settings,
)
from onward.trainer.data.storage.shards import ShardManifest, Shards
from onward.trainer.errors import DataError
from onward.trainer.run.durable_files import sha256
from tests.support.shards import make_shards

GOLDEN = bytes.fromhex("1e000000 0b000000 080210073a0201024201 78 0b000000 1001 2204 0000003f 4201 79")
"""int64 x = [1, 2] and scalar float y = 0.5, as ONNX Runtime's trainer reads them."""
GOLDEN_COLUMNS = [Column(name="x", dtype="int64", shape=(2,)), Column(name="y", dtype="float32")]

COLUMNS = {
    "image": np.arange(100 * 12, dtype=np.float32).reshape(100, 2, 2, 3),
    "flag": np.arange(100) % 2 == 0,
    "half": np.linspace(0, 1, 100, dtype=np.float16),
    "label": np.arange(100) - 50,
}


@pytest.fixture
def npz(tmp_path: Path) -> Path:
    np.savez(tmp_path / "data.npz", **COLUMNS)
    return tmp_path / "data.npz"


def both(directory: Path) -> tuple[Shards, Shards]:
    return open_shards(directory, "train"), open_shards(directory, "evaluation")


@pytest.mark.parametrize("rows_per_shard", [1, 7, 1000])
def test_every_row_is_in_exactly_one_split_with_its_values(tmp_path: Path, npz: Path, rows_per_shard: int) -> None:
    data = DataConfig(source=str(npz), rows_per_shard=rows_per_shard)
    directory, manifest, _ = make_shards(data, None, tmp_path / "cache")
    train, evaluation = both(directory)
    assert (train.num_rows, evaluation.num_rows) == (90, 10) == (manifest.rows("train"), manifest.rows("evaluation"))
    assert len(manifest.train) == -(-90 // rows_per_shard)
    random = np.random.default_rng(0)
    parts = [split.read(random.permutation(split.num_rows)) for split in (train, evaluation)]
    order = np.argsort(np.concatenate([part["label"] for part in parts]))
    for name, values in COLUMNS.items():
        got = np.concatenate([part[name] for part in parts])[order]
        np.testing.assert_array_equal(got, values)
        assert got.dtype == values.dtype
    assert manifest.table["label"].extremes == (-50, -49, 48, 49)
    assert damaged_files(directory, manifest) == []


def test_rows_of_varying_length_come_back_in_any_order(tmp_path: Path) -> None:
    rows = [list(range(n % 5 + 1)) for n in range(50)]
    (tmp_path / "t.jsonl").write_text("\n".join(f'{{"v": {row}}}' for row in rows))
    data = DataConfig(source=str(tmp_path / "t.jsonl"), rows_per_shard=8, evaluation_fraction=0.02)
    directory, _, _ = make_shards(data, {"v": ColumnType("int64", (None,))}, tmp_path / "cache")
    train = open_shards(directory, "train")
    read = train.read(np.arange(train.num_rows)[::-1])["v"]
    held_out = open_shards(directory, "evaluation").read(np.arange(1))["v"][0].tolist()
    assert sorted([row.tolist() for row in read] + [held_out]) == sorted(rows)


def test_many_rows_and_few_rows_are_read_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    random = np.random.default_rng(0)
    columns = [
        Column(name="x", dtype="float32", shape=(3,)),
        Column(name="flag", dtype="bool"),
        Column(name="ids", dtype="int64", shape=(4,), variable=True),
        Column(name="text", dtype="str"),
        Column(name="image", dtype="bytes"),
    ]
    writer = None
    for count in (5, 40, 1):
        rows = record_batch(
            {
                "x": random.random((count, 3), np.float32),
                "flag": random.random(count) > 0.5,
                "ids": [np.arange(size) for size in random.integers(1, 5, count)],
                "text": np.array([f"é{number}" for number in range(count)], object),
                "image": np.array([bytes([number]) for number in range(count)], object),
            },
            columns,
        )
        writer = writer or ArrowWriter(tmp_path / "t.arrow", rows.schema)
        writer.write(rows)
    assert writer
    assert writer.close() == sha256(tmp_path / "t.arrow")
    reader = ArrowFiles([ArrowReader(tmp_path / "t.arrow", columns)], np.array([0]))
    rows = random.integers(0, 46, 60)
    found = []
    for few in (1, 1000):
        monkeypatch.setattr(arrow_shards, "FEW_ROWS", few)
        found.append(reader.read(rows))
    one_by_one = [reader.read(rows[at : at + 1]) for at in range(len(rows))]
    for name in ("x", "flag", "text", "image"):
        np.testing.assert_array_equal(found[0][name], found[1][name])
        np.testing.assert_array_equal(found[0][name], np.concatenate([each[name] for each in one_by_one]))
        assert np.asarray(found[0][name]).dtype == np.asarray(found[1][name]).dtype
    assert [ids.tolist() for ids in found[0]["ids"]] == [ids.tolist() for ids in found[1]["ids"]]
    assert {type(text) for text in found[0]["text"]} == {str}


@pytest.mark.parametrize("width", [3, 20_000], ids=["small", "80 kB"])
def test_rows_of_many_files_come_in_the_order_asked_for(
    tmp_path: Path, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = np.random.default_rng(0).random((60, width), np.float32)
    # rows of 1, 2, 4 and 8 bytes are copied in another way than those of 12
    small = {kind: np.arange(60).astype(kind) for kind in ("uint8", "bool", "float16", "int32", "float64")}
    np.savez(tmp_path / "d.npz", x=values, ids=np.arange(60), pair=values[:, :2], **small)
    data = DataConfig(source=str(tmp_path / "d.npz"), rows_per_shard=7, evaluation_fraction=0.1)
    directory, _, _ = make_shards(data, None, tmp_path / "cache")
    rows = np.random.default_rng(1).integers(0, open_shards(directory, "train").num_rows, 90)
    for most_open in (4096, 2):
        monkeypatch.setattr(shards, "MOST_OPEN", most_open)
        train = open_shards(directory, "train")
        for _ in range(2):
            found = train.read(rows)
            numbers = np.asarray(found["ids"])
            np.testing.assert_array_equal(found["x"], values[numbers])
            np.testing.assert_array_equal(found["pair"], values[numbers, :2])
            for kind, cells in small.items():
                np.testing.assert_array_equal(found[kind], cells[numbers])
                assert np.asarray(found[kind]).dtype == cells.dtype
        one_by_one = [int(np.asarray(train.read(rows[at : at + 1])["ids"])[0]) for at in range(len(rows))]
        assert numbers.tolist() == one_by_one


def test_a_copy_with_soft_labels_reads_files_that_the_other_has_opened(tmp_path: Path, npz: Path) -> None:
    directory, _, _ = make_shards(DataConfig(source=str(npz), rows_per_shard=20), None, tmp_path / "cache")
    plain = open_shards(directory, "train")
    soft: Any = SimpleNamespace(names=("soft",), read=lambda rows: {"soft": rows})
    copied = plain.with_soft_labels(soft)
    for rows in (np.array([0]), np.array([plain.num_rows - 1, 25]), np.array([45, 1])):
        one, other = plain.read(rows), copied.read(rows)
        assert other.pop("soft").tolist() == rows.tolist()
        for name, values in one.items():
            np.testing.assert_array_equal(other[name], values)
    plain.close_files()
    np.testing.assert_array_equal(copied.read(rows)["soft"], rows)


def test_a_row_that_no_file_has_is_an_error_and_no_memory_is_read(tmp_path: Path, npz: Path) -> None:
    directory, _, _ = make_shards(DataConfig(source=str(npz), rows_per_shard=20), None, tmp_path / "cache")
    train = open_shards(directory, "train")
    for row in (-1, train.num_rows, 10**12):
        with pytest.raises(IndexError, match=f"there are {train.num_rows} rows"):
            train.read(np.array([0, row]))


def test_a_row_between_two_open_files_is_an_error(tmp_path: Path, npz: Path) -> None:
    directory, manifest, _ = make_shards(DataConfig(source=str(npz), rows_per_shard=20), None, tmp_path / "cache")
    readers = [ArrowReader(directory / manifest.train[at].name, manifest.columns) for at in (0, 2)]
    files = ArrowFiles(readers, np.array([100, 140]))
    end = 140 + manifest.train[2].rows
    assert len(files.read(np.array([end - 1, 119, 100, 140]))["label"]) == 4
    for row in (0, 99, 120, 139, end, end + 1000):
        with pytest.raises(IndexError):
            files.read(np.array([105, row]))


def test_reading_numbers_imports_no_pandas(tmp_path: Path, npz: Path) -> None:
    directory, _, _ = make_shards(DataConfig(source=str(npz), rows_per_shard=20), None, tmp_path / "cache")
    # it takes half a second, and each rank would import it
    program = (
        "import sys, numpy, pathlib\nfrom onward.trainer.data.storage.opened_shards import open_shards\n"
        "open_shards(pathlib.Path(sys.argv[1]), 'train').read(numpy.arange(30))\nprint('pandas' in sys.modules)"
    )
    found = subprocess.run([sys.executable, "-c", program, str(directory)], check=True, capture_output=True, text=True)
    assert found.stdout.strip() == "False"


def test_a_shard_that_states_more_values_than_it_has_is_refused(tmp_path: Path) -> None:
    columns = [Column(name="x", dtype="float32", shape=(3,))]
    rows = record_batch({"x": np.zeros((1234, 3), np.float32)}, columns)
    writer = ArrowWriter(tmp_path / "t.arrow", rows.schema)
    writer.write(rows)
    writer.close()
    content = (tmp_path / "t.arrow").read_bytes()
    (tmp_path / "t.arrow").write_bytes(content.replace((1234).to_bytes(8, "little"), (10**8).to_bytes(8, "little")))
    with pytest.raises(DataError, match=r"t\.arrow cannot be read: .* is less than the length \(100000000\)"):
        ArrowReader(tmp_path / "t.arrow", columns)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([1.5, np.nan, -2.5, np.inf], (-2.5, 1.5)),
        ([np.nan, np.inf], ()),
        ([0.5], (0.5,)),
        ([], ()),
        (np.array([3, -100, 7, 3, 9]), (-100, 3, 7, 9)),
        (np.array([5, 5]), (5,)),
    ],
)
def test_extremes_leave_out_what_is_not_finite(values: Any, expected: tuple[float, ...]) -> None:
    assert extremes(np.asarray(values)) == expected


def test_a_disk_that_cannot_be_flushed_is_an_error_and_nothing_is_left(
    tmp_path: Path, npz: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed: list[str] = []

    def fails_at_the_third(path: Path) -> None:
        flushed.append(threading.current_thread().name)
        if len(flushed) == 3:
            raise OSError("the disk is gone")

    monkeypatch.setattr(split_writer, "fsync", fails_at_the_third)
    with pytest.raises(OSError, match="the disk is gone"):
        make_shards(DataConfig(source=str(npz), rows_per_shard=20), None, tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []
    assert all(name.startswith("disk") for name in flushed)


def test_arrow_shards_are_mapped_not_loaded(tmp_path: Path, npz: Path) -> None:
    directory, _, _ = make_shards(DataConfig(source=str(npz)), None, tmp_path / "cache")
    train = open_shards(directory, "train")
    train.read(np.array([0]))
    assert f"{directory}/train-00000.arrow" in Path("/proc/self/maps").read_text()


# -- the format of ONNX Runtime's trainer


def sample(tensors: dict[str, np.ndarray[Any, Any]]) -> bytes:
    features = [onnx.numpy_helper.from_array(each, name).SerializeToString() for name, each in tensors.items()]
    packed = b"".join(struct.pack("<I", len(feature)) + feature for feature in features)
    return struct.pack("<I", len(packed)) + packed


def test_the_golden_sample_is_read(tmp_path: Path) -> None:
    (tmp_path / "t.pb").write_bytes(GOLDEN * 3)
    reader = ProtoReader(tmp_path / "t.pb", GOLDEN_COLUMNS)
    rows = ProtoFiles([reader], np.array([0])).read(np.array([2, 0]))
    assert reader.num_rows == 3
    np.testing.assert_array_equal(rows["x"], [[1, 2], [1, 2]])
    np.testing.assert_array_equal(rows["y"], np.array([0.5, 0.5], np.float32))


def test_raw_data_in_any_order_is_read_too(tmp_path: Path) -> None:
    tensors = {"y": np.array(0.5, np.float32), "other": np.array(1, np.int32), "x": np.array([1, 2])}
    (tmp_path / "t.pb").write_bytes(sample(tensors))
    rows = ProtoFiles([ProtoReader(tmp_path / "t.pb", GOLDEN_COLUMNS)], np.array([0])).read(np.array([0]))
    assert (rows["x"][0].tolist(), float(rows["y"][0])) == ([1, 2], 0.5)


def test_a_tensor_that_is_missing_is_named_with_its_byte(tmp_path: Path) -> None:
    (tmp_path / "t.pb").write_bytes(GOLDEN * 2)
    reader = ProtoFiles([ProtoReader(tmp_path / "t.pb", [Column(name="z", dtype="float32")])], np.array([0]))
    with pytest.raises(DataError, match=r"t\.pb, sample 2 \(byte 34\): there is no tensor 'z', only x, y"):
        reader.read(np.array([1]))


# -- the bugs of ONNX Runtime's trainer (the index bug and the wrapping last batch: test_each_sample_once.py)


def proto_source(path: Path, shapes: list[int]) -> DataConfig:
    path.write_bytes(b"".join(sample({"x": np.ones(n, np.float32)}) for n in shapes))
    return DataConfig(source=str(path.parent / "*.pb"))


def test_samples_of_mixed_shapes_are_refused_by_name(tmp_path: Path) -> None:
    data = proto_source(tmp_path / "t.pb", [2] * 30 + [3] + [2] * 30)
    with pytest.raises(DataError, match=r"t\.pb, sample 31: x has shape \[3\], not \[2\]"):
        make_shards(data, {"x": ColumnType("float32", (2,))}, tmp_path / "cache")


def test_an_empty_shard_among_others_changes_nothing(tmp_path: Path) -> None:
    data = proto_source(tmp_path / "b.pb", [2] * 30)
    (tmp_path / "a.pb").write_bytes(b"")
    _, manifest, _ = make_shards(data, {"x": ColumnType("float32", (2,))}, tmp_path / "cache")
    assert manifest.rows("train") + manifest.rows("evaluation") == 30


def test_unequal_shards_are_one_stream_of_rows(tmp_path: Path) -> None:
    for name, count in (("a", 3), ("b", 40), ("c", 1)):
        np.savez(tmp_path / f"{name}.npz", x=np.full(count, ord(name)))
    data = DataConfig(source=str(tmp_path / "*.npz"), evaluation_source=str(tmp_path / "a.npz"), rows_per_shard=16)
    directory, manifest, _ = make_shards(data, None, tmp_path / "cache")
    assert [file.rows for file in manifest.train] == [16, 16, 12]
    rows = open_shards(directory, "train").read(np.array([43, 0, 42, 3, 16]))["x"]
    assert bytes(np.asarray(rows, np.uint8)) == b"cabbb"


@pytest.mark.parametrize(("rows", "fraction"), [(1, 0.5), (3, 0.01), (5, 0.0)])
def test_an_empty_split_is_refused_with_numbers(tmp_path: Path, rows: int, fraction: float) -> None:
    np.savez(tmp_path / "t.npz", x=np.arange(rows))
    data = DataConfig(source=str(tmp_path / "t.npz"), evaluation_fraction=fraction)
    with pytest.raises(
        DataError, match=rf"\d rows to train on and \d to evaluate on \(by data.evaluation_fraction {fraction:g}"
    ):
        make_shards(data, None, tmp_path / "cache")


# -- the cache


def make(data: DataConfig, cache: Path) -> tuple[Path, ShardManifest, bool]:
    return make_shards(data, None, cache)


def test_unchanged_input_is_not_sharded_twice(tmp_path: Path, npz: Path) -> None:
    first, _, cached = make(DataConfig(source=str(npz)), tmp_path / "cache")
    before = (first / "manifest.json").stat().st_mtime_ns
    moved = tmp_path / "elsewhere" / "data.npz"
    moved.parent.mkdir()
    moved.write_bytes(npz.read_bytes())
    for same in (npz, moved):
        assert make(DataConfig(source=str(same), pad_values={"x": 1}), tmp_path / "cache")[::2] == (first, True)
    assert not cached
    assert (first / "manifest.json").stat().st_mtime_ns == before


@pytest.mark.parametrize("settings", [{"evaluation_fraction": 0.2}, {"rows_per_shard": 9}, {"bad_rows": "skip"}])
def test_settings_that_matter_make_other_shards(tmp_path: Path, npz: Path, settings: dict[str, Any]) -> None:
    first = make(DataConfig(source=str(npz)), tmp_path / "cache")[0]
    assert make(DataConfig(source=str(npz), **settings), tmp_path / "cache")[0] != first


def test_every_setting_of_the_data_is_in_the_key_or_listed_as_one_that_need_not_be() -> None:
    listed = IN_EVERY_KEY | COUNTED_OTHERWISE | HARMLESS
    of_formats = frozenset[str]().union(*(each.settings for each in FORMATS.values()))
    assert DataConfig.model_fields.keys() == listed | of_formats
    assert TableConfig.model_fields.keys() >= OF_COLUMNS
    reading = {"separator", "decimal", "thousands", "quote", "encoding", "header", "window"}
    assert TableConfig.model_fields.keys() - OF_COLUMNS == reading


def test_a_setting_that_is_not_listed_counts_once_it_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharding, "HARMLESS", HARMLESS - {"evaluation_rows"})
    data = DataConfig(source="digits", image_size=8)
    settings = {"evaluation_fraction": 0.1, "bad_rows": "fail", "rows_per_shard": 65536, "shard_format": "arrow"}
    settings |= {"image_size": 8, "image_channels": 3}
    assert counted_settings(data, {"digits"}) == settings
    few = data.model_copy(update={"evaluation_rows": 9})
    assert counted_settings(few, {"digits"}) == settings | {"evaluation_rows": 9}


def test_changed_content_of_the_same_size_and_time_is_noticed(tmp_path: Path) -> None:
    path, keys = tmp_path / "t.csv", set()
    for value in "12":
        path.write_text("x\n" + f"{value}\n" * 40)
        os.utime(path, (1, 1))
        keys.add(make(DataConfig(source=str(path)), tmp_path / "cache")[0])
    assert len(keys) == 2


def flip_a_bit(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        ("remove", "train-00000.arrow is missing"),
        ("truncate", "train-00000.arrow has "),
        ("flip", r"train-00000.arrow has SHA-256 \w{12}, not \w{12}: its content changed"),
        ("evaluation", "evaluation-00000.arrow has SHA-256 "),
        ("manifest", "manifest.json is not a ShardManifest"),
        ("value", "manifest.json has changed"),
    ],
)
def test_damaged_shards_are_made_again_and_said(
    tmp_path: Path, npz: Path, damage: str, problem: str, caplog: pytest.LogCaptureFixture
) -> None:
    data = DataConfig(source=str(npz))
    directory, manifest, _ = make(data, tmp_path / "cache")
    shard, record = directory / manifest.train[0].name, directory / "manifest.json"
    if damage == "remove":
        shard.unlink()
    elif damage == "truncate":
        shard.write_bytes(shard.read_bytes()[:-8])
    elif damage == "flip":
        flip_a_bit(shard, shard.stat().st_size // 2)
    elif damage == "evaluation":
        flip_a_bit(directory / manifest.evaluation[0].name, 100)
    elif damage == "manifest":
        record.write_text("{")
    else:
        extreme = json.dumps(json.loads(record.read_text())["columns"][0]["extremes"][1])
        assert extreme in record.read_text()
        record.write_text(record.read_text().replace(extreme, "7"))
    assert make(data, tmp_path / "cache") == (directory, manifest, False)
    assert re.search("are made again, because they are damaged: .*" + problem, caplog.text)
    assert damaged_files(directory, manifest) == []
    assert make(data, tmp_path / "cache") == (directory, manifest, True)
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [directory.name]


def test_of_two_processes_the_second_uses_the_shards_of_the_first(
    tmp_path: Path, npz: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    meeting = threading.Barrier(2)
    write = sharding.write_shards

    def write_together(*arguments: Any) -> ShardManifest:
        meeting.wait(10)
        return write(*arguments)

    monkeypatch.setattr(sharding, "write_shards", write_together)
    results: list[Any] = []
    builders = [
        threading.Thread(
            target=lambda: results.append(make(DataConfig(source=str(npz)), tmp_path / "cache")), daemon=True
        )
        for _ in range(2)
    ]
    for builder in builders:
        builder.start()
    for builder in builders:
        builder.join(20)
    assert results[0] == results[1]
    assert damaged_files(*results[0][:2]) == []
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [results[0][0].name]


def test_after_an_error_nothing_is_left(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("x\n" + "1\n" * 50 + "?\n")
    with pytest.raises(DataError):
        make(DataConfig(source=str(tmp_path / "t.csv")), tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []
