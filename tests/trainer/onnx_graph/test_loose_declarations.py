"""Negative lengths, sequences, notes of tools and a Squeeze without axes are what onnxruntime takes them for."""

import logging
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

import onward
from onward.trainer.data.schema.signature import read_signature
from onward.trainer.errors import UnsupportedModel
from onward.trainer.onnx_graph.files.index import known_types
from onward.trainer.onnx_import.driver import load_model
from onward.trainer.onnx_import.imported_graph import named_weights
from onward.trainer.onnx_import.tracing import shape_assumptions
from tests.trainer.onnx_graph.test_beyond_onnx import ROWS, W, plain, saved, under_onnxruntime


def test_a_negative_length_is_an_unknown_one(tmp_path):
    def negative(model):
        for value in (model.graph.input[0], model.graph.output[0]):
            value.type.tensor_type.shape.dim[0].dim_value = -1
        model.graph.value_info.append(helper.make_tensor_value_info("h", TensorProto.FLOAT, [-1, 5]))

    path = saved(negative, tmp_path)
    module = onward.to_module(path)
    for rows in (1, 3, 7):
        x = np.random.default_rng(rows).normal(size=(rows, 4)).astype(np.float32)
        np.testing.assert_allclose(
            module(torch.from_numpy(x)).detach(), under_onnxruntime(path, x), rtol=1e-5, atol=1e-6
        )
    assert read_signature(path).inputs[0].shape == (None, 4)
    same, *_ = onward.write(module, path, tmp_path / "same.onnx")
    assert same.read_bytes() == path.read_bytes()
    assert onward.doctor(path).inputs == ("x float [?, 4]",)


def test_the_weight_of_a_negative_length_stays_refused(tmp_path):
    path = saved(lambda model: model.graph.initializer[0].dims.__setitem__(0, -1), tmp_path)
    with pytest.raises(UnsupportedModel, match=r"tensor 'w' has shape \[-1, 5\], with a negative length"):
        load_model(path)


def test_notes_of_tools_at_a_node_are_ignored_as_onnxruntime_does(tmp_path):
    path = saved(lambda model: model.graph.node[1].attribute.append(helper.make_attribute("__note", 1)), tmp_path)
    onnx.checker.check_model(str(path))
    result = onward.to_module(path)(torch.from_numpy(ROWS)).detach()
    np.testing.assert_allclose(result, under_onnxruntime(path, ROWS), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("operator", ["ConcatFromSequence", "SequenceAt"])
def test_a_sequence_as_input_is_a_list_of_tensors_in_the_module(operator, tmp_path):
    parts = [ROWS[:, :2], ROWS[:, 2:]] if operator == "ConcatFromSequence" else [ROWS + 1, ROWS]
    first = (
        helper.make_node("ConcatFromSequence", ["xs"], ["x"], axis=1)
        if operator == "ConcatFromSequence"
        else helper.make_node("SequenceAt", ["xs", "place"], ["x"])
    )
    model = plain()
    model.graph.initializer.append(numpy_helper.from_array(np.array(1), "place"))
    model.graph.node.insert(0, first)
    del model.graph.input[:]
    model.graph.input.append(helper.make_tensor_sequence_value_info("xs", TensorProto.FLOAT, ["N", None]))
    path = saved(lambda _: None, tmp_path, model)
    module = onward.to_module(path)
    assert module.input_names == ("xs",)
    result = module([torch.from_numpy(np.ascontiguousarray(part)) for part in parts])
    np.testing.assert_allclose(result.detach(), under_onnxruntime(path, parts), rtol=1e-5, atol=1e-6)
    result.sum().backward()
    by_hand = ROWS.astype(np.float64).T @ (ROWS.astype(np.float64) @ W > 0)
    np.testing.assert_allclose(named_weights(module)["w"].grad, by_hand, rtol=1e-5, atol=1e-6)


def squeezing(folder: Path, dims: list[str | int], axes: bool = False) -> Path:
    """y = squeeze(x * w) with or without the axis 1, of x [N, 1, dims...]."""
    inputs = ["p", "axes"] if axes else ["p"]
    graph = helper.make_graph(
        [helper.make_node("Mul", ["x", "w"], ["p"]), helper.make_node("Squeeze", inputs, ["y"], "squeeze")],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 1, *dims])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(np.linspace(0.5, 2, 4).astype(np.float32), "w")]
        + ([numpy_helper.from_array(np.array([1]), "axes")] if axes else []),
    )
    path = folder / "squeeze.onnx"
    path.write_bytes(
        helper.make_model(graph, ir_version=8, opset_imports=[helper.make_opsetid("", 17)]).SerializeToString()
    )
    return path


def test_a_squeeze_without_axes_keeps_a_batch_of_one_and_says_so(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(shape_assumptions, "_SAID", set())
    path = squeezing(tmp_path, [4])
    module = onward.to_module(path)
    x = np.random.default_rng(0).normal(size=(2, 1, 4)).astype(np.float32)
    with caplog.at_level(logging.WARNING):
        np.testing.assert_allclose(module(torch.from_numpy(x)).detach(), under_onnxruntime(path, x), rtol=1e-6)
        assert not caplog.records
        one = module(torch.from_numpy(x[:1])).detach()
        module(torch.from_numpy(x[:1]))
    wanted = under_onnxruntime(path, x[:1])
    assert wanted.shape == (4,)
    np.testing.assert_allclose(one, wanted[None], rtol=1e-6)
    [said] = [record.getMessage() for record in caplog.records]
    assert "Squeeze 'squeeze' has no axes, and dimension 0 of what it reads is 1 now" in said
    [warning] = [each for each in onward.doctor(path).warnings if each.key == "squeezed_batch"]
    assert "(squeeze)" in warning.what


def test_a_squeeze_without_axes_refuses_another_length_of_one(tmp_path):
    path = squeezing(tmp_path, ["T", 4])
    module = onward.to_module(path)
    x = np.random.default_rng(0).normal(size=(2, 1, 3, 4)).astype(np.float32)
    np.testing.assert_allclose(module(torch.from_numpy(x)).detach(), under_onnxruntime(path, x), rtol=1e-6)
    assert under_onnxruntime(path, x[:, :, :1]).shape == (2, 4)
    with pytest.raises(RuntimeError, match=r"Squeeze 'squeeze' has no axes, and dimension 2 .* is 1 now"):
        module(torch.from_numpy(x[:, :, :1]))


def test_a_squeeze_with_axes_is_not_warned_of(tmp_path):
    path = squeezing(tmp_path, ["T", 4], axes=True)
    x = np.random.default_rng(0).normal(size=(1, 1, 1, 4)).astype(np.float32)
    module = onward.to_module(path)
    np.testing.assert_allclose(module(torch.from_numpy(x)).detach(), under_onnxruntime(path, x), rtol=1e-6)
    assert not [each for each in onward.doctor(path).warnings if each.key == "squeezed_batch"]


@pytest.mark.timeout(60)
def test_an_imputer_of_an_input_without_an_element_type_gets_no_type():
    x = onnx.ValueInfoProto(name="x")
    x.type.tensor_type.shape.dim.add().dim_param = "B"
    imputer = helper.make_node("Imputer", ["x"], ["y"], domain="ai.onnx.ml")
    graph = helper.make_graph([imputer], "g", [x], [onnx.ValueInfoProto(name="y")])
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("ai.onnx.ml", 3)]
    types = known_types(helper.make_model(graph, opset_imports=opsets))
    assert types["y"].type.WhichOneof("value") is None
