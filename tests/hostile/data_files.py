"""Tables and texts that are wrong: headers that lie, bytes of no encoding, files that are none."""

from __future__ import annotations

import gzip
import json
import os
import random
from pathlib import Path

import onnx
import onnx.parser

from tests.hostile.cases import HEADER, ROWS, SPARSE, case, damaged
from tests.hostile.sandbox import Case

# -- text


def csv(rng: random.Random, folder: Path) -> Case:
    """CSV files: wide headers, quotes, encodings, separators, compression."""
    kind, text = rng.randrange(14), (HEADER + ROWS).encode()
    name = "train.csv"
    if kind == 0:
        columns = rng.choice((2_000, 20_000, 250_000))
        header, row = ",".join(f"c{i}" for i in range(columns)), ",".join("1" * columns)
        text = f"{header},{HEADER}{row},1,2,3,4,0\n".encode()
    elif kind == 1:
        text = b",".join([b"a"] * rng.choice((2, 100_000))) + b"\n1\n"
    elif kind == 2:
        text = (HEADER + '"1,2,3\n' * 1000).encode() + b'"' * rng.choice((1, 2, 100_001))
    elif kind == 3:
        text = (HEADER + f'"{"9" * 200_000}",1,2,3,0\n' + ROWS).encode()
    elif kind == 4:
        at = rng.randrange(len(text))
        text = (
            text[:at]
            + rng.choice((b"\0", b"\xff\xfe", b"\r", b"\x1a", b"\xef\xbb\xbf", b'"', b"\xe2\x80\xa8"))
            + text[at:]
        )
    elif kind == 5:
        text = text.decode().encode(rng.choice(("utf-16", "utf-32", "utf-16-le", "utf-7", "cp500")))
    elif kind == 6:
        name, text = "train.csv.gz", damaged(rng, gzip.compress(text))
    elif kind == 7:
        name, text = "train.csv.gz", gzip.compress(HEADER.encode() + b"1" * (1 << 29), 1)
    elif kind == 8:
        text = HEADER.encode() + f"{'9' * 5000},1e999,nan,-inf,{2**70}\n".encode() * 30
    elif kind == 9:
        name = rng.choice(("train\udcff.csv", "a\nb.csv", "-.csv", "é.csv", "%s.csv", "[.csv"))
    elif kind == 10:
        text = HEADER.encode() + rng.randbytes(5000)
    elif kind == 11:
        text = b"\n" * rng.choice((0, 1, 100_000)) + rng.choice((b"", HEADER.encode(), text))
    else:
        text = damaged(rng, text)
    (folder / name).write_bytes(text)
    source = rng.choice((name, ".", "*.csv*"))
    marks = ("", "", "data.table.separator=';'", "data.table.quote='none'", "data.table.header=false")
    marks += ("data.table.encoding='utf-16'", "data.table.encoding='latin-1'", "data.table.decimal='auto'")
    return case(rng, folder, source, *filter(None, [rng.choice(marks)]))


def json_lines(rng: random.Random, folder: Path) -> Case:
    """JSON Lines: deep, long, of changing types."""
    row = {"x0": 1, "x1": 2, "x2": 3, "x3": 4, "label": 1}
    wrong = (
        "[" * 100_000,
        '{"x0":' * 3000,
        f'{{"x0": {"9" * 5000}}}',
        '{"x0": NaN, "x1": Infinity, "x2": -Infinity, "x3": 1e999, "label": 0}',
        '{"x0": {"a": [1, {"b": 2}]}, "x1": "\\ud800", "x2": null, "x3": true, "label": []}',
        '{"": 1, "x0": 1, "x0": 2}',
        "[1, 2, 3]",
        "null",
        '{"x0": "\\u0000"}',
        json.dumps({f"c{i}": i for i in range(20_000)}),
        json.dumps({**row, "x0": [[1, 2], [3]]}),
        json.dumps({**row, "label": 2**70}),
    )
    lines = [json.dumps({**row, "label": i % 3}) for i in range(30)]
    lines.insert(rng.choice((0, 5)), rng.choice(wrong))
    content = "\n".join(lines).encode()
    if rng.random() < 0.1:
        content = b'{"x0": [' + b"1," * rng.choice((1 << 20, 1 << 25))
    (folder / "train.jsonl").write_bytes(damaged(rng, content) if rng.random() < 0.5 else content)
    return case(rng, folder, "train.jsonl")


def text(rng: random.Random, folder: Path) -> Case:
    """Texts and tokenizers: of no encoding, without an end, sparse files of a terabyte, JSON of other things."""
    good = {
        "version": "1.0",
        "model": {"type": "WordLevel", "vocab": {"[UNK]": 0, "[PAD]": 1, "a": 2, "b": 3}, "unk_token": "[UNK]"},
        "pre_tokenizer": {"type": "Whitespace"},
        "added_tokens": [{"id": 1, "content": "[PAD]", "single_word": False, "lstrip": False, "rstrip": False}],
    }
    good["added_tokens"][0] |= {"normalized": False, "special": True}  # type: ignore[index]
    if rng.random() < 0.3:
        place = rng.choice((good, good["model"], good["pre_tokenizer"]))
        odd = (None, -1, 2**63, "x", [], {}, {"type": "x"}, {"a": -1}, {"a": 2**40}, [[[]]], "\0")
        place[rng.choice(list(place))] = rng.choice(odd)  # type: ignore[index]
    content = json.dumps(good).encode()
    if rng.random() < 0.4:
        content = rng.choice((b"", b"{}", b"[" * 100_000, b"\0", b"null", damaged(rng, content)))
    (folder / "tokenizer.json").write_bytes(content)
    section = '[data.text]\ntokenizer = "tokenizer.json"\ntokens.pad = "[PAD]"\n'
    if rng.random() < 0.3:
        return _text_file(rng, folder, section)
    wrong = ("", "a" * 2_000_000, "a " * 200_000, "\0", "\ud800", "\u202e", "\r\n", None, 1, ["a"], {"a": "b"})
    rows = [{"text": rng.choice(wrong) if rng.random() < 0.1 else "a b a", "label": n % 3} for n in range(40)]
    (folder / "train.jsonl").write_bytes("\n".join(json.dumps(row) for row in rows).encode())
    settings = ("data.text.max_length=8", "data.text.stride=2", "data.text.task='tokens'", "data.text.lowercase=true")
    chosen = ("data.text.max_length=8", *rng.sample(settings, 1)) if rng.random() < 0.7 else ()
    return case(rng, folder, "train.jsonl", *chosen, model=_text_model(), table=section)


def _text_file(rng: random.Random, folder: Path, section: str) -> Case:
    path, kind = folder / "train.txt", rng.randrange(4)
    if kind == 0:
        with path.open("wb") as file:
            file.truncate(SPARSE if rng.random() < 0.5 else 1 << 29)
    elif kind == 1:
        path.write_bytes(rng.randbytes(20_000))
    else:
        path.write_text("a text\n\n" * 500)
    settings = ["data.format='text'", f"data.text.documents='{rng.choice(('line', 'paragraph', 'file'))}'"]
    settings.append(f"data.text.task='{rng.choice(('causal', 'masked', 'classification'))}'")
    return case(rng, folder, "train.txt", *settings, model=_text_model(), table=section)


def _text_model() -> onnx.ModelProto:
    return onnx.parser.parse_model(f"""
        <ir_version: 10, opset_import: ["" : 20]>
        net (int64[batch, length] input_ids) => (float[batch, 3] y)
        <float[16, 3] table = {{{", ".join(["0.1"] * 48)}}}, int64[1] axis = {{1}}>
        {{
            e = Gather (table, input_ids)
            y = ReduceMean <keepdims = 0> (e, axis)
        }}""")


# -- places


def places(rng: random.Random, folder: Path) -> Case:
    """Sources that are no files: devices, FIFOs, sockets, links in a circle, the root, names of no encoding."""
    os.mkfifo(folder / "fifo.csv")
    os.mknod(folder / "socket.csv", 0o140644)
    (folder / "loop.csv").symlink_to("loop.csv")
    (folder / "circle").mkdir()
    (folder / "circle" / "again").symlink_to("..")
    (folder / "empty").mkdir()
    with (folder / "sparse.csv").open("wb") as file:
        file.truncate(SPARSE)
    (folder / "mixed").mkdir()
    (folder / "mixed" / "a.csv").write_text(HEADER + ROWS)
    os.mkfifo(folder / "mixed" / "b.csv")
    (folder / os.fsdecode(b"mixed/\xff.csv")).write_text(HEADER + ROWS)
    names = ("fifo.csv", "socket.csv", "loop.csv", "circle", "circle/**", "**/*.csv", "empty", "sparse.csv", "mixed")
    names += ("/", "//", "/../", "/**", "/**/*.csv", "/dev/zero", "/dev/full", "/dev", "/proc/self/mem", "/proc/kmsg")
    names += ("/*", "[", "*" * 100, "~nobody-here/x.csv", "", ".", "..", "a" * 300, "x/" * 3000, "\\u0000", "?/?")
    key = rng.choice(("data.source", "data.evaluation_source", "data.test_source", "model.path", "teacher.path"))
    key = rng.choice((key, "data.source", "export.path", "checkpoint.load", "launch.hostfile", "data.text.tokenizer"))
    (folder / "good.csv").write_text(HEADER + ROWS)
    found = case(rng, folder, "good.csv")
    formats = ("auto", "auto", "csv", "text", "npz", "parquet", "pb", "arrow", "jsonl", "images", "webdataset")
    settings = (f'{key}="{rng.choice(names)}"', f"data.format='{rng.choice(formats)}'")
    return Case(("run", "config.toml", *settings)) if found.command[0] == "run" else found
