"""A rank, an export, a plan and a rehearsal parse each file once, or twice, and pass on what they have read."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from onward.trainer.config.sections.model import ModelConfig
from onward.trainer.data.schema.signature import read_source, read_training_signature, training_signature
from onward.trainer.onnx_graph.files.source_model import SourceModel
from onward.trainer.run.directory import RunDir
from tests.support import rank_server
from tests.support.ranks import ROOT, SETTINGS
from tests.support.runs import make_run

OF_BYTES = {"sha256", "_same_content", "map_external"}
"""Functions that read the bytes of files without parsing them."""


def run_of(folder: Path, model: onnx.ModelProto, **data: Any) -> RunDir:
    rows = np.random.default_rng(0)
    columns = {"features": rows.normal(size=(40, 4)).astype(np.float32), "label": np.arange(40) % 3}
    np.savez(folder / "test.npz", **columns)
    sections = {
        # both from the data, so that there is a resolved.json
        "loss": [{"name": "cross_entropy", "class_weights": "balanced"}],
        "train": {"global_batch_size": 8, "num_steps": 2, "evaluation_period": 1},
        "data": {"test_source": str(folder / "test.npz"), **data},
    }
    return make_run(folder, model, columns, **sections)


def reads(folder: Path, *arguments: str | Path) -> dict[str, dict[str, int]]:
    """Run the trainer, and return file -> reader -> how often it has read it."""
    out = folder / "reads.json"
    words = [*rank_server.command(), "-m", "tests.support.file_reads", out, "onward.trainer", *arguments]
    done = subprocess.run(words, env=os.environ | SETTINGS, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    found: dict[str, dict[str, int]] = {}
    for key, count in json.loads(out.read_text()).items():
        file, _, reader = key.rpartition(": ")
        found.setdefault(file, {})[reader] = count
    return found


def parsed(readers: Mapping[str, int]) -> dict[str, int]:
    return {reader: count for reader, count in readers.items() if reader not in OF_BYTES}


def mlp(width: int = 40000, shape: Sequence[int | str] | None = ("N", 3)) -> onnx.ModelProto:
    """Features to three scores; if it is wide, `read_mapped` leaves weights in the file. shape: that of the output."""
    rng = np.random.default_rng(0)
    stored = {"wide": rng.normal(size=(4, width)), "narrow": rng.normal(size=(width, 3)) / 200}
    nodes = [
        helper.make_node("MatMul", ["features", "wide"], ["hidden"]),
        helper.make_node("Relu", ["hidden"], ["active"]),
        helper.make_node("MatMul", ["active", "narrow"], ["scores"]),
    ]
    graph = helper.make_graph(
        nodes,
        "large",
        [helper.make_tensor_value_info("features", TensorProto.FLOAT, ["N", 4])],
        [helper.make_tensor_value_info("scores", TensorProto.FLOAT, shape)],
        [numpy_helper.from_array(value.astype(np.float32), name) for name, value in stored.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunDir, dict[str, dict[str, int]]]:
    """A run that was trained, and what its rank has read."""
    folder = tmp_path_factory.mktemp("large")
    run = run_of(folder, mlp())
    return run, reads(folder, "train", run.root)


def test_a_rank_parses_the_model_and_its_settings_once_and_leaves_large_weights_in_the_file(
    large: tuple[RunDir, dict[str, dict[str, int]]],
) -> None:
    run, found = large
    assert parsed(found[str(run.root.parent / "model.onnx")]) == {"read_mapped": 1}
    assert found[str(run.config)] == {"read_config": 1}
    assert found[str(run.resolved)] == {"read_record": 1}


def test_a_rank_parses_a_model_without_large_weights_once(tmp_path: Path) -> None:
    run = run_of(tmp_path, mlp(width=4))
    found = reads(tmp_path, "train", run.root)
    # read_mapped looks for large weights, and parses nothing where there are none; the checker takes files of any size
    assert found[str(tmp_path / "model.onnx")] == {"read_mapped": 1, "read_model": 1, "onnx.checker": 1}


def test_an_export_parses_each_file_once_but_the_original_again_for_the_report(
    large: tuple[RunDir, dict[str, dict[str, int]]],
) -> None:
    run, _ = large
    found = reads(run.root.parent, "export", run.root, run.checkpoint(2))
    # the graph of the original has become the written one by the time at which the report compares both
    assert parsed(found.pop(str(run.root.parent / "model.onnx"))) == {"read_model": 2, "onnx.checker": 1}
    written = {file: parsed(readers) for file, readers in found.items() if file.endswith(".onnx")}
    (under_its_first_name,) = (file for file in written if ".verifying-" in file)
    assert written == {
        under_its_first_name: {"ModelFile.read": 1, "onnx.checker": 1},
        str(run.export / "model.onnx"): {},
    }
    assert found[str(run.config)] == {"read_config": 1}
    assert found[str(run.resolved)] == {"read_record": 1}
    assert found[str(run.identity)] == {"read_record": 1}


def settings_of(run: RunDir, folder: Path) -> Path:
    """Return a folder with what the process of a plan or of a rehearsal begins with."""
    folder.mkdir()
    for record in (run.config, run.code):
        if record.exists():
            (folder / record.name).write_bytes(record.read_bytes())
    return folder


def test_a_plan_parses_the_model_once(large: tuple[RunDir, dict[str, dict[str, int]]], tmp_path: Path) -> None:
    run, _ = large
    found = reads(tmp_path, "plan", settings_of(run, tmp_path / "plan"))
    assert (tmp_path / "plan" / "plan.json").exists()
    assert parsed(found[str(run.root.parent / "model.onnx")]) == {"read_mapped": 1}


def test_a_rehearsal_parses_the_model_for_its_signature_and_for_its_graph(
    large: tuple[RunDir, dict[str, dict[str, int]]], tmp_path: Path
) -> None:
    run, _ = large
    found = reads(tmp_path, "rehearse", settings_of(run, tmp_path / "rehearsed"))
    assert (tmp_path / "rehearsed" / "rehearsal.json").exists()
    readers = parsed(found[str(run.root.parent / "model.onnx")])
    # once more where onnxruntime opens the file itself, which is looked through before
    assert readers == {"read_mapped": 1, "read_model": 2, "onnx.checker": 1}


@pytest.mark.parametrize("settings", [{}, {"num_classes": 5}, {"output": "active"}])
def test_the_signature_of_a_file_that_was_read_is_that_of_the_file_and_leaves_the_graph_as_it_is(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(mlp(shape=None).SerializeToString())
    model = ModelConfig(path=path, **settings)
    for by_parts in (False, True):
        source = read_source(path, by_parts=by_parts)
        assert source.is_mapped == by_parts
        before = source.proto.SerializeToString(deterministic=True)
        assert training_signature(source, model) == read_training_signature(model)
        assert source.proto.SerializeToString(deterministic=True) == before
        assert source.files == [path]


def test_external_data_files_are_files_of_the_model_also_where_large_weights_stay_in_it(tmp_path: Path) -> None:
    model = mlp()
    narrow = model.graph.initializer[1]
    (tmp_path / "narrow.bin").write_bytes(narrow.raw_data)
    narrow.ClearField("raw_data")
    narrow.data_location = TensorProto.EXTERNAL
    narrow.external_data.add(key="location", value="narrow.bin")
    path = tmp_path / "model.onnx"
    path.write_bytes(model.SerializeToString())
    for by_parts in (False, True):
        assert SourceModel.read(path, by_parts=by_parts).files == [path, tmp_path / "narrow.bin"]
