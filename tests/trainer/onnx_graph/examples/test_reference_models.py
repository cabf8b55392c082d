"""The reference models are the published ones: sizes, names, initial distributions; and they run."""

import math

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import numpy_helper

from onward.trainer.errors import ConfigError
from onward.trainer.onnx_graph.examples.reference_models import build_gpt2, build_squeezenet
from onward.trainer.onnx_graph.node_builder import SMALL_BYTES
from tests.support.graphs import MODELS, feed


def weights(model: onnx.ModelProto) -> dict[str, np.ndarray]:
    """The float weights by name, without scalars."""
    arrays = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    return {name: array for name, array in arrays.items() if array.ndim and array.dtype == np.float32}


def run(model: onnx.ModelProto, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
    return onnxruntime.InferenceSession(model.SerializeToString()).run(None, feeds)


def test_squeezenet_has_the_1235496_weights_of_the_published_one():
    found = weights(build_squeezenet(image_size=32))
    assert sum(array.size for array in found.values()) == 1_235_496
    assert found["features.3.squeeze.weight"].shape == (16, 64, 1, 1)
    assert found["classifier.1.weight"].shape == (1000, 512, 1, 1)


def test_squeezenet_starts_like_torchvision():
    found = weights(build_squeezenet(image_size=32))
    assert all(not array.any() for name, array in found.items() if name.endswith("bias"))
    assert found["classifier.1.weight"].std() == pytest.approx(0.01, rel=0.01)
    kernel = found["features.9.expand3x3.weight"]
    bound = math.sqrt(6 / (48 * 9))
    assert 0.99 * bound < abs(kernel).max() <= bound
    assert kernel.std() == pytest.approx(bound / math.sqrt(3), rel=0.01)


@pytest.mark.parametrize("image_size", [17, 32, 224])
def test_squeezenet_runs_at_any_batch_size(image_size):
    model = build_squeezenet(num_classes=10, image_size=image_size, channels=1)
    assert run(model, feed(model, 3))[0].shape == (3, 10)


def test_squeezenet_refuses_an_image_that_is_too_small_for_its_pools():
    with pytest.raises(ConfigError, match="image_size 16"):
        build_squeezenet(image_size=16)


def test_gpt2_has_the_124439808_weights_of_the_published_one():
    per_layer = weights(build_gpt2(vocab_size=8, sequence_length=8, num_layers=1))
    one_layer = sum(array.size for name, array in per_layer.items() if ".h.0." in name)
    assert 12 * one_layer + 2 * 768 + 50257 * 768 + 1024 * 768 == 124_439_808
    assert per_layer["transformer.h.0.attn.c_attn.weight"].shape == (768, 2304)


def test_gpt2_scales_the_projections_into_the_residual_stream():
    found = weights(build_gpt2(vocab_size=64, sequence_length=8, num_layers=2, num_heads=2, width=128))
    assert found["transformer.wte.weight"].std() == pytest.approx(0.02, rel=0.03)
    assert found["transformer.h.1.mlp.c_fc.weight"].std() == pytest.approx(0.02, rel=0.03)
    assert found["transformer.h.1.mlp.c_proj.weight"].std() == pytest.approx(0.01, rel=0.03)
    assert (found["transformer.ln_f.weight"] == 1).all()


def test_gpt2_outputs_do_not_depend_on_later_tokens():
    model = build_gpt2(vocab_size=16, sequence_length=16, num_layers=2, num_heads=2, width=16)
    ids = np.random.default_rng(0).integers(0, 16, (2, 9))
    changed = ids.copy()
    changed[:, 5:] = (changed[:, 5:] + 1) % 16
    before, after = run(model, {"input_ids": ids})[0], run(model, {"input_ids": changed})[0]
    assert (before[:, :5] == after[:, :5]).all()
    assert (before[:, 5:] != after[:, 5:]).all(axis=(0, 2)).any()


def test_gpt2_refuses_heads_that_do_not_divide_the_width():
    with pytest.raises(ConfigError, match="width 10 does not divide over 4 heads"):
        build_gpt2(width=10, num_heads=4)


@pytest.mark.parametrize("name", MODELS)
def test_the_same_seed_gives_the_same_bytes_and_the_model_runs(name):
    model = MODELS[name]()
    assert model.SerializeToString() == MODELS[name]().SerializeToString()
    for batch in (2, 3):
        assert all(np.isfinite(output).all() for output in run(model, feed(model, batch)))


def test_a_model_is_checked_without_its_large_weights(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    checked: list[onnx.ModelProto] = []
    monkeypatch.setattr(onnx.checker, "check_model", lambda model, *, full_check: checked.append(model))
    model = build_gpt2(vocab_size=64, sequence_length=8, num_layers=1, num_heads=2, width=16, dropout=0.0)
    monkeypatch.undo()
    (small,) = checked
    onnx.checker.check_model(model, full_check=True)
    onnx.checker.check_model(small, full_check=True)
    assert max(len(tensor.raw_data) for tensor in small.graph.initializer) < SMALL_BYTES
    assert len(small.graph.initializer) + len(small.graph.input) == len(model.graph.initializer) + 1
    del small.graph.input[-1]
    with pytest.raises(onnx.checker.ValidationError):
        onnx.checker.check_model(small, full_check=True)
