"""Adapters: nothing before the first step, low rank after it, and merged they are the same model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper
from torch import Tensor, nn

from onward.trainer.config.loading import build_config
from onward.trainer.config.run_config import RunConfig
from onward.trainer.errors import ConfigError
from onward.trainer.model.trainable import TrainableModel, merged_module, open_trainable
from onward.trainer.onnx_graph.files.onnxruntime_session import open_session
from onward.trainer.onnx_graph.node_builder import GraphWriter
from onward.trainer.onnx_import.driver import to_module
from onward.trainer.onnx_import.imported_graph import named_weights
from tests.support import graphs
from tests.support.trained_models import model_with_weights

Open = Callable[..., TrainableModel]


@pytest.fixture
def opened(tmp_path: Path) -> Open:
    """opened(model, section={...}, ...) -> the trainable of that configuration."""

    def opened(model: onnx.ModelProto, /, **sections: Any) -> TrainableModel:
        onnx.save(model, tmp_path / "model.onnx")
        return open_trainable(configuration(tmp_path / "model.onnx", **sections))

    return opened


def configuration(path: Path, **sections: Any) -> RunConfig:
    model = {"path": path} | sections.pop("model", {})
    train = {"num_steps": 1} | sections.pop("train", {})
    return build_config({"model": model, "data": {"source": "x"}, "train": train, **sections})


def inputs(model: onnx.ModelProto) -> list[Tensor]:
    return [torch.from_numpy(array) for array in graphs.feed(model, 3).values()]


@torch.no_grad()
def moved(trainable: TrainableModel) -> None:
    """Adapters as after training."""
    torch.manual_seed(0)
    for name, tensor in named_weights(trainable.module).items():
        if name.endswith(".lora_b"):
            tensor.normal_(0, 0.3)


@torch.no_grad()
def assert_merges(trainable: TrainableModel, model: onnx.ModelProto) -> None:
    """The merged file under onnxruntime is the adapted module, and not the original one."""
    trainable.module.eval()
    before = trainable.module(*inputs(model))
    moved(trainable)
    ours = trainable.module(*inputs(model))
    merged = merged_module(trainable)
    out = model_with_weights(merged, trainable.model)
    assert [node.SerializeToString() for node in out.graph.node] == [n.SerializeToString() for n in model.graph.node]
    assert [tensor.name for tensor in out.graph.initializer] == [tensor.name for tensor in model.graph.initializer]
    theirs = open_session(out).run(None, graphs.feed(model, 3))[0]
    scale = ours.abs().max()
    assert (ours - before).abs().max() > 0.05 * scale, "the adapters did nothing"
    assert np.abs(ours.numpy() - theirs).max() <= 2e-6 * scale
    assert (merged(*inputs(model)) - ours).abs().max() <= 2e-6 * scale


# -- kinds of weights


def _one(name: str, dims: tuple[int | str, ...], build: Callable[[GraphWriter, str], str]) -> onnx.ModelProto:
    g = GraphWriter(name)
    g.op("Identity", build(g, g.input("x", dims)), outputs="y")
    g.output("y", [f"y{place}" for place in range(max(len(dims), 2))])
    return g.model()


def gemm(**attributes: Any) -> onnx.ModelProto:
    shape = (5, 4) if attributes.get("transB") else (4, 5)
    return _one(
        "gemm",
        (4, "batch") if attributes.get("transA") else ("batch", 4),
        lambda g, x: g.op("Gemm", x, g.weight("w", g.normal(1, *shape)), g.weight("b", g.normal(1, 5)), **attributes),
    )


def conv(*shape: int, dims: tuple[int | str, ...], **attributes: Any) -> onnx.ModelProto:
    return _one("conv", dims, lambda g, x: g.op("Conv", x, g.weight("w", g.normal(0.3, *shape)), **attributes))


def used_twice_and_transposed() -> onnx.ModelProto:
    def build(g: GraphWriter, x: str) -> str:
        w = g.weight("w", g.normal(0.5, 4, 5))
        h = g.op("Tanh", g.op("MatMul", x, w))
        return g.op("MatMul", g.op("Tanh", g.op("MatMul", h, g.op("Transpose", w, perm=[1, 0]))), w)

    return _one("twice", ("batch", 4), build)


def read_by_something_else() -> onnx.ModelProto:
    def build(g: GraphWriter, x: str) -> str:
        w = g.weight("w", g.normal(0.5, 4, 5))
        return g.op("Add", g.op("MatMul", x, w), g.op("ReduceMean", g.op("Mul", w, w), keepdims=0))

    return _one("else", ("batch", 4), build)


def experts() -> onnx.ModelProto:
    return _one("experts", (2, "batch", 4), lambda g, x: g.op("MatMul", x, g.weight("w", g.normal(0.5, 2, 4, 5))))


KINDS: dict[str, Callable[[], onnx.ModelProto]] = {
    "Gemm": gemm,
    "Gemm transposed": lambda: gemm(transB=1),
    "Gemm scaled": lambda: gemm(alpha=0.5, beta=2.0),
    "Gemm scaled and transposed": lambda: gemm(alpha=0.5, transA=1, transB=1),
    "Conv 1-D": lambda: conv(6, 4, 3, dims=("batch", 4, 9), strides=[2], pads=[1, 1]),
    "Conv 2-D dilated": lambda: conv(6, 4, 3, 3, dims=("batch", 4, 9, 9), dilations=[2, 2]),
    "Conv grouped": lambda: conv(6, 2, 3, 3, dims=("batch", 4, 9, 9), group=2, pads=[1, 1, 1, 1]),
    "Conv depthwise": lambda: conv(4, 1, 3, dims=("batch", 4, 9), group=4),
    "Conv 3-D, pads uneven": lambda: conv(5, 2, 2, 2, 2, dims=("batch", 2, 4, 4, 4), pads=[1, 0, 0, 0, 0, 0]),
    "used twice and transposed": used_twice_and_transposed,
    "read by something else": read_by_something_else,
    "experts": experts,
    **{name: graphs.MODELS[name] for name in ("tiny_transformer", "tiny_bert", "tiny_conv_net", "tiny_resnet")},
}


@pytest.mark.parametrize("fuse", [True, False], ids=["fused", "node by node"])
@pytest.mark.parametrize("kind", KINDS)
def test_merged_adapters_are_the_adapted_model_under_onnxruntime(opened: Open, kind: str, fuse: bool) -> None:
    model = KINDS[kind]()
    # some of these graphs declare lengths that are no batch; they are fed at those
    own_size = {"fixed_batch": "joint"}
    assert_merges(opened(model, model=own_size, lora={"weights": ["*"], "rank": 3}, graph={"fuse": fuse}), model)


def test_an_adapter_learns_in_the_rank_it_was_given(opened: Open) -> None:
    trainable = opened(graphs.tiny_transformer(), lora={"weights": ["*.c_attn.weight"], "rank": 3, "alpha": 12})
    moved(trainable)
    name = "transformer.h.0.attn.c_attn.weight"
    own = named_weights(trainable.module)
    change = named_weights(merged_module(trainable))[name] - own[name]
    assert int(torch.linalg.matrix_rank(change)) == 3
    wanted = 12 / 3 * (own[f"{name}.lora_b"] @ own[f"{name}.lora_a"]).T  # the file's layout is [inputs, outputs]
    assert torch.allclose(change, wanted, atol=1e-6)


# -- before the first step


@pytest.mark.parametrize("name", ["tiny_transformer", "tiny_bert", "tiny_resnet", "tiny_mlp"])
def test_without_training_adapters_change_no_result_and_not_a_byte_of_the_file(opened: Open, name: str) -> None:
    model = graphs.MODELS[name]()
    weight = next(tensor for tensor in model.graph.initializer if len(tensor.dims) > 1 and tensor.data_type == 1)
    weight.raw_data = _with_negative_zero(weight)
    trainable = opened(model, lora={"weights": ["*"]})
    with torch.no_grad():
        plain, ours = to_module(model).eval()(*inputs(model)), trainable.module.eval()(*inputs(model))
    assert torch.equal(plain, ours)
    assert (
        model_with_weights(merged_module(trainable), trainable.model).SerializeToString() == model.SerializeToString()
    )


def _with_negative_zero(tensor: onnx.TensorProto) -> bytes:
    array = numpy_helper.to_array(tensor).copy()
    array.reshape(-1)[0] = -0.0
    return array.tobytes()


def test_adapters_are_a_function_of_the_seed_and_their_name(opened: Open) -> None:
    model, lora = graphs.tiny_transformer(), {"weights": ["*.c_fc.weight"], "rank": 4}
    first, again, other = (named_weights(opened(model, lora=lora, train={"seed": s}).module) for s in (1, 1, 2))
    names = [f"transformer.h.{layer}.mlp.c_fc.weight.lora_a" for layer in (0, 1)]
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first[names[0]], other[names[0]])
    assert not torch.equal(first[names[0]], first[names[1]])
    bound = 1 / np.sqrt(32)
    assert 0.9 * bound < first[names[0]].abs().max() <= bound
    assert not first[names[0].replace("lora_a", "lora_b")].any()


def test_only_adapters_and_what_is_named_are_trained(opened: Open) -> None:
    model = graphs.tiny_bert()
    trainable = opened(
        model,
        lora={"weights": ["*.query.weight"], "also_train": ["classifier.*"]},
        model={"num_classes": 5, "freeze": ["encoder.layer.1.*"]},
    )
    trained = {
        name
        for name, tensor in named_weights(trainable.module).items()
        if isinstance(tensor, nn.Parameter) and tensor.requires_grad
    }
    adapter = "encoder.layer.0.query.weight"
    assert trained == {f"{adapter}.lora_a", f"{adapter}.lora_b", "classifier.weight", "classifier.bias"}
    trainable.module(*inputs(model)).square().sum().backward()
    for name, tensor in named_weights(trainable.module).items():
        assert (tensor.grad is not None) == (name in trained)
    assert named_weights(trainable.module)[f"{adapter}.lora_b"].grad.any()


def test_dropout_of_the_adapters_input_acts_in_training_only(opened: Open) -> None:
    model = graphs.tiny_mlp()
    trainable = opened(model, lora={"weights": ["fc1.weight"], "dropout": 0.5})
    moved(trainable)
    feed = inputs(model)
    torch.manual_seed(0)
    with torch.no_grad():
        trained = [trainable.module.train()(*feed) for _ in range(2)]
        evaluated = [trainable.module.eval()(*feed) for _ in range(2)]
    assert not torch.equal(*trained)
    assert torch.equal(*evaluated)
    assert_merges(opened(model, lora={"weights": ["fc*"], "dropout": 0.5}), model)


def test_patterns_that_match_no_product_and_dropout_that_has_no_place_are_refused(opened: Open) -> None:
    with pytest.raises(ConfigError) as raised:
        opened(graphs.tiny_mlp(), lora={"weights": ["*.bias", "fc3.weight", "fc1.weight"]})
    assert raised.value.problems == (
        "lora.weights: no MatMul, Gemm or Conv weight matches '*.bias'; there is fc1.weight",
        "lora.weights: no MatMul, Gemm or Conv weight matches 'fc3.weight'; there is fc2.weight",
    )
    with pytest.raises(ConfigError, match="'w' is also read by"):
        opened(read_by_something_else(), lora={"weights": ["w"], "dropout": 0.1})
