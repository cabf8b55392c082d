"""The table of compatibility: it holds every committed file, its results are those of the files, and it can be made."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.compatibility import __main__ as command
from tests.compatibility import report
from tests.compatibility.checks import examine
from tests.compatibility.entries import all_entries
from tests.support import zoo
from tests.support.foreign_files import FILES, FOLDER
from tests.support.ranks import ROOT


def test_every_committed_file_has_a_record_and_a_row_in_the_table() -> None:
    committed = {path.stem for path in FOLDER.glob("*.onnx")}
    others = {name for name in committed - set(FILES) if name.partition("-")[0] in report.OTHERS}
    assert committed - others == set(FILES)
    for kind, (_, test) in report.OTHERS.items():
        assert f"{kind}-" in (ROOT / test).read_text(encoding="utf-8")
    examined = {line["entry"].removeprefix("foreign/") for line in report.read().values() if not line["variant"]}
    missing = set(FILES) ^ examined
    assert not missing, f"run `make compatibility ENTRIES=foreign`: {', '.join(sorted(missing))}"


def test_every_row_is_of_a_file_that_is_still_examined() -> None:
    assert set(report.read()) <= set(all_entries())
    assert {name.split("/")[1] for name in all_entries() if name.startswith("zoo/")} == set(zoo.ARCHITECTURES)


def test_committed_files_are_small_and_name_no_folder_of_a_machine() -> None:
    paths = list(FOLDER.iterdir())
    assert sum(path.stat().st_size for path in paths if path.is_file()) < 2_000_000
    for path in FOLDER.glob("*.onnx"):
        content = path.read_bytes()
        assert len(content) < 200_000
        assert not re.search(rb"/(home|tmp|usr|opt|work|root)/", content), path.name


def test_the_page_shows_each_result(tmp_path: Path) -> None:
    lines = report.read()
    page = report.page(lines)
    for line in lines.values():
        assert line["architecture"].replace("_", "\\_") in page
        for check in report.CHECKS:
            if line[check] and line[check] != "not reached":
                assert f"`{line['entry']}` | {report.CHECKS[check]}" in page
    report.write(lines, tmp_path / "results.jsonl")
    assert report.read(tmp_path / "results.jsonl") == lines


@pytest.mark.parametrize("name", ["jax2onnx-cnn", "tf2onnx-text"])
def test_a_file_of_another_framework_gets_better_weights_and_nothing_else_is_changed(name: str) -> None:
    good = examine(all_entries()[f"foreign/{name}"])
    assert [good[check] for check in report.CHECKS] == ["", "", ""]
    assert good["figures"]["loss_after"] < good["figures"]["loss"]


def test_a_file_of_which_the_framework_trains_something_else_is_said_not_to_train() -> None:
    entry = all_entries()["foreign/tf2onnx-text"]
    (first, *_) = FILES["tf2onnx-text"].trained
    other = examine(dataclasses.replace(entry, truth=lambda model: {**entry.truth(model), first: False}))
    assert [other[check] for check in report.CHECKS] == ["", f"trained though a buffer: {first}", ""]


@pytest.mark.slow
def test_the_command_notes_an_ended_process_goes_on_and_does_not_repeat_what_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    dying = [sys.executable, "-c", "import os; input(); os.kill(os.getpid(), 9)"]
    start, started = command._start, list[subprocess.Popen[str]]()

    def start_one_that_dies() -> subprocess.Popen[str]:
        pipe = subprocess.PIPE
        started.append(start() if started else subprocess.Popen(dying, stdin=pipe, stdout=pipe, text=True))
        return started[-1]

    monkeypatch.setattr(report, "RESULTS", tmp_path / "results.jsonl")
    monkeypatch.setattr(command, "_start", start_one_that_dies)
    names = ["foreign/jax2onnx-text", "foreign/paddle2onnx-text"]
    assert command.main([*names, "--processes", "1"]) == 0
    assert len(started) == 2
    found = report.read(tmp_path / "results.jsonl")
    assert {name: line["imports"] for name, line in found.items()} == {
        names[0]: "the process ended: SIGKILL",
        names[1]: "",
    }
    capsys.readouterr()
    assert command.main(names) == 0
    assert "0 of 2 entries to examine" in capsys.readouterr().out
