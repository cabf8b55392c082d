"""What a configuration names in the world is asked of the world."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx
import pytest

from onward.trainer.config.loading import build_config
from onward.trainer.config.sections.data import DataConfig
from onward.trainer.config.sections.model import ModelConfig
from onward.trainer.config.sections.ranks import LaunchConfig
from onward.trainer.config.sections.results import CheckpointConfig, ExportConfig
from onward.trainer.diagnostics.config_check import check_files_and_data, export_conflicts
from onward.trainer.errors import ConfigError
from tests.support import graphs


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONWARD_HOME", str(tmp_path / "home"))


def test_nothing_is_judged_that_could_not_be_read() -> None:
    assert check_files_and_data({}) == []


@pytest.mark.parametrize("source", ["digits", "stdlib", "{}", "{}/a.csv", "{}/*.csv", "{}/**/b.csv"])
def test_a_name_a_directory_a_file_and_a_glob_are_sources(source: str, tmp_path: Path) -> None:
    (tmp_path / "deeper").mkdir()
    for file in ("a.csv", "deeper/b.csv"):
        (tmp_path / file).touch()
    assert check_files_and_data({"data": DataConfig(source=source.format(tmp_path))}) == []


def test_every_absent_path_is_named(tmp_path: Path) -> None:
    absent = str(tmp_path / "absent")
    (tmp_path / "file").touch()
    problems = check_files_and_data(
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


def test_an_export_path_names_a_file_not_a_directory(tmp_path: Path) -> None:
    (problem,) = check_files_and_data({"export": ExportConfig(path=str(tmp_path))})
    assert f"{tmp_path} is a directory; name the file to write" in problem


def test_an_export_writes_over_neither_the_original_nor_weights_that_are_not_its_own(tmp_path: Path) -> None:
    def kept_beside(folder: Path, name: str) -> Path:
        folder.mkdir(exist_ok=True)
        path, model = folder / name, graphs.tiny_mlp()
        onnx.save(model, path, save_as_external_data=True, location="weights.bin", size_threshold=0)
        return path

    source, other = kept_beside(tmp_path / "a", "m.fp16.onnx"), kept_beside(tmp_path / "b", "other.onnx")
    (itself,) = export_conflicts(source, source)[:1]
    assert itself == f"{source} is the model that is trained; choose another name"
    assert export_conflicts(source.with_name("m.onnx"), source, ["bf16", "fp16"])[0] == itself, (
        "by the name of a variant"
    )
    (theirs,) = export_conflicts(source.with_name("new.onnx"), source)
    assert "keeps weights in weights.bin, and in" in theirs
    assert "those belong to the original; choose another directory" in theirs
    (foreign,) = export_conflicts(tmp_path / "b" / "new.onnx", source)
    assert "weights.bin, which in" in foreign
    assert "is not a file of new.onnx" in foreign
    assert export_conflicts(other, source) == [], "an earlier export may be replaced"
    assert export_conflicts(tmp_path / "c" / "new.onnx", source) == []
    sections = {"model": ModelConfig(path=source), "export": ExportConfig(path=str(source))}
    assert check_files_and_data(sections)[0] == f"export.path: {itself}"


@pytest.mark.parametrize(
    "wrong",
    [{"alias": "latest"}, {"alias": "v12"}, {"alias": "a.b"}, {"register_as": "a/b"}, {"register_as": "it's"}],
    ids=str,
)
def test_a_name_that_the_registry_does_not_take_is_refused(wrong: dict[str, str]) -> None:
    raw = {"model": {"path": "m"}, "data": {"source": "d"}, "train": {"num_steps": 1}, "export": wrong}
    (key, value), (problem,) = *wrong.items(), refused(raw)
    assert problem.startswith(f"export.{key}: ")
    assert repr(value) in problem


def refused(raw: dict[str, Any]) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as error:
        build_config(raw)
    return error.value.problems


def test_a_home_that_cannot_be_written_to_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("ONWARD_HOME", str(tmp_path / "file" / "home"))
    (problem,) = check_files_and_data({})
    assert "set ONWARD_HOME to a directory of yours" in problem
