"""Sparse initializers: dense and frozen in the module, and written back as they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

from onward.trainer.errors import ConfigError, UnsupportedModel
from onward.trainer.onnx_import.driver import load_model, to_module
from onward.trainer.onnx_import.roles.roles import SPARSE
from onward.trainer.onnx_import.train_selection import select_trained
from onward.trainer.onnx_import.write_back import write_model


def sparse_model(folder: Path, places: str) -> Path:
    """x [n, 4] times a sparse matrix [4, 6] with 4 values, plus a dense bias."""
    rng = np.random.default_rng(0)
    at: Any = np.array([1, 7, 8, 20])
    values = numpy_helper.from_array(rng.standard_normal(4).astype(np.float32), "w")
    if places == "of each dimension":
        at = np.stack(np.unravel_index(at, (4, 6)), 1)
    sparse = helper.make_sparse_tensor(values, numpy_helper.from_array(at.astype(np.int64), "at"), [4, 6])
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["h"]), helper.make_node("Add", ["h", "b"], ["y"])],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 4])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 6])],
        [numpy_helper.from_array(rng.standard_normal(6).astype(np.float32), "b")],
        sparse_initializer=[sparse],
    )
    path = folder / "sparse.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9), path)
    return path


def by_onnxruntime(path: Path, x: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(onnxruntime.InferenceSession(str(path)).run(None, {"x": x.numpy()})[0])


@pytest.mark.parametrize("places", ["counted through", "of each dimension"])
def test_a_sparse_initializer_computes_is_frozen_and_keeps_its_form(places: str, tmp_path: Path) -> None:
    path = sparse_model(tmp_path, places)
    model, x = load_model(path), torch.randn(3, 4)
    module = to_module(model)
    torch.testing.assert_close(module(x), by_onnxruntime(path, x))
    assert (module.roles["w"].kind, module.roles["w"].reason) == ("frozen", SPARSE)
    given = x.clone().requires_grad_()
    module(given).sum().backward()
    assert given.grad is not None
    dense = to_module(model)(torch.eye(4)) - to_module(model)(torch.zeros(4, 4))
    torch.testing.assert_close(given.grad, dense.sum(1).detach().expand(3, 4))
    with torch.no_grad():
        module.b += 1
    write_model(module, model, path, tmp_path / "after.onnx")
    torch.testing.assert_close(by_onnxruntime(tmp_path / "after.onnx", x), by_onnxruntime(path, x) + 1)
    assert onnx.load(tmp_path / "after.onnx").graph.sparse_initializer == model.graph.sparse_initializer


def test_naming_it_to_be_trained_says_what_to_do(tmp_path: Path) -> None:
    module = to_module(load_model(sparse_model(tmp_path, "counted through")), train=["w"])
    with pytest.raises(ConfigError, match=r"'w' is frozen: stored sparse.*store it as a plain tensor to train it"):
        select_trained(module, train=["w"])


def test_one_in_another_file_is_refused(tmp_path: Path) -> None:
    model = load_model(sparse_model(tmp_path, "counted through"))
    values = model.graph.sparse_initializer[0].values
    values.data_location = TensorProto.EXTERNAL
    values.external_data.add(key="location", value="w.bin")
    with pytest.raises(UnsupportedModel, match="'w' is sparse and in another file"):
        to_module(model, base=tmp_path)
