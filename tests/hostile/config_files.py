"""Configuration files and settings that are wrong: types, numbers, nesting, paths, names, bytes."""

from __future__ import annotations

import os
import random
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from onward.trainer.config.run_config import RunConfig
from tests.hostile.onnx_files import NAMES, small_model
from tests.hostile.sandbox import Case

DIGITS = "9" * 5000
VALUES = (
    *("true", "false", "0", "-1", "1", "2.5", "1e999", "nan", "-inf", DIGITS, f"1.{DIGITS}", "9223372036854775808"),
    *("''", "'x'", "'?'", "'~nobody-here/x'", "'~'", "'../secret/secret.csv'", "'/'", "'/dev/zero'", "'.'", "'fifo'"),
    *("'socket'", "'loop'", f"'{'x' * 300}'", f"'{'a/' * 3000}'", '"a\\u0000b"', '"\\u202e"', "'**'", "'a**b'"),
    *("'s3://'", "'http://[::1'", "'http://x:99999/y'", "'models:/'", "'file:///etc/passwd'", "'[['", "'https:///'"),
    *(
        "[]",
        "[true]",
        "[[[]]]",
        "[1, 'x']",
        "{}",
        "{a = 1}",
        "{true = true}",
        "1979-05-27",
        "07:32:00",
        "[{}]",
        "[{a=1}]",
    ),
    "[" * 30 + "]" * 30,
    "[" * 3000 + "]" * 3000,
    "{a=" * 40 + "1" + "}" * 40,
)
GOOD = """
[model]
path = "model.onnx"
[data]
source = "train.csv"
[data.inputs]
x = ["x0", "x1", "x2", "x3"]
[train]
num_steps = 2
global_batch_size = 4
"""


@cache
def settings() -> tuple[str, ...]:
    """Return every setting of a configuration, as section.key."""
    found = ["name", "nothing", "data.nothing", "data"]

    def add(section: type[BaseModel], before: str) -> None:
        for name, field in section.model_fields.items():
            found.append(f"{before}{name}")
            for kind in (field.annotation, *getattr(field.annotation, "__args__", ())):
                if isinstance(kind, type) and issubclass(kind, BaseModel):
                    add(kind, f"{before}{name}.")

    add(RunConfig, "")
    return tuple(found)


def _files(folder: Path) -> None:
    (folder / "model.onnx").write_bytes(small_model().SerializeToString())
    (folder / "train.csv").write_text("x0,x1,x2,x3,label\n" + "".join(f"{i},1,2,3,{i % 3}\n" for i in range(40)))
    (folder / "loop").symlink_to("loop")
    os.mkfifo(folder / "fifo")
    os.mknod(folder / "socket", 0o140644)


def setting(rng: random.Random, folder: Path) -> Case:
    """Settings of wrong types and values, in the file or on the command line."""
    _files(folder)
    changes = [(rng.choice(settings()), rng.choice(VALUES)) for _ in range(rng.choice((1, 1, 1, 3)))]
    (folder / "config.toml").write_text(GOOD)
    named = frozenset({"secret.csv"} if any("secret.csv" in value for _, value in changes) else ())
    if rng.random() < 0.5:
        # a NUL cannot be an argument of a process; surrogates can, for bytes that are not UTF-8
        own = [f"{key}={value}".replace("\0", "") for key, value in changes]
        command = (
            "run",
            "config.toml",
            *own,
            *rng.sample(("x=\udcff", "data.source=\udcff", "=", "a..b=1"), 1)[: rng.random() < 0.1],
        )
        return Case(command, named=named)
    if rng.random() < 0.2:
        return Case(("config", "config.toml", *(f"{key}={value}" for key, value in changes)), named=named)
    nested: dict[str, Any] = {}
    for key, value in changes:
        nested[key] = value
    lines = "".join(
        f"{key} = {value}\n" for key, value in nested.items() if not GOOD.count(f"\n{key.split('.')[-1]} =")
    )
    (folder / "config.toml").write_text(lines + GOOD)
    return Case(("run", "config.toml"), named=named)


def file(rng: random.Random, folder: Path) -> Case:
    """Files that are no TOML, or no files."""
    _files(folder)
    text = GOOD.encode()
    config, kind = folder / "config.toml", rng.randrange(12)
    start = rng.randrange(len(text))
    if kind == 0:
        config.write_bytes(text[:start])
    elif kind == 1:
        config.write_bytes(text[:start] + rng.randbytes(3) + text[start:])
    elif kind == 2:
        data = bytearray(text)
        for _ in range(rng.choice((1, 3, 10))):
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        config.write_bytes(bytes(data))
    elif kind == 3:
        config.write_text(".".join("a" * rng.choice((33, 1000, 50_000))) + " = 1\n" + GOOD)
    elif kind == 4:
        config.write_text("[" + ".".join("a" * rng.choice((20, 500))) + "]\n" + GOOD)
    elif kind == 5:
        config.write_text("a = " + "[" * 100_000)
    elif kind == 6:
        os.mkfifo(config)
    elif kind == 7:
        with config.open("wb") as sparse:
            sparse.truncate(1 << 40)
    elif kind == 8:
        config.mkdir()
    elif kind == 9:
        config.write_text(GOOD.replace("\n", "\r"), encoding=rng.choice(("utf-16", "utf-32", "latin-1")))
    elif kind == 10:
        config.write_text(f"name = '{rng.choice(('x' * 300, 'a/b', '..', 'é', '-'))}'\n" + GOOD)
    else:
        return Case(
            (
                rng.choice(("run", "config", "doctor")),
                rng.choice(("/dev/zero", "fifo", "loop", "socket", "x" * 300, "\udcff", "/")),
            )
        )
    return Case((rng.choice(("run", "run", "config")), "config.toml"))


def arguments(rng: random.Random, folder: Path) -> Case:
    """Names and numbers of the command line."""
    _files(folder)
    (folder / "config.toml").write_text(GOOD)
    name = rng.choice(
        (*(name.replace("\0", "") for name in NAMES), "x" * 300, "a/" * 3000, "\udcff", "/", "..", "fifo", "loop")
    )
    if name == "../../secret":  # as an output it would be written there, as asked
        name = "elsewhere/secret"
    commands = (
        ("status", name),
        ("resume", name),
        ("resume", "last", name),
        ("export", name, "-o", "new.onnx"),
        ("export", "last", "-o", name),
        ("doctor", name),
        ("doctor", "model.onnx", name),
        ("doctor", "model.onnx", "--converters", name),
        ("doctor", f"{name}.onnx"),
        ("diff", name, name),
        ("init", name, "train.csv", "--no-try", "-o", "new.toml"),
        ("init", "model.onnx", name, "--no-try", "-o", "new.toml"),
        ("init", "model.onnx", "train.csv", "--no-try", "-o", name),
        ("run", name),
        ("config", name),
        ("runs", "--json"),
        ("status", "--json", name),
        ("clean", "--days", rng.choice(("-1", "nan", "1e999", DIGITS, "x"))),
        ("sweep", "config.toml", f"optimizer.learning_rate={name}", "--trials", rng.choice(("-1", "0", DIGITS, "2"))),
        ("sweep", "config.toml", rng.choice(("optimizer.learning_rate=log(0, 1)", "a=log(", "=1,2", "name=a,b", "x"))),
        ("sweep", "--resume", name),
        ("reference", "gpt2", "--vocab-size", rng.choice(("-1", "0", DIGITS, "x")), "-o", "new.onnx"),
    )
    # the directory above, and that of all files, contain `secret`
    named = frozenset({"secret.txt", "secret.bin", "secret.csv", "secret.onnx"} if name in ("..", "/") else ())
    return Case(rng.choice(commands), named=named)
