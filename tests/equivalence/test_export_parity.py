"""Promises 6 and 7: the exported ONNX under onnxruntime equals the trained module; untrained, it is what came in."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch

from onward.tasks.export import export_file
from onward.trainer.checkpoint.load import load
from onward.trainer.checkpoint.verification import verify
from onward.trainer.distributed.weights import weights_in
from onward.trainer.model.trainable import load_weights
from onward.trainer.onnx_import.driver import to_module
from onward.trainer.run.directory import RunDir, read_config
from tests.support import graphs, runs
from tests.support.trained_models import running_statistics

Data = Callable[..., dict[str, runs.Array]]

CASES: dict[str, tuple[Callable[[], onnx.ModelProto], Data]] = {
    "conv net": (graphs.tiny_conv_net, runs.tiny_images),
    "conv net with batch norm": (graphs.tiny_conv_net_with_batch_norm, runs.tiny_images),
    "transformer": (lambda: graphs.tiny_transformer(dropout=0.1), runs.tiny_text),
}


def trained(folder: Path, case: str, **sections: Any) -> tuple[RunDir, Path]:
    """A run of two ranks with its last checkpoint."""
    build, data = CASES[case]
    settings = {"train": {"global_batch_size": 8, "num_steps": 12}, "parallel": {"data": 2}} | sections
    run = runs.make_run(folder, build(), data(60), **settings)
    return run, run.checkpoint(runs.train_run(run).step)


@pytest.mark.mpi
@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize(
    "case",
    [pytest.param(name, marks=() if name == "conv net with batch norm" else pytest.mark.slow) for name in CASES],
)
def test_the_exported_file_under_onnxruntime_equals_the_trained_module(tmp_path: Path, case: str) -> None:
    run, last = trained(tmp_path, case, optimizer={"learning_rate": 1e-2})
    exported = export_file(run, last)
    assert exported.parity < 2e-6

    original = onnx.load(read_config(run).model.path)
    module = to_module(original)
    load_weights(module, weights_in(load(verify(last))[1]))
    session = onnxruntime.InferenceSession(str(exported.path), providers=["CPUExecutionProvider"])
    feed = graphs.feed(original, 5, seed=9)
    with torch.no_grad():
        ours = module.eval()(*map(torch.from_numpy, feed.values())).numpy()
    theirs = session.run(None, feed)[0]
    assert np.abs(ours - theirs).max() <= 2e-6 * np.abs(ours).max()

    evaluations = [event.values for event in runs.events(run, "evaluation")]
    assert exported.before == pytest.approx(evaluations[0], rel=1e-5)
    assert exported.after == pytest.approx(evaluations[-1], rel=1e-5)
    assert exported.after["evaluation/loss"] < exported.before["evaluation/loss"], "nothing was learned"


@pytest.mark.mpi
@pytest.mark.usefixtures("forked")
def test_a_weight_that_never_moves_comes_out_byte_for_byte(tmp_path: Path) -> None:
    still = {"optimizer": {"weights": [{"pattern": "*", "learning_rate_scale": 0.0}]}}
    run, last = trained(tmp_path, "conv net with batch norm", **still)
    exported = export_file(run, last)
    before, after = (
        {tensor.name: tensor.SerializeToString() for tensor in onnx.load(path).graph.initializer}
        for path in (read_config(run).model.path, exported.path)
    )
    statistics = running_statistics(to_module(onnx.load(read_config(run).model.path)))
    assert exported.changed == len(statistics)
    assert {name for name in after if after[name] != before[name]} == set(statistics)


def in_half_precision(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model with inputs, outputs and weights in FLOAT16."""
    for tensor in model.graph.initializer:
        if tensor.data_type == onnx.TensorProto.FLOAT:
            array = onnx.numpy_helper.to_array(tensor).astype(np.float16)
            tensor.CopyFrom(onnx.numpy_helper.from_array(array, tensor.name))
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.elem_type = onnx.TensorProto.FLOAT16
    return model


@pytest.mark.mpi
@pytest.mark.usefixtures("forked")
@pytest.mark.slow
@pytest.mark.parametrize("compute", ["fp32", "bf16"])
def test_a_file_in_half_precision_is_trained_on_columns_in_half_precision(tmp_path: Path, compute: str) -> None:
    images = runs.tiny_images(60)
    columns = {"image": images["image"].astype(np.float16), "label": images["label"]}
    model = in_half_precision(graphs.tiny_conv_net_with_batch_norm())
    settings = {"train": {"global_batch_size": 8, "num_steps": 12}, "parallel": {"data": 2}}
    run = runs.make_run(tmp_path, model, columns, **settings, precision={"compute": compute})
    exported = export_file(run, run.checkpoint(runs.train_run(run).step))
    found, before = runs.losses(run), onnx.load(read_config(run).model.path)
    assert found[12] < found[1]
    after = onnx.load(exported.path)
    assert [(t.name, t.data_type) for t in after.graph.initializer] == [
        (t.name, t.data_type) for t in before.graph.initializer
    ]
    assert after.graph.node == before.graph.node
