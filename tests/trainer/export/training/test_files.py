"""model_with_loss, eval, training and optimizer .onnx: each computes under onnxruntime what Onward computes."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

from onward.trainer.config.loading import build_config
from onward.trainer.config.losses import LossConfig
from onward.trainer.config.sections.model import ModelConfig
from onward.trainer.config.sections.training import OptimizerConfig, WeightAttributes
from onward.trainer.config.update_rules import UPDATE_RULES
from onward.trainer.errors import ConfigError, ExportRefused, UnsupportedModel
from onward.trainer.export.training import decompositions
from onward.trainer.export.training.files import TrainingArtifacts, write_artifacts
from onward.trainer.export.training.gradients import TrainingModel, gradient_of, training_model, updated
from onward.trainer.export.training.loss_graph import evaluation_model, loss_names, model_with_loss
from onward.trainer.export.training.optimizer_graph import UPDATES, optimizer_model
from onward.trainer.model.losses.loss import Loss
from onward.trainer.model.trainable import load_weights
from onward.trainer.onnx_graph.examples.reference_models import build_squeezenet
from onward.trainer.onnx_graph.node_builder import GraphWriter
from onward.trainer.onnx_import.driver import to_module
from onward.trainer.onnx_import.imported_graph import ImportedGraph, named_weights
from onward.trainer.onnx_import.train_selection import select_trained
from onward.trainer.optim.optimizers import build_optimizer, clip_factor, set_learning_rate
from tests.support.graphs import MODELS, feed
from tests.support.losses import loss_of

Array = np.ndarray[Any, np.dtype[Any]]


def run(model: onnx.ModelProto, feeds: Mapping[str, Array]) -> dict[str, Array]:
    """Every output, by name, after the checks each file must pass."""
    onnx.checker.check_model(model, full_check=True)
    assert {entry.domain for entry in model.opset_import} == {""}
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return dict(zip([output.name for output in session.get_outputs()], session.run(None, dict(feeds)), strict=True))


def settings(**sections: Any) -> Any:
    return build_config({"data": {"source": "x"}, "train": {"num_steps": 1}, **sections})


def labels_for(loss: str, output: torch.Tensor, *, ignored: int = -100) -> Array:
    """Labels of every kind: the first one is ignored."""
    random = np.random.default_rng(7)
    if loss == "cross_entropy":
        labels = random.integers(0, output.shape[-1], tuple(output.shape[:-1]))
        labels.flat[0] = ignored
        return labels
    labels = random.standard_normal(tuple(output.shape)).astype(np.float32)
    return (labels > 0).astype(np.float32) if loss == "bce_with_logits" else labels


def mean_loss(module: ImportedGraph, config: ModelConfig, inputs: list[Array], labels: Array) -> torch.Tensor:
    """The loop's: the sum over the targets, divided by how many count."""
    loss, targets = Loss(loss_of(config), module.output_names), torch.from_numpy(labels)
    given = None if config.loss == "output" else targets
    outputs = module(*map(torch.from_numpy, inputs))
    return loss(outputs, given, 1) / max(loss.count(given, 1), 1)


LOSSES = [
    ("tiny_conv_net", "cross_entropy"),
    ("tiny_transformer", "cross_entropy"),
    ("tiny_two_outputs", "cross_entropy"),
    ("tiny_mlp", "mse"),
    ("tiny_mlp", "l1"),
    ("tiny_mlp", "bce_with_logits"),
    ("tiny_bert", "bce_with_logits"),
    ("tiny_loss_model", "output"),
]


SETTINGS = {
    "huber": (LossConfig(name="huber", delta=0.4, ignore_index=-100), (3, 5), "y"),
    "weights": (LossConfig(name="cross_entropy", class_weights=(0.1, 0.4, 2.0), ignore_index=-100), (4, 3), "y"),
    "images": (LossConfig(name="cross_entropy", class_axis=1, ignore_index=-100), (2, 3, 4, 5), "y"),
    "weights of images": (
        LossConfig(name="cross_entropy", class_axis=1, class_weights=(0.1, 0.4, 2.0), ignore_index=-100),
        (2, 3, 3, 3),
        "y",
    ),
}


# -- model_with_loss.onnx and eval.onnx


@pytest.mark.parametrize("case", SETTINGS)
def test_settings_of_losses_are_in_the_files(case: str) -> None:
    config, shape, name = SETTINGS[case]
    g = GraphWriter("scaled", seed=0)
    dims = ("batch", *shape[1:])
    g.op("Mul", g.input("x", dims), g.weight("w", g.normal(0.5, shape[1], *(1 for _ in shape[2:]))), outputs=name)
    g.output(name, dims)
    model = g.model()
    module, names = to_module(model, fuse=False), loss_names(model, [config])
    feeds = feed(model, shape[0])
    loss = Loss(config, module.output_names)
    outputs = module(*map(torch.from_numpy, feeds.values()))
    random = np.random.default_rng(0)
    labels: Array = random.standard_normal(shape).astype(np.float32)
    if config.name == "cross_entropy":
        labels = random.integers(0, 3, (shape[0], *shape[2:]))
        labels.flat[0] = -100
    given = torch.from_numpy(labels)
    mean = loss(outputs, given, shape[0]) / loss.count(given, shape[0])
    mean.backward()
    files = [
        model_with_loss(model, [config], names=names),
        evaluation_model(model, [config], names=names, weights=["w"], copies={}).model,
    ]
    for file in files:
        onnx.checker.check_model(file, full_check=True)
        assert run(file, feeds | {names.labels[0]: labels})[names.loss] == pytest.approx(float(mean.detach()), rel=1e-5)
    if config.name == "cross_entropy":
        found = run(files[1], feeds | {names.labels[0]: labels})
        right = (outputs.argmax(1) == given) & (given != -100)
        assert (found["count"], found["correct"]) == (given.numel() - 1, int(right.sum()))
    trained = training_model(to_module(model, fuse=False), model, [config], names=names).model
    weights = {"w": named_weights(module)["w"].detach().numpy()}
    found = run(trained, {**feeds, names.labels[0]: labels, **weights})
    assert found[names.loss] == pytest.approx(float(mean.detach()), rel=1e-5)
    np.testing.assert_allclose(found["w_grad"], named_weights(module)["w"].grad.numpy(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("name", "loss"), LOSSES)
def test_the_loss_in_the_file_equals_the_loss_of_training(name: str, loss: str) -> None:
    model, config = MODELS[name](), ModelConfig(path=Path("m.onnx"), loss=loss, ignore_index=2)
    module, names = to_module(model).eval(), loss_names(model, [loss_of(config)])
    files = [
        model_with_loss(model, [loss_of(config)], names=names),
        evaluation_model(model, [loss_of(config)], names=names, weights=named_weights(module), copies={}).model,
    ]
    for batch in (1, 3):
        feeds = feed(model, batch)
        output = Loss(loss_of(config), module.output_names).output(module(*map(torch.from_numpy, feeds.values())))
        labels = labels_for(loss, output, ignored=2)
        expected = float(mean_loss(module, config, list(feeds.values()), labels).detach())
        for file in files:
            found = run(file, feeds | ({names.labels[0]: labels} if names.labels[0] else {}))
            assert found[names.loss] == pytest.approx(expected, rel=1e-6, abs=1e-7)
            assert {value.name for value in model.graph.output} <= found.keys()


def test_labels_that_are_all_ignored_give_loss_zero() -> None:
    model, config = MODELS["tiny_conv_net"](), ModelConfig(path=Path("m.onnx"))
    file = model_with_loss(model, [loss_of(config)], names=loss_names(model, [loss_of(config)]))
    assert run(file, feed(model, 2) | {"labels": np.full(2, -100)})["loss"] == 0.0


@pytest.mark.parametrize("loss", ["cross_entropy", "bce_with_logits"])
def test_eval_counts_correct_targets(loss: str) -> None:
    model, config = MODELS["tiny_transformer"](), ModelConfig(path=Path("m.onnx"), loss=loss)
    module = to_module(model).eval()
    file = evaluation_model(model, [loss_of(config)], names=loss_names(model, [loss_of(config)]), weights=[], copies={})
    feeds = feed(model, 4)
    output = module(torch.from_numpy(feeds["input_ids"])).detach()
    labels = labels_for(loss, output)
    found = run(file.model, feeds | {"labels": labels})
    if loss == "cross_entropy":
        right, count = (output.argmax(-1).numpy() == labels).sum(), (labels != -100).sum()
    else:
        right, count = ((output > 0).numpy() == (labels > 0.5)).sum(), labels.size
    assert (int(found[file.corrects[0]]), int(found[file.counts[0]])) == (right, count)


def test_eval_takes_trained_weights_and_copies_follow_their_original() -> None:
    g = GraphWriter("tied")
    table = g.normal(0.5, 8, 4)
    x = g.op("Gather", g.weight("table", table), g.input("ids", ("batch",), TensorProto.INT64))
    g.op("MatMul", x, g.weight("head", table.T.copy()), outputs="logits")
    g.output("logits", ("batch", 8))
    model, config = g.model(), ModelConfig(path=Path("m.onnx"))
    module = to_module(model)
    assert module.copies == {"head": ("table", True)}
    names = loss_names(model, [loss_of(config)])
    file = evaluation_model(
        model, [loss_of(config)], names=names, weights=named_weights(module), copies=module.copies
    ).model
    feeds = {"ids": np.arange(3), "labels": np.arange(3)}
    np.testing.assert_allclose(run(file, feeds)["logits"], table[:3] @ table.T, rtol=1e-6)
    np.testing.assert_allclose(run(file, feeds | {"table": 2 * table})["logits"], 4 * table[:3] @ table.T, rtol=1e-6)


def test_added_names_differ_from_those_of_the_graph() -> None:
    g = GraphWriter("taken")
    g.op("MatMul", g.input("labels", ("batch", 4)), g.weight("loss", g.normal(0.5, 4, 3)), outputs="onward.Cast")
    g.output("onward.Cast", ("batch", 3))
    model, config = g.model(), ModelConfig(path=Path("m.onnx"))
    names = loss_names(model, [loss_of(config)])
    assert (names.loss, names.labels[0]) == ("loss_2", "labels_2")
    found = run(
        model_with_loss(model, [loss_of(config)], names=names),
        {"labels": np.ones((2, 4), np.float32), "labels_2": np.zeros(2, np.int64)},
    )
    assert found.keys() == {"loss_2", "onward.Cast"}


# -- optimizer.onnx

RULES = [
    OptimizerConfig(name="adamw", weight_decay=0.1),
    OptimizerConfig(name="adamw", weight_decay=0.1, bias_correction=False, epsilon=1e-3),
    OptimizerConfig(name="adam", weight_decay=0.1, weight_decay_mode="huggingface"),
    OptimizerConfig(name="lamb", weight_decay=0.1, trust_ratio=(0.2, 5.0)),
    OptimizerConfig(name="sgd", weight_decay=0.1),
    OptimizerConfig(name="sgd", weight_decay=0.1, momentum=0.9),
    OptimizerConfig(
        name="sgd",
        momentum=0.9,
        nesterov=True,
        weights=(WeightAttributes(pattern="b*", learning_rate_scale=3.0, weight_decay=0.5),),
    ),
    OptimizerConfig(name="adamw", weights=(WeightAttributes(pattern="a", alpha=0.5, beta=0.8, epsilon=0.1),)),
    OptimizerConfig(name="lamb", weights=(WeightAttributes(pattern="a", alpha=0.5, trust_ratio=(0.0, 0.1)),)),
    OptimizerConfig(name="sgd", weights=(WeightAttributes(pattern="a", momentum=0.5),)),
]


def test_every_optimizer_has_an_update_rule_for_the_file_and_a_case_here() -> None:
    names = {name for name, rule in UPDATE_RULES.items() if rule.in_onnx}
    assert set(UPDATES) == names == {config.name for config in RULES}


@pytest.mark.parametrize("config", RULES, ids=lambda config: f"{config.name}-{RULES.index(config)}")
@pytest.mark.parametrize("clip_norm", [0.0, 1.5])
def test_an_update_in_the_file_equals_an_optimizer_step(config: OptimizerConfig, clip_norm: float) -> None:
    torch.manual_seed(0)
    weights = {name: torch.randn(shape) for name, shape in {"a": (3, 4), "b.bias": (4,), "zero": (2,)}.items()}
    weights["zero"].zero_()
    update = optimizer_model(config, weights, clip_norm=clip_norm)
    carried = {name: tensor.numpy().copy() for name, tensor in weights.items()}
    carried |= {each: np.zeros_like(carried[name]) for name in weights for each in update.state[name].values()}
    optimizer = build_optimizer(config, weights.items())
    for step in range(1, 6):
        gradients = {name: torch.randn_like(weight) / step for name, weight in weights.items()}
        norm = math.sqrt(sum(float(gradient.square().sum()) for gradient in gradients.values()))
        scalars = {"step": np.array(step), "learning_rate": np.array(0.02 / step, np.float32)}
        feeds = carried | {gradient_of(name): gradient.numpy() for name, gradient in gradients.items()} | scalars
        found = run(update.model, feeds)
        carried = {name: found[updated(name)] for name in carried}
        for name, weight in weights.items():
            weight.grad = gradients[name] * clip_factor(norm, clip_norm)
        set_learning_rate(optimizer, 0.02 / step)
        optimizer.step()
        assert found["gradient_norm"] == pytest.approx(norm, rel=1e-6)
    for name, weight in weights.items():
        held = {carried_as: optimizer.state[weight][key] for key, carried_as in update.state[name].items()}
        for carried_as, tensor in {name: weight, **held}.items():
            atol = 2e-6 * float(tensor.abs().max())
            np.testing.assert_allclose(carried[carried_as], tensor.numpy(), rtol=0, atol=atol, err_msg=carried_as)


# -- gradients in operators that ONNX has


# fmt: off
CONVOLUTIONS = [  # input, weight, stride, padding, dilation, transposed, output padding, groups
    ((2, 4, 9), (6, 4, 3), [2], [1], [1], False, [0], 1),
    ((2, 4, 9, 8), (6, 2, 3, 2), [2, 3], [1, 0], [1, 2], False, [0, 0], 2),
    ((3, 4, 8, 7), (4, 1, 3, 3), [1, 1], [2, 1], [2, 1], False, [0, 0], 4),
    ((2, 3, 5, 6, 7), (4, 3, 2, 3, 1), [2, 1, 3], [0, 1, 0], [1, 1, 1], False, [0, 0, 0], 1),
    ((2, 4, 5), (4, 3, 3), [2], [1], [1], True, [1], 2),
    ((2, 6, 5, 4), (6, 2, 2, 3), [3, 1], [0, 1], [1, 2], True, [2, 0], 3),
    ((1, 2, 4, 4), (3, 2, 4, 4), [2, 2], [3, 3], [1, 1], False, [0, 0], 1),
]
# fmt: on


@pytest.mark.parametrize("case", CONVOLUTIONS, ids=str)
def test_the_gradients_of_a_convolution_are_convolutions(case: Any) -> None:
    torch.manual_seed(0)
    shape, kernel, *rest = case
    x, weight = torch.randn(shape, dtype=torch.float64), torch.randn(kernel, dtype=torch.float64)
    y = torch.ops.aten.convolution(x, weight, None, *rest)
    gradient = torch.randn_like(y)
    arguments = (gradient, x, weight, [y.shape[1]], *rest, [True, True, True])
    expected = torch.ops.aten.convolution_backward(*arguments)
    found = decompositions.DECOMPOSITIONS[torch.ops.aten.convolution_backward.default](*arguments)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("ceil_mode", [False, True])
@pytest.mark.parametrize("count_padding", [False, True])
@pytest.mark.parametrize(("kernel", "stride", "padding"), [([3, 2], [2, 2], [1, 1]), ([2, 2], [3, 1], [0, 1])])
def test_the_gradients_of_an_average_pool(
    kernel: list[int], stride: list[int], padding: list[int], ceil_mode: bool, count_padding: bool
) -> None:
    x = torch.randn(2, 3, 8, 9, dtype=torch.float64)
    window = (kernel, stride, padding, ceil_mode, count_padding, None)
    gradient = torch.randn_like(torch.ops.aten.avg_pool2d(x, *window))
    found = decompositions.DECOMPOSITIONS[torch.ops.aten.avg_pool2d_backward.default](gradient, x, *window)
    torch.testing.assert_close(found, torch.ops.aten.avg_pool2d_backward(gradient, x, *window))


# -- training.onnx


def made(model: onnx.ModelProto, config: ModelConfig) -> tuple[ImportedGraph, TrainingModel]:
    module = to_module(model, fuse=False)
    select_trained(module, train=config.train, freeze=config.freeze)
    return module, training_model(module, model, [loss_of(config)], names=loss_names(model, [loss_of(config)]))


def assert_gradients(
    module: ImportedGraph, file: TrainingModel, config: ModelConfig, feeds: Mapping[str, Array]
) -> None:
    """Loss, gradients and running statistics are torch's, at the weights the module has; they stay as they are."""
    before = {name: tensor.detach().clone() for name, tensor in named_weights(module).items()}
    module.train().zero_grad()
    with torch.no_grad():
        output = Loss(loss_of(config), module.output_names).output(module(*map(torch.from_numpy, feeds.values())))
    load_weights(module, before)
    labels = labels_for(config.loss, output)
    loss = mean_loss(module, config, list(feeds.values()), labels)
    loss.backward()
    after = named_weights(module)
    own = {} if config.loss == "output" else {"labels": labels}
    found = run(file.model, {**feeds, **own, **{n: before[n].numpy() for n in (*file.weights, *file.statistics)}})
    assert found["loss"] == pytest.approx(float(loss.detach()), rel=1e-6)
    greatest = max(float(after[name].grad.abs().max()) for name in file.weights)
    for name in file.weights:
        gradient = after[name].grad.numpy()
        # a gradient that is 0 but for rounding (a key's bias) is judged by the others' size
        atol = 2e-6 * np.abs(gradient).max() + 1e-7 * greatest
        np.testing.assert_allclose(found[gradient_of(name)], gradient, rtol=0, atol=atol, err_msg=name)
    for name in file.statistics:
        np.testing.assert_allclose(found[updated(name)], after[name].numpy(), rtol=1e-6, atol=1e-7, err_msg=name)
    load_weights(module, before)


def squeezenet() -> onnx.ModelProto:
    return build_squeezenet(num_classes=4, image_size=32, dropout=0.0)


def images_of_any_size() -> onnx.ModelProto:
    """Strides, dilations, groups and uneven pads where height and width are known only when it runs."""
    g = GraphWriter("any_size")
    x = g.input("image", ("batch", 4, "height", "width"))
    for number, (shape, attributes) in enumerate(
        [
            ((8, 2, 3, 3), {"group": 2, "strides": [2, 2], "pads": [1, 1, 1, 1]}),
            ((6, 8, 2, 2), {"dilations": [2, 1], "pads": [0, 1, 1, 0]}),
            ((6, 1, 3, 3), {"group": 6, "strides": [1, 2]}),
        ]
    ):
        weights = [
            g.weight(f"{number}.weight", g.normal(0.3, *shape)),
            g.weight(f"{number}.bias", g.normal(0.3, shape[0])),
        ]
        x = g.op("Tanh", g.op("Conv", x, *weights, kernel_shape=list(shape[2:]), **attributes))
    g.op("Flatten", g.op("GlobalAveragePool", x), outputs="logits")
    g.output("logits", ("batch", 6))
    return g.model()


def many_operators() -> onnx.ModelProto:
    """What the other models have not: pools of every kind, upsampling, sorting, slices, reflected edges."""
    g = GraphWriter("many")
    x = g.input("image", ("batch", 3, 9, 8))
    x = g.op("ConvTranspose", x, g.weight("up", g.normal(0.3, 3, 4, 3, 3)), kernel_shape=[3, 3], strides=[2, 2])
    x = g.op("AveragePool", x, kernel_shape=[3, 2], strides=[2, 2], pads=[1, 0, 1, 0], ceil_mode=1)
    x = g.op("Conv", x, g.weight("mix", g.normal(0.5, 4, 4, 1, 1)), kernel_shape=[1, 1])
    x = g.op("Resize", x, "", g.weight("scales", np.array([1, 1, 2, 2], np.float32)), mode="linear")
    x = g.op("MaxPool", g.op("PRelu", x, g.weight("slope", g.normal(0.3, 4, 1, 1))), kernel_shape=[3, 3], pads=[1] * 4)
    x = g.op("Pad", x, g.weight("edges", [0, 0, 1, 0, 0, 0, 0, 1]), mode="reflect")
    x = g.op("ReduceMean", x, g.weight("axes", [3]), keepdims=0)
    x = g.op("Slice", g.op("Flatten", x), g.weight("from", [1]), g.weight("to", [33]), g.weight("one", [1]))
    g.op("TopK", g.op("Softplus", x), g.weight("k", [5]), outputs=["top", "where"])
    g.op("Gemm", "top", g.weight("head", g.normal(0.5, 4, 5)), transB=1, alpha=0.5, outputs="logits")
    g.output("logits", ("batch", 4))
    return g.model()


QUICK = [("tiny_mlp", "mse"), ("tiny_conv_net_with_batch_norm", "cross_entropy")]
SLOW = [
    *[entry for entry in LOSSES if entry not in QUICK],
    ("tiny_resnet", "cross_entropy"),
    ("tiny_bert", "cross_entropy"),
    ("squeezenet", "cross_entropy"),
    ("images_of_any_size", "cross_entropy"),
    ("many_operators", "cross_entropy"),
]
BUILT: dict[str, Callable[[], onnx.ModelProto]] = {
    **MODELS,
    "squeezenet": squeezenet,
    "images_of_any_size": images_of_any_size,
    "many_operators": many_operators,
}


@pytest.mark.parametrize(("name", "loss"), [*QUICK, *(pytest.param(*entry, marks=pytest.mark.slow) for entry in SLOW)])
def test_loss_and_gradients_equal_those_of_torch_at_any_batch_size(name: str, loss: str) -> None:
    model, config = BUILT[name](), ModelConfig(path=Path("m.onnx"), loss=loss)
    module, file = made(model, config)
    assert set(file.weights) == {module.onnx_names[path] for path, _ in module.named_parameters()}
    for batch in (2, 5):
        assert_gradients(module, file, config, feed(model, batch, seed=batch))


@pytest.mark.slow
def test_frozen_weights_stay_in_the_file_and_frozen_statistics_stay_as_they_are() -> None:
    model = MODELS["tiny_conv_net_with_batch_norm"]()
    config = ModelConfig(path=Path("m.onnx"), train=("classifier.*", "features.0.*"))
    module, file = made(model, config)
    assert file.weights == ("features.0.weight", "classifier.weight", "classifier.bias")
    stored = {tensor.name for tensor in file.model.graph.initializer}
    assert {"features.1.weight", "features.4.weight", "features.5.bias"} <= stored
    assert_gradients(module, file, config, feed(model, 3))  # a BatchNormalization without trained weights is frozen


def test_a_single_value_in_each_channel_leaves_the_running_statistics() -> None:
    g = GraphWriter("one_value")
    channels = [g.weight(name, np.abs(g.normal(1.0, 4))) for name in ("scale", "bias", "mean", "variance")]
    x = g.op("BatchNormalization", g.input("features", ("batch", 4)), *channels)
    g.op("Mul", x, g.weight("last", g.normal(1.0, 4)), outputs="y")
    g.output("y", ("batch", 4))
    model, config = g.model(), ModelConfig(path=Path("m.onnx"), loss="mse")
    module, file = made(model, config)
    for batch in (1, 2):
        assert_gradients(module, file, config, feed(model, batch))


@pytest.mark.slow
def test_dropout_draws_a_new_mask_at_every_run_and_its_gradient_has_the_same_mask() -> None:
    g = GraphWriter("dropped")
    x = g.op("Mul", g.input("features", ("batch", 500)), g.weight("weight", np.ones(500, np.float32)))
    g.op("Dropout", x, g.weight("ratio", 0.25), outputs="y")
    g.output("y", ("batch", 500))
    model, config = g.model(), ModelConfig(path=Path("m.onnx"), loss="l1")
    _, file = made(model, config)
    onnx.checker.check_model(file.model, full_check=True)
    session = onnxruntime.InferenceSession(file.model.SerializeToString(), providers=["CPUExecutionProvider"])
    ones = np.ones((1, 500), np.float32)
    feeds = {"features": ones, "labels": 0 * ones, "weight": ones[0]}
    masks = [session.run(["weight_grad"], feeds)[0] > 0 for _ in range(2)]
    assert not np.array_equal(*masks)
    for mask in masks:
        assert 0.65 < mask.mean() < 0.85
    loss, gradient = session.run(["loss", "weight_grad"], feeds)
    assert loss == pytest.approx((gradient > 0).mean() / 0.75, rel=1e-5)
    np.testing.assert_allclose(gradient[gradient > 0], 1 / 0.75 / 500, rtol=1e-5)


@pytest.mark.slow
def test_a_file_in_half_precision_is_trained_in_fp32() -> None:
    model = MODELS["tiny_mlp"]()
    for tensor in model.graph.initializer:
        tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor).astype(np.float16), tensor.name))
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.elem_type = TensorProto.FLOAT16
    config = ModelConfig(path=Path("m.onnx"), loss="mse")
    module, file = made(model, config)
    feeds = {"features": np.random.default_rng(0).standard_normal((3, 4)).astype(np.float32)}
    assert_gradients(module, file, config, feeds)
    names = loss_names(model, [loss_of(config)])
    evaluation = evaluation_model(model, [loss_of(config)], names=names, weights=file.weights, copies={}).model
    labels = np.zeros((3, 1), np.float32)
    found = run(evaluation, {"features": feeds["features"].astype(np.float16), "labels": labels})
    assert found["loss"].dtype == np.float32
    assert found["loss"] == pytest.approx(
        float(mean_loss(module, config, list(feeds.values()), labels).detach()), rel=5e-3
    )


def test_names_are_those_of_the_file_and_no_path_of_this_machine_is_written() -> None:
    g = GraphWriter("odd_names")
    x = g.op("MatMul", g.input("x/0:0", ("batch", 4)), g.weight("val_3", g.normal(0.5, 4, 4)))
    g.op("Add", x, g.weight("onnx::Add_7", g.normal(0.5, 4)), outputs="y.1")
    g.output("y.1", ("batch", 4))
    _, file = made(g.model(), ModelConfig(path=Path("m.onnx")))
    assert [value.name for value in file.model.graph.input] == ["x/0:0", "labels", "val_3", "onnx::Add_7"]
    assert [value.name for value in file.model.graph.output] == ["loss", "val_3_grad", "onnx::Add_7_grad"]
    onnx.checker.check_model(file.model, full_check=True)
    assert b"trainer" not in file.model.SerializeToString()
    assert file.model.graph.input[0].type.tensor_type.shape.dim[0].dim_param == "batch"


# -- all of it


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, TrainingArtifacts]:
    folder = tmp_path_factory.mktemp("artifacts")
    config = settings(model={"path": "m.onnx", "loss": "mse"})
    return folder, write_artifacts(folder, MODELS["tiny_mlp"](), config, base=folder)


def test_training_json_names_every_input_and_output_of_every_file(written: tuple[Path, TrainingArtifacts]) -> None:
    folder, record = written
    assert {path.name for path in folder.iterdir()} == {
        *("model_with_loss.onnx", "eval.onnx", "training.onnx", "optimizer.onnx", "weights.npz", "training.json")
    }
    assert TrainingArtifacts.model_validate(json.loads((folder / "training.json").read_text())) == record
    for artifact in record.files.values():
        session = onnxruntime.InferenceSession(folder / artifact.file, providers=["CPUExecutionProvider"])
        taken = [*session.get_inputs(), *session.get_overridable_initializers()]
        assert [value.name for value in artifact.inputs] == [value.name for value in taken]
        assert [value.name for value in artifact.outputs] == [value.name for value in session.get_outputs()]
    weights = np.load(folder / "weights.npz")
    assert set(weights) == set(record.weights) == {"fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias"}
    optimizer = {value.name for value in record.files["optimizer"].inputs}
    states = [name for names in record.weights.values() for name in names.state]
    gradients = [names.gradient for names in record.weights.values()]
    assert optimizer == {*record.weights, *gradients, *states, record.step, record.learning_rate}


@pytest.mark.slow
def test_training_json_names_the_values_and_labels_of_each_loss(tmp_path: Path) -> None:
    losses = [{"name": "mse", "weight": 0.5}, {"name": "bce_with_logits"}]
    config = settings(model={"path": "m.onnx"}, loss=losses)
    record = write_artifacts(tmp_path, MODELS["tiny_mlp"](), config, base=tmp_path)
    assert TrainingArtifacts.model_validate(json.loads((tmp_path / "training.json").read_text())) == record
    assert (record.labels, record.count, record.correct) == ("", "", "")
    for kind in ("model_with_loss", "eval", "training"):
        names = [value.name for value in record.files[kind].outputs]
        assert names[:3] == [record.loss, *(loss.mean for loss in record.losses)]
        assert {loss.labels for loss in record.losses} < {value.name for value in record.files[kind].inputs}
    first, second = record.losses
    assert (first.weight, first.count, second.weight) == (0.5, "", 1.0)
    assert {second.count, second.correct} < {value.name for value in record.files["eval"].outputs}


def test_an_opset_without_losses_is_refused_with_what_to_do(tmp_path: Path) -> None:
    model = MODELS["tiny_mlp"]()
    model.opset_import[0].version = 11
    with pytest.raises(UnsupportedModel, match=r"opset 11 .*convert_version\(model, 13\)"):
        model_with_loss(
            model, [loss_of(config := ModelConfig(path=Path("m.onnx")))], names=loss_names(model, [loss_of(config)])
        )


@pytest.mark.slow
def test_an_operator_without_translation_is_named_and_nothing_is_written(tmp_path: Path) -> None:
    g = GraphWriter("singular")
    x = g.op("MatMul", g.input("x", ("batch", 3, 3)), g.weight("w", g.normal(1.0, 3, 3)))
    g.op("Det", x, outputs="y")
    g.output("y", ("batch",))
    with pytest.raises(UnsupportedModel, match=r"no training\.onnx .*linalg"):
        write_artifacts(tmp_path, g.model(), settings(model={"path": "m.onnx", "loss": "mse"}), base=tmp_path)
    assert not list(tmp_path.iterdir())


def test_weights_beyond_one_file_are_refused_before_they_are_read(tmp_path: Path) -> None:
    model = MODELS["tiny_mlp"]()
    model.graph.initializer.append(
        TensorProto(name="vast", data_type=TensorProto.FLOAT, dims=[2**30], data_location=TensorProto.EXTERNAL)
    )
    with pytest.raises(ExportRefused, match=r"4 GiB.*variant 'training'"):
        write_artifacts(tmp_path, model, settings(model={"path": "m.onnx"}), base=tmp_path)


def test_an_unknown_output_is_refused() -> None:
    model = MODELS["tiny_mlp"]()
    with pytest.raises(ConfigError, match="'nowhere'"):
        model_with_loss(
            model,
            [loss_of(config := ModelConfig(path=Path("m.onnx"), output="nowhere"))],
            names=loss_names(model, [loss_of(config)]),
        )


def test_the_loss_may_read_any_tensor_of_the_graph() -> None:
    model, config = MODELS["tiny_two_outputs"](), ModelConfig(path=Path("m.onnx"), output="rest")
    file = model_with_loss(model, [loss_of(config)], names=loss_names(model, [loss_of(config)]))
    probe = onnx.ModelProto()
    probe.CopyFrom(model)
    probe.graph.output.append(helper.make_tensor_value_info("rest", TensorProto.FLOAT, ("batch", 2)))
    feeds = feed(model, 3)
    rest = torch.from_numpy(run(probe, feeds)["rest"])
    labels = np.array([0, 1, 1])
    expected = torch.nn.functional.cross_entropy(rest, torch.from_numpy(labels))
    assert run(file, feeds | {"labels": labels})["loss"] == pytest.approx(float(expected), rel=1e-6)


def test_weights_stored_as_integers_are_refused(tmp_path: Path) -> None:
    g = GraphWriter("integers", seed=0)
    codes, scale = g.weight("q", np.int8([[3, -9], [40, 7]])), g.weight("s", 0.1)
    g.op("MatMul", g.input("x", ("n", 2)), g.op("DequantizeLinear", codes, scale), outputs="logits")
    g.output("logits", ("n", 2))
    config = build_config({"model": {"path": "m.onnx"}, "data": {"source": "d.npz"}, "train": {"num_steps": 1}})
    with pytest.raises(ExportRefused, match=r"1 trained weights are stored as integers \(q, ...\).*variant 'training'"):
        write_artifacts(tmp_path, g.model(), config, base=tmp_path)
    assert not any(tmp_path.iterdir())
