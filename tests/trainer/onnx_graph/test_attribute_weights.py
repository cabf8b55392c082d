"""Numbers in attributes of ai.onnx.ml are trained, written back, verified, compared and reported like initializers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch

from onward.trainer.config.losses import LossConfig
from onward.trainer.diagnostics.diff import compare
from onward.trainer.diagnostics.doctor import diagnose
from onward.trainer.errors import UnsupportedModel
from onward.trainer.export.file_verification import weight_problems
from onward.trainer.export.model_file import ModelFile
from onward.trainer.export.training.loss_graph import evaluation_model, loss_names
from onward.trainer.onnx_import.driver import load_model, to_module
from onward.trainer.onnx_import.imported_graph import ImportedGraph, named_weights
from onward.trainer.onnx_import.write_back import write_model
from tests.support.foreign_files import FOLDER
from tests.trainer.onnx_import.ops.classical.test_ml import X, model_of, under_onnxruntime

ROWS = {"coefficients": [0.1, 0.2, 0.3, 0.1, 0.0, 0.4], "intercepts": [0.1, 0.2, 0.15]}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "linear.onnx"
    labels, transform = [5, 9, 7], "SOFTMAX"
    path.write_bytes(
        model_of(
            "LinearClassifier", [X], 2, classlabels_ints=labels, post_transform=transform, **ROWS
        ).SerializeToString()
    )
    return path


def changed(source: Path) -> tuple[ImportedGraph, Path]:
    """A module with other weights than the file's, and the file written with them."""
    module, target = to_module(load_model(source)), source.with_name("trained.onnx")
    with torch.no_grad():
        for number, weight in enumerate(module.parameters()):
            weight.mul_(2).add_(0.1 + number)
    write_model(module, load_model(source), source, target)
    return module, target


def test_zero_steps_give_back_the_same_bytes(source: Path) -> None:
    target = source.with_name("same.onnx")
    write_model(to_module(load_model(source)), load_model(source), source, target)
    assert target.read_bytes() == source.read_bytes()


def test_the_written_file_computes_under_onnxruntime_what_the_module_computes(source: Path) -> None:
    module, target = changed(source)
    with torch.no_grad():
        labels, scores = module(torch.from_numpy(X))
    found = under_onnxruntime(onnx.load(target), [X])
    np.testing.assert_array_equal(found[0], labels.numpy())
    np.testing.assert_allclose(found[1], scores.numpy(), atol=1e-6)


def test_only_the_two_attributes_differ_and_diff_reports_them_as_tensors(source: Path) -> None:
    _, target = changed(source)
    found = compare(source, target)
    assert (*found.model, *found.interface, *found.nodes) == ()
    assert {(each.name, each.after) for each in found.tensors} == {
        ("y0/coefficients", "float32 [3, 2]"),
        ("y0/intercepts", "float32 [3]"),
    }


def test_verification_compares_the_attributes_with_the_checkpoint(source: Path) -> None:
    module, target = changed(source)
    written = ModelFile(target, load_model(target))
    own = {name: tensor.detach() for name, tensor in named_weights(module).items()}
    assert weight_problems(written, own) == []
    off = {name: tensor + 1 for name, tensor in own.items()}
    assert [each.split("'")[1] for each in weight_problems(written, off)] == ["y0/coefficients", "y0/intercepts"]


def test_doctor_lists_them_as_weights(source: Path) -> None:
    weights = {weight.name: (weight.shape, weight.kind, weight.reason) for weight in diagnose(source).weights}
    assert weights == {
        "y0/coefficients": ((3, 2), "trained", "weight of LinearClassifier"),
        "y0/intercepts": ((3,), "trained", "weight of LinearClassifier"),
    }


def test_scale_and_offset_of_a_scaler_stay_frozen_unless_they_are_named() -> None:
    model = model_of("Scaler", [X], offset=[1.0, 2.0], scale=[2.0, 0.5])
    roles = to_module(model).roles
    assert {name: role.kind for name, role in roles.items()} == {"y0/offset": "frozen", "y0/scale": "frozen"}
    assert {role.reason for role in roles.values()} == {"normalises the input"}
    assert list(named_weights(to_module(model, train=["y0/scale"]))) == ["y0/scale"]


def test_an_initializer_with_the_name_of_an_attribute_is_refused() -> None:
    model = model_of("LinearClassifier", [X], 2, classlabels_ints=[0, 1, 2], **ROWS)
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.zeros(2, np.float32), "y0/intercepts"))
    with pytest.raises(UnsupportedModel, match="'y0/intercepts' is also the name of an attribute"):
        to_module(model)


def test_training_files_are_refused_because_no_input_can_change_an_attribute() -> None:
    model = model_of("LinearRegressor", [X], coefficients=[0.1, 0.2], intercepts=[0.3])
    config = LossConfig(name="mse")
    with pytest.raises(UnsupportedModel, match=r"y0/coefficients, y0/intercepts are attributes of ai\.onnx\.ml"):
        evaluation_model(
            model, [config], names=loss_names(model, [config]), weights=["y0/coefficients", "y0/intercepts"], copies={}
        )


TRAINED = {
    "skl2onnx-linear": {"variable/coefficients", "variable/intercepts"},
    "skl2onnx-logistic": {"label/coefficients", "label/intercepts"},
    "sklearn-binary": {"label/coefficients", "label/intercepts"},
    "sklearn-imputed": {"label/coefficients", "label/intercepts"},
    "sklearn-columns": {"coefficient", "coefficient1", "intercepts", "intercepts1"},
    "sklearn-strings": {"coefficient", "coefficient1", "intercepts", "intercepts1"},
}


@pytest.mark.parametrize("name", TRAINED)
def test_what_scikit_learn_fits_by_gradients_is_trained_and_nothing_else(name: str) -> None:
    roles = to_module(load_model(FOLDER / f"{name}.onnx")).roles
    assert {tensor for tensor, role in roles.items() if role.kind == "trained"} == TRAINED[name]
