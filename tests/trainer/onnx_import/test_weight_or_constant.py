"""Parameters that look like constants are trained and buffers that look like weights are not: written or guessed."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
import torch
from onnx import helper, numpy_helper

from onward.trainer.onnx_import.driver import to_module
from onward.trainer.onnx_import.imported_graph import named_weights
from onward.trainer.onnx_import.roles import tensor_contents
from onward.trainer.onnx_import.train_selection import select_trained
from tests.bench.roles import roles_of, verdicts
from tests.support import zoo
from tests.support.foreign_files import FILES
from tests.support.zoo_buffers import BUFFERS
from tests.support.zoo_parameters import PARAMETERS

HEADER = '<ir_version: 10, opset_import: ["" : 20], producer_name: "{}">\n'
UNKNOWABLE = ("learned_waves", "frozen_operator", "radial_basis", "codebook")
"""Modules whose files do not say by any use, contents or name what a tensor is (TorchScript exporter)."""
GUESSED = [name for name in (*PARAMETERS, *BUFFERS) if "legacy-17" in zoo.entry_of(name).exporters]


def parsed(body: str, producer: str = "", **weights: np.ndarray) -> onnx.ModelProto:
    model = onnx.parser.parse_model(HEADER.format(producer) + body)
    model.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in weights.items())
    return model


def kinds(model: onnx.ModelProto) -> dict[str, str]:
    return {name: role.kind for name, role in roles_of(model).items()}


@pytest.mark.parametrize("name", ["rezero", "frozen_operator"])
def test_the_file_of_the_dynamo_exporter_decides(name):
    model, module = zoo.export(name, "dynamo-20", folded=False), zoo.build(name)
    found = roles_of(model)
    trained = {name for name, role in found.items() if role.kind == "trained"}
    assert trained == {name for name, _ in module.named_parameters()}
    frozen = {name for name, role in found.items() if role.kind == "frozen"}
    assert frozen >= {name for name, _ in module.named_buffers()}
    assert all(role.written for role in found.values())


@pytest.mark.parametrize("name", [name for name in GUESSED if name not in (*UNKNOWABLE, "older_spectral_norm")])
def test_roles_of_the_torchscript_exporter_are_guessed_right(name):
    found = list(verdicts(name, "legacy-17", folded=False))
    assert [str(verdict) for verdict in found if not verdict.right] == []
    assert any(verdict.truth == "trained" and not verdict.role.written for verdict in found)


def test_blocks_that_begin_with_a_factor_of_zero_learn():
    """A frozen factor of zero would leave every weight of its block without a gradient for ever."""
    module = to_module(zoo.export("rezero", "legacy-17", folded=True))
    select_trained(module)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    x, before = torch.randn(8, 16), {name: weight.clone() for name, weight in named_weights(module).items()}
    for _ in range(3):
        optimizer.zero_grad()
        (module(x) - x.flip(1)).square().mean().backward()
        optimizer.step()
    after = named_weights(module)
    assert all(after[f"alpha.{i}"].abs() > 0 for i in range(2))
    assert len(after) == 6
    assert all(not torch.equal(after[name], weight) for name, weight in before.items())


@pytest.mark.parametrize("name", ["swish", "gem", "contrastive_head", "learned_state", "temperature"])
def test_trained_numbers_have_the_gradient_of_the_module(name):
    native, module = zoo.build(name), to_module(zoo.export(name, "legacy-17", folded=True))
    inputs = list(zoo.feed(name, 5).values())
    for each in (native, module):
        each(*inputs).square().sum().backward()
    for path, parameter in native.named_parameters():
        if parameter.numel() == 1 or path == "h0":
            torch.testing.assert_close(dict(named_weights(module))[path].grad, parameter.grad, rtol=1e-4, atol=1e-5)


# -- masks that are computed in the graph

MASKS = {
    "Where of the input": "m = Where(c, zero, low)",
    "the branches exchanged": "n = Not(c)\n m = Where(n, low, zero)",
    "expanded": "wide = Expand(zero, shape)\n far = Expand(low, shape)\n m = Where(c, wide, far)",
    "cast": "a = CastLike(zero, x)\n b = CastLike(low, x)\n m = Where(c, a, b)",
    "as matrices": "axes = Constant <value_ints = [0]> ()\n a = Unsqueeze(zero, axes)\n m = Where(c, a, low)",
    "a product": "k = Cast <to = 1> (c)\n l = Sub(one, k)\n m = Mul(l, low)",
}


@pytest.mark.parametrize("written", MASKS)
@pytest.mark.parametrize("constant_nodes", [True, False], ids=["nodes", "initializers"])
@pytest.mark.parametrize(("shape", "lowest"), [([1], -np.inf), ([], -1e4), ([1, 1], -3.4e38)])
def test_the_numbers_of_a_computed_mask_are_not_trained(written, constant_nodes, shape, lowest):
    numbers = {"zero": np.zeros(shape), "low": np.full(shape, lowest), "one": np.ones(shape)}
    arrays = {name: array.astype(np.float32) for name, array in numbers.items()}
    model = parsed(
        f"""mask (float[batch, 4, 8] x, bool[batch, 4, 4] c) => (float[batch, 4, 4] y) {{
            t = Transpose <perm = [0, 2, 1]> (x)
            s = MatMul(x, t)
            {MASKS[written]}
            scores = Add(s, m)
            y = Softmax(scores)
        }}""",
        shape=np.array([4, 4]),
        **({} if constant_nodes else arrays),
    )
    if constant_nodes:
        nodes = [
            helper.make_node("Constant", [], [name], value=numpy_helper.from_array(array))
            for name, array in arrays.items()
        ]
        nodes += list(model.graph.node)
        del model.graph.node[:]
        model.graph.node.extend(nodes)
    assert set(kinds(model).values()) == {"frozen"}


# -- what decides where nothing is written

NUMBER = """number (float[batch, 4] x) => (float[batch, 3] y) {{
    h = MatMul(x, w)
    y = Mul(h, {0})
}}"""


@pytest.mark.parametrize(
    ("name", "producer", "kind"),
    [
        ("logit_scale", "", "trained"),
        ("blocks.0.alpha", "", "trained"),
        ("head.scale", "other", "trained"),
        ("temperature", "pytorch", "trained"),
        ("temperature", "", "frozen"),
        ("embed_scale", "pytorch", "frozen"),
        ("pixel_mean", "pytorch", "frozen"),
        ("onnx::Mul_123", "pytorch", "frozen"),
        ("val_3", "pytorch", "frozen"),
        ("const_9", "jax2onnx", "frozen"),
        ("model/mul/ReadVariableOp:0", "tf2onnx", "trained"),
        ("model/mul/y:0", "tf2onnx", "frozen"),
    ],
)
def test_a_single_number_is_trained_if_it_has_the_name_of_a_parameter(name, producer, kind):
    model = parsed(NUMBER.format("s"), producer, w=np.eye(4, 3, dtype=np.float32))
    model.graph.initializer.append(numpy_helper.from_array(np.array(1.5, np.float32), name))
    model.graph.node[1].input[1] = name
    assert kinds(model)[name] == kind


def test_the_user_has_the_last_word_on_guessed_roles():
    model = parsed(
        NUMBER.format("temperature"), w=np.eye(4, 3, dtype=np.float32), temperature=np.array(2.0, np.float32)
    )
    module = to_module(model, train=["temperature"])
    select_trained(module, train=["temperature", "w"])
    module(torch.randn(2, 4)).sum().backward()
    assert module.temperature.grad is not None
    model.producer_name = "pytorch"
    module = to_module(model)
    select_trained(module, freeze=["temperature"])
    assert not module.temperature.requires_grad


def test_a_learned_interpolation_is_trained_and_a_blur_is_not():
    line = np.array([1, 3, 3, 1], np.float32) / 4
    model = parsed(
        """up (float[batch, 1, 8, 8] x) => (float[batch, 1, height, width] y) {
            h = ConvTranspose <strides = [2, 2], pads = [1, 1, 1, 1]> (x, learned)
            y = Conv <pads = [1, 1, 1, 1]> (h, blur)
        }""",
        learned=np.outer(line, line)[None, None],
        blur=np.outer(line, line)[None, None] / 4,
    )
    assert kinds(model) == {"learned": "trained", "blur": "frozen"}


@pytest.mark.parametrize("operator", ["Mul", "Where"])
def test_an_identity_that_is_no_layer_is_a_mask(operator):
    call = "Mul(x, eye)" if operator == "Mul" else "Where(c, x, eye)"
    model = parsed(
        f"eye (float[batch, 4, 4] x, bool[4, 4] c) => (float[batch, 4, 4] y) {{ y = {call} }}",
        eye=np.eye(4, dtype=np.float32),
    )
    assert kinds(model)["eye"] == "frozen"


def test_a_frozen_batch_norm_is_not_updated():
    module = to_module(zoo.export("frozen_operator", "dynamo-20", folded=False)).train()
    assert set(named_weights(module)) == {"conv.weight", "fc.weight", "fc.bias"}
    [x] = zoo.feed("frozen_operator", 4).values()
    torch.testing.assert_close(module(x), zoo.build("frozen_operator")(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("factor", "shift", "expected"), [(6, 6, "frozen"), (1, 6, "trained"), (6, 1, "trained")])
def test_a_mean_in_front_of_a_factor_and_a_shift_of_its_shape_is_a_statistic_written_out(factor, shift, expected):
    """So Keras writes BatchNormalization on torch; the shift can learn what the mean could."""
    model = parsed(
        """net (float[batch, 4] x) => (float[batch, 6] y) {
            h = MatMul(x, weight)
            centred = Sub(h, mean)
            scaled = Mul(centred, factor)
            y = Add(scaled, shift)
        }""",
        weight=np.random.default_rng(0).normal(size=(4, 6)).astype(np.float32),
        mean=np.random.default_rng(1).normal(size=6).astype(np.float32),
        factor=np.random.default_rng(2).normal(size=factor).astype(np.float32),
        shift=np.random.default_rng(3).normal(size=shift).astype(np.float32),
    )
    assert kinds(model)["mean"] == expected
    assert kinds(model)["weight"] == "trained"


FOREIGN_MISSES = {"onnxruntime": 1, "torch-legacy": 1}
"""Exporter -> number of tensors whose role no use, contents or name gives away: a decay."""


@pytest.mark.parametrize("exporter", sorted({file.exporter for file in FILES.values()}))
def test_roles_of_files_of_other_exporters_are_those_of_the_framework(exporter):
    wrong = []
    for key, file in FILES.items():
        if file.exporter == exporter:
            trained = {name for name, role in roles_of(onnx.load(file.path)).items() if role.kind == "trained"}
            wrong += [f"{key}: {name}" for name in trained ^ file.trained]
    assert len(wrong) == FOREIGN_MISSES.get(exporter, 0), wrong


@pytest.mark.slow
@pytest.mark.parametrize("folded", [False, True])
def test_every_role_in_files_of_the_dynamo_exporter_is_that_of_the_module(folded):
    names = [*PARAMETERS, *BUFFERS, *zoo.ARCHITECTURES]
    names = [name for name in names if "dynamo-20" in zoo.entry_of(name).exporters]
    wrong = [str(v) for name in names for v in verdicts(name, "dynamo-20", folded) if not v.right]
    assert wrong == []


def test_a_large_matrix_of_zeros_is_a_weight_and_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """All weights of a file that is made of shapes are zero, and reading those of billions would take minutes."""
    monkeypatch.setattr(tensor_contents, "is_filter_bank", lambda tensor: pytest.fail("the whole tensor was read"))
    monkeypatch.setattr("onward.trainer.onnx_import.roles.role_guesses.is_filter_bank", tensor_contents.is_filter_bank)
    zeros = np.zeros((2049, 2048), np.float32)
    assert kinds(parsed("g (float[n, 2049] x) => (float[n, 2048] y) { y = MatMul(x, w) }", w=zeros)) == {"w": "trained"}
    monkeypatch.undo()
    bank = np.zeros((4100, 1024), np.float32)  # a large filter bank is none of zeros in a sample
    for at in range(1024):
        bank[4 * at : 4 * at + 5, at] = (0, 1, 2, 1, 0)
    assert kinds(parsed("g (float[n, 4100] x) => (float[n, 1024] y) { y = MatMul(x, w) }", w=bank)) == {"w": "frozen"}


@pytest.mark.parametrize(
    ("name", "producer", "kind"),
    [
        # Spotify's basic_pitch, and other constants in the code of a network
        ("model_1/cq_t2010v2_1/conv1d/ExpandDims_1:0", "tf2onnx", "frozen"),
        ("model/stft/kernel_real", "", "frozen"),
        ("model/filterbank/bands", "", "frozen"),
        ("hann", "", "frozen"),
        ("dct_matrix", "", "frozen"),
        ("model/gabor/filters", "", "frozen"),
        # torchlibrosa: fixed, though they are called weights
        ("spectrogram_extractor.stft.conv_real.weight", "pytorch", "frozen"),
        ("logmel_extractor.melW", "pytorch", "frozen"),
        ("cqt.cqt_kernels_real", "pytorch", "frozen"),
        ("frontend.window", "pytorch", "frozen"),
        # learned, though their names have such words
        ("mel_linear.weight", "pytorch", "trained"),
        ("stft_encoder.conv.weight", "pytorch", "trained"),
        ("layers.0.window_attention.qkv.weight", "pytorch", "trained"),
        ("encoder.filterbank._filters", "pytorch", "trained"),
        ("decoder.mel_proj.weight", "", "trained"),
        ("caramel.weight", "pytorch", "trained"),
        ("channel.kernel", "", "trained"),
    ],
)
def test_kernels_are_fixed_that_are_named_after_a_transform_of_signals(name: str, producer: str, kind: str) -> None:
    model = parsed("conv (float[batch, 1, n] x) => (float[batch, 4, m] y) { y = Conv(x, w) }", producer)
    model.graph.node[0].input[1] = name
    kernel = np.random.default_rng(0).normal(size=(4, 1, 8)).astype(np.float32)
    model.graph.initializer.append(numpy_helper.from_array(kernel, name))
    role = roles_of(model)[name]
    assert (role.kind, role.written) == (kind, False)
    assert kind == "trained" or "in its name, as fixed kernels of signals have" in role.reason
    module = to_module(model, train=[name])
    assert list(named_weights(module)) == [name], "model.train decides otherwise"
