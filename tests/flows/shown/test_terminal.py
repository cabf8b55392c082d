"""No name of a file commands the terminal: what a command prints is shown and not obeyed."""

from __future__ import annotations

import contextlib
import io
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from rich.console import Console

from onward.flows import cli
from onward.flows.live_view.view import ViewConsole
from onward.flows.shown.terminal import EscapedStream, escaped_output
from onward.trainer.run.remote import remote_files
from tests.support.terminals import Terminal

EVIL = "\x1b[2J\x1b]0;title\x07\x08\x9b2J\x85\u202eeman\u2066\r\x1bc"
"""Clears the screen, sets the title, rings, goes back, clears again (C1), ends the line, reverses letters, resets."""
CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")
"""What a terminal obeys, but for the line ends that its driver writes."""
OWN = re.compile(r"\x1b\[([0-9;]*m|\?25[lh]|1A|2K)")
"""Colours, and what the live view of `onward run` writes: it hides the cursor, and goes up and erases its own lines."""


@pytest.fixture
def workshop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with a model, a table and configurations that have EVIL in every name."""
    names = {each: f"{each}{EVIL}" for each in ("x", "y", "w", "batch", "node", "graph", "exporter")}
    weight = numpy_helper.from_array(np.ones((2, 3), np.float32), names["w"])
    node = helper.make_node("MatMul", [names["x"], names["w"]], [names["y"]], names["node"])
    values = [
        helper.make_tensor_value_info(names[name], TensorProto.FLOAT, [names["batch"], length])
        for name, length in (("x", 2), ("y", 3))
    ]
    graph = helper.make_graph([node], names["graph"], values[:1], values[1:], [weight])
    opsets = [helper.make_opsetid("", 20)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10, producer_name=names["exporter"])
    model_file, table = f"model{EVIL}.onnx", f"train{EVIL}.csv"
    onnx.save_model(model, tmp_path / model_file)
    onnx.save_model(model, tmp_path / "model.onnx")
    model.graph.node[0].op_type = f"Unknown{EVIL}"
    model.graph.node[0].domain = f"own{EVIL}"
    onnx.save_model(model, tmp_path / "unknown.onnx")
    classes = [f'"{name}{EVIL}"' for name in ("cat", "dog", "fox")]
    rows = "".join(f'{i},"{i if i % 7 else EVIL}",{classes[i % 3]}\n' for i in range(30))
    (tmp_path / table).write_text(f'"a{EVIL}","b{EVIL}",label\n{rows}')
    columns = json.dumps([f"a{EVIL}", f"b{EVIL}"])
    text = (
        f"[model]\npath = {json.dumps(model_file)}\n[data]\nsource = {json.dumps(table)}\n[data.inputs]\n"
        f"{json.dumps(names['x'])} = {columns}\n[train]\nnum_steps = 2\n"
    )
    (tmp_path / "config.toml").write_text(text)
    key = json.dumps(EVIL)
    (tmp_path / "keys.toml").write_text(f"name = {key}\n{key} = 1\n{text}{key} = 1\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ONWARD_HOME", str(tmp_path / "home"))
    return tmp_path


def printed(words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> str:
    """Run a command in a terminal; return all that was written to it."""
    terminal = Terminal(columns=200)
    for stream in ("stdout", "stderr"):
        monkeypatch.setattr(sys, stream, terminal.stream)
    monkeypatch.setattr(sys, "argv", ["onward", *words])
    with contextlib.suppress(SystemExit):
        cli.main()
    terminal.close()
    return terminal.text


@pytest.mark.parametrize(
    "words",
    [
        ("doctor", "model.onnx"),
        ("doctor", f"model{EVIL}.onnx"),
        ("doctor", "unknown.onnx"),
        ("diff", "model.onnx", "unknown.onnx"),
        ("init", "model.onnx", f"train{EVIL}.csv", "--no-try", "-o", f"new{EVIL}.toml"),
        ("config", "config.toml"),
        ("config", "keys.toml"),
        ("config", f"absent{EVIL}.toml"),
        ("run", "keys.toml"),
        ("run", "config.toml", f"train.{EVIL}=1"),
        ("plan", "config.toml"),
        ("status", f"absent{EVIL}"),
        ("verify", f"absent{EVIL}"),
    ],
    ids=lambda words: re.sub(r"[^a-z .-]", "", " ".join(words)),
)
def test_no_command_writes_what_a_terminal_obeys(
    words: tuple[str, ...], workshop: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = printed(words, monkeypatch)
    assert r"\x1b[2J" in text or r"\u001b[2J" in text  # the second in a value of TOML
    assert not CONTROL.search(OWN.sub("", text)), repr(text)


def test_a_stream_shows_every_character_that_a_terminal_obeys() -> None:
    stream = io.StringIO()
    EscapedStream(stream).write(f"a{EVIL}b\tc\nd\udcff")
    shown = r"a\x1b[2J\x1b]0;title\x07\x08\x9b2J\x85\u202eeman\u2066\r\x1bcb" + "\tc\nd" + r"\udcff"
    assert stream.getvalue() == shown


def test_colours_of_rich_pass_and_hidden_letters_and_movements_do_not() -> None:
    stream = io.StringIO()
    console = Console(file=EscapedStream(stream), force_terminal=True, color_system="standard")  # type: ignore[arg-type]
    console.print(f"[red]a[/red] \x1b[8m{EVIL}", highlight=False)
    assert stream.getvalue().startswith("\x1b[31ma\x1b[0m")
    assert not CONTROL.search(re.sub(r"\x1b\[(31|0)m", "", stream.getvalue()))


def test_the_progress_of_a_download_is_written_over_itself_and_no_other_text(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stderr", EscapedStream(terminal))
    progress = remote_files._Bar(f"model{EVIL}", 4_000_000)
    progress._shown_at -= 60
    progress.add(1_000_000)
    written = terminal.getvalue()
    assert written.startswith("\r\x1b[K[###")
    assert r"model\x1b[2J" in written
    assert not CONTROL.search(written.removeprefix("\r\x1b[K"))
    terminal.truncate(0)
    print("\r\x1b[Kall is well", end="", file=sys.stderr)
    assert r"\r\x1b[Kall is well" in terminal.getvalue()


def test_the_live_view_shows_names_and_moves_the_cursor_itself() -> None:
    stream = io.StringIO()
    console = ViewConsole(file=stream, force_terminal=True, highlight=False)
    console.print(f"loss{EVIL}")
    console.show_cursor(False)
    assert stream.getvalue().endswith("\x1b[?25l")
    assert not CONTROL.search(stream.getvalue().removesuffix("\x1b[?25l"))


@pytest.mark.parametrize("write", [print, lambda text: sys.stderr.writelines([text])])
def test_output_is_escaped_inside_and_as_it_was_afterwards(write: Callable[[str], None]) -> None:
    before = sys.stdout, sys.stderr
    with escaped_output():
        assert isinstance(sys.stdout, EscapedStream)
        write(EVIL)
    assert (sys.stdout, sys.stderr) == before
