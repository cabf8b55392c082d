"""What families of files have in common: a run that reads them, and damage."""

from __future__ import annotations

import json
import random
import struct
from pathlib import Path

import onnx

from tests.hostile.config_files import GOOD
from tests.hostile.onnx_files import small_model
from tests.hostile.sandbox import Case

ROWS = "".join(f"{i},1,2,3,{i % 3}\n" for i in range(40))
HEADER = "x0,x1,x2,x3,label\n"
SPARSE = 1 << 40
"""The size of a file that has no content on the disk."""


def case(
    rng: random.Random, folder: Path, source: str, *settings: str, model: onnx.ModelProto | None = None, table: str = ""
) -> Case:
    """Return a run, or rarely an `init`, that reads `source`. table: the sections of the config about the data."""
    (folder / "model.onnx").write_bytes((model or small_model()).SerializeToString())
    text = GOOD.replace('"train.csv"', json.dumps(source))
    inputs = text.index("[data.inputs]")
    train = text.index("[train]")
    (folder / "config.toml").write_text(text[:inputs] + (table or text[inputs:train]) + text[train:])
    if rng.random() < 0.15:
        return Case(("init", "model.onnx", source, "--no-try", "-o", "new.toml"))
    skip = ("data.bad_rows=skip",) if rng.random() < 0.3 else ()
    return Case(("run", "config.toml", *settings, *skip))


def damaged(rng: random.Random, content: bytes) -> bytes:
    """Flip bits, cut off, insert, repeat; or leave as it is."""
    data, kind = bytearray(content), rng.randrange(6)
    if kind == 0 or not data:
        return content
    at = rng.randrange(len(data))
    if kind in (1, 2):
        for _ in range(rng.choice((1, 2, 8, 100))):
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        return bytes(data)
    if kind == 3:
        return bytes(data[:at])
    if kind == 4:
        return bytes(data[:at]) + rng.randbytes(rng.choice((1, 8, 500))) + bytes(data[at:])
    number = struct.pack("<q", rng.choice((-1, 2**31 - 1, 2**62, -(2**63), 2**40)))
    return bytes(data[:at]) + number + bytes(data[at + 8 :])
