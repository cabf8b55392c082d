"""Adapters beside quantized weights: nodes of the file, whose weights stay byte for byte, trained like others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

from onward.trainer.config.loading import build_config
from onward.trainer.diagnostics.audit_input import audit_of_run
from onward.trainer.diagnostics.exporter_warnings import exporter_warnings
from onward.trainer.errors import ConfigError
from onward.trainer.model.trainable import TrainableModel, merged_module, open_trainable
from onward.trainer.onnx_import.imported_graph import named_weights
from onward.trainer.onnx_import.write_back import write_model
from tests.support.packed import matmul_nbits, two_layers

Array = np.ndarray[Any, np.dtype[Any]]


def opened(file: Path, **lora: Any) -> TrainableModel:
    settings = {"model": {"path": file}, "data": {"source": "digits"}, "train": {"num_steps": 1}}
    return open_trainable(build_config({**settings, "lora": {"weights": ["*"], "rank": 3, **lora}}))


KINDS = {"nbits4": "packed", "nbits8": "packed", "int4": "integers", "int8": "integers"} | dict.fromkeys(
    ("transposed", "gemm"), "integers"
)
X = np.random.default_rng(2).standard_normal((5, 64)).astype(np.float32)


def by_onnxruntime(model: onnx.ModelProto) -> list[Array]:
    options = onnxruntime.SessionOptions()
    # its optimiser makes a kernel that rounds activations of a MatMul behind DequantizeLinear
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return [np.asarray(value) for value in session.run(None, {"x": X})]


@pytest.mark.parametrize("kind", KINDS)
def test_a_written_adapter_computes_what_was_trained_and_its_weight_keeps_its_bytes(kind: str, tmp_path: Path) -> None:
    file, written = tmp_path / "model.onnx", tmp_path / "written.onnx"
    onnx.save(two_layers(kind), file)
    weight = KINDS[kind]
    trainable = opened(file, weights=[weight, "head"], alpha=6.0)
    module = trainable.module
    a, b = f"{weight}.lora_a", f"{weight}.lora_b"
    trained = {module.onnx_names[path] for path, p in module.named_parameters() if p.requires_grad}
    assert trained == {a, b, "head.lora_a", "head.lora_b"}
    with torch.no_grad():
        before = module.eval()(torch.from_numpy(X))
    np.testing.assert_allclose(before, by_onnxruntime(onnx.load(file))[0], rtol=1e-4, atol=1e-5)

    with torch.no_grad():
        for name in (b, "head.lora_b"):
            named_weights(module)[name].normal_(0, 0.3)
        after = module(torch.from_numpy(X))
    assert abs(after - before).max() > 0.1
    write_model(merged_module(trainable), trainable.model, file, written)
    np.testing.assert_allclose(after, by_onnxruntime(onnx.load(written))[0], rtol=1e-4, atol=1e-4)
    model, given = onnx.load(written), onnx.load(file)
    onnx.checker.check_model(model, full_check=True)
    stored = {tensor.name: tensor for tensor in model.graph.initializer}
    assert [stored[each.name] for each in given.graph.initializer if each.name != "head"] == [
        each for each in given.graph.initializer if each.name != "head"
    ]
    assert [each.op_type for each in model.graph.node if ".lora" in each.name] == ["MatMul", "Mul", "MatMul", "Add"]
    assert model.graph.output == given.graph.output
    # 6 / 3 A B, added before the rest of the graph
    product = 2 * numpy_helper.to_array(stored[a]) @ numpy_helper.to_array(stored[b])
    assert (stored[a].dims, stored[b].dims) == ([64, 3], [3, 6])
    values = onnx.load(written)
    values.graph.output.extend(
        helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", 6]) for name in (f"{weight}.lora_before", "z")
    )
    _, base, total = by_onnxruntime(values)
    np.testing.assert_allclose(total - base, X @ product, rtol=1e-3, atol=1e-4)


def test_a_file_that_has_adapters_is_trained_further_without_more_nodes(tmp_path: Path) -> None:
    file, written = tmp_path / "model.onnx", tmp_path / "written.onnx"
    onnx.save(two_layers("nbits4"), file)
    first = opened(file, weights=["packed"])
    with torch.no_grad():
        named_weights(first.module)["packed.lora_b"].fill_(0.25)
    write_model(first.module, first.model, file, written)
    second = opened(written, weights=["packed"])
    assert len(second.model.graph.node) == len(first.model.graph.node)
    assert named_weights(second.module)["packed.lora_b"].unique().tolist() == [0.25]
    trained = [
        name for path, name in second.module.onnx_names.items() if second.module.get_parameter(path).requires_grad
    ]
    assert sorted(trained) == ["packed.lora_a", "packed.lora_b"]
    with pytest.raises(ConfigError, match=r"lora.rank 4: the file has an adapter of rank 3 beside 'packed'; set 3"):
        opened(written, weights=["packed"], rank=4)
    with pytest.raises(ConfigError, match=r"lora.alpha 8: the file has an adapter with 16 beside 'packed'; set 16"):
        opened(written, weights=["packed"], alpha=8.0)


def test_the_same_seed_gives_the_same_adapters(tmp_path: Path) -> None:
    onnx.save(two_layers("nbits4"), tmp_path / "model.onnx")
    first, second = (named_weights(opened(tmp_path / "model.onnx").module) for _ in range(2))
    assert torch.equal(first["packed.lora_a"], second["packed.lora_a"])
    assert 0.8 / 8 < first["packed.lora_a"].abs().max() <= 1 / 8
    assert not first["packed.lora_b"].any()


def test_dropout_of_its_input_acts_in_training_only(tmp_path: Path) -> None:
    onnx.save(two_layers("int4"), tmp_path / "model.onnx")
    module = opened(tmp_path / "model.onnx", weights=["integers"], dropout=0.5).module
    torch.manual_seed(0)
    with torch.no_grad():
        named_weights(module)["integers.lora_b"].fill_(1.0)
        trained = [module.train()(torch.from_numpy(X)) for _ in range(2)]
        evaluated = [module.eval()(torch.from_numpy(X)) for _ in range(2)]
    assert (trained[0] - trained[1]).abs().max() > 0.1
    torch.testing.assert_close(*evaluated, rtol=1e-6, atol=1e-6)  # where memory lies may change the order of sums


def test_integers_that_operators_on_integers_read_have_no_adapter(tmp_path: Path) -> None:
    graph = helper.make_graph(
        [
            helper.make_node("DynamicQuantizeLinear", ["x"], ["q", "s", "z"]),
            helper.make_node("MatMulInteger", ["q", "w", "z"], ["i"]),
            helper.make_node("Cast", ["i"], ["f"], to=TensorProto.FLOAT),
            helper.make_node("Mul", ["f", "s"], ["y"]),
        ],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 4])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 3])],
        [numpy_helper.from_array(np.arange(12, dtype=np.int8).reshape(4, 3), "w")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.save(model, tmp_path / "model.onnx")
    with pytest.raises(ConfigError, match="'w' is stored as integers, and is no second operand"):
        opened(tmp_path / "model.onnx", weights=["w"])


def warned(file: Path, **lora: Any) -> list[str]:
    trainable = opened(file, **lora)
    return [each.key for each in exporter_warnings(audit_of_run(trainable.model, trainable.module, file.parent))]


def test_a_weight_with_an_adapter_is_not_told_to_stay_frozen(tmp_path: Path) -> None:
    alone, _ = matmul_nbits()
    onnx.save(alone, tmp_path / "alone.onnx")
    onnx.save(two_layers("nbits4"), tmp_path / "two.onnx")
    assert "mostly_frozen" in warned(tmp_path / "two.onnx", weights=[], rank=8)
    assert "mostly_frozen" not in warned(tmp_path / "alone.onnx", weights=["packed"])
