"""What is written beside the exported file: the weights it keeps elsewhere, its variants, what trains it on."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest

from onward.tasks.export import copy_to, export_file
from onward.trainer.config.sections.results import ExportConfig
from onward.trainer.data.schema.signature import model_digest
from onward.trainer.errors import ExportRefused, RuntimeUnavailable
from onward.trainer.run.directory import RunDir
from onward.trainer.run.records import ExportedModel, read_record
from tests.support import graphs, runs


def kept_elsewhere(folder: Path) -> onnx.ModelProto:
    """A model whose larger tensors are in `weights.bin`."""
    folder.mkdir()
    path = folder / "model.onnx"
    model = graphs.tiny_conv_net_with_batch_norm()
    onnx.save(model, path, save_as_external_data=True, location="weights.bin", size_threshold=256)
    return onnx.load(path, load_external_data=False)


def trained(folder: Path) -> tuple[RunDir, Path]:
    run = runs.make_run(
        folder,
        kept_elsewhere(folder),
        runs.tiny_images(60),
        train={"global_batch_size": 8, "num_steps": 6},
        optimizer={"learning_rate": 1e-2},
        parallel={"data": 2},
    )
    return run, run.checkpoint(runs.train_run(run).step)


@pytest.mark.slow
@pytest.mark.mpi
@pytest.mark.usefixtures("forked")
def test_a_model_that_keeps_its_weights_elsewhere_is_trained_and_written_with_all_that_goes_with_it(
    tmp_path: Path,
) -> None:
    run, last = trained(tmp_path / "model")
    before = (tmp_path / "model" / "weights.bin").read_bytes()
    extras = ExportConfig.model_validate({"variants": ["optimized", "int8_static", "training"]})
    exported = export_file(run, last, extras=extras)

    assert [path.name for path in exported.beside] == ["weights.bin"]
    assert exported.parity < 2e-6
    assert exported.changed == 12, "two convolutions, two norms of four tensors, the last layer's two"
    assert (tmp_path / "model" / "weights.bin").read_bytes() == before
    assert exported.beside[0].read_bytes() != before
    # as JSON, where a time that was only noise, NaN, equals itself
    assert read_record(run.exported, ExportedModel).model_dump_json() == exported.model_dump_json()
    assert not [path for path in run.export.iterdir() if path.name.startswith(".")], "the stage is gone"

    feed = graphs.feed(graphs.tiny_conv_net_with_batch_norm(), 5, seed=3)
    want = onnxruntime.InferenceSession(str(exported.path)).run(None, feed)[0]
    assert len(exported.variants) == 2
    for variant in exported.variants:
        assert not variant.refused
        got = onnxruntime.InferenceSession(str(variant.path)).run(None, feed)[0]
        assert np.abs(got - want).max() < 0.1 * np.abs(want).max()
    assert {path.name for path in exported.training} >= {"training.onnx", "optimizer.onnx", "eval.onnx"}

    moved = export_file(run, last, tmp_path / "elsewhere" / "out.onnx", extras=ExportConfig())
    assert (tmp_path / "elsewhere" / "weights.bin").read_bytes() == exported.beside[0].read_bytes()
    assert model_digest(moved.path) == exported.sha256
    with pytest.raises(RuntimeUnavailable, match="choose another directory"):
        copy_to(tmp_path / "model" / "out.onnx", exported, source=tmp_path / "model" / "model.onnx")
    assert (tmp_path / "model" / "weights.bin").read_bytes() == before


@pytest.mark.mpi
@pytest.mark.usefixtures("forked")
def test_weights_that_changed_under_a_run_stop_its_export(tmp_path: Path) -> None:
    run, last = trained(tmp_path / "model")
    side = tmp_path / "model" / "weights.bin"
    content = bytearray(side.read_bytes())
    content[0] ^= 1
    side.write_bytes(content)
    with pytest.raises(ExportRefused, match="changed since the run began"):
        export_file(run, last)
