"""Promise 7: exporting without training gives back the model that came in, byte for byte, whatever it is stored in."""

import copy

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from onward.trainer.model.trainable import load_weights
from onward.trainer.onnx_graph.examples.reference_models import build_gpt2, build_squeezenet
from onward.trainer.onnx_import.driver import load_model, to_module
from onward.trainer.onnx_import.imported_graph import named_weights
from onward.trainer.onnx_import.train_selection import select_trained
from onward.trainer.onnx_import.write_back import write_model
from tests.support.graphs import MODELS
from tests.support.trained_models import model_with_weights

MODELS_AS_THEY_COME = {
    **MODELS,
    "squeezenet": lambda: build_squeezenet(num_classes=10, image_size=32),
    "gpt2": lambda: build_gpt2(vocab_size=64, sequence_length=16, num_layers=2, num_heads=2, width=32),
}


def in_typed_fields(model: onnx.ModelProto) -> None:
    for tensor in model.graph.initializer:
        values = numpy_helper.to_array(tensor)
        tensor.CopyFrom(helper.make_tensor(tensor.name, tensor.data_type, values.shape, values.reshape(-1)))


def in_constant_nodes(model: onnx.ModelProto) -> None:
    for tensor in list(model.graph.initializer)[::2]:
        model.graph.node.insert(0, helper.make_node("Constant", [], [tensor.name], value=tensor))
        model.graph.initializer.remove(tensor)


def as_inputs_too(model: onnx.ModelProto) -> None:
    """As files of before IR version 4 list their weights."""
    for tensor in model.graph.initializer:
        model.graph.input.append(helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims))


def with_a_copy(model: onnx.ModelProto) -> None:
    """A weight stored once more, transposed, as exporters store tied ones."""
    original = next(tensor for tensor in model.graph.initializer if len(tensor.dims) == 2 and tensor.data_type == 1)
    values = numpy_helper.to_array(original).T.copy()
    model.graph.initializer.append(numpy_helper.from_array(values, "val_1"))
    width = values.shape[0]
    model.graph.input.append(helper.make_tensor_value_info("extra", TensorProto.FLOAT, ["batch", width]))
    model.graph.output.append(helper.make_tensor_value_info("more", TensorProto.FLOAT, ["batch", values.shape[1]]))
    model.graph.node.append(helper.make_node("MatMul", ["extra", "val_1"], ["more"], name="more"))


def in_halves(model: onnx.ModelProto) -> None:
    """Weights as half-precision files keep them, cast where they are used."""
    casts = []
    for tensor in [tensor for tensor in model.graph.initializer if tensor.data_type == TensorProto.FLOAT]:
        with np.errstate(over="ignore"):  # masks become infinite
            half = numpy_helper.from_array(numpy_helper.to_array(tensor).astype(np.float16), f"{tensor.name}.half")
        casts.append(helper.make_node("Cast", [half.name], [tensor.name], to=TensorProto.FLOAT))
        tensor.CopyFrom(half)
    for cast in casts:
        model.graph.node.insert(0, cast)


FORMS = {
    "as it comes": lambda model: None,
    "typed fields": in_typed_fields,
    "Constant nodes": in_constant_nodes,
    "inputs too": as_inputs_too,
    "a copy": with_a_copy,
    "halves": in_halves,
}


@pytest.mark.parametrize("outside", [False, True], ids=["one file", "two files"])
@pytest.mark.parametrize(
    ("name", "form"),
    [
        (name, form)
        for name in MODELS_AS_THEY_COME
        for form in FORMS
        if (name, form) != ("squeezenet", "a copy")  # has no matrix
    ],
)
def test_a_model_that_was_not_trained_comes_back_byte_for_byte(name, form, outside, tmp_path):
    path, target = tmp_path / "model.onnx", tmp_path / "out" / "model.onnx"
    model = copy.deepcopy(MODELS_AS_THEY_COME[name]())
    FORMS[form](model)
    onnx.save(model, path, save_as_external_data=outside, location="model.data", size_threshold=256)
    model = load_model(path)
    module = to_module(model, base=tmp_path)
    select_trained(module)
    for file in write_model(module, model, path, target):
        assert file.read_bytes() == (tmp_path / file.name).read_bytes()
    assert bool(module.copies) == (form == "a copy")
    if not outside:
        assert model_with_weights(module, model).SerializeToString() == path.read_bytes()


@pytest.mark.parametrize("name", MODELS_AS_THEY_COME)
def test_weights_saved_and_loaded_are_still_the_models_own(name):
    model = MODELS_AS_THEY_COME[name]()
    module = to_module(model)
    saved = {key: tensor.detach().clone() for key, tensor in named_weights(module).items()}
    fresh = to_module(model)
    for parameter in fresh.parameters():
        parameter.data.zero_()
    load_weights(fresh, saved)
    assert model_with_weights(fresh, model).SerializeToString() == model.SerializeToString()
