"""What a configuration names in the world is asked of the world."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from onward.trainer.config.loading import build_config
from onward.trainer.config.sections.data import DataConfig
from onward.trainer.config.sections.model import ModelConfig
from onward.trainer.config.sections.ranks import LaunchConfig
from onward.trainer.config.sections.results import CheckpointConfig, ExportConfig
from onward.trainer.diagnostics.config_check import check_files_and_data
from onward.trainer.diagnostics.export_conflicts import export_conflicts
from onward.trainer.errors import ConfigError
from onward.trainer.onnx_graph.node_builder import GraphWriter
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


def test_two_stars_beside_other_letters_match_no_file(tmp_path: Path) -> None:
    (problem,) = check_files_and_data({"data": DataConfig(source=f"{tmp_path}/a**")})
    assert problem == f"data.source: there is no file, directory or glob match {tmp_path}/a**"


@pytest.mark.parametrize("key", ["evaluation_source", "test_source"])
def test_held_out_data_that_lacks_a_column_is_refused_before_training(key: str, tmp_path: Path) -> None:
    (tmp_path / "m.onnx").write_bytes(graphs.tiny_mlp().SerializeToString())
    names = [*(f"x{at}" for at in range(4)), "label"]
    for file, header in (("train", names), ("held", names), ("other", names[1:])):
        rows = [",".join(["0"] * len(header))] * 8
        (tmp_path / f"{file}.csv").write_text("\n".join([",".join(header), *rows]) + "\n")

    def problems(held_out: str) -> list[str]:
        source, inputs = str(tmp_path / "train.csv"), {"features": names[:4]}
        config = build_config(
            {
                "model": {"path": str(tmp_path / "m.onnx")},
                "data": {"source": source, key: str(tmp_path / held_out), "inputs": inputs},
                "train": {"num_steps": 1, "global_batch_size": 4},
                "loss": {"name": "cross_entropy"},
            }
        )
        return check_files_and_data(dict(config))

    assert problems("held.csv") == []
    problem, *_ = problems("other.csv")
    assert "other.csv" in problem
    assert "x0" in problem


def test_an_export_path_names_a_file_not_a_directory(tmp_path: Path) -> None:
    (problem,) = check_files_and_data({"export": ExportConfig(path=str(tmp_path))})
    assert f"{tmp_path} is a directory; name the file to write" in problem


def test_an_existing_file_at_the_export_path_is_refused_before_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ONWARD_HOME", str(tmp_path / "home"))
    kept = tmp_path / "kept.onnx"
    kept.write_text("the only copy")
    (problem,) = check_files_and_data({"export": ExportConfig(path=str(kept))})
    assert problem.startswith(f"export.path: {kept} exists, and no export has left it so; choose another name")
    assert "export.overwrite = true" in problem
    assert check_files_and_data({"export": ExportConfig(path=str(kept), overwrite=True)}) == []
    free = ExportConfig(path=str(tmp_path / "new.onnx"), variants=("fp16",))
    assert check_files_and_data({"export": free}) == []
    (tmp_path / "new.fp16.onnx").write_text("another only copy")
    (problem,) = check_files_and_data({"export": free})
    assert "new.fp16.onnx exists" in problem


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


def test_files_for_onnxruntime_that_cannot_be_written_are_refused_before_training(tmp_path: Path) -> None:
    g = GraphWriter("loss", seed=0, opset=20)
    g.input("output", ("n", 1))
    g.op("ReduceMean", g.op("Gelu", g.op("Sub", "output", g.input("labels", ("n", "columns")))), outputs="mean")
    g.output("mean", (1, 1))
    onnx.save(g.model(), tmp_path / "loss.onnx")
    data = {"features": np.zeros((8, 4), np.float32), "label": np.zeros((8, 1), np.float32)}
    np.savez(tmp_path / "data.npz", **data)

    def problems(opset: int, loss: dict[str, str], *, shape: bool = True) -> list[str]:
        model = graphs.tiny_mlp()
        model.opset_import[0].version = opset
        if not shape:
            model.graph.output[0].type.tensor_type.ClearField("shape")
        (tmp_path / "m.onnx").write_bytes(model.SerializeToString())
        config = build_config(
            {
                "model": {"path": str(tmp_path / "m.onnx")},
                "data": {"source": str(tmp_path / "data.npz")},
                "train": {"num_steps": 1, "global_batch_size": 4},
                "loss": loss,
                "export": {"variants": ["training"]},
            }
        )
        return check_files_and_data(dict(config))

    own = {"file": str(tmp_path / "loss.onnx")}
    assert problems(20, {"name": "mse"}) == []
    (old,) = problems(11, {"name": "mse"})
    assert old.startswith(
        "export.variants 'training': opset 11 does not have the operators of a loss (SoftmaxCrossEntropyLoss, "
    )
    (unknown,) = problems(20, {"name": "mse"}, shape=False)
    assert unknown.startswith("export.variants 'training': the file does not declare the shape of ")
    (newer,) = problems(17, own)
    assert "has opset 20, and opset 17 of the model has other versions of Gelu" in newer
    (labels,) = problems(20, own)
    assert "the length of axis 1 of its input 'labels' is not known; declare it as a number" in labels
