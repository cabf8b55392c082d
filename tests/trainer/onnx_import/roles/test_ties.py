"""Copies of one weight, as torch's dynamo exporter stores them for a layer that is applied several times."""

import warnings
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import numpy_helper
from torch import Tensor, nn
from typer.testing import CliRunner

from onward.flows.cli import app
from onward.trainer.diagnostics.doctor import diagnose
from onward.trainer.onnx_import.driver import to_module
from onward.trainer.onnx_import.roles.exporter_records import read_records
from tests.support import zoo
from tests.support.trained_models import model_with_weights

FOREIGN = Path(__file__).resolve().parents[3] / "support" / "foreign"
DUPLICATES = 2
"""The embedding is the output layer's weight, and the output layer's bias has two names."""

WIDTH, HIDDEN, CALLS = 40, 48, 3
"""Matrices of more than 1,024 elements, which the exporter does not merge although they are equal."""


class Repeated(nn.Module):
    """One transformer layer that is applied several times, as ALBERT does."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(30, WIDTH)
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for _ in range(CALLS):
            scores = self.query(x) @ self.key(x).transpose(-1, -2) / WIDTH**0.5
            x = x + scores.softmax(-1) @ self.value(x)
            x = self.norm(x + self.down(torch.nn.functional.gelu(self.up(x))))
        result: Tensor = self.head(x[:, 0])
        return result


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> tuple[nn.Module, onnx.ModelProto]:
    torch.manual_seed(0)
    module = Repeated().eval()
    ids = torch.randint(0, 30, (2, 7))
    path = tmp_path_factory.mktemp("repeated") / "m.onnx"
    with warnings.catch_warnings():
        for opening, category in zoo.IGNORED:
            warnings.filterwarnings("ignore", opening, category)
        dims = {0: torch.export.Dim("batch"), 1: torch.export.Dim("length")}
        program = torch.onnx.export(module, (ids,), dynamo=True, dynamic_shapes=(dims,), verbose=False)
    assert program is not None
    program.save(str(path))
    return module, onnx.load(path)


def initializers(model: onnx.ModelProto) -> dict[str, np.ndarray]:
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}


@pytest.mark.slow
def test_the_gradients_of_a_repeated_layer_are_those_of_the_module(exported):
    original, model = exported
    originals = read_records(model).originals
    stored = [name for name, of in originals.items() if of == "query.weight"]
    assert len(stored) == CALLS, "the exporter stores the matrix once for each call"
    imported = to_module(model)
    assert {of for of, _ in imported.copies.values()} <= set(stored) | set(originals)
    assert sum(name in imported.copies for name in stored) == CALLS - 1
    ids = torch.randint(0, 30, (4, 9), generator=torch.Generator().manual_seed(1))
    for module in (original, imported):
        module.zero_grad()
        module(ids).square().mean().backward()
    expected = dict(original.named_parameters())
    found = {imported.onnx_names[path]: parameter for path, parameter in imported.named_parameters()}
    assert len(found) == len(expected)
    for name, parameter in found.items():
        gradient = expected[originals.get(name, name)].grad
        transposed = name in originals
        torch.testing.assert_close(parameter.grad, gradient.t() if transposed else gradient, rtol=1e-4, atol=1e-7)


def test_the_gradients_of_albert_are_those_of_the_module():
    model, found = onnx.load(FOREIGN / "albert-dynamo.onnx"), np.load(FOREIGN / "albert-dynamo.npz")
    originals, module = read_records(model).originals, to_module(model)
    assert len(module.copies) == 7, "six matrices of the layer's second call, and the embedding's transpose"
    module(torch.from_numpy(found["ids"])).square().mean().backward()
    names = {module.onnx_names[path]: parameter.grad for path, parameter in module.named_parameters()}
    assert len(names) == len([name for name in found.files if name != "ids"]) - DUPLICATES
    for name, gradient in names.items():
        expected = found[originals.get(name, name)]
        turned = expected.T if name in originals else expected
        np.testing.assert_allclose(gradient, turned, rtol=1e-3, atol=1e-6 * np.abs(expected).max() + 1e-8, err_msg=name)


@pytest.mark.slow
def test_every_copy_of_a_repeated_layer_is_written_with_the_trained_value(exported):
    _, model = exported
    stored = [name for name, of in read_records(model).originals.items() if of == "query.weight"]
    module = to_module(model)
    ids = torch.randint(0, 30, (4, 9), generator=torch.Generator().manual_seed(1))
    module(ids).square().mean().backward()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter -= 0.1 * parameter.grad
    written = model_with_weights(module, model)
    before, after = initializers(model), initializers(written)
    assert not np.array_equal(before[stored[0]], after[stored[0]])
    assert all(np.array_equal(after[name], after[stored[0]]) for name in stored)
    [want] = onnxruntime.InferenceSession(written.SerializeToString()).run(None, {"ids": ids.numpy()})
    np.testing.assert_allclose(module(ids).detach().numpy(), want, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_doctor_names_the_weight_of_the_module_that_a_tensor_was_folded_from(exported, tmp_path):
    _, model = exported
    onnx.save(model, tmp_path / "m.onnx")
    found = diagnose(tmp_path / "m.onnx")
    folded = read_records(model).originals
    assert folded
    assert {weight.name: weight.original for weight in found.weights if weight.name in folded} == folded
    shown = CliRunner().invoke(app, ["doctor", str(tmp_path / "m.onnx"), "--all"]).output
    assert all(f"{name} ({original})" in shown for name, original in folded.items())


def test_equal_tensors_folded_from_two_weights_are_not_tied(exported):
    _, model = exported
    changed = onnx.ModelProto()
    changed.CopyFrom(model)
    records = read_records(model)
    first, second, *_ = (name for name, of in records.originals.items() if of == "query.weight")
    for value in changed.graph.value_info:
        if value.name == second:
            for entry in value.metadata_props:
                entry.value = entry.value.replace("query.weight", "key.weight")
    assert first in to_module(changed).roles
    assert second not in to_module(changed).copies
    assert second in to_module(model).copies
