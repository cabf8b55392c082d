"""Outputs that cannot be trained are left out or refused with the tensor to name, and stay in the file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper

from onward.trainer.config.sections.model import ModelConfig
from onward.trainer.diagnostics.doctor import diagnose
from onward.trainer.diagnostics.output_warnings import output_warnings
from onward.trainer.errors import ConfigError
from onward.trainer.onnx_graph.files.index import dims_of, known_types
from onward.trainer.onnx_graph.outputs import class_order, score_tensors, with_numeric_outputs
from onward.trainer.onnx_graph.surgery.surgery import apply_surgery, extract_subgraph, trains_subgraph
from onward.trainer.onnx_import.driver import load_model, to_module
from onward.trainer.onnx_import.imported_graph import named_weights
from onward.trainer.onnx_import.write_back import write_model
from tests.support.foreign_files import FOLDER
from tests.trainer.onnx_import.ops.classical.test_ml import X, model_of, under_onnxruntime

ROWS = {"coefficients": [0.1, 0.2, 0.3, 0.1, 0.0, 0.4], "intercepts": [0.1, 0.2, 0.15]}


def file(name: str) -> Path:
    return FOLDER / f"{name}.onnx"


def part_of(name: str, output: str) -> onnx.ModelProto:
    model, config = load_model(file(name)), ModelConfig(path=file(name), output=output)
    apply_surgery(model, config, seed=0)
    return extract_subgraph(model, config)


# -- which tensors the loss can read


@pytest.mark.parametrize(
    ("name", "tensor", "what"),
    [
        ("skl2onnx-mlp", "add_result2", "the logits before Softmax, for the loss cross_entropy"),
        ("skl2onnx-logistic", "probability_tensor/log_probabilities", "the logarithm of LinearClassifier's SOFTMAX"),
        ("skl2onnx-trees", "proba_output", "the scores of TreeEnsembleClassifier, which is not trained"),
        ("sklearn-strings", "add_result1", "the logits before Softmax"),
        ("sklearn-binary", "probabilities/log_probabilities", "the logarithm of LinearClassifier's LOGISTIC"),
        ("sklearn-imputed", "probability_tensor/log_probabilities", "the logarithm of LinearClassifier's SOFTMAX"),
        ("sklearn-columns", "add_result1", "the logits before Sigmoid, for the loss bce_with_logits"),
    ],
)
def test_a_default_run_of_a_classifier_is_refused_with_the_tensor_to_name(name: str, tensor: str, what: str) -> None:
    with pytest.raises(ConfigError) as raised:
        part_of(name, "")
    (problem,) = raised.value.problems
    assert "which has no gradient; set model.output to " in problem
    assert f"'{tensor}' ({what}" in problem


def test_a_regressor_needs_no_model_output() -> None:
    for name in ("skl2onnx-mlp-regressor", "skl2onnx-linear"):
        model = load_model(file(name))
        assert not trains_subgraph(model, ModelConfig(path=file(name)))
        assert len(named_weights(to_module(model))) in (2, 4)


def test_the_refusal_says_how_the_classes_of_string_labels_are_numbered() -> None:
    with pytest.raises(
        ConfigError, match=r"number the labels .* order of classes: 0 = 'eight', 1 = 'five', 2 = 'four'"
    ):
        part_of("sklearn-strings", "")
    assert class_order(load_model(file("sklearn-forest")).graph)[:2] == ["eight", "five"]
    assert class_order(load_model(file("skl2onnx-mlp")).graph) == []


def test_doctor_says_that_a_run_reads_the_logits_when_the_first_output_is_a_softmax(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["logits"]),
        helper.make_node("Softmax", ["logits"], ["p"]),
        helper.make_node("Identity", ["p"], ["probabilities"]),
    ]
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, ["N", 2]) for name in ("x", "probabilities"))
    weight = onnx.numpy_helper.from_array(np.array([[1, 2], [3, 5]], np.float32), "w")
    opset = [helper.make_opsetid("", 13)]
    model = helper.make_model(helper.make_graph(nodes, "g", [x], [y], [weight]), opset_imports=opset, ir_version=8)
    (tmp_path / "p.onnx").write_bytes(model.SerializeToString())
    (found,) = (warning for warning in diagnose(tmp_path / "p.onnx").warnings if warning.key == "probabilities")
    assert found.what == (
        "output 'probabilities' holds probabilities: a run with the loss cross_entropy, ctc, dice and set_classes "
        "reads 'logits', the logits before Softmax, and the exported file still has the output"
    )
    assert found.remedy.endswith("to compute such a loss from the probabilities, set model.output = 'probabilities'")


def test_probabilities_that_a_run_reads_beside_other_outputs_are_warned_of() -> None:
    model = onnx.load(FOLDER / "skl2onnx-mlp.onnx")
    (found,) = output_warnings(model, model.graph, "probabilities")
    assert found.key == "probabilities"
    assert "'add_result2' (the logits before Softmax" in found.remedy
    assert not [*output_warnings(model, model.graph, "add_result2")]


def test_doctor_suggests_what_an_argmax_reads(tmp_path: Path) -> None:
    model = onnx.parser.parse_model("""
        <ir_version: 10, opset_import: ["" : 20]>
        classes (float[N, 2] x) => (int64[N] y) {
            logits = MatMul(x, w)
            y = ArgMax<axis=1, keepdims=0>(logits)
        }""")
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.array([[1, 2], [3, 5]], np.float32), "w"))
    onnx.save(model, tmp_path / "c.onnx")
    (found,) = (warning for warning in diagnose(tmp_path / "c.onnx").warnings if warning.key == "label_output")
    assert "set model.output to 'logits' (the scores before ArgMax, for the loss cross_entropy)" in found.remedy


# -- outputs that torch has no type for


@pytest.mark.parametrize("name", ["sklearn-strings", "sklearn-binary"])
def test_outputs_of_strings_and_maps_are_not_imported_and_stay_in_the_written_file(name: str, tmp_path: Path) -> None:
    model, target = load_model(file(name)), tmp_path / "written.onnx"
    module = to_module(model)
    assert not {value.name for value in model.graph.output if value.type.HasField("sequence_type")} & {
        *module.output_names
    }
    write_model(module, model, file(name), target)
    assert target.read_bytes() == file(name).read_bytes()


def test_without_an_output_of_numbers_the_scores_are_imported() -> None:
    part = with_numeric_outputs(load_model(file("sklearn-strings")))
    assert [value.name for value in part.graph.output] == ["add_result1"]
    assert "ZipMap" not in {node.op_type for node in part.graph.node}


def test_doctor_imports_such_a_file_and_says_what_is_kept() -> None:
    found = diagnose(file("sklearn-strings"))
    assert found.importable
    assert {warning.key for warning in found.warnings} >= {"label_output", "kept_outputs"}
    assert {use.operator for use in found.operators if use.imported_by == "kept"} >= {"ai.onnx.ml.ZipMap", "ArgMax"}


def test_doctor_says_that_trees_are_not_trained() -> None:
    found = diagnose(file("sklearn-forest"))
    assert "trees and support vectors have no weights that a gradient changes" in found.unsupported[0].why
    (trees,) = (warning for warning in found.warnings if warning.key == "trees")
    assert trees.what.startswith("1 TreeEnsembleClassifier: computed by onnxruntime when the data is read")


# -- log-probabilities of a linear classifier


@pytest.mark.parametrize("transform", ["SOFTMAX", "LOGISTIC"])
def test_log_probabilities_are_the_logarithms_of_the_files_probabilities(transform: str) -> None:
    model = model_of("LinearClassifier", [X], 2, classlabels_ints=[0, 1, 2], post_transform=transform, **ROWS)
    assert_logarithm(model)


def test_log_probabilities_of_two_opposite_rows_are_those_of_a_softmax() -> None:
    opposite = {"coefficients": [-0.5, 0.25, 0.5, -0.25], "intercepts": [-0.1, 0.1], "post_transform": "LOGISTIC"}
    model = model_of("LinearClassifier", [X], 2, classlabels_ints=[0, 1], **opposite)
    assert_logarithm(model)
    # opposite gradients: the rows stay each other's negative
    module = to_module(part_with_logarithm(model))
    torch.nn.functional.cross_entropy(module(torch.from_numpy(X)), torch.tensor([0, 1, 1, 0, 1])).backward()
    rows = module.get_parameter(next(path for path, name in module.onnx_names.items() if "coefficients" in name)).grad
    assert rows is not None
    torch.testing.assert_close(rows[0], -rows[1])


def part_with_logarithm(model: onnx.ModelProto) -> onnx.ModelProto:
    return extract_subgraph(model, ModelConfig(path=Path("m.onnx"), output="y1/log_probabilities"))


def assert_logarithm(model: onnx.ModelProto) -> None:
    (wanted,) = under_onnxruntime(model, [X])[1:]
    part = part_with_logarithm(model)
    np.testing.assert_allclose(under_onnxruntime(part, [X])[0], np.log(wanted), atol=1e-6)
    with torch.no_grad():
        np.testing.assert_allclose(to_module(part)(torch.from_numpy(X)).numpy(), np.log(wanted), atol=1e-6)
    assert list(named_weights(to_module(part))) == list(named_weights(to_module(model)))


@pytest.mark.parametrize(
    "given",
    [
        {"coefficients": [0.5, 0.25], "intercepts": [0.1], "post_transform": "LOGISTIC"},
        {"coefficients": [0.5, 0.25, 0.5, 0.25], "intercepts": [0.1, 0.0], "post_transform": "LOGISTIC"},
        {"coefficients": [0.5, 0.25, 0.5, 0.25], "intercepts": [0.1, 0.0], "post_transform": "PROBIT"},
    ],
)
def test_other_linear_classifiers_have_no_log_probabilities(given: dict[str, Any]) -> None:
    model = model_of("LinearClassifier", [X], 2, classlabels_ints=[0, 1], **given)
    assert list(score_tensors(model.graph)) == []
    with pytest.raises(ConfigError, match="is not a tensor of the model"):
        part_with_logarithm(model)


def test_a_model_of_numbers_alone_is_imported_as_it_is() -> None:
    node = helper.make_node("Relu", ["x"], ["y"])
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, ["N", 2]) for name in "xy")
    model = helper.make_model(helper.make_graph([node], "g", [x], [y]))
    assert with_numeric_outputs(model) is model


# -- types that ONNX's shape inference leaves out


@pytest.mark.parametrize(
    ("name", "output", "shape"),
    [
        ("skl2onnx-mlp", "add_result2", [None, 10]),
        ("skl2onnx-trees", "proba_output", [None, 10]),
        ("sklearn-strings", "variable", [None, 64]),
        ("sklearn-imputed", "variable1", [None, 64]),
    ],
)
def test_the_shape_of_an_inner_tensor_behind_ai_onnx_ml_is_known(name: str, output: str, shape: list[Any]) -> None:
    (value,) = part_of(name, output).graph.output
    assert dims_of(value) == shape
    part = part_of(name, output)
    feed = {each.name: np.ones((3, 64), np.float32) for each in part.graph.input}
    session = onnxruntime.InferenceSession(part.SerializeToString(), providers=["CPUExecutionProvider"])
    assert session.run(None, feed)[0].shape == (3, shape[1])


def test_the_type_of_an_undeclared_output_of_ai_onnx_ml_is_known() -> None:
    model = model_of("Scaler", [X], offset=[0.0], scale=[2.0])
    model.graph.output[0].ClearField("type")
    assert dims_of(known_types(model)["y0"]) == [None, 2]


def test_another_number_of_classes_is_refused_when_the_file_has_labels_for_them() -> None:
    """Else ZipMap would refuse the scores when somebody runs the exported file."""
    path = file("sklearn-strings")
    with pytest.raises(ConfigError, match=r"the file has labels for 10 classes \(eight, \.\.\., two\)"):
        apply_surgery(load_model(path), ModelConfig(path=path, output="add_result1", num_classes=5), seed=0)
    apply_surgery(load_model(path), ModelConfig(path=path, output="add_result1", num_classes=10), seed=0)


def test_an_inner_tensor_of_integers_is_refused_too() -> None:
    with pytest.raises(ConfigError, match=r"cannot read output 'argmax_output' \(int64\)"):
        part_of("skl2onnx-mlp", "argmax_output")
