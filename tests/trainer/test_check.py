"""What a configuration names in the world is asked of the world."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainer.check import check_sections
from trainer.config import CheckpointConfig, DataConfig, ExportConfig, LaunchConfig, ModelConfig


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONWARD_HOME", str(tmp_path / "home"))


def test_nothing_is_judged_that_could_not_be_read() -> None:
    assert check_sections({}) == []


@pytest.mark.parametrize("source", ["digits", "stdlib", "{}", "{}/a.csv", "{}/*.csv", "{}/**/b.csv"])
def test_a_name_a_directory_a_file_and_a_glob_are_sources(source: str, tmp_path: Path) -> None:
    (tmp_path / "deeper").mkdir()
    for file in ("a.csv", "deeper/b.csv"):
        (tmp_path / file).touch()
    assert check_sections({"data": DataConfig(source=source.format(tmp_path))}) == []


def test_every_absent_path_is_named(tmp_path: Path) -> None:
    absent = str(tmp_path / "absent")
    (tmp_path / "file").touch()
    problems = check_sections(
        {
            "model": ModelConfig(path=Path(absent)),
            "data": DataConfig(source=f"{absent}/*.csv", evaluation_source=absent),
            "launch": LaunchConfig(hostfile=absent),
            "checkpoint": CheckpointConfig(load=absent),
            "export": ExportConfig(path=str(tmp_path / "file" / "model.onnx")),
        }
    )
    keys = ["model.path", "data.source", "data.evaluation_source", "launch.hostfile", "checkpoint.load", "export.path"]
    assert [problem.partition(":")[0] for problem in problems] == keys


def test_a_home_that_cannot_be_written_to_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("ONWARD_HOME", str(tmp_path / "file" / "home"))
    (problem,) = check_sections({})
    assert "set ONWARD_HOME to a directory of yours" in problem
