"""Arrays that are wrong: archives, columns and tensors that lie about their sizes, and bombs."""

from __future__ import annotations

import io
import random
import struct
import zipfile
from pathlib import Path

import numpy as np
import onnx
import pyarrow as pa
import pyarrow.parquet as pq

from tests.hostile.cases import case, damaged
from tests.hostile.sandbox import Case


def npz(rng: random.Random, folder: Path) -> Case:
    """Archives and headers of numpy that lie about their sizes, and bombs."""
    path, kind = folder / "train.npz", rng.randrange(7)
    if kind == 0:
        shapes = (
            "(1000000000000,)",
            "(1, 1000000000000)",
            "(-1, 4)",
            "(40, 0)",
            "(0,)",
            "()",
            "(4,)*70",
            "(1e5,)",
            "'x'",
        )
        types = (
            "'<f4'",
            "'|O'",
            "'<U1000000000'",
            "[('a', '<f4')]",
            "'<f4'",
            "'V100'",
            "'<c16'",
            "'x'",
            "None",
            "'>i8'",
        )
        header = f"{{'descr': {rng.choice(types)}, 'fortran_order': False, 'shape': {rng.choice(shapes)}, }}"
        header = rng.choice(
            (header, header, header, "[" * 5000, "__import__('os').system('id')", "{}", "\0", "9" * 5000)
        )
        content = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header.encode() + bytes(160)
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("x0.npy", content)
    elif kind == 1:
        row = rng.choice((1 << 28, 1 << 29, 1 << 20))
        head = io.BytesIO()
        np.lib.format.write_array_header_1_0(head, {"descr": "<f4", "fortran_order": False, "shape": (2, row // 4)})
        with (
            zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive,
            archive.open("x.npy", "w", force_zip64=True) as file,
        ):
            file.write(head.getvalue())
            for _ in range(2 * row >> 20):
                file.write(bytes(1 << 20))
    elif kind == 2:
        np.savez(path, x=np.array([{"a": 1}], dtype=object), allow_pickle=True)
    elif kind == 3:
        with zipfile.ZipFile(path, "w") as archive:
            for number in range(rng.choice((0, 1, 3000))):
                archive.writestr(f"{'../' * 5}a{number}.npy", b"x")
    else:
        arrays = {f"x{i}": np.ones(40, np.float32) for i in range(4)} | {"label": np.arange(40) % 3}
        odd = (np.ones((40, 0)), np.array("a"), np.ones(39), np.array([b"a"] * 40), np.zeros(40, "M8[s]"))
        odd += (np.full(40, np.nan), np.zeros(40, complex), np.full(40, 2**63, np.uint64), np.ones((40, 2, 2)))
        if rng.random() < 0.5:
            arrays[rng.choice(("x3", "label"))] = rng.choice(odd)
        (np.savez_compressed if rng.random() < 0.5 else np.savez)(path, **arrays)
        if rng.random() < 0.7:
            path.write_bytes(damaged(rng, path.read_bytes()))
    return case(rng, folder, "train.npz")


def _long_row() -> pa.Array:
    values = pa.array(np.zeros(1 << 25, np.int8))
    return pa.LargeListArray.from_arrays(pa.array([0, len(values)], pa.int64()), values)


BOMBS = (
    _long_row,
    lambda: pa.array(np.zeros(1 << 27, np.int64)),
    lambda: pa.nulls(1 << 20),
    lambda: pa.DictionaryArray.from_arrays(np.zeros(20_000, np.int32), ["a" * 200_000]),
    lambda: pa.RunEndEncodedArray.from_arrays([1 << 20], [1.0]),
)
"""Columns of gigabytes, or of as many rows, that are some kilobytes in a file."""


def arrow(rng: random.Random, folder: Path) -> Case:
    """Parquet and Arrow files with lying metadata, and lists of many equal values, which are stored once."""
    columns: dict[str, object] = {f"x{i}": [float(i)] * 40 for i in range(4)}
    columns["label"] = [i % 3 for i in range(40)]
    odd = rng.randrange(5)
    if odd == 1:
        columns["x0"] = [[1.0] * (i + 1) for i in range(40)]
    elif odd == 2:
        columns["x0"] = [{"a": 1}] * 40
    elif odd == 3:
        columns["x0"] = ["é", "b"] * 20
    elif odd == 4:
        columns["x0"] = pa.array(["a", "b"] * 20).dictionary_encode()
    is_bomb = rng.random() < 0.15
    table = pa.table({"x0": rng.choice(BOMBS)()} if is_bomb else columns)
    encoded = pa.types.is_run_end_encoded(table.schema.field(0).type)
    if rng.random() < 0.5 and not encoded:
        path = folder / "train.parquet"
        packing = "zstd" if is_bomb else rng.choice(("none", "snappy", "zstd"))
        # without the schema of Arrow, what was a dictionary is read as text
        pq.write_table(table, path, compression=packing, store_schema=rng.random() < 0.5)
    else:
        path = folder / "train.arrow"
        packing = "zstd" if is_bomb else rng.choice((None, "zstd", "lz4"))
        maker = rng.choice((pa.ipc.new_file, pa.ipc.new_stream))
        with maker(str(path), table.schema, options=pa.ipc.IpcWriteOptions(compression=packing)) as writer:
            writer.write_table(table)
    path.write_bytes(damaged(rng, path.read_bytes()))
    return case(rng, folder, path.name)


def shards(rng: random.Random, folder: Path) -> Case:
    """Shards of TensorProtos: sizes, external data, damaged messages; saved datasets of Hugging Face."""
    if rng.random() < 0.3:
        (folder / "set").mkdir()
        wrong = (
            "[]",
            "{",
            "[" * 100_000,
            '{"_data_files": 3}',
            '{"_data_files": [{}]}',
            '{"_data_files": []}',
            "\0",
            "null",
        )
        wrong += (
            '{"_data_files": [{"filename": "../../secret/secret.csv"}]}',
            '{"_data_files": [{"filename": "a\\u0000"}]}',
        )
        (folder / "set" / rng.choice(("state.json", "dataset_dict.json"))).write_text(
            rng.choice((*wrong, '{"splits": 3}'))
        )
        return case(rng, folder, "set")
    kinds = ({}, {"dims": [-1]}, {"dims": [2**40]}, {"data_type": 99}, {"raw_data": b"123"}, {"name": "label"})
    content = b""
    for number in range(20):
        features = b""
        for column in ("x0", "x1", "x2", "x3", "label"):
            tensor = onnx.TensorProto(name=column, data_type=1, float_data=[float(number % 3)])
            if rng.random() < 0.05:
                for key, value in rng.choice(kinds).items():
                    getattr(tensor, key).extend(value) if key == "dims" else setattr(tensor, key, value)
            if rng.random() < 0.02:
                tensor.data_location = 1
                tensor.external_data.add(key="location", value="../secret/secret.bin")
            data = tensor.SerializeToString()
            features += struct.pack("<I", len(data)) + data
        content += struct.pack("<I", len(features)) + features
    (folder / "train.pb").write_bytes(damaged(rng, content))
    return case(rng, folder, "train.pb")
