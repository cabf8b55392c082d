"""Losses of scores read the scores behind a file's probabilities, unless a setting names what they read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import numpy_helper
from torch.nn import functional as F

from onward.trainer.config.loading import build_config
from onward.trainer.config.run_config import RunConfig
from onward.trainer.data.schema.signature import read_training_signature
from onward.trainer.data.scores_read import scores_said, with_scores
from onward.trainer.model.trainable import open_trainable
from onward.trainer.onnx_import.driver import load_model
from onward.trainer.onnx_import.imported_graph import ImportedGraph
from onward.trainer.onnx_import.write_back import write_model
from tests.trainer.onnx_graph.test_probabilities import SIGMOID, SOFTMAX, TRUTH, model_of

FORM = SOFTMAX["with its maximum subtracted"]


def saved(model: onnx.ModelProto, folder: Path, name: str = "model.onnx") -> Path:
    onnx.save(model, folder / name)
    return folder / name


def parsed(text: str, opset: int = 17) -> onnx.ModelProto:
    model = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : {opset}]>\ng {text}')
    weight = np.random.default_rng(0).normal(size=(4, 4)).astype(np.float32)
    model.graph.initializer.append(numpy_helper.from_array(weight, "w"))
    return model


def configured(path: Path, loss: Any = "cross_entropy", **sections: Any) -> RunConfig:
    model: dict[str, Any] = {"path": path, **sections.pop("model", {})}
    if isinstance(loss, str):
        model["loss"] = loss
    else:
        sections["loss"] = loss
    return build_config(
        {"model": model, "data": {"source": "digits"}, "train": {"num_steps": 1}, "launch": {"device": "cpu"}}
        | sections
    )


def read_by(config: RunConfig) -> list[Any]:
    found = with_scores(config)
    assert RunConfig.model_validate_json(found.model_dump_json()) == found  # as the ranks read it
    assert with_scores(found) is found
    return [each.output for each in found.losses] or [found.model.output]


@pytest.mark.parametrize(
    ("form", "loss", "output"),
    [
        *((form, "cross_entropy", "z") for form in SOFTMAX.values()),
        *((form, "bce_with_logits", "z") for form in SIGMOID.values()),
        (FORM, "ctc", "z"),
        (FORM, "dice", "z"),
        (SIGMOID["as Reciprocal"], "focal", "z"),
        # the file's own activation is not the one that the loss applies, or the loss applies none
        (FORM, "bce_with_logits", ""),
        (FORM, "mse", ""),
        (SIGMOID["as Reciprocal"], "cross_entropy", ""),
        (SIGMOID["as Reciprocal"], "dice", ""),
        ("y = LogSoftmax(z)", "cross_entropy", ""),
        ("y = Relu(z)", "cross_entropy", ""),
    ],
)
def test_a_loss_reads_the_scores_to_which_the_file_applies_the_same_activation(
    form: str, loss: str, output: str, tmp_path: Path
) -> None:
    config = configured(saved(model_of(form), tmp_path), loss)
    assert read_by(config) == [output]
    said = list(scores_said(config, with_scores(config)))
    assert len(said) == bool(output)
    if output:
        (signature,) = read_training_signature(with_scores(config).model).outputs
        assert (signature.name, signature.shape) == ("z", (None, 3))
        assert said[0].startswith(f"the loss {loss} reads 'z', the logits before ")
        assert said[0].endswith("set model.output = 'y'")


def test_a_named_output_is_read_as_it_is(tmp_path: Path) -> None:
    path = saved(model_of(FORM), tmp_path)
    for config in (configured(path, model={"output": "y"}), configured(path, {"output": "y"})):
        assert with_scores(config) is config
    assert read_by(configured(path, {"label_smoothing": 0.1})) == ["z"]
    assert read_by(configured(path, {"class_axis": 1})) == ["z"]


@pytest.mark.parametrize(
    ("text", "opset", "class_axis", "output"),
    [
        ("y = Softmax<axis=1>(z)", 17, None, "z"),
        ("y = Softmax<axis=1>(z)", 17, 1, "z"),
        ("y = Softmax<axis=1>(z)", 17, 3, ""),  # other classes than those of the file's softmax
        ("y = Softmax<axis=0>(z)", 17, None, ""),  # over the rows
        ("y = Softmax<axis=1>(z)", 11, None, ""),  # until opset 13 over the axes 1, 2 and 3 together
        ("y = Softmax<axis=3>(z)", 11, None, "z"),
        ("p = Softmax<axis=3>(z)  y = Transpose<perm=[0, 3, 1, 2]>(p)", 17, None, ""),  # other axes than the labels'
    ],
)
def test_of_several_axes_the_softmax_must_be_that_of_the_loss(
    text: str, opset: int, class_axis: int | None, output: str, tmp_path: Path
) -> None:
    model = onnx.parser.parse_model(f"""
        <ir_version: 8, opset_import: ["" : {opset}]>
        g (float[N, 4, H, W] x) => (float[N, 4, H, W] y) {{
            z = Mul(x, k)
            {text}
        }}""")
    model.graph.initializer.append(numpy_helper.from_array(np.float32([2]), "k"))
    loss = {"name": "cross_entropy"} | ({"class_axis": class_axis} if class_axis else {})
    assert read_by(configured(saved(model, tmp_path), loss)) == [output]


def test_a_mask_of_one_class_is_read_before_its_sigmoid(tmp_path: Path) -> None:
    model = onnx.parser.parse_model("""
        <ir_version: 8, opset_import: ["" : 17]>
        g (float[N, 1, H, W] x) => (float[N, 1, H, W] y) { z = Mul(x, k)  y = Sigmoid(z) }""")
    model.graph.initializer.append(numpy_helper.from_array(np.float32([2]), "k"))
    assert read_by(configured(saved(model, tmp_path), "dice")) == ["z"]


def test_scores_that_no_node_computes_are_not_read(tmp_path: Path) -> None:
    model = parsed("(float[N, 4] x) => (float[N, 4] y, float[N, 4] v) { y = Softmax(x)  v = MatMul(x, w) }")
    assert read_by(configured(saved(model, tmp_path))) == [""]


def test_a_file_that_is_absent_is_reported_elsewhere(tmp_path: Path) -> None:
    config = configured(tmp_path / "absent.onnx")
    assert with_scores(config) is config


TWO = "(float[N, 4] x) => (float[N, 4] p, float[N, 4] v) { z = MatMul(x, w)  p = Softmax(z)  v = Tanh(z) }"


def test_of_several_losses_each_has_its_own_tensor_and_the_first_output_is_named(tmp_path: Path) -> None:
    path = saved(parsed(TWO), tmp_path)
    losses = [{"name": "cross_entropy"}, {"name": "mse", "output": "v", "label": "b"}, {"name": "l1", "label": "c"}]
    config = configured(path, losses)
    # without its name the third would read the first of the tensors that the losses name, which is z
    assert read_by(config) == ["z", "v", "p"]
    assert [value.name for value in read_training_signature(with_scores(config).model).outputs] == ["z", "v", "p"]
    (sentence,) = scores_said(config, with_scores(config))
    assert sentence.endswith("set loss.0.output = 'p'")


@pytest.mark.parametrize(
    ("teacher", "tensor"),
    [
        (TWO.replace("Softmax", "Softmax<axis=1>"), "z"),
        (TWO.replace("p = Softmax(z)", "p = Identity(z)"), "p"),
        (TWO.replace("p = Softmax(z)", "p = Sigmoid(z)"), "p"),
    ],
)
@pytest.mark.parametrize("alone", [False, True])
def test_a_teacher_gives_its_scores_for_those_of_the_model(
    teacher: str, tensor: str, alone: bool, tmp_path: Path
) -> None:
    path, other = saved(parsed(TWO), tmp_path), saved(parsed(teacher), tmp_path, "teacher.onnx")
    loss, section = ("teacher", {"loss": "kl"}) if alone else ("cross_entropy", {})
    always = {"export": {"promote_if": "always"}} if alone else {}
    config = with_scores(configured(path, loss, teacher={"path": str(other), **section}, **always))
    (soft,) = config.soft_losses
    assert (config.model.output, soft.student, soft.teacher) == ("z", "z", tensor)


def test_a_teachers_output_that_is_named_keeps_the_models(tmp_path: Path) -> None:
    path = saved(parsed(TWO), tmp_path)
    config = configured(path, teacher={"path": str(path), "output": "p"})
    assert with_scores(config) is config


# -- what it is for


@pytest.mark.parametrize(
    ("form", "loss", "least"),
    [
        # of probabilities: log(1 + 2 / e) and log(1 + 1 / e)
        *((SOFTMAX[name], "cross_entropy", 0.5514) for name in ("an operator", "with its maximum subtracted")),
        (SIGMOID["as a half of 1 + tanh"], "bce_with_logits", 0.4),
    ],
)
def test_the_loss_falls_where_it_was_flat_and_the_written_output_is_the_activation(
    form: str, loss: str, least: float, tmp_path: Path
) -> None:
    path = saved(model_of(form), tmp_path)
    rows = torch.from_numpy(np.random.default_rng(2).normal(size=(60, 6)).astype(np.float32))
    labels = rows[:, :3].argmax(1) if loss == "cross_entropy" else (rows[:, :3] > 0).float()
    formula = F.cross_entropy if loss == "cross_entropy" else F.binary_cross_entropy_with_logits

    def trained(config: RunConfig) -> tuple[float, ImportedGraph]:
        module = open_trainable(config).module
        optimizer = torch.optim.Adam(module.parameters(), lr=0.3)
        for _ in range(400):
            optimizer.zero_grad()
            value = formula(module(rows), labels)
            value.backward()
            optimizer.step()
        return value.item(), module

    assert trained(configured(path, loss, model={"output": "y"}))[0] > least
    value, module = trained(with_scores(configured(path, loss)))
    assert value < least / 4
    write_model(module, load_model(path), path, tmp_path / "trained.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "trained.onnx", providers=["CPUExecutionProvider"])
    (result,) = (torch.from_numpy(each) for each in session.run(None, {"x": rows.numpy()}))
    activation = TRUTH["softmax" if loss == "cross_entropy" else "sigmoid"]
    torch.testing.assert_close(result, activation(module(rows).detach()), rtol=1e-4, atol=1e-6)
