"""Fourier transforms, windows, linear attention, causal convolution and random nodes."""

import numpy as np
import onnxruntime
import pytest
import torch
from onnx import TensorProto

from onward.trainer.errors import UnsupportedModel
from onward.trainer.onnx_graph.node_builder import GraphWriter
from onward.trainer.onnx_import.driver import to_module
from onward.trainer.onnx_import.imported_graph import named_weights
from onward.trainer.onnx_import.ops.random import RandomNode


def by_onnxruntime(model, *inputs):
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(model.SerializeToString(), options)
    return session.run(None, dict(zip([value.name for value in session.get_inputs()], inputs, strict=True)))


def assert_same(model, *inputs):
    got = to_module(model)(*map(torch.from_numpy, inputs))
    got = got if isinstance(got, tuple) else (got,)
    for one, other in zip(got, by_onnxruntime(model, *inputs), strict=True):
        np.testing.assert_allclose(one.detach().numpy(), other, rtol=1e-4, atol=1e-4)


def random(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


# -- transforms


@pytest.mark.parametrize("opset", [17, 20])
@pytest.mark.parametrize("length", [None, 5, 12])
@pytest.mark.parametrize(
    ("parts", "attributes"),
    [(1, {}), (2, {}), (2, {"inverse": 1}), (1, {"onesided": 1})],
    ids=["real", "complex", "inverse", "onesided"],
)
def test_transforms_are_those_of_onnxruntime(opset, length, parts, attributes):
    g = GraphWriter("transform", opset=opset)
    inputs = [g.input("x", ("n", 9, 3, parts)), "" if length is None else g.weight("length", np.array(length))]
    axis = {"axis": 1} if opset == 17 else {}
    g.op("DFT", *inputs, *([] if axis else [g.weight("axis", np.array(1))]), outputs="y", **axis, **attributes)
    g.output("y", ("n", "frequencies", 3, 2))
    model = g.model()
    for batch in (2, 3):
        assert_same(model, random(batch, 9, 3, parts))


@pytest.mark.parametrize("length", [None, 8, 9])
def test_the_onesided_inverse_undoes_the_onesided_transform(length):
    g = GraphWriter("back", opset=20)
    one = "" if length is None else g.weight("length", np.array(length))
    half = g.op("DFT", g.input("x", ("n", length or 8, 1)), onesided=1)
    g.op("DFT", half, one, outputs="y", onesided=1, inverse=1)
    g.output("y", ("n", length or 8, 1))
    x = torch.from_numpy(random(2, length or 8, 1))
    torch.testing.assert_close(to_module(g.model())(x), x)


@pytest.mark.parametrize("given", ["window", "length", "both"])
@pytest.mark.parametrize("onesided", [0, 1])
def test_spectrograms_are_those_of_onnxruntime_for_any_length_of_signal(onesided, given):
    g = GraphWriter("spectrogram", opset=17)
    window = g.op("HannWindow", g.weight("size", np.array(16)))
    operands = {
        "window": (window,),
        "length": ("", g.weight("length", np.array(16))),
        "both": (window, g.weight("length", np.array(16))),
    }[given]
    signal = g.input("signal", ("n", "samples", 1))
    g.op("STFT", signal, g.weight("step", np.array(4)), *operands, outputs="y", onesided=onesided)
    g.output("y", ("n", "frames", "frequencies", 2))
    model = g.model()
    assert "Leaf" not in str(to_module(model))
    for samples in (64, 37):
        assert_same(model, random(2, samples, 1))


@pytest.mark.parametrize("window", ["HannWindow", "HammingWindow", "BlackmanWindow"])
@pytest.mark.parametrize("periodic", [0, 1])
def test_windows_are_those_of_onnxruntime_and_may_be_as_long_as_an_input(window, periodic):
    g = GraphWriter("window", opset=17)
    size = g.op("Gather", g.op("Shape", g.input("x", ("n", "length"))), g.weight("one", np.array(1)))
    g.op("Mul", "x", g.op(window, size, periodic=periodic), outputs="y")
    g.output("y", ("n", "length"))
    model = g.model()
    for length in (10, 17):
        assert_same(model, random(2, length))


@pytest.mark.parametrize("bins", [8, 40])
def test_mel_triangles_are_those_of_onnxruntime(bins):
    g = GraphWriter("mel", opset=17)
    sizes = [g.weight(name, np.array(n)) for name, n in (("mels", bins), ("length", 256), ("rate", 8192))]
    mel = g.op("MelWeightMatrix", *sizes, g.weight("low", 0.0), g.weight("high", 4096.0))
    g.op("MatMul", g.input("x", ("n", 129)), mel, outputs="y")
    g.output("y", ("n", bins))
    assert_same(g.model(), random(3, 129))


def test_gradients_reach_the_signal_and_a_trained_window():
    g = GraphWriter("trained", opset=17)
    operands = g.weight("step", np.array(2)), g.weight("window", g.normal(1.0, 8))
    g.op("STFT", g.input("signal", ("n", "samples", 1)), *operands, outputs="y")
    g.output("y", ("n", "frames", 5, 2))
    module = to_module(g.model(), train=["window"]).double()  # its name says that it is fixed
    signal = torch.randn(2, 20, 1, dtype=torch.float64, requires_grad=True)
    assert set(named_weights(module)) == {"window"}
    assert torch.autograd.gradcheck(lambda x, window: torch.func.functional_call(module, {"window": window}, x),
                                    (signal, module.window.detach().clone().requires_grad_()))  # fmt: skip


# -- layers with a state


def attention_step_by_step(q, k, v, decay, beta, *, scale):
    """One head of each, as the standard writes it down: [batch, steps, width]."""
    state, outputs = torch.zeros(q.shape[0], k.shape[2], v.shape[2]), []
    for t in range(q.shape[1]):
        if decay is not None:
            state = torch.exp(decay[:, t])[:, :, None] * state
        told = torch.einsum("bkv,bk->bv", state, k[:, t])
        new = v[:, t] if beta is None else beta[:, t] * (v[:, t] - told)
        state = state + torch.einsum("bk,bv->bkv", k[:, t], new)
        outputs.append(scale * torch.einsum("bk,bkv->bv", q[:, t], state))
    return torch.stack(outputs, 1)


@pytest.mark.parametrize("rule", ["linear", "gated", "delta", "gated_delta"])
def test_linear_attention_runs_over_any_number_of_steps_and_trains(rule):
    heads, queries, width, values = 2, 4, 3, 5
    g = GraphWriter("linear_attention", opset=27)
    shape = ("n", "steps")
    inputs = [
        g.op("MatMul", g.input("q", (*shape, queries * width)), g.weight("w", g.normal(0.5, 12, 12))),
        g.input("k", (*shape, heads * width)),
        g.input("v", (*shape, heads * values)),
        "",
        g.input("decay", (*shape, heads * width)) if "gated" in rule else "",
        g.input("beta", (*shape, heads)) if "delta" in rule else "",
    ]
    g.op("LinearAttention", *inputs, outputs=["y", "state"], update_rule=rule, q_num_heads=queries, kv_num_heads=heads)
    g.output("y", (*shape, queries * values))
    g.output("state", ("n", heads, width, values))
    module = to_module(g.model())
    for steps in (4, 7):
        sizes = {"q": 12, "k": 6, "v": 10, "decay": 6, "beta": 2}
        given = {name: torch.from_numpy(random(2, steps, sizes[name], seed=i)) * 0.5
                 for i, name in enumerate(module.input_names)}  # fmt: skip
        y, _ = module(**given)
        q = (given["q"] @ module.w).unflatten(2, (heads, queries // heads, width))
        k, v = given["k"].unflatten(2, (heads, width)), given["v"].unflatten(2, (heads, values))
        decay = given["decay"].unflatten(2, (heads, width)) if "gated" in rule else None
        wanted = [
            attention_step_by_step(
                *(q[:, :, h, i], k[:, :, h], v[:, :, h], None if decay is None else decay[:, :, h]),
                given["beta"][:, :, h : h + 1] if "delta" in rule else None,
                scale=width**-0.5,
            )
            for h in range(heads)
            for i in range(queries // heads)
        ]
        torch.testing.assert_close(y, torch.cat(wanted, 2))
    y.sum().backward()
    assert module.w.grad.abs().sum() > 0


def test_a_causal_convolution_continues_where_it_stopped():
    g = GraphWriter("causal", opset=27)
    x, past = g.input("x", ("n", 4, "steps")), g.input("past", ("n", 4, 2))
    weight, bias = g.weight("weight", g.normal(0.5, 4, 1, 3)), g.weight("bias", g.normal(0.5, 4))
    g.op("CausalConvWithState", x, weight, bias, past, outputs=["y", "now"], activation="silu")
    g.output("y", ("n", 4, "steps"))
    g.output("now", ("n", 4, 2))
    module = to_module(g.model())
    x, nothing = torch.randn(2, 4, 9), torch.zeros(2, 4, 2)
    whole, last = module(x, nothing)
    first, state = module(x[:, :, :5], nothing)
    rest, end = module(x[:, :, 5:], state)
    torch.testing.assert_close(torch.cat((first, rest), 2), whole)
    torch.testing.assert_close(end, last)
    assert set(named_weights(module)) == {"weight", "bias"}


def test_rules_of_linear_attention_without_their_gates_are_refused():
    g = GraphWriter("refused", opset=27)
    names = [g.input(name, ("n", "steps", 4)) for name in ("q", "k", "v", "decay")]
    names.insert(3, "")
    g.op("LinearAttention", *names, outputs=["y", "state"], update_rule="gated", q_num_heads=1, kv_num_heads=1)
    g.output("y", ("n", "steps", 4))
    model = g.model()
    del model.graph.node[0].input[3:]
    with pytest.raises(UnsupportedModel, match="update_rule='gated' needs decay"):
        to_module(model)


# -- random nodes


def noisy(opset=22):
    """Of x [n, 1000], one output for each operator that draws."""
    g = GraphWriter("noisy", opset=opset)
    x = g.input("x", ("n", 1000))
    g.op("RandomNormalLike", x, outputs="normal", mean=3.0, scale=0.5, seed=1.0)
    g.op("RandomUniformLike", x, outputs="uniform", low=2.0, high=4.0)
    g.op("RandomNormal", outputs="alone", shape=[1000], scale=2.0)
    g.op("RandomUniform", outputs="level", shape=[1000], high=2.0, dtype=TensorProto.DOUBLE)
    g.op("Bernoulli", g.weight("p", np.full(1000, 0.3, np.float32)), outputs="kept", dtype=TensorProto.BOOL)
    g.op("Multinomial", x, outputs="chosen", sample_size=50)
    for name in ("normal", "uniform"):
        g.output(name, ("n", 1000))
    g.output("alone", (1000,))
    g.output("level", (1000,), TensorProto.DOUBLE)
    g.output("kept", (1000,), TensorProto.BOOL)
    g.output("chosen", ("n", 50), TensorProto.INT32)
    return g.model()


@pytest.mark.parametrize("opset", [15, 22])
def test_random_nodes_draw_new_numbers_each_time_in_eval_too(opset):
    module = to_module(noisy(opset)).eval()
    assert sum(isinstance(part, RandomNode) for part in module.modules()) == 6
    torch.manual_seed(0)
    logarithms = torch.full((3, 1000), -20.0)
    logarithms[:, 7] = logarithms[:, 9] = 0.0
    normal, uniform, alone, level, kept, chosen = first = module(logarithms)
    assert normal.shape == uniform.shape == (3, 1000)
    assert normal.mean().item() == pytest.approx(3.0, abs=0.05)
    assert normal.std().item() == pytest.approx(0.5, abs=0.05)
    assert alone.std().item() == pytest.approx(2.0, abs=0.2)
    assert 2.0 <= uniform.min().item() < 2.05
    assert 3.95 < uniform.max().item() <= 4.0
    assert level.dtype == torch.float64
    assert level.mean().item() == pytest.approx(1.0, abs=0.1)
    assert kept.float().mean().item() == pytest.approx(0.3, abs=0.06)
    assert chosen.dtype == torch.int32
    assert set(chosen.flatten().tolist()) == {7, 9}
    assert not any(torch.equal(one, other) for one, other in zip(first, module(logarithms), strict=True))
    torch.manual_seed(0)
    assert all(torch.equal(one, other) for one, other in zip(first, module(logarithms), strict=True))
