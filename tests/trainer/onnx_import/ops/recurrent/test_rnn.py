"""LSTM, GRU and RNN: what onnxruntime computes, and the gradients torch's own layers have."""

import copy

import numpy as np
import onnxruntime
import pytest
import torch
from onnx import TensorProto

from onward.trainer.errors import UnsupportedModel
from onward.trainer.onnx_graph.node_builder import GraphWriter
from onward.trainer.onnx_import.driver import to_module

GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}
STATES = {"LSTM": ("initial_h", "initial_c"), "GRU": ("initial_h",), "RNN": ("initial_h",)}
FEATURES, HIDDEN = 3, 4
ONNX_TO_TORCH = {"LSTM": (0, 2, 3, 1), "GRU": (1, 0, 2), "RNN": (0,)}
DIRECTIONS = ("forward", "reverse", "bidirectional")


def recurrent(kind, direction, *, operands=("B",), opset=22, layout=0, double=False, **attributes):
    """A model of one layer; its graph inputs are X and those of `operands` that are not weights."""
    g = GraphWriter("recurrent", seed=0, opset=opset)
    directions, gates = 2 if direction == "bidirectional" else 1, GATES[kind]
    dtype, element = (np.float64, TensorProto.DOUBLE) if double else (np.float32, TensorProto.FLOAT)

    def weight(name, *shape):
        return g.weight(name, g.normal(0.6, directions, *shape).astype(dtype))

    def per_sequence(*dims):
        return [dims[1], dims[0], *dims[2:]] if layout else list(dims)

    def operand(name):
        if name not in operands or (name not in ("B", "sequence_lens", "P") and name not in STATES[kind]):
            return ""
        if name == "sequence_lens":
            return g.input(name, ("batch",), TensorProto.INT32)
        if name in ("B", "P"):
            return weight(name, (2 * gates if name == "B" else 3) * HIDDEN)
        return g.input(name, per_sequence(directions, "batch", HIDDEN), element)

    inputs = [
        g.input("X", per_sequence("steps", "batch", FEATURES), element),
        weight("W", gates * HIDDEN, FEATURES),
        weight("R", gates * HIDDEN, HIDDEN),
    ]
    inputs += [operand(name) for name in ("B", "sequence_lens", "initial_h", "initial_c", "P")]
    while not inputs[-1]:
        inputs.pop()
    outputs = ["Y", "Y_h", "Y_c"][: 3 if kind == "LSTM" else 2]
    attributes |= {"layout": layout} if opset >= 14 else {}
    g.op(kind, *inputs, outputs=outputs, direction=direction, hidden_size=HIDDEN, **attributes)
    y = ["batch", "steps", directions, HIDDEN] if layout else ["steps", directions, "batch", HIDDEN]
    g.output("Y", y, element)
    for name in outputs[1:]:
        g.output(name, per_sequence(directions, "batch", HIDDEN), element)
    return g.model()


def inputs_of(model, *, steps, batch, lengths=None):
    random = np.random.default_rng(steps)
    sizes = {"steps": steps, "batch": batch}
    found = {}
    for value in model.graph.input:
        shape = [sizes.get(dim.dim_param, dim.dim_value) for dim in value.type.tensor_type.shape.dim]
        if value.name == "sequence_lens":
            found[value.name] = np.array(lengths or random.integers(1, steps + 1, batch), np.int32)
        else:
            double = value.type.tensor_type.elem_type == TensorProto.DOUBLE
            found[value.name] = random.standard_normal(shape).astype(np.float64 if double else np.float32)
    return found


def by_onnxruntime(model, inputs):
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    return onnxruntime.InferenceSession(model.SerializeToString(), options).run(None, inputs)


def ours(module, inputs):
    return module(*(torch.from_numpy(inputs[name]) for name in module.input_names))


def assert_same(got, want):
    assert len(got) == len(want)
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one.detach(), torch.as_tensor(other), rtol=1e-5, atol=1e-5)


OPTIONS = {
    "no bias": ((), {}),
    "bias": (("B",), {}),
    "states": (("B", "initial_h", "initial_c"), {}),
    "lengths": (("B", "sequence_lens"), {}),
    "lengths and states": (("B", "sequence_lens", "initial_h", "initial_c"), {}),
    "clip": (("B", "sequence_lens", "initial_h", "initial_c"), {"clip": 0.5}),
}
OF_ONE_KIND = {
    ("LSTM", "peepholes"): (("B", "initial_c", "P"), {}),
    ("LSTM", "peepholes and lengths"): (("B", "sequence_lens", "P"), {"clip": 0.7}),
    ("LSTM", "input_forget"): (("B",), {"input_forget": 1}),
    ("GRU", "linear_before_reset"): (("B",), {"linear_before_reset": 1}),
    ("GRU", "linear_before_reset, lengths"): (("B", "sequence_lens", "initial_h"), {"linear_before_reset": 1}),
    ("GRU", "linear_before_reset, clip"): (("B",), {"linear_before_reset": 1, "clip": 0.5}),
}
CASES = {(kind, name): option for kind in GATES for name, option in OPTIONS.items()} | OF_ONE_KIND


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("case", CASES, ids=" ".join)
def test_every_option_computes_what_onnxruntime_does_at_any_length(case, direction):
    operands, attributes = CASES[case]
    model = recurrent(case[0], direction, operands=operands, **attributes)
    module = to_module(model)
    for steps, batch in ((5, 3), (2, 1)):
        inputs = inputs_of(model, steps=steps, batch=batch)
        assert_same(ours(module, inputs), by_onnxruntime(model, inputs))


@pytest.mark.parametrize("opset", [9, 14])
@pytest.mark.parametrize("kind", GATES)
def test_older_versions_mean_the_same(kind, opset):
    model = recurrent(kind, "bidirectional", operands=("B", "sequence_lens", "initial_h"), opset=opset)
    inputs = inputs_of(model, steps=4, batch=3)
    assert_same(ours(to_module(model), inputs), by_onnxruntime(model, inputs))


@pytest.mark.parametrize("clip", [{}, {"clip": 50.0}], ids=["fused", "step by step"])
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("kind", GATES)
def test_layout_1_has_the_batch_first(kind, direction, clip):
    operands = ("B", "sequence_lens", "initial_h", "initial_c")
    first = recurrent(kind, direction, operands=operands, layout=1, **clip)
    inputs = inputs_of(first, steps=5, batch=3)
    y, *states = ours(to_module(first), inputs)
    swapped = {name: np.swapaxes(a, 0, 1).copy() if a.ndim == 3 else a for name, a in inputs.items()}
    usual = recurrent(kind, direction, operands=operands, **clip)
    assert_same([y.permute(1, 2, 0, 3), *(s.transpose(0, 1) for s in states)], by_onnxruntime(usual, swapped))


@pytest.mark.parametrize("clip", [{}, {"clip": 50.0}], ids=["fused", "step by step"])
@pytest.mark.parametrize("kind", GATES)
def test_a_sequence_of_no_steps_gives_zeros(kind, clip):
    model = recurrent(kind, "bidirectional", operands=("B", "sequence_lens", "initial_h", "initial_c"), **clip)
    inputs = inputs_of(model, steps=4, batch=3, lengths=[0, 4, 2])
    assert_same(ours(to_module(model), inputs), by_onnxruntime(model, inputs))


SHAPED = ("Affine", "LeakyRelu", "ThresholdedRelu", "ScaledTanh", "HardSigmoid", "Elu")
USUAL = {"LSTM": ["Sigmoid", "Tanh", "Tanh"], "GRU": ["Sigmoid", "Tanh"], "RNN": ["Tanh"]}


@pytest.mark.parametrize("name", [*SHAPED, "Relu", "Softsign", "Softplus", "Tanh", "Sigmoid"])
@pytest.mark.parametrize("kind", GATES)
def test_every_activation_at_every_gate_computes_what_onnxruntime_does(kind, name):
    for position in range(len(USUAL[kind])):
        names = [*USUAL[kind], *USUAL[kind]]
        names[position] = names[len(names) - 1] = name  # the alphas and betas are those of either direction
        shapes = {"activation_alpha": [0.3, 0.2], "activation_beta": [0.6, 0.1]} if name in SHAPED else {}
        model = recurrent(kind, "bidirectional", activations=names, **shapes)
        inputs = inputs_of(model, steps=3, batch=2)
        assert_same(ours(to_module(model), inputs), by_onnxruntime(model, inputs))


def test_an_rnn_with_relu_uses_torchs_kernel():
    model = recurrent("RNN", "bidirectional", activations=["Relu", "Relu"], operands=("B", "sequence_lens"))
    inputs = inputs_of(model, steps=4, batch=3)
    module = to_module(model)
    assert "fused" in str(module)
    assert_same(ours(module, inputs), by_onnxruntime(model, inputs))


def test_a_missing_alpha_is_refused_where_runtimes_disagree():
    with pytest.raises(UnsupportedModel, match="its activation scaledtanh needs activation_alpha and activation_beta"):
        to_module(recurrent("RNN", "forward", activations=["ScaledTanh"]))


def test_an_unknown_activation_is_refused():
    with pytest.raises(UnsupportedModel, match="activation swish is not among ONNX's"):
        to_module(recurrent("RNN", "forward", activations=["Swish"]))


# -- training


def torch_layer(module, kind, direction):
    """torch's own layer with the same weights, double precision."""
    layer = {"LSTM": torch.nn.LSTM, "GRU": torch.nn.GRU, "RNN": torch.nn.RNN}[kind]
    layer = layer(FEATURES, HIDDEN, bidirectional=direction == "bidirectional").double()
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            parameter.copy_(in_torch_order(module, kind, name))
    return layer


def in_torch_order(module, kind, name, of=lambda weight: weight):
    """The part of W, R or B (or of something as large) that torch's layer has under that name."""
    which, d = name.split("_l0")[0], 1 if name.endswith("_reverse") else 0
    tensor = of({"weight_ih": module.W, "weight_hh": module.R}.get(which, module.B))[d]
    if which.startswith("bias"):
        tensor = tensor.chunk(2)[which == "bias_hh"]
    gates = tensor.chunk(GATES[kind])
    return torch.cat([gates[i] for i in ONNX_TO_TORCH[kind]])


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("direction", ["forward", "bidirectional"])
@pytest.mark.parametrize("kind", GATES)
def test_gradients_are_those_of_torchs_own_layer(kind, direction, training):
    extra = {"linear_before_reset": 1} if kind == "GRU" else {}
    module = to_module(recurrent(kind, direction, double=True, **extra)).train(training)
    assert {name for name, _ in module.named_parameters()} == {"W", "R", "B"}
    layer = torch_layer(module, kind, direction)
    x = torch.randn(5, 3, FEATURES, dtype=torch.float64)
    y, *_ = module(x)
    want, _ = layer(x)
    torch.testing.assert_close(y.permute(0, 2, 1, 3).flatten(2), want)
    y.square().sum().backward()
    want.square().sum().backward()
    for name, parameter in layer.named_parameters():
        torch.testing.assert_close(in_torch_order(module, kind, name, lambda weight: weight.grad), parameter.grad)


def gradients(model, inputs):
    module = to_module(model)
    given = [torch.from_numpy(inputs[name]) for name in module.input_names]
    leaves = [value.requires_grad_() for value in given if value.is_floating_point()]
    sum(output.square().sum() * (i + 1) for i, output in enumerate(module(*given))).backward()
    return [tensor.grad for tensor in (*leaves, *module.parameters())]


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("kind", GATES)
def test_the_kernel_and_the_steps_have_the_same_gradients(kind, direction):
    extra = {"linear_before_reset": 1} if kind == "GRU" else {}
    options = {"operands": ("B", "sequence_lens", "initial_h", "initial_c"), "double": True, **extra}
    fused, steps = recurrent(kind, direction, **options), recurrent(kind, direction, clip=1e9, **options)
    inputs = inputs_of(fused, steps=4, batch=3, lengths=[4, 0, 2])
    for one, other in zip(gradients(fused, inputs), gradients(steps, inputs), strict=True):
        torch.testing.assert_close(one, other)


def test_peepholes_are_trained():
    model = recurrent("LSTM", "reverse", operands=("B", "P"), double=True)
    *_, of_peepholes = gradients(model, inputs_of(model, steps=3, batch=2))
    assert of_peepholes.shape == (1, 3 * HIDDEN)
    assert (of_peepholes != 0).all()


def test_a_copied_layer_computes_the_same_and_shares_no_memory():
    model = recurrent("GRU", "bidirectional")
    module = to_module(model)
    twin = copy.deepcopy(module)
    inputs = inputs_of(model, steps=3, batch=2)
    before = ours(module, inputs)
    assert_same(ours(twin, inputs), [output.detach() for output in before])
    with torch.no_grad():
        twin.W.zero_()
    assert_same(ours(module, inputs), [output.detach() for output in before])
