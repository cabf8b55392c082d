"""A file that was trained before decides its preprocessing and its order of classes itself, and is trained gently."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

import onward
from onward.trainer.config.loading import load_config
from onward.trainer.onnx_graph.examples.reference_models import build_gpt2, build_squeezenet
from onward.trainer.onnx_graph.examples.small_models import build_bert, build_resnet18
from onward.trainer.onnx_graph.node_builder import GraphWriter
from onward.trainer.proposal.training_proposal import family_of, trained_before
from tests.trainer.rehearsal.trials.test_preprocessing_trials import COLOURS, IMAGENET, colour_model, pictures


def test_the_preprocessing_and_the_order_of_classes_are_those_under_which_the_file_is_right(tmp_path: Path) -> None:
    order = (3, 1, 4, 0, 2)
    values = {"scale": 1 / 255, "mean": [0.0] * 3, "std": [1.0] * 3}
    colour_model(tmp_path / "model.onnx", bgr=True, order=order, **values)
    data = pictures(tmp_path / "data", each=25)
    found = onward.init(tmp_path / "model.onnx", data, output=tmp_path / "config.toml", steps=0)
    config = load_config(tmp_path / "config.toml")
    assert config.data.image is not None
    assert (config.data.image.color, config.data.image.mean) == ("bgr", (0.0, 0.0, 0.0))
    assert config.data.classes == tuple(list(COLOURS)[place] for place in order)
    reasons = {guess.setting: guess.reason for guess in found.guesses}
    assert "that were tried: accuracy" in reasons["data.image.color"]
    assert "the order in which accuracy is" in reasons["data.classes"]
    assert config.optimizer.learning_rate < 1e-3


def test_a_head_of_another_size_is_replaced_and_the_rest_fine_tuned(tmp_path: Path) -> None:
    colour_model(tmp_path / "model.onnx", **IMAGENET)
    data = pictures(tmp_path / "data", each=12)
    for name in ("pink", "red"):
        for file in (data / name).iterdir():
            file.unlink()
        (data / name).rmdir()
    found = onward.init(tmp_path / "model.onnx", data, output=tmp_path / "config.toml")
    config = load_config(tmp_path / "config.toml")
    assert config.model.num_classes == 3
    assert "3 class names in 36 rows, and the output has 5 scores" in (tmp_path / "config.toml").read_text()
    assert found.proof is not None
    assert not found.refused


@pytest.mark.parametrize(
    ("model", "family"),
    [
        (build_resnet18(num_classes=3, image_size=8, width=4), "convolution"),
        (build_squeezenet(num_classes=3, image_size=32), "convolution"),
        (build_bert(vocab_size=40, num_classes=2, width=16), "transformer"),
        (build_gpt2(vocab_size=40, sequence_length=8, num_layers=1, num_heads=2, width=16), "transformer"),
    ],
)
def test_fresh_weights_and_the_family_are_recognised(model: onnx.ModelProto, family: str) -> None:
    assert family_of(model.graph) == family
    assert trained_before(model, Path())[0] is False


def test_weights_that_torch_initialises_are_fresh_and_trained_ones_are_not() -> None:
    random = np.random.default_rng(0)

    def model(weight: np.ndarray, bias: np.ndarray) -> onnx.ModelProto:  # type: ignore[type-arg]
        g = GraphWriter("layer")
        g.op(
            "Gemm",
            g.input("x", ("batch", 64)),
            g.weight("w", weight.astype(np.float32)),
            g.weight("b", bias.astype(np.float32)),
            transB=1,
            outputs="y",
        )
        g.output("y", ("batch", 32))
        return g.model()

    uniform = random.uniform(-1, 1, (32, 64)) / 8, random.uniform(-1, 1, 32) / 8
    assert trained_before(model(*uniform), Path()) == (
        False,
        "its matrices are uniform in ±1/√fan_in, as torch initialises them",
    )
    assert trained_before(model(random.normal(size=(32, 64)), np.zeros(32)), Path())[0] is False
    assert trained_before(model(uniform[0] + random.normal(0, 0.1, (32, 64)), uniform[1]), Path())[0] is None


def test_convolutions_that_torchvision_initialises_are_fresh_and_trained_ones_are_not() -> None:
    random = np.random.default_rng(0)

    def convolutions(widen: float) -> onnx.ModelProto:
        g = GraphWriter("layers")
        x = g.input("x", ("batch", 16, 8, 8))
        for number in range(5):  # folded into a convolution, BatchNormalization leaves a bias of noise
            kernel = random.normal(0, np.sqrt(2 / (16 * 9)), (16, 16, 3, 3)) * random.normal(1, widen, (16, 1, 1, 1))
            names = (
                g.weight(f"{number}.w", kernel.astype(np.float32)),
                g.weight(f"{number}.b", random.normal(size=16).astype(np.float32)),
            )
            x = g.op("Conv", x, *names, pads=[1, 1, 1, 1], outputs="y" if number == 4 else "")
        g.output("y", ("batch", 16, 8, 8))
        return g.model()

    assert trained_before(convolutions(0.0), Path()) == (
        False,
        "5 of its 5 matrices are normal with a usual deviation, the rest uniform",
    )
    assert trained_before(convolutions(0.6), Path())[0] is None, "training widens some channels"


def test_running_statistics_that_have_seen_data_show_that_a_file_was_trained() -> None:
    model = build_resnet18(num_classes=3, image_size=8, width=4)
    for tensor in model.graph.initializer:
        if tensor.name.endswith("running_mean"):
            values = np.random.default_rng(0).normal(size=tensor.dims).astype(np.float32)
            tensor.CopyFrom(onnx.numpy_helper.from_array(values, tensor.name))
    assert trained_before(model, Path()) == (True, "its running means have seen data")
