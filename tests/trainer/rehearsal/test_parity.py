"""The rehearsal compares the user's own file, as it is, with the module; and says how far two forms of it are apart."""

import re
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper, parser

from onward.trainer.config.loading import build_config
from onward.trainer.data.batches.batches import Batch
from onward.trainer.errors import ExportRefused
from onward.trainer.export.measuring.evaluation_data import EvaluationData
from onward.trainer.model.trainable import open_trainable
from onward.trainer.onnx_graph.surgery.strip_training import strip_training
from onward.trainer.onnx_import.ops.batch_norm import BatchNorm
from onward.trainer.rehearsal.parity import compare_untrained

RNG = np.random.default_rng(0)


def saved(folder: Path, text: str, **weights):
    model = parser.parse_model('<ir_version: 8, opset_import: ["": 17]>' + text)
    for name, value in weights.items():
        array = RNG.standard_normal(value) if isinstance(value, tuple) else np.asarray(value)
        array = array.astype(np.float32) if array.dtype == np.float64 else array
        model.graph.initializer.append(numpy_helper.from_array(array, name))
    onnx.save(model, folder / "model.onnx")
    return model


def compared(folder: Path, change=lambda module: None, rows=5):
    """Return what `compare_untrained` returns for folder/model.onnx on made-up rows of [3, 6]."""
    settings = {"model": {"path": folder / "model.onnx", "loss": "mse"}, "data": {"source": "x.npz"}}
    config = build_config(settings | {"train": {"num_steps": 1}, "launch": {"device": "cpu"}})
    trainable = open_trainable(config)
    change(trainable.module)
    x = torch.from_numpy(RNG.standard_normal((rows, 3, 6)).astype(np.float32) * 3)
    batch = Batch((x,), (torch.zeros(rows),), rows, (float(rows),))
    found = compare_untrained(
        trainable,
        config.model,
        config.losses,
        config.export,
        EvaluationData(lambda: [batch], lambda names: None),
        folder / "work",
    )
    return found.difference, found.runtime, found.said


STATISTICS = {"s": [1.0, 0.5, 2.0], "o": [0.1, 0.2, 0.3], "m": [0.5, -0.5, 1.0], "v": [1.0, 2.0, 3.0]}
NORM = "y, rm, rv = BatchNormalization <training_mode = 1> (h, s, o, m, v)"


def test_running_statistics_in_training_form_are_compared_in_both_forms_and_the_difference_is_told(tmp_path):
    model = saved(tmp_path, f"g (float[N,3,6] x) => (float[N,3,6] y) {{ h = Conv(x, w) {NORM} }}",
                  w=(3, 3, 1), **STATISTICS)  # fmt: skip
    parity, runtime, [said] = compared(tmp_path)
    assert parity < 1e-5
    assert runtime == "onnxruntime"
    assert said.key == "training_form"
    assert "1 BatchNormalization nodes normalise by each batch" in said.what
    assert 0.05 < float(re.search(r"are ([\d.e+-]+) of the largest", said.what)[1]) < 20
    assert onnx.load(tmp_path / "model.onnx") == model


def test_a_module_that_is_wrong_in_training_mode_alone_is_refused(tmp_path):
    """What was compared before, the inference form, agrees here."""
    saved(tmp_path, f"g (float[N,3,6] x) => (float[N,3,6] y) {{ h = Conv(x, w) {NORM} }}", w=(3, 3, 1), **STATISTICS)

    class Wrong(BatchNorm):
        def forward(self, x, scale, bias, mean, variance):
            y = super().forward(x, scale, bias, mean, variance)
            return y * 1.1 if self.training else y

    def change(module):
        [norm] = [each for each in module.modules() if isinstance(each, BatchNorm)]
        norm.__class__ = Wrong

    with pytest.raises(ExportRefused, match="in training form, as the file is"):
        compared(tmp_path, change)


def test_dropout_in_training_form_is_told_and_the_rest_is_compared(tmp_path):
    saved(tmp_path, f"""g (float[N,3,6] x) => (float[N,3,6] y) {{
        c = Conv(x, w) h, mask = Dropout(c, ratio, on) {NORM} }}""",
        w=(3, 3, 1), ratio=np.float32(0.5), on=np.array(True), **STATISTICS)  # fmt: skip
    parity, _, [said] = compared(tmp_path)
    assert parity < 1e-5
    assert "1 BatchNormalization nodes normalise by each batch, 1 nodes draw random numbers" in said.what


def test_dropout_that_is_off_needs_no_other_form_and_the_file_is_compared_as_it_is(tmp_path):
    saved(tmp_path, """g (float[N,3,6] x) => (float[N,3,6] y) {
        c = Conv(x, w) y = Dropout(c, ratio) }""", w=(3, 3, 1), ratio=np.float32(0.5))  # fmt: skip
    parity, _, said = compared(tmp_path)
    assert parity < 1e-5
    assert said == ()


def test_a_rewrite_that_changes_the_file_and_the_module_alike_is_refused(tmp_path, monkeypatch):
    """The fault that was missed: the stripped graph was compared with a module that made the same mistake."""
    saved(tmp_path, """g (float[N,3,6] x) => (float[N,3,6] y) {
        h = Reshape(w, flat)
        n, rm, rv = BatchNormalization <training_mode = 1> (h, s, o, m, v)
        k = Reshape(n, back)
        y = Conv(x, k) }""",
        w=(3, 3, 1), flat=np.array([1, 3, 3]), back=np.array([3, 3, 1]), **STATISTICS)  # fmt: skip
    assert compared(tmp_path)[0] < 1e-5

    def as_running(module):  # evaluation by what is stored, as it was
        for each in module.modules():
            if hasattr(each, "always"):
                each.always = False

    with pytest.raises(ExportRefused, match="off the torch module"):
        compared(tmp_path, as_running)
    assert strip_training(onnx.load(tmp_path / "model.onnx")) == {}
