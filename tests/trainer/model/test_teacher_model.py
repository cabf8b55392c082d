"""A teacher beside the model: its losses are torch's own, and it computes what it computes alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
import torch.nn.functional as F

from onward.trainer.config.distillation import SoftLoss
from onward.trainer.config.loading import build_config
from onward.trainer.config.run_config import RunConfig
from onward.trainer.data.batches.batches import one_batch
from onward.trainer.data.schema.columns import Column
from onward.trainer.data.schema.signature import read_training_signature
from onward.trainer.data.storage.first_rows import FirstRows
from onward.trainer.distributed.weights import average_key, averages_in, checkpoint_key, weights_in
from onward.trainer.errors import ConfigError
from onward.trainer.model.losses.teacher_loss import TeacherLoss
from onward.trainer.model.teacher.teacher_model import projected_sizes
from onward.trainer.model.trainable import open_with_teacher
from onward.trainer.onnx_import.driver import to_module
from onward.trainer.onnx_import.imported_graph import named_weights
from tests.support import graphs


def soft_loss(**settings: Any) -> TeacherLoss:
    given = {"kind": "kl", "weight": 1.0, "temperature": 3.0, "matched": False} | settings
    return TeacherLoss(SoftLoss(0, "logits", "", **given), ["logits", "teacher:0"], {})


def configured(folder: Path, student: onnx.ModelProto, larger: onnx.ModelProto, /, **sections: Any) -> RunConfig:
    for name, model in (("student", student), ("teacher", larger)):
        onnx.save_model(model, folder / f"{name}.onnx")
    given: dict[str, Any] = {"model": {"path": folder / "student.onnx"}, "teacher": {"path": folder / "teacher.onnx"}}
    rest = {"data": {"source": "digits"}, "train": {"num_steps": 1}}
    both = {name: given.get(name, {}) | sections.get(name, {}) for name in given.keys() | sections.keys()}
    both["teacher"]["path"] = str(both["teacher"]["path"])
    return build_config(rest | both)


# -- the losses


def test_the_loss_against_scores_of_classes_is_torchs_divergence_with_its_gradient() -> None:
    torch.manual_seed(0)
    own, teacher = torch.randn(6, 5, requires_grad=True), torch.randn(6, 5)
    loss = soft_loss()([own, teacher], None, 6)
    expected = 9 * F.kl_div((own / 3).log_softmax(1), (teacher / 3).log_softmax(1), reduction="sum", log_target=True)
    torch.testing.assert_close(loss, expected)
    gradients = [torch.autograd.grad(value, own)[0] for value in (loss, expected)]
    torch.testing.assert_close(*gradients)
    assert soft_loss().count(None, 6) == 6


def test_rows_that_do_not_count_have_no_loss_and_no_gradient_on_whichever_axis_the_classes_are() -> None:
    torch.manual_seed(0)
    own, teacher = torch.randn(2, 5, 7, requires_grad=True), torch.randn(2, 5, 7)
    counted = torch.rand(2, 7) < 0.5
    loss = soft_loss()([own, teacher], counted, 2)
    rows = [each.movedim(1, -1)[counted] for each in (own, teacher)]
    torch.testing.assert_close(loss, soft_loss()(rows, None, int(counted.sum())))
    assert not torch.autograd.grad(loss, own)[0].movedim(1, -1)[~counted].any()
    assert soft_loss().count(counted, 2) == counted.sum()


def test_the_losses_of_numbers_and_of_yes_or_no_labels_are_means_over_a_row() -> None:
    torch.manual_seed(0)
    own, teacher = torch.randn(4, 3), torch.randn(4, 3)
    torch.testing.assert_close(soft_loss(kind="mse")([own, teacher], None, 4), 4 * F.mse_loss(own, teacher))
    labels = (teacher / 3).sigmoid()
    entropy = F.binary_cross_entropy_with_logits(teacher / 3, labels)
    expected = 4 * 9 * (F.binary_cross_entropy_with_logits(own / 3, labels) - entropy)
    torch.testing.assert_close(soft_loss(kind="bce")([own, teacher], None, 4), expected)


def test_outputs_of_other_shapes_and_classes_without_an_axis_are_refused_with_their_numbers() -> None:
    with pytest.raises(ConfigError, match=r"'logits' is \[2, 10\], but the teacher's 'output' is \[2, 1000\]"):
        soft_loss()([torch.zeros(2, 10), torch.zeros(2, 1000)], None, 2)
    with pytest.raises(ConfigError, match=r"set teacher\.class_axis, 1 for images"):
        soft_loss()([torch.zeros(2, 5, 7), torch.zeros(2, 5, 7)], None, 2)
    matched = SoftLoss(1, "a", "b", "mse", 1.0, 1.0, matched=True)
    assert projected_sizes(matched, (None, 4, 8), (None, 4, 8)) is None
    assert projected_sizes(matched, (None, None, 8), (None, None, 12)) == (2, 8, 12)
    for one, other in (((None, 4, 8), (None, 6, 12)), ((None, 8), (None, 4, 8)), (None, (None, 8))):
        with pytest.raises(ConfigError, match="match"):
            projected_sizes(matched, one, other)


def test_the_mask_says_which_targets_count_without_labels(tmp_path: Path) -> None:
    model = graphs.tiny_bert(of_tokens=True)
    settings = {"loss": "kl", "mask": "attention_mask", "class_axis": -1}
    sections: dict[str, Any] = {"model": {"loss": "teacher"}, "export": {"promote_if": "never"}}
    config = configured(tmp_path, model, model, teacher=settings, **sections)
    mask = np.array([[1, 1, 1, 0], [1, 0, 0, 0]])
    columns = {"input_ids": np.ones_like(mask), "attention_mask": mask}
    schema = {name: Column(name=name, dtype="int64", shape=(4,)) for name in columns}
    rows = FirstRows(schema, {}, columns, 2, None, {})
    batch = one_batch(rows, config, read_training_signature(config.model), np.arange(2))
    assert batch.num_targets == (4.0,)
    assert batch.labels[0] is not None
    assert batch.labels[0].tolist() == (mask != 0).tolist()


# -- the graph


def test_the_teacher_computes_what_it_computes_alone_while_the_model_trains(tmp_path: Path) -> None:
    teacher = graphs.tiny_transformer(width=48, dropout=0.5, seed=3)
    config = configured(tmp_path, graphs.tiny_transformer(), teacher)
    module = open_with_teacher(config).module
    ids = torch.randint(0, 32, (2, 16))
    _, found = module.train()(ids)
    assert not found.requires_grad
    torch.testing.assert_close(found, to_module(teacher).eval()(ids), rtol=0, atol=0)


def test_batch_normalization_of_the_teacher_keeps_its_running_statistics(tmp_path: Path) -> None:
    config = configured(tmp_path, graphs.tiny_resnet(), graphs.tiny_resnet(seed=5))
    module = open_with_teacher(config).module.train()
    before = {name: value.clone() for name, value in named_weights(module).items()}
    images = torch.randn(4, 3, 8, 8)
    _, found = module(images)
    torch.testing.assert_close(found, to_module(graphs.tiny_resnet(seed=5)).eval()(images), rtol=0, atol=0)
    changed = [name for name, value in named_weights(module).items() if not torch.equal(value, before[name])]
    assert changed
    assert not [name for name in changed if name.startswith("teacher:")]
    assert not [name for name, value in module.named_parameters() if "teacher" in name and value.requires_grad]


def test_a_matched_tensor_of_another_width_is_projected(tmp_path: Path) -> None:
    match = {"Relu_1": "Relu_1"}
    student, teacher = graphs.tiny_mlp(outputs=3), graphs.tiny_mlp(outputs=3, hidden=24, seed=2)
    config = configured(tmp_path, student, teacher, teacher={"match": match})
    module = open_with_teacher(config).module
    assert module.output_names == ("prediction", "teacher:0", "teacher:1", "matched:1")
    assert named_weights(module)["projection:1"].shape == (24, 16)
    outputs = dict(zip(module.output_names, module(torch.randn(5, 4)), strict=True))
    assert outputs["matched:1"].shape == outputs["teacher:1"].shape == (5, 24)
    assert outputs["matched:1"].requires_grad


def test_soft_labels_that_were_computed_before_are_inputs_that_come_out_as_they_are(tmp_path: Path) -> None:
    student, teacher = graphs.tiny_mlp(outputs=3), graphs.tiny_mlp(outputs=3, hidden=24, seed=2)
    config = configured(tmp_path, student, teacher, teacher={"cache": "float16"})
    module = open_with_teacher(config, cached=True).module
    assert module.input_names == ("features", "teacher:0")
    rows, soft_labels = torch.randn(5, 4), torch.randn(5, 3)
    prediction, found = module(rows, soft_labels)
    assert found is soft_labels
    torch.testing.assert_close(prediction, to_module(student)(rows), rtol=0, atol=0)
    assert not [name for name in named_weights(module) if name.startswith("teacher:")]


def test_a_projection_is_in_checkpoints_and_in_nothing_that_is_exported() -> None:
    keys = [checkpoint_key(name) for name in ("w", "projection:1")]
    keys += [average_key(name, "ema") for name in ("w", "projection:1")]
    tensors = dict.fromkeys(keys, torch.zeros(1))
    assert len(tensors) == 4
    assert list(weights_in(tensors)) == list(averages_in(tensors, "ema")) == ["w"]
