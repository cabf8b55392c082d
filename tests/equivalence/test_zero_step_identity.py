"""Promise 7: exporting without training gives back the model that came in, byte for byte."""

import onnx
import pytest

from tests.graphs import MODELS
from trainer import graph
from trainer.reference import build_gpt2, build_squeezenet

MODELS_AS_THEY_COME = {
    **MODELS,
    "squeezenet": lambda: build_squeezenet(num_classes=10, image_size=32),
    "gpt2": lambda: build_gpt2(vocab_size=64, sequence_length=16, num_layers=2, num_heads=2, width=32),
}


@pytest.mark.parametrize("name", MODELS_AS_THEY_COME)
def test_a_model_that_was_not_trained_comes_back_byte_for_byte(name, tmp_path):
    path = tmp_path / "model.onnx"
    onnx.save(MODELS_AS_THEY_COME[name](), path)
    model = graph.load_model(path)
    module = graph.to_module(model)
    graph.trainable(module)
    back = graph.to_onnx(module, model)
    assert back.SerializeToString() == path.read_bytes()
    for ours, theirs in zip(back.graph.initializer, model.graph.initializer, strict=True):
        assert ours.SerializeToString() == theirs.SerializeToString()


@pytest.mark.parametrize("name", MODELS_AS_THEY_COME)
def test_weights_saved_and_loaded_are_still_the_models_own(name):
    model = MODELS_AS_THEY_COME[name]()
    module = graph.to_module(model)
    saved = {key: tensor.detach().clone() for key, tensor in graph.weights(module).items()}
    fresh = graph.to_module(model)
    for parameter in fresh.parameters():
        parameter.data.zero_()
    graph.load_weights(fresh, saved)
    assert graph.to_onnx(fresh, model).SerializeToString() == model.SerializeToString()
