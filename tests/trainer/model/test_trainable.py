"""From the configuration to the module and back: on real ranks, killed in between, and proven by the gate."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper

from onward.tasks.export import export_file
from onward.trainer.config.loading import build_config
from onward.trainer.config.run_config import RunConfig
from onward.trainer.model.trainable import merged_module, open_trainable
from onward.trainer.onnx_graph.examples.reference_models import build_squeezenet
from onward.trainer.onnx_graph.files.onnxruntime_session import open_session
from onward.trainer.onnx_graph.node_builder import GraphWriter
from onward.trainer.onnx_graph.surgery.surgery import extract_subgraph
from onward.trainer.onnx_import.driver import to_module
from onward.trainer.onnx_import.imported_graph import named_weights
from onward.trainer.onnx_import.write_back import write_model
from onward.trainer.run.directory import RunDir, read_config
from tests.support import graphs
from tests.support.runs import assert_equal_bits, events, final_tensors, make_run, tiny_images, train_run, train_until
from tests.support.trained_models import model_with_weights

Array = np.ndarray[Any, np.dtype[Any]]


def configuration(path: Path, **sections: Any) -> RunConfig:
    model = {"path": path} | sections.pop("model", {})
    return build_config({"model": model, "data": {"source": "x"}, "train": {"num_steps": 1}, **sections})


def tensors(path: Path) -> dict[str, Array]:
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in onnx.load(path).graph.initializer}


@pytest.mark.parametrize("name", ["tiny_transformer", "tiny_resnet"])
def test_the_trained_part_goes_back_into_the_whole_and_is_judged_as_it_was_trained(tmp_path: Path, name: str) -> None:
    model = graphs.MODELS[name]()
    onnx.save(model, tmp_path / "m.onnx")
    kinds = ("LayerNormalization", "Relu")
    inner = [node.output[0] for node in model.graph.node if node.op_type in kinds]
    section = {"start": [inner[1]], "output": inner[-1], "train": ["*"]}
    config = configuration(tmp_path / "m.onnx", model=section)
    trainable = open_trainable(config)
    with torch.no_grad():
        for tensor in named_weights(trainable.module).values():
            tensor.mul_(1.5)
    merged = merged_module(trainable)
    (tmp_path / "out").mkdir()
    write_model(merged, trainable.model, tmp_path / "m.onnx", tmp_path / "out" / "m.onnx")
    before, after = tensors(tmp_path / "m.onnx"), tensors(tmp_path / "out" / "m.onnx")
    changed = {name for name in before if before[name].tobytes() != after[name].tobytes()}
    assert changed == {n for n, tensor in named_weights(trainable.module).items() if tensor.any()}
    assert 0 < len(changed) < len(named_weights(to_module(model)))

    whole = onnx.load(tmp_path / "out" / "m.onnx")
    part = extract_subgraph(whole, config.model)
    assert [value.name for value in part.graph.output] == list(trainable.module.output_names) == [inner[-1]]
    assert [value.name for value in part.graph.input] == list(trainable.module.input_names)
    feed = {}
    for value in part.graph.input:
        _, *dims = value.type.tensor_type.shape.dim
        shape = [2, *(dim.dim_value or 5 for dim in dims)]
        feed[value.name] = np.random.default_rng(0).standard_normal(shape, np.float32)
        if value.type.tensor_type.elem_type == onnx.TensorProto.INT64:
            feed[value.name] = np.ones(shape, np.int64)
    with torch.no_grad():
        ours = trainable.module.eval()(*(torch.from_numpy(feed[key]) for key in trainable.module.input_names)).numpy()
    theirs = open_session(part).run(None, feed)[0]
    assert np.abs(ours - theirs).max() <= 2e-6 * np.abs(ours).max()


def test_dropout_is_put_where_it_is_said_and_the_file_never_has_it(tmp_path: Path) -> None:
    onnx.save(graphs.tiny_transformer(), tmp_path / "m.onnx")
    config = configuration(tmp_path / "m.onnx", graph={"dropout": 0.5}, lora={"weights": ["*.c_fc.weight"]})
    trainable = open_trainable(config)
    assert trainable.dropout
    ids = torch.zeros(2, 5, dtype=torch.int64)
    with torch.no_grad():
        evaluated = [trainable.module.eval()(ids) for _ in range(2)]
        trained = [trainable.module.train()(ids) for _ in range(2)]
    assert torch.equal(*evaluated)
    assert not torch.equal(*trained)
    content = model_with_weights(merged_module(trainable), trainable.model).SerializeToString()
    assert content == onnx.load(tmp_path / "m.onnx").SerializeToString()


# -- whole runs

SETTINGS: dict[str, Any] = {
    "train": {"global_batch_size": 8, "num_steps": 12, "seed": 3},
    "optimizer": {"learning_rate": 1e-2},
    "parallel": {"data": 2},
    "checkpoint": {"period": 4},
}
ADAPTED: dict[str, Any] = SETTINGS | {
    "model": {"num_classes": 4},
    "lora": {"weights": ["features.*"], "rank": 2, "dropout": 0.1, "also_train": ["classifier.*"]},
}


def head_and_adapters(folder: Path) -> RunDir:
    return make_run(folder, graphs.tiny_conv_net(num_classes=9), tiny_images(80), **ADAPTED)


@pytest.mark.mpi
@pytest.mark.usefixtures("forked")
@pytest.mark.slow
def test_a_new_head_with_adapters_killed_and_resumed_ends_with_the_same_bits_and_passes_the_gate(
    tmp_path: Path,
) -> None:
    undisturbed, killed = head_and_adapters(tmp_path / "undisturbed"), head_and_adapters(tmp_path / "killed")
    train_run(undisturbed)
    train_until(killed, lambda event: event.step >= 6 and event.kind == "scalars")
    result = train_run(killed)
    assert (result.attempt, result.step) == (2, 12)
    assert_equal_bits(final_tensors(killed), final_tensors(undisturbed))

    source = read_config(killed).model.path
    exported = export_file(killed, killed.checkpoint(12))
    assert exported.parity < 2e-6
    evaluations = [event.values for event in events(killed, "evaluation")]
    assert exported.before == pytest.approx(evaluations[0], rel=1e-5), "not judged with the new head, untrained"
    assert exported.after == pytest.approx(evaluations[-1], rel=1e-5)
    assert exported.after["evaluation/loss"] < exported.before["evaluation/loss"], "nothing was learned"
    before, after = tensors(source), tensors(exported.path)
    assert list(after) == list(before), "adapters are in the file"
    assert {name for name in before if before[name].shape != after[name].shape} == {
        "classifier.weight",
        "classifier.bias",
    }
    kept = {name for name in before if before[name].tobytes() == after[name].tobytes()}
    assert kept == {"features.0.bias", "features.3.bias"}


def three_layers() -> onnx.ModelProto:
    """features [batch, 3] -> fc1 -> Relu -> fc2 -> Relu -> fc3 -> Softmax -> shares [batch, 9]."""
    g = GraphWriter("three_layers")
    x, sizes = g.input("features", ("batch", 3)), (3, 16, 12, 9)
    for layer in (1, 2, 3):
        weight = g.weight(f"fc{layer}.weight", g.normal(0.4, sizes[layer], sizes[layer - 1]))
        x = g.op("Gemm", x, weight, g.weight(f"fc{layer}.bias", g.normal(0.1, sizes[layer])), transB=1)
        x = g.op("Relu", x, outputs=f"hidden{layer}") if layer < 3 else x
    g.op("Softmax", x, axis=-1, outputs="shares")
    g.output("shares", ("batch", 9))
    return g.model()


@pytest.mark.mpi
@pytest.mark.usefixtures("forked")
def test_a_run_with_a_new_head_and_adapters_from_inner_tensor_to_inner_tensor_learns_and_passes_the_gate(
    tmp_path: Path,
) -> None:
    model = three_layers()
    random, logits = np.random.default_rng(0), model.graph.node[4].output[0]
    label = random.integers(0, 4, 80)
    columns = {"hidden": (random.standard_normal((80, 16)) + label[:, None]).astype(np.float32), "label": label}
    settings = SETTINGS | {
        "model": {"start": ["hidden1"], "output": logits, "num_classes": 4},
        "lora": {"weights": ["fc2.weight"], "rank": 2, "also_train": ["fc3.*"]},
        "data": {"inputs": {"hidden1": "hidden"}},
        "parallel": {"data": 1},
    }
    run = make_run(tmp_path, model, columns, **settings)
    train_run(run)
    exported = export_file(run, run.checkpoint(12))
    assert exported.parity < 2e-6
    evaluations = [event.values for event in events(run, "evaluation")]
    assert exported.before == pytest.approx(evaluations[0], rel=1e-5), "not judged with the new head, untrained"
    assert exported.after == pytest.approx(evaluations[-1], rel=1e-5)
    assert exported.after["evaluation/loss"] < exported.before["evaluation/loss"], "nothing was learned"
    before, after = tensors(read_config(run).model.path), tensors(exported.path)
    assert list(after) == list(before), "adapters are in the file"
    changed = {name for name in before if before[name].tobytes() != after[name].tobytes()}
    assert changed == {"fc2.weight", "fc3.weight", "fc3.bias"}
    written = onnx.load(exported.path)
    assert [value.name for value in (*written.graph.input, *written.graph.output)] == ["features", "shares"]
    assert open_session(written).run(None, {"features": np.ones((2, 3), np.float32)})[0].shape == (2, 4)


def test_squeezenet_with_a_new_head_is_ready_to_train(tmp_path: Path) -> None:
    onnx.save(build_squeezenet(image_size=32, num_classes=50), tmp_path / "m.onnx")
    trainable = open_trainable(configuration(tmp_path / "m.onnx", model={"num_classes": 3}))
    images = torch.from_numpy(np.random.default_rng(0).standard_normal((2, 3, 32, 32), np.float32))
    assert trainable.module.train()(images).shape == (2, 3)
