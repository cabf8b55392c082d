"""`quantize.aware`: a float model becomes one with QuantizeLinear before training, and an int8 file after it."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, numpy_helper

from onward.tasks.checks.rehearsing import Preparation
from onward.tasks.export import export_file
from onward.trainer.config.sections.quantize import QuantizeConfig
from onward.trainer.data.schema.signature import model_digest
from onward.trainer.diagnostics.config_check import check_local_files
from onward.trainer.errors import ConfigError
from onward.trainer.export.measuring.rounding_neighbours import Neighbours
from onward.trainer.export.variants.quantize_aware import integer_kernels, make_quantized
from onward.trainer.onnx_graph.surgery.quantizing import output_steps, quantizing_problems, store_integers
from onward.trainer.run.directory import read_config
from tests.bench.quantization import ACCURACY, MODELS, compare, insert_nodes
from tests.support import runs
from tests.support.graphs import tiny_conv_net
from tests.support.mobile_models import digits, mobile_net
from tests.support.quantized import quantized
from tests.trainer.onnx_import.quantization.test_quantized_weights import by_onnxruntime

SMALL = {"train": {"global_batch_size": 32, "num_steps": 2}}


def made(tmp_path: Path, **settings: object) -> tuple[runs.RunDir, Path]:
    """A run of a small MobileNet with the nodes inserted, and the file that it trains."""
    run = runs.make_run(tmp_path, mobile_net(width=2), digits(), quantize={"aware": True, **settings}, **SMALL)
    target = run.quantized / "model.onnx"
    make_quantized(read_config(run, "local"), target)
    return run, target


def test_the_inserted_nodes_leave_weights_in_floating_point_and_names_as_they_are(tmp_path: Path) -> None:
    run, path = made(tmp_path)
    model, given = onnx.load(path), mobile_net(width=2)
    assert [each.name for each in (*model.graph.input, *model.graph.output)] == ["image", "logits"]
    kinds = Counter(node.op_type for node in model.graph.node)
    assert kinds["BatchNormalization"] == 0  # folded into the convolutions
    assert kinds["Clip"] == 9  # kept: a range that follows the values would not clip
    stored = {tensor.name: tensor for tensor in model.graph.initializer}
    heads = [tensor for tensor in given.graph.initializer if tensor.name == "head.weight"]
    np.testing.assert_array_equal(numpy_helper.to_array(stored["head.weight"]), numpy_helper.to_array(heads[0]))
    assert sum(integer_kernels(path).values()) >= 10
    assert read_config(run).model.path == path
    path.unlink()
    with pytest.raises(ConfigError, match=r"quantized/model\.onnx is gone: the run trains this file"):
        read_config(run)


def test_the_same_settings_make_the_same_bytes(tmp_path: Path) -> None:
    run, path = made(tmp_path)
    again = tmp_path / "again" / "model.onnx"
    record = make_quantized(read_config(run, "local"), again)
    assert again.read_bytes() == path.read_bytes()
    assert record.sha256 == model_digest(path)


def test_weights_stored_as_integers_compute_the_same_bits(tmp_path: Path) -> None:
    _, path = made(tmp_path, aware="u8u7")
    model, inputs = onnx.load(path), {"image": digits()["image"][:8]}
    before = by_onnxruntime(model, inputs)
    names = store_integers(model)
    assert "head.weight" in names
    assert len(names) == 10
    kinds = {tensor.name: tensor.data_type for tensor in model.graph.initializer}
    assert {kinds[name] for name in names} == {TensorProto.UINT8}
    np.testing.assert_array_equal(by_onnxruntime(model, inputs), before)


# name: (model, settings, what is said)
REFUSED = {
    "quantized already": (quantized(), {}, "has 18 QuantizeLinear and DequantizeLinear nodes already"),
    "an old opset": (tiny_conv_net(), {"opset": 11}, "needs opset 13 or newer, and the file has 11"),
    "an unknown operator": (
        tiny_conv_net(),
        {"op_types": ("Convolution",)},
        "does not quantize 'Convolution'; did you",
    ),
    "an absent operator": (
        tiny_conv_net(),
        {"op_types": ("LayerNormalization",)},
        "the graph has no LayerNormalization",
    ),
    "an absent node": (tiny_conv_net(), {"exclude": ("nothing*",)}, "no node is named 'nothing*'; there is"),
    "nothing": (tiny_conv_net(), {"exclude": ("*",)}, "nothing would be quantized"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_quantized_is_refused_before_the_run(case: str) -> None:
    model, settings, said = REFUSED[case]
    if opset := settings.get("opset"):
        model = onnx.ModelProto.FromString(model.SerializeToString())
        model.opset_import[0].version = opset
    chosen = QuantizeConfig(aware=True, **{name: value for name, value in settings.items() if name != "opset"})
    [problem] = quantizing_problems(model, chosen, size=1000)
    assert said in problem


def test_the_check_of_a_configuration_finds_what_cannot_be_quantized(tmp_path: Path) -> None:
    run = runs.make_run(tmp_path, mobile_net(width=2), digits(), **SMALL)
    config = read_config(run).model_copy(update={"quantize": QuantizeConfig(aware=True, op_types=("Convolution",))})
    [problem] = check_local_files(dict(config))
    assert problem.startswith("quantize.op_types: onnxruntime does not quantize 'Convolution'; did you mean 'Conv")


def test_contradicting_settings_are_refused_together(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        runs.make_run(
            tmp_path,
            mobile_net(width=2),
            digits(),
            model={"num_classes": 3},
            quantize={"aware": True},
            parallel={"tensor": 2},
            export={"variants": ["int8_static", "training"]},
            **SMALL,
        )
    said = str(refused.value)
    for part in ("model.num_classes 3", "parallel.tensor 2", "int8_static", "'training'"):
        assert part in said
    with pytest.raises(ConfigError, match=r"quantize\.exclude has no effect without quantize\.aware"):
        runs.make_run(tmp_path, mobile_net(width=2), digits(), quantize={"exclude": ["head"]}, **SMALL)


def test_rounding_to_neighbours_is_allowed_and_a_shift_of_many_elements_is_not() -> None:
    ours = torch.arange(400.0).reshape(100, 4) / 4
    flipped = ours.clone()
    flipped[:9] += 0.5
    for share, shift, allowed in ((9, 0.5, True), (9, 4.5, False), (11, 0.5, False)):
        theirs = ours.clone()
        theirs[:share] += shift
        found = Neighbours(0.5, 1e-3)
        found.add(ours, theirs.numpy())
        assert found.allowed is allowed
        assert found.share == pytest.approx(share / 100)
    # NaN, and another shape, are no rounding
    for wrong in (np.full((100, 4), np.nan), np.zeros((100, 3))):
        found = Neighbours(0.5, 1e-3)
        found.add(ours, wrong)
        assert not found.allowed


def test_the_step_of_an_output_is_its_scale() -> None:
    model = quantized()
    stored = {tensor.name: tensor for tensor in model.graph.initializer}
    assert output_steps(model) == {"logits": float(numpy_helper.to_array(stored["logits_scale"]))}
    assert output_steps(tiny_conv_net()) == {}


@pytest.mark.slow
def test_the_planner_and_the_rehearsal_see_the_file_with_the_nodes(tmp_path: Path) -> None:
    run = runs.make_run(
        tmp_path, mobile_net(width=2), digits(), quantize={"aware": True}, parallel={"data": 2}, **SMALL
    )
    config = read_config(run, "local")
    preparation = Preparation(config, quantized=run.quantized)
    preparation.quantize(run)
    _, found = preparation.rehearse()
    assert found.batches
    assert found.judged_by == "onnxruntime"
    assert (
        Preparation(config).plan().traffic is not None
    )  # without the directory the nodes are inserted for the occasion


@pytest.mark.mpi
@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", MODELS)
def test_training_with_the_nodes_beats_static_quantization_under_int8_kernels(name: str, tmp_path: Path) -> None:
    before, after = compare(name, tmp_path, steps=300)
    static = before.variants[0].metrics[ACCURACY]
    assert after.after[ACCURACY] > static
    assert after.fp32[ACCURACY] == pytest.approx(before.after[ACCURACY])
    assert after.before[ACCURACY] < after.after[ACCURACY]
    assert sum(after.kernels.values()) > 10
    assert after.neighbours < 0.1
    written = onnx.load(after.path)
    kinds = {tensor.data_type for tensor in written.graph.initializer if tensor.name == "head.weight"}
    assert kinds <= {TensorProto.INT8}
    made = onnx.load(tmp_path / "aware" / "run" / "quantized" / "model.onnx")
    assert {value.name for value in written.graph.output} == {value.name for value in made.graph.output} == {"logits"}


@pytest.mark.mpi
@pytest.mark.slow
def test_a_killed_run_continues_with_the_same_bits(tmp_path: Path) -> None:
    how = {
        "train": {"global_batch_size": 32, "num_steps": 6, "seed": 2},
        "quantize": {"aware": True},
        "parallel": {"data": 2},
        "checkpoint": {"period": 2},
    }
    found = {}
    for name in ("whole", "killed"):
        run = runs.make_run(tmp_path / name, mobile_net(width=2), digits(), **how)
        insert_nodes(run)
        if name == "killed":
            runs.train_until(run, ("checkpoint", 2))
        runs.train_run(run)
        found[name] = runs.final_tensors(run)
    assert any(key.endswith(".range") for key in found["whole"])
    runs.assert_equal_bits(found["killed"], found["whole"])
    assert export_file(run, run.checkpoint(6)).kernels
