"""Stochastic depth in files exported from train(): found in every spelling, drops in training, gone from the file."""

import io
import logging
import warnings
from types import SimpleNamespace

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import numpy_helper
from torch import nn

from onward.trainer.config.sections.model import ModelConfig
from onward.trainer.config.sections.results import ExportConfig
from onward.trainer.diagnostics.doctor import diagnose
from onward.trainer.errors import ExportRefused
from onward.trainer.export.file_verification import Expected, verify
from onward.trainer.export.measuring.evaluation_data import EvaluationData
from onward.trainer.export.model_file import ModelFile
from onward.trainer.onnx_graph.surgery.stochastic_depth import find_branches, random_nodes
from onward.trainer.onnx_graph.surgery.strip_training import strip_training
from onward.trainer.onnx_graph.torchvision_import import import_torchvision
from onward.trainer.onnx_import.driver import load_model, to_module
from onward.trainer.onnx_import.imported_graph import named_weights, stored_weights
from onward.trainer.onnx_import.ops.random import RandomNode, StochasticDepth
from onward.trainer.onnx_import.write_back import write_model
from tests.support.trained_models import model_with_weights

KEEP = 0.75


def floored(x):
    """HF Swin, Segformer, ConvNeXt."""
    mask = KEEP + torch.rand((x.shape[0],) + (1,) * (x.ndim - 1), dtype=x.dtype)
    return x.div(KEEP) * mask.floor_()


def filled(x):
    """timm."""
    mask = x.new_empty((x.shape[0],) + (1,) * (x.ndim - 1)).bernoulli_(KEEP)
    return x * mask.div_(KEEP)


def row(x):
    import_torchvision()
    from torchvision.ops import stochastic_depth

    return stochastic_depth(x, 1 - KEEP, "row")


def compared(x):
    mask = torch.rand((x.shape[0],) + (1,) * (x.ndim - 1)) < KEEP
    return x / KEEP * mask


SPELLINGS = (floored, filled, row, compared)


class Branches(nn.Module):
    """A residual branch in each spelling; what they have in common is the identity in eval()."""

    def __init__(self, *spellings, noise=False):
        super().__init__()
        self.spellings = spellings
        self.noise = noise
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in spellings)
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        for layer, drop in zip(self.layers, self.spellings, strict=True):
            branch = torch.tanh(layer(x))
            x = x + (drop(branch) if self.training else branch)
        if self.noise:
            x = x + 0.1 * torch.rand_like(x)
        return self.head(x)


def exported(module, how, opset=18, *, dynamic=True):
    """The file of a module in train(). how: legacy, optimised or plain (dynamo)."""
    torch.manual_seed(0)
    file, x = io.BytesIO(), torch.randn(4, 5, 8)
    names = {"input_names": ["x"], "output_names": ["y"], "opset_version": opset}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)
        try:
            if how == "legacy":
                torch.onnx.export(
                    module.train(), (x,), file, dynamo=False, training=torch.onnx.TrainingMode.TRAINING,
                    do_constant_folding=False, dynamic_axes={"x": {0: "batch"}} if dynamic else None, **names,
                )  # fmt: skip
                return onnx.load_from_string(file.getvalue())
            shapes = ({0: torch.export.Dim("batch")},) if dynamic else None
            program = torch.onnx.export(
                module.train(), (x,), dynamo=True, optimize=how == "optimised", dynamic_shapes=shapes, verbose=False,
                **names,
            )  # fmt: skip
            return onnx.ModelProto.FromString(program.model_proto.SerializeToString())
        finally:
            logging.disable(logging.NOTSET)


def run(model, x):
    return onnxruntime.InferenceSession(model.SerializeToString()).run(None, {"x": x.numpy()})[0]


def initializers(model):
    return {tensor.name: numpy_helper.to_array(tensor).tobytes() for tensor in model.graph.initializer}


@pytest.mark.parametrize(
    ("how", "opset", "dynamic"),
    [("legacy", 17, True), ("legacy", 20, False), ("optimised", 18, True), ("plain", 20, True), ("plain", 18, False)],
)
def test_every_spelling_follows_train_and_eval_and_is_removed_from_the_inference_form(how, opset, dynamic):
    own = Branches(*SPELLINGS)
    model = exported(own, how, opset, dynamic=dynamic)
    module = to_module(model)
    drops = [part for part in module.modules() if isinstance(part, StochasticDepth)]
    assert [(drop.keep, drop.mask_dims) for drop in drops] == [(pytest.approx(KEEP), 1)] * len(SPELLINGS)
    assert not any(isinstance(part, RandomNode) for part in module.modules())
    assert model_with_weights(module, model) == model, "without training, the file that came in"

    inference = onnx.ModelProto.FromString(model.SerializeToString())
    assert strip_training(inference) == {"stochastic depth": len(SPELLINGS)}
    assert strip_training(inference) == {}, "once is enough"
    onnx.checker.check_model(inference, full_check=True)
    assert {node.op_type for node in inference.graph.node} <= {"MatMul", "Gemm", "Add", "Tanh", "Transpose"}
    weights = {name for name, role in module.roles.items() if role.kind == "trained"}
    assert initializers(inference) == {name: raw for name, raw in initializers(model).items() if name in weights}

    x = torch.randn(4, 5, 8)
    with torch.no_grad():
        want, ours, again = own.eval()(x), module.eval()(x), to_module(inference).eval()(x)
    assert torch.equal(ours, again)
    for result in (ours, torch.from_numpy(run(inference, x))):
        torch.testing.assert_close(result, want, rtol=1e-5, atol=1e-6)
    written = model_with_weights(module, inference)
    assert written == inference


def test_training_drops_whole_samples_at_the_rate_and_scales_up_the_rest_with_the_gradient():
    torch.manual_seed(0)
    drop, x = StochasticDepth(KEEP), torch.randn(4000, 3, 2, requires_grad=True)
    y = drop(x)
    y.sum().backward()
    kept = (y != 0).flatten(1)
    assert torch.equal(kept.all(1), kept.any(1)), "all of a sample or none of it"
    assert kept.all(1).float().mean().item() == pytest.approx(KEEP, abs=0.035)  # five deviations
    scale = kept.all(1).float().div(KEEP)[:, None, None].expand_as(x)
    torch.testing.assert_close(y, x * scale)
    torch.testing.assert_close(x.grad, scale)
    assert drop.eval()(x) is x


@pytest.mark.parametrize("how", ["legacy", "plain"])
def test_a_dropped_sample_gives_no_gradient_in_its_branch(how):
    module = to_module(exported(Branches(filled), how)).train()
    torch.manual_seed(0)
    x = torch.randn(64, 5, 8)
    first = module(x)
    assert not torch.equal(first, module(x)), "a new mask each time"
    samples = [module(x[:1]).sum() for _ in range(40)]
    bias = named_weights(module)["layers.0.bias"]
    moved = [bool(torch.autograd.grad(sample, bias)[0].any()) for sample in samples]
    assert 20 <= sum(moved) < 40
    assert len({round(sample.item(), 4) for sample in samples}) == 2, "with the branch and without"


BERNOULLI = """
    <ir_version: 10, opset_import: ["" : 20]>
    drawn (float[n, 4, 6] x) => (float[n, 4, 6] y{more}) {{
        keep = Constant <value = float {{0.75}}> ()
        one = Constant <value = int64[1] {{1}}> ()
        length = Shape <start = 0, end = 1> (x)
        shape = Concat <axis = 0> (length, {ones})
        chance = Expand(keep, shape)
        mask = Bernoulli(chance)
        {apply}
    }}"""


def drawn(apply, *, ones="one, one", more=""):
    return onnx.parser.parse_model(BERNOULLI.format(apply=apply, ones=ones, more=more))


@pytest.mark.parametrize(
    "apply",
    [
        "scaled = Div(mask, keep)  y = Mul(scaled, x)",
        "masked = Mul(x, mask)  y = Div(masked, keep)",
        "c = Cast <to = 9> (mask)  f = CastLike(c, x)  z = Div(x, keep)  y = Mul(z, f)",
    ],
)
def test_a_bernoulli_node_in_any_order_is_found_and_an_output_keeps_its_name(apply):
    model = drawn(apply)
    [found] = find_branches(model)
    assert (found.value, found.result, found.keep, found.mask_dims) == ("x", "y", 0.75, 1)
    module = to_module(model)
    assert strip_training(model) == {"stochastic depth": 1}
    assert [node.op_type for node in model.graph.node] == ["Identity"]
    x = torch.randn(3, 4, 6)
    assert torch.equal(module.eval()(x), x)
    assert np.array_equal(run(model, x), x.numpy())


@pytest.mark.parametrize(
    "model",
    [
        drawn("y = Mul(x, mask)"),  # not scaled: its mean is not x
        drawn("scaled = Div(mask, keep)  y = Add(scaled, x)"),
        drawn("scaled = Div(mask, keep)  y = Mul(scaled, x)", more=", float[n, 1, 1] mask"),
        drawn("scaled = Div(mask, keep)  z = Mul(scaled, x)  y = Mul(scaled, z)"),  # one mask for two
        drawn("scaled = Div(mask, keep)  y = Mul(scaled, x)", ones="one"),  # [n, 1] is not a mask of samples
        drawn("u = RandomUniformLike <high = 2.0> (mask)  s = Add(u, keep)  f = Floor(s)  d = Div(f, keep)"
              "  y = Mul(d, x)"),
    ],
    ids=["unscaled", "added", "also an output", "shared", "other rank", "other range"],
)  # fmt: skip
def test_other_random_nodes_are_not_replaced(model):
    before = model.SerializeToString()
    assert find_branches(model) == []
    assert strip_training(model) == {}
    assert model.SerializeToString() == before


def test_added_noise_stays_random_and_doctor_names_it_and_the_masks_found(tmp_path):
    model = exported(Branches(floored, filled, noise=True), "legacy", 17)
    assert len(find_branches(model)) == 2
    [noise] = random_nodes(model, find_branches(model))
    module = to_module(model).eval()
    x = torch.randn(4, 5, 8)
    assert not torch.equal(module(x), module(x)), "this noise is what the model is"
    onnx.save(model, tmp_path / "m.onnx")
    said = "\n".join(warning.what for warning in diagnose(tmp_path / "m.onnx").warnings)
    assert "2 branches with stochastic depth, driven by train()/eval() (dropped at a rate of 0.25)" in said
    assert f"1 nodes draw random numbers, in evaluation, too ({noise})" in said
    assert strip_training(model) == {"stochastic depth": 2}
    assert random_nodes(model) == [noise]


@pytest.mark.parametrize("noise", [False, True])
def test_verification_accepts_found_masks_and_compares_other_noise_on_the_same_numbers(noise, tmp_path):
    model = exported(Branches(floored, row, noise=noise), "legacy", 17)
    source, file = tmp_path / "m.onnx", tmp_path / "out.onnx"
    onnx.save(model, source)
    module = to_module(model)
    strip_training(model)
    with torch.no_grad():
        named_weights(module)["layers.0.bias"].add_(1.0)
    write_model(module, model, source, file)
    config = ModelConfig(path=source)
    weights = {name: weight.detach() for name, weight in stored_weights(module).items()}
    expected = Expected(ModelFile(source, model), weights, module.eval(), config)
    rows = SimpleNamespace(inputs=(torch.randn(4, 5, 8),), labels=None, size=4)
    data = EvaluationData(batches=lambda: [rows], new_metrics=lambda names: None)
    # the noise that stays is the model's: both are compared on the numbers that the module drew
    assert len(random_nodes(model)) == noise
    assert verify(ModelFile.read(file), expected, data=data, config=ExportConfig()).parity < 1e-5
    # which hides no difference: a module with another weight is refused with and without noise
    with torch.no_grad():
        named_weights(module)["layers.0.bias"].add_(0.01)
    with pytest.raises(ExportRefused, match="off the torch module"):
        verify(ModelFile.read(file), expected, data=data, config=ExportConfig())


def test_channel_dropout_in_elementary_nodes_follows_train_and_eval():
    """As dynamo writes F.dropout1d: no Dropout node, a mask for each channel."""
    model = drawn("scaled = Div(mask, keep)  y = Mul(scaled, x)", ones="four, one")
    model.graph.initializer.append(numpy_helper.from_array(np.array([4]), "four"))
    module = to_module(model).train()
    torch.manual_seed(0)
    kept = (module(torch.ones(50, 4, 6)) != 0).float()
    assert torch.equal(kept.amin(-1), kept.amax(-1))
    assert 0 < kept.mean(-1).mean(1).unique().numel() > 2, "some channels of a sample, not all"
    assert strip_training(model) == {"dropout written out": 1}


def test_constants_of_the_pattern_are_read_from_external_data(tmp_path):
    model = exported(Branches(floored, row), "optimised", dynamic=False)
    onnx.save(model, tmp_path / "m.onnx", save_as_external_data=True, location="m.bin", size_threshold=0)
    model = load_model(tmp_path / "m.onnx")
    module = to_module(model, base=tmp_path)
    assert sum(isinstance(part, StochasticDepth) for part in module.modules()) == 2
    assert strip_training(model, base=tmp_path) == {"stochastic depth": 2}


@pytest.mark.parametrize("how", ["legacy", "plain"])
def test_attention_dropout_in_elementary_nodes_follows_train_and_eval(how):
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(8, 8)

        def forward(self, x):
            q = self.inner(x).unsqueeze(1)
            rate = 0.5 if self.training else 0.0
            return nn.functional.scaled_dot_product_attention(q, q, q, dropout_p=rate)

    own = Attention()
    model = exported(own, how)
    module, x = to_module(model), torch.randn(4, 5, 8)
    assert not torch.equal(module.train()(x), module(x))
    torch.testing.assert_close(module.eval()(x), own.eval()(x), rtol=1e-5, atol=1e-6)
    assert strip_training(model)["Dropout"] == 1
    torch.testing.assert_close(torch.from_numpy(run(model, x)), own(x), rtol=1e-5, atol=1e-6)
