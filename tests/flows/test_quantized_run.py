"""Quantized files through the command line: 8 bits from a float model, and adapters beside 4 bits; killed once."""

from __future__ import annotations

import signal
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto

from onward.trainer.run.directory import RunDir
from onward.trainer.run.records import ExportedModel, read_record
from tests.support.packed import two_layers
from tests.support.workshop import Workshop, finished, ranks_of, reached, until

pytestmark = [
    pytest.mark.usefixtures("only_servers"),
    pytest.mark.mpi,
    pytest.mark.slow,
    pytest.mark.timeout(900),
]


def test_a_trained_float_file_becomes_a_registered_8_bit_file_that_onnxruntime_runs_on_integers(tmp_path: Path) -> None:
    workshop = Workshop.made(tmp_path)
    try:
        config = str(tmp_path / "config.toml")
        name = "export.register_as=shapes"
        floats = workshop.onward("run", config, "train.num_steps=200", "parallel.data=1", name)
        aware = (config, name, f'model.path="{floats["model"]}"', "quantize.aware=true", "optimizer.learning_rate=3e-4")
        process = workshop.start("run", *aware)
        run = workshop.new_run()
        until(lambda: reached(run, 100), limit_s=300)
        ranks_of(run)[1].send_signal(signal.SIGKILL)
        found = finished(process)
        assert (found["state"], found["attempts"]) == ("exported", 2)
        assert found["registered"] == "shapes version 2"
        exported = read_record(RunDir(Path(found["directory"])).exported, ExportedModel)
    finally:
        workshop.close()
    model, before = onnx.load(found["model"]), onnx.load(floats["model"])
    assert [each.name for each in model.graph.output] == [each.name for each in before.graph.output]
    names = {tensor.name for tensor in model.graph.initializer if tensor.data_type == TensorProto.INT8}
    assert names & {tensor.name for tensor in before.graph.initializer}, "weights keep their names, in 8 bits"
    assert sum(exported.kernels.values()) > 0
    assert exported.fp32["evaluation/accuracy"] == pytest.approx(floats["after"]["evaluation/accuracy"])
    assert exported.after["evaluation/accuracy"] >= exported.before["evaluation/accuracy"]
    session = onnxruntime.InferenceSession(found["model"])
    images = np.load(tmp_path / "data.npz")["image"][:8]
    (logits,) = session.run(None, {session.get_inputs()[0].name: images})
    assert logits.shape == (8, 4)


ADAPTERS = """
[model]
path = "model.onnx"
loss = "cross_entropy"
[data]
source = "data.npz"
[lora]
weights = ["packed"]
rank = 4
[train]
num_steps = 400
global_batch_size = 32
[optimizer]
learning_rate = 0.01
[parallel]
data = 2
[checkpoint]
period = 50
"""


def test_adapters_are_trained_beside_4_bits_night_after_night(tmp_path: Path) -> None:
    workshop, config = Workshop(tmp_path), str(tmp_path / "config.toml")
    onnx.save(two_layers("nbits4"), tmp_path / "model.onnx")
    x = np.random.default_rng(0).standard_normal((400, 64)).astype(np.float32)
    np.savez(tmp_path / "data.npz", x=x, label=x[:, :4].argmax(1))
    (tmp_path / "config.toml").write_text(ADAPTERS)
    try:
        undisturbed = workshop.onward("run", config)
        process = workshop.start("run", config)
        run = workshop.new_run()
        until(lambda: reached(run, 100), limit_s=300)
        ranks_of(run)[1].send_signal(signal.SIGKILL)
        found = finished(process)
        assert found["attempts"] == 2
        second = workshop.onward("run", config, f"model.path={found['model']!r}")
    finally:
        workshop.close()
    assert Path(found["model"]).read_bytes() == Path(undisturbed["model"]).read_bytes()
    assert found["after"]["evaluation/accuracy"] > found["before"]["evaluation/accuracy"] + 0.2
    given, first, next_night = (onnx.load(path) for path in (tmp_path / "model.onnx", found["model"], second["model"]))
    packed = [t for model in (given, first, next_night) for t in model.graph.initializer if t.name == "packed"]
    assert packed[0] == packed[1] == packed[2]
    assert len(first.graph.node) == len(given.graph.node) + 4
    assert first.graph.node == next_night.graph.node
