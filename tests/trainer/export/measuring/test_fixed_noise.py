"""onnxruntime computes with the numbers that the module drew; where it cannot, the file is refused with the reason."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper

from onward.trainer.export.measuring import cuda_provider
from onward.trainer.export.measuring.evaluation_data import EvaluationData
from onward.trainer.export.measuring.fixed_noise import NoiseSessions, noise_inside_bodies, recorded_noise
from onward.trainer.export.measuring.onnx_runner import OnnxRunner
from onward.trainer.export.model_file import ModelFile
from onward.trainer.onnx_graph.node_builder import GraphWriter
from onward.trainer.onnx_import.driver import to_module


def noisy() -> onnx.ModelProto:
    g = GraphWriter("noisy", seed=0, opset=15)
    x = g.op("MatMul", g.input("x", ("batch", 64)), g.weight("w", g.normal(0.5, 64, 64)))
    g.op("Add", x, g.op("RandomNormalLike", x, outputs="eps"), outputs="y")
    g.output("y", ("batch", 64))
    return g.model()


def test_a_file_with_external_data_computes_with_the_recorded_numbers(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    onnx.save(noisy(), path, save_as_external_data=True, location="weights.bin", size_threshold=0)
    file = ModelFile.read(path)
    module = to_module(noisy())
    x = torch.randn(3, 64)
    with torch.no_grad(), recorded_noise(module) as drawn:
        expected = module(x)
    assert set(drawn) == {"eps"}
    sessions = NoiseSessions(file)
    (found,) = sessions.run(drawn, {"x": x.numpy()})
    np.testing.assert_allclose(found, expected.numpy(), rtol=1e-5, atol=1e-5)
    weight = onnx.numpy_helper.to_array(noisy().graph.initializer[0])
    np.testing.assert_allclose(found, x.numpy() @ weight + drawn["eps"], rtol=1e-5, atol=1e-5)
    (other,) = sessions.run({"eps": drawn["eps"] + 1}, {"x": x.numpy()})
    np.testing.assert_allclose(other, found + 1, rtol=1e-5, atol=1e-5)


def test_a_file_that_draws_is_not_compared_with_what_a_gpu_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_provider, "has_cuda", lambda: True)
    runner = OnnxRunner(noisy(), EvaluationData(batches=list, new_metrics=lambda names: None))  # type: ignore[arg-type,return-value]
    found = cuda_provider.check_on_cuda(runner, batches=1, tolerance=1e-4)
    assert found is not None
    assert "draws random numbers" in found.not_run


def test_noise_in_a_body_is_named_with_what_to_do() -> None:
    g = GraphWriter("inside", seed=0, opset=15)
    x = g.op("MatMul", g.input("x", ("batch", 4)), g.weight("w", g.normal(0.5, 4, 4)))
    g.input("noisy", (), TensorProto.BOOL)
    value = helper.make_tensor_value_info("drawn", TensorProto.FLOAT, None)
    body = helper.make_graph([helper.make_node("RandomNormalLike", [x], ["drawn"], name="inner")], "then", [], [value])
    plain = helper.make_tensor_value_info("same", TensorProto.FLOAT, None)
    other = helper.make_graph([helper.make_node("Identity", [x], ["same"])], "else", [], [plain])
    g.op("If", "noisy", outputs="y", then_branch=body, else_branch=other)
    g.output("y", ("batch", 4))
    (sentence,) = noise_inside_bodies(g.model())
    assert sentence.startswith("1 nodes draw random numbers in bodies of If, Loop or Scan or in functions (inner)")
    assert noise_inside_bodies(noisy()) == []
