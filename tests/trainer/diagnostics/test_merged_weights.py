"""Parameters that an exporter merged are found by what it wrote, and separated; sharing by the author is no warning."""

import contextlib
import copy
import io
import warnings
from pathlib import Path

import onnx
import pytest
import torch
from torch import Tensor, nn

from onward.trainer.config.sections.model import ModelConfig
from onward.trainer.diagnostics.audit_input import audit_of_run
from onward.trainer.diagnostics.exporter_warnings import exporter_warnings, refused_warnings
from onward.trainer.diagnostics.merged_weights import folded_products, merged_weights
from onward.trainer.onnx_graph.shared_parameters import MAX_MERGED, parameters_read
from onward.trainer.onnx_graph.surgery.surgery import apply_surgery
from onward.trainer.onnx_import.driver import to_module
from onward.trainer.onnx_import.imported_graph import named_weights
from onward.trainer.onnx_import.roles.exporter_records import read_records
from tests.support import zoo

WIDE = 40


class FreshNorms(nn.Module):
    """Two new BatchNormalizations: scales and variances of ones, biases and means of zeros."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.fc1, self.bn1 = nn.Linear(width, width), nn.BatchNorm1d(width)
        self.fc2, self.bn2 = nn.Linear(width, width), nn.BatchNorm1d(width)

    def forward(self, x: Tensor) -> Tensor:
        # an activation before each norm, so that the exporter does not fold it
        result: Tensor = self.bn2(torch.tanh(self.fc2(self.bn1(torch.tanh(self.fc1(x))))))
        return result


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.fc, self.norm = nn.Linear(width, width), nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.norm(torch.tanh(self.fc(x)))
        return result


class Layers(nn.Module):
    """Layers, the last one applied twice, and one output norm after each of them."""

    def __init__(self, layers: list[Layer]) -> None:
        super().__init__()
        self.layers, self.norm = nn.ModuleList(layers), nn.LayerNorm(layers[0].fc.in_features)
        nn.init.uniform_(self.norm.weight)
        nn.init.uniform_(self.norm.bias)

    def forward(self, x: Tensor) -> Tensor:
        found = []
        for layer in [*self.layers, self.layers[-1]]:
            x = layer(x)
            found.append(self.norm(x))
        return torch.stack(found).sum(0)


class TwoScales(nn.Module):
    def __init__(self, width: int = 9) -> None:
        super().__init__()
        self.fc = nn.Linear(width, width)
        self.first, self.second = nn.Parameter(torch.ones(width)), nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return self.second * torch.tanh(self.fc(x) * self.first)


class Tied(nn.Module):
    def __init__(self, width: int = 11) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(20, width), nn.Linear(width, 20, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(torch.tanh(self.embedding((x > 0).long()).sum(1)))
        return result


class Unbiased(nn.Module):
    """A layer whose bias is still 0, as those of a new GPT-2 are."""

    def __init__(self, width: int = 13) -> None:
        super().__init__()
        self.fc, self.head = nn.Linear(width, 12), nn.Linear(12, 14)
        nn.init.zeros_(self.fc.bias)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(torch.tanh(self.fc(x)))
        return result


class Everything(nn.Module):
    """All of them, of different widths, so that the exporter merges nothing of two of them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        copied, repeated = Layer(6), Layer(WIDE)
        self.norms = FreshNorms()
        self.copied = Layers([copy.deepcopy(copied) for _ in range(3)])
        self.once = Layers([Layer(7)])
        self.repeated = Layers([repeated] * 3)
        self.scales = TwoScales()
        self.tied = Tied()
        self.unbiased = Unbiased()

    def forward(self, x: Tensor) -> Tensor:
        scaled = self.scales(self.scales(x[:, :9]))
        parts = [self.norms(x[:, :4]), self.copied(x[:, :6]), self.once(x[:, :7]), self.repeated(x), scaled]
        return torch.cat([*parts, self.tied(x[:, :11]), self.unbiased(x[:, :13])], 1)


@pytest.fixture(scope="module", params=[pytest.param("dynamo", marks=pytest.mark.slow), "TorchScript"])
def exported(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> onnx.ModelProto:
    path, example = tmp_path_factory.mktemp("merged") / "m.onnx", (torch.randn(3, WIDE),)
    module = Everything().eval()
    with warnings.catch_warnings():
        for opening, category in zoo.IGNORED:
            warnings.filterwarnings("ignore", opening, category)
        if request.param == "dynamo":
            shapes = ({0: torch.export.Dim("batch")},)
            program = torch.onnx.export(module, example, dynamo=True, dynamic_shapes=shapes, verbose=False)
            assert program is not None
            program.save(str(path))
        else:
            axes = {"x": {0: "batch"}}
            torch.onnx.export(module, example, str(path), dynamo=False, input_names=["x"], dynamic_axes=axes)
    return onnx.load(path)


def found_in(model: onnx.ModelProto, prefix: str = "") -> list[set[str]]:
    """Return the parameters of each merged tensor, as far as their names begin like this."""
    audit = audit_of_run(model, to_module(model), Path())
    found = merged_weights(audit.model.graph, audit.stored, audit.roles).values()
    return [set(parts) for parts in found if any(part.startswith(prefix) for part in parts)]


def untied(model: onnx.ModelProto) -> onnx.ModelProto:
    audit = audit_of_run(model, to_module(model), Path())
    names = merged_weights(audit.model.graph, audit.stored, audit.roles)
    changed = copy.deepcopy(model)
    apply_surgery(changed, ModelConfig(path=Path("m.onnx"), untie=tuple(names)), seed=0)
    return changed


def test_a_scale_that_is_one_tensor_with_a_running_variance_is_found(exported):
    found = found_in(exported, "norms.")
    assert len(found) == 2
    for kind, statistic in (("weight", "running_var"), ("bias", "running_mean")):
        assert {f"norms.bn{i}.{part}" for i in (1, 2) for part in (kind, statistic)} in found


def refused(model: onnx.ModelProto, *accept: str) -> list[str]:
    return refused_warnings(exporter_warnings(audit_of_run(model, to_module(model), Path())), accept)


def test_merged_parameters_are_refused_until_they_are_accepted_or_untied(exported):
    [sentence] = refused(exported, "removed")
    assert 'model.untie = ["' in sentence
    assert 'model.accept = ["merged"]' in sentence
    assert refused(untied(exported), "removed") == refused(exported, "removed", "merged") == []


def test_biases_of_zeros_that_the_exporter_removed_are_refused_until_they_are_accepted(exported):
    removed = refused(exported, "merged")
    if "unbiased.fc.bias" in {tensor.name for tensor in exported.graph.initializer}:
        assert removed == []
    else:
        assert len(removed) == 1
        assert "1 biases of the network are not in the file and cannot be trained" in removed[0]
        assert "unbiased.fc.bias" in removed[0]


def test_copied_layers_whose_equal_matrices_were_merged_are_found(exported):
    found = found_in(exported, "copied.layers.")
    assert len(found) == 4, "matrix and bias, scale and bias of the norm"
    assert all(len(parts) == 3 for parts in found), "the layer that is called twice counts once"


def test_modules_that_are_called_several_times_are_not_reported(exported):
    assert found_in(exported, "once.") == [], "the output norm is read more often than any matrix"
    assert WIDE**2 > MAX_MERGED
    assert found_in(exported, "repeated.") == [], "one module under three names"


def test_a_tied_embedding_is_not_reported(exported):
    assert found_in(exported, "tied.") == []


def test_two_parameters_of_one_module_that_is_called_twice_are_told_apart(exported):
    [parts] = found_in(exported, "scales")
    assert len(parts) == 2
    read = parameters_read(untied(exported).graph)
    uses = [uses for found in read.values() for name, uses in found.items() if name.startswith("scales")]
    assert [len(found) for found in uses if found[0].node.op_type in ("Mul", "Identity")] == [2, 2]


def test_untied_parameters_have_the_gradients_and_statistics_of_the_module(exported):
    module, changed = Everything(), untied(exported)
    imported = to_module(changed)
    x = torch.randn(16, WIDE)
    for each in (module, imported):
        each.train()
        each(x).pow(3).mean().backward()
    gradients = {name: parameter.grad for name, parameter in module.named_parameters()}
    buffers, originals = dict(module.named_buffers()), read_records(changed).originals
    read = {name: next(iter(found)) for name, found in parameters_read(changed.graph).items()}
    stored = {tensor.name for tensor in changed.graph.initializer}
    gradients = {name: each for name, each in gradients.items() if name in stored or not name.startswith("unbiased")}
    expected = gradients | {name: tensor for name, tensor in buffers.items() if "running" in name}
    for name, tensor in named_weights(imported).items():
        value = tensor.grad if isinstance(tensor, nn.Parameter) else tensor
        labels = (read[name], originals.get(name, name))
        candidates = [each for each in expected if each in labels or each.startswith(f"{read[name]}.")]
        equal = [
            each
            for each in candidates
            for turned in (value, value.t())
            if turned.shape == expected[each].shape and torch.allclose(turned, expected[each], rtol=1e-4, atol=1e-6)
        ]
        assert equal, (name, candidates)
        assert isinstance(tensor, nn.Parameter) == (equal[0] in gradients)
        del expected[equal[0]]
    assert not expected


def test_merged_parameters_are_found_when_another_tool_has_removed_the_identities(exported):
    model = copy.deepcopy(exported)
    passed = {node.output[0]: node.input[0] for node in model.graph.node if node.op_type == "Identity"}
    for node in [*model.graph.node]:
        if node.op_type == "Identity":
            model.graph.node.remove(node)
        for slot, name in enumerate(node.input):
            node.input[slot] = passed.get(name, name)
    assert {f"copied.layers.{i}.norm" for i in range(3)} in [
        {part.removesuffix(".weight").removesuffix(".bias") for part in parts} for parts in found_in(model, "copied.")
    ]
    assert found_in(model, "once.") == []


class SharedConvolution(nn.Module):
    """One convolution with a norm of its own for each of two uses, as the heads of detectors have."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.other = nn.Conv2d(3, 3, 3, padding=1), nn.Conv2d(3, 3, 3, padding=1)
        self.norms = nn.ModuleList(nn.BatchNorm2d(3) for _ in range(2))
        for norm in self.norms:
            nn.init.uniform_(norm.weight, 0.5, 2)
            nn.init.uniform_(norm.running_var, 0.5, 2)

    def forward(self, x: Tensor) -> Tensor:
        for norm in self.norms:
            x = torch.relu(norm(self.conv(x)))
        result: Tensor = self.other(x)
        return result


def test_a_shared_weight_into_whose_uses_different_norms_were_folded_is_refused(tmp_path):
    path, example = tmp_path / "m.onnx", (torch.randn(2, 3, 8, 8),)
    with warnings.catch_warnings():
        for opening, category in zoo.IGNORED:
            warnings.filterwarnings("ignore", opening, category)
        torch.onnx.export(SharedConvolution().eval(), example, str(path), dynamo=False, input_names=["x"])
    model = onnx.load(path)
    warned = [*exporter_warnings(audit_of_run(model, to_module(model), tmp_path))]
    [separated] = [warning for warning in warned if warning.key == "separated"]
    convolutions = [node.input[1] for node in model.graph.node if node.op_type == "Conv"]
    assert f"{convolutions[0]} and {convolutions[1]}. They train apart" in separated.what
    assert 'model.accept = ["separated"]' in refused_warnings(warned, accept=())[0]
    assert refused_warnings(warned, accept=["separated"]) == []


class RelativePositions(nn.Module):
    """A projection of the input and of a table of positions, as DeBERTa has it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.q, self.table = nn.Linear(8, 8), nn.Embedding(6, 8)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.q(x) @ self.q(self.table.weight).t()
        return result


def test_a_product_of_weights_that_an_exporter_folded_is_refused(tmp_path):
    path, rows = tmp_path / "m.onnx", {"x": {0: torch.export.Dim("N")}}
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        program = torch.onnx.export(
            RelativePositions().eval(), (torch.randn(3, 8),), input_names=["x"], dynamic_shapes=rows, dynamo=True
        )
        assert program is not None
        program.save(path)
    model = onnx.load(path)
    [product] = [tensor.name for tensor in model.graph.initializer if list(tensor.dims) == [8, 6]]
    warned = [*exporter_warnings(audit_of_run(model, to_module(model), tmp_path))]
    [separated] = [warning for warning in warned if warning.key == "separated"]
    assert f"q.weight and q.bias and {product}. They train apart" in separated.what
    assert 'model.accept = ["separated"]' in refused_warnings(warned, accept=())[0]
    # a record that another tool has removed
    [value] = [each for each in model.graph.value_info if each.name == product]
    del value.metadata_props[:]
    warned = [*exporter_warnings(audit_of_run(model, to_module(model), tmp_path))]
    [unrecorded] = [warning for warning in warned if warning.key == "unrecorded"]
    assert f"1 trained tensors are no weights of the exported network by what its exporter wrote: {product}." in (
        unrecorded.what
    )
    assert not unrecorded.changes_training


def test_parts_of_a_joint_projection_are_not_taken_for_separated_weights():
    parameters = {"q": ["joint"], "k": ["joint"], "ab": ["a", "b"], "c": ["c"], "d": ["d", "c"]}
    assert folded_products(parameters, parameters) == [["c", "d"]]
    assert folded_products(["one", "two"], {"one": ["g", "v"], "two": ["v", "g"]}) == []


def test_a_tensor_that_is_scale_and_bias_of_one_node_is_merged_whoever_wrote_the_file():
    model = onnx.parser.parse_model("""
        <ir_version: 10, opset_import: ["" : 20]>
        norm (float[batch, 8] x) => (float[batch, 8] y) { y = LayerNormalization(x, zeros, zeros) }""")
    model.graph.initializer.add(name="zeros", dims=[8], data_type=1, float_data=[0.0] * 8)
    assert found_in(model) == [{"y weight", "y bias"}]
    assert found_in(untied(model)) == []
