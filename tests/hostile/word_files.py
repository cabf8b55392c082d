"""Words of a command line and keys of a file: long, deep, many, huge; and names that a terminal would obey."""

from __future__ import annotations

import json
import random
from pathlib import Path

from onnx import TensorProto, helper, numpy_helper

from tests.hostile.config_files import DIGITS, GOOD, settings
from tests.hostile.onnx_files import small_model
from tests.hostile.run_template import RUN, copy_into
from tests.hostile.sandbox import Case

ROWS = "".join(f"{i},1,2,3,{i % 3}\n" for i in range(40))


def _files(folder: Path, text: str = GOOD) -> None:
    (folder / "model.onnx").write_bytes(small_model().SerializeToString())
    (folder / "train.csv").write_text("x0,x1,x2,x3,label\n" + ROWS)
    (folder / "config.toml").write_text(text)


def overrides(rng: random.Random, folder: Path) -> Case:
    """Overrides of thousands of dots, brackets, letters, and thousands of overrides."""
    _files(folder)
    many = rng.choice((31, 33, 500, 5000, 50_000))
    words = (
        "a." * many + "b=1",
        "train." * many + "num_steps=1",
        "a" * many,
        "a" * many + "=1",
        "a" * many + ".toml",
        "x=" + "[" * many,
        "train.x={" + "a." * many + "b=1}",
        "train.x=" + "{a=" * min(many, 900) + "1" + "}" * min(many, 900),
        f"{rng.choice(settings())}={'a' * many}",
        f"{rng.choice(settings())}='{'a/' * many}'",
        f"train.num_steps={'9' * many}",
        "." * many + "=1",
        "=" * many,
        f"{rng.choice(settings())}={{}}",
        f"{rng.choice(settings())}.a.b=1",
    )
    chosen = [rng.choice(words)] if rng.random() < 0.8 else [f"train.k{n}=1" for n in range(min(many, 5000))]
    return Case((rng.choice(("run", "config", "config", "sweep", "plan")), "config.toml", *chosen))


def unknown_keys(rng: random.Random, folder: Path) -> Case:
    """Thousands of keys that no table has, in tables, outside of them, with dots, in lists of tables, over a base."""
    many = rng.choice((100, 5000, 20_000, 250_000))
    kind = rng.randrange(6)
    lines = [f"k{number} = 1" for number in range(many)]
    text = GOOD
    if kind == 0:
        text = GOOD + "\n".join(lines)
    elif kind == 1:
        text = "\n".join(lines) + GOOD
    elif kind == 2:
        text = GOOD + "".join(f"[t{number}]\n" for number in range(many))
    elif kind == 3:
        text = GOOD + "".join("[[loss]]\nk = 1\n" for _ in range(min(many, 20_000)))
    elif kind == 4:
        text = "".join(f"a{number}.b{number} = 1\n" for number in range(min(many, 150_000))) + GOOD
    else:
        (folder / "base.toml").write_text("[train]\n" + "\n".join(lines))
        text = 'base = "base.toml"\n' + GOOD + "\n".join(lines)
    _files(folder, text)
    return Case((rng.choice(("run", "config", "config")), "config.toml"))


def options(rng: random.Random, folder: Path) -> Case:
    """Options of commands and settings with numbers far beyond what memory holds."""
    _files(folder)
    huge = ("99999999999999", "2147483648", "16777217", "9223372036854775808", DIGITS, "-1", "nan", "inf", "1e999", "x")
    number = rng.choice(huge)
    if rng.random() < 0.5:
        some = [each for each in settings() if each.count(".")]
        return Case(("run", "config.toml", *(f"{rng.choice(some)}={number}" for _ in range(rng.choice((1, 1, 2))))))
    named = (
        *(("reference", "squeezenet", f"--{name}") for name in ("num-classes", "image-size", "channels", "seed")),
        *(("reference", "gpt2", f"--{name}") for name in ("vocab-size", "sequence-length", "num-layers", "width")),
        ("reference", "gpt2", "--num-heads"),
        # with the usual sizes they are ordinary requests for a file of 500 MB
        *(("reference", "gpt2", "--num-layers", "1", f"--{name}") for name in ("dropout", "seed")),
        ("doctor", "model.onnx", "train.csv", "--rows"),
        ("init", "model.onnx", "train.csv", "--no-try", "--steps"),
        ("sweep", "config.toml", "optimizer.learning_rate=log(1e-4, 1e-2)", "--trials"),
        ("runs", "--last"),
        ("gc", "--days"),
        ("gc", "--keep"),
        ("clean", "--days"),
        ("logs", "--rank"),
        ("plan", "config.toml", "--steps"),
    )
    output = ("-o", "new.onnx")
    chosen = rng.choice(named)
    return Case((*chosen, number, *(output if chosen[0] == "reference" else ())))


BEGINS = ("\x1b[2J", "\x1b[31m", "\x1b]0;owned\x07", "\x07", "\x9b2J", "\x85", "\u202e", "\u2066", "\x08" * 9, "\x1bc")
BEGINS += ("\r", "\n", "\u2028", "\x1b[8m", "\x1b[1;1H", "\x1bP1;2q\x1b\\", "\u200f")


def terminal_names(rng: random.Random, folder: Path) -> Case:
    """Names of tensors, columns, classes, files and runs that a terminal would obey."""

    def name(text: str) -> str:
        return f"{rng.choice(BEGINS)}{text}{rng.choice(('', *BEGINS))}" if rng.random() < 0.6 else text

    x, y, w, dim = name("x"), name("y"), name("w"), name("batch")
    columns = [name(f"x{number}") for number in range(4)]
    weight = numpy_helper.from_array(numpy_helper.to_array(small_model().graph.initializer[0])[:, :3].copy(), w)
    node = helper.make_node(rng.choice(("MatMul", "MatMul", name("Other"))), [x, w], [y], name("first"))
    shown = [helper.make_tensor_value_info(each, TensorProto.FLOAT, [dim, n]) for each, n in ((x, 4), (y, 3))]
    graph = helper.make_graph([node], name("net"), shown[:1], shown[1:], [weight])
    opsets = [helper.make_opsetid("", 20)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10, producer_name=name("exporter"))
    files = [name("model.onnx").replace("/", "_"), name("train").replace("/", "_") + ".csv"]
    (folder / files[0]).write_bytes(model.SerializeToString())
    classes = [name("cat"), name("dog"), name("fox")]

    def cell(text: str) -> str:
        return '"' + text.replace('"', '""') + '"'

    rows = "".join(f"{i},1,{rng.choice(('2', '2', cell(name('z'))))},3,{cell(classes[i % 3])}\n" for i in range(40))
    (folder / files[1]).write_text(",".join(map(cell, [*columns, "label"])) + "\n" + rows)
    text = (
        f"{rng.choice(('', '', json.dumps(name('key')) + ' = 1'))}\nname = {json.dumps(name('run'))}\n"
        f"[model]\npath = {json.dumps(files[0])}\n[data]\nsource = {json.dumps(files[1])}\n"
        f"[data.inputs]\n{json.dumps(x)} = {json.dumps(columns)}\n[train]\nnum_steps = 2\nglobal_batch_size = 4\n"
    )
    (folder / "config.toml").write_text(text if rng.random() < 0.5 else text.replace("name =", "#", 1))
    (folder / "good.onnx").write_bytes(small_model().SerializeToString())
    commands = (
        ("doctor", files[0]),
        ("doctor", files[0], files[1]),
        ("diff", files[0], "good.onnx"),
        ("init", files[0], files[1], "--no-try", "-o", "new.toml"),
        ("init", files[0], files[1], "--no-try", "-o", f"{name('new')}.toml".replace("/", "_")),
        ("run", "config.toml"),
        ("run", "config.toml", f"{name('data')}.x=1"),
        ("config", "config.toml"),
        ("plan", "config.toml"),
        ("status", name("last")),
        ("doctor", name("absent")),
        ("config", name("absent")),
    )
    if rng.random() < 0.15:
        home = copy_into(folder)
        record = home / "runs" / RUN / rng.choice(("identity.json", "flow_ending.json", "train.json", "metrics.json"))
        if record.exists():
            content = record.read_text()
            for part in ("test", "loss", "TrainingFailed", "done"):
                content = content.replace(f'"{part}"', json.dumps(name(part)))
            record.write_text(content)
        return Case(rng.choice((("status", "last"), ("runs",), ("verify", "last"), ("report", "last"), ("gc",))))
    return Case(rng.choice(commands))
