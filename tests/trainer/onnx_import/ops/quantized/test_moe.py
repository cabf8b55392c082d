"""Mixtures of experts, with weights in fp32 and in blocks of integers: onnxruntime's results, and gradients."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch

from onward.trainer.errors import UnsupportedModel
from onward.trainer.onnx_import.driver import to_module
from tests.support.packed import mixture

Array = np.ndarray[Any, np.dtype[Any]]
ACTIVATIONS = ("swiglu", "silu", "relu", "gelu", "identity")


def by_onnxruntime(model: onnx.ModelProto, inputs: dict[str, Array]) -> Array:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    return onnxruntime.InferenceSession(model.SerializeToString(), options).run(None, inputs)[0]


def check(model: onnx.ModelProto, inputs: dict[str, Array], *, bound: float = 2e-6) -> None:
    want = by_onnxruntime(model, inputs)
    got = to_module(model)(*map(torch.from_numpy, inputs.values())).detach().numpy()
    assert np.abs(got - want).max() <= bound * np.abs(want).max()


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_experts_of_4_and_2_bits_compute_what_onnxruntime_computes(activation: str) -> None:
    for bits, block, zero, normalizes, k, mixing in itertools.product(
        (4, 2), (0, 16, 32), (False, True), (False, True), (1, 2), (False, True)
    ):
        model, _, inputs = mixture(
            bits=bits, block=block, has_zero=zero, activation=activation, normalizes=normalizes, k=k, mixing=mixing
        )
        # with this many rows onnxruntime looks 2 bits up in tables, for x in 8 bits
        check(model, inputs, bound=0.01 if (bits, block, activation) == (2, 32, "swiglu") else 2e-6)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_experts_of_8_bits_compute_what_onnxruntime_computes(activation: str) -> None:
    for block, zero, mixing in itertools.product((0, 32), (False, True), (False, True)):
        model, _, inputs = mixture(bits=8, block=block, has_zero=zero, activation=activation, mixing=mixing)
        # onnxruntime has no kernel for blocks of 8 bits that does not round x to 8 bits
        check(model, inputs, bound=0.03 if block else 2e-6)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_experts_in_fp32_compute_what_onnxruntime_computes_and_are_trained(activation: str) -> None:
    for normalizes, k in itertools.product((False, True), (1, 2, 4)):
        _, model, inputs = mixture(activation=activation, normalizes=normalizes, k=k)
        check(model, inputs)
        roles = to_module(model).roles
        assert {name for name, role in roles.items() if role.kind == "trained"} == {"w1", "b1", "w2", "b2"}


def gradients(model: onnx.ModelProto, inputs: dict[str, Array]) -> dict[str, torch.Tensor]:
    module = to_module(model)
    given = {name: torch.from_numpy(value).requires_grad_() for name, value in inputs.items()}
    y = module(*given.values())
    (y * torch.linspace(-1, 1, y.numel()).reshape(y.shape)).sum().backward()
    found = dict(module.named_parameters()) | given
    return {name: tensor.grad for name, tensor in found.items() if tensor.grad is not None}


@pytest.mark.parametrize("activation", ["swiglu", "gelu"])
def test_gradients_of_packed_experts_are_those_of_the_dequantized_ones(activation: str) -> None:
    # with `normalizes` the softmax over all experts and that over the chosen ones are the same
    packed, floats, inputs = mixture(has_zero=True, activation=activation, normalizes=True)
    found, wanted = gradients(packed, inputs), gradients(floats, inputs)
    assert found.keys() == {"x", "r", "b1", "b2"}
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, wanted[name], rtol=1e-4, atol=1e-6)


def test_kinds_that_onnxruntime_does_not_run_are_refused() -> None:
    model, _, _ = mixture(activation="swiglu")
    next(a for a in model.graph.node[0].attribute if a.name == "swiglu_fusion").i = 2
    with pytest.raises(UnsupportedModel, match=r"swiglu_fusion=2 is not implemented \(only 1\)"):
        to_module(model)
    model, _, _ = mixture()
    model.graph.node[0].input[8] = "w1"
    with pytest.raises(UnsupportedModel, match="a third matrix"):
        to_module(model)
    model, _, _ = mixture()
    model.graph.node[0].attribute.append(onnx.helper.make_attribute("quant_type", "fp4"))
    with pytest.raises(UnsupportedModel, match="quant_type='fp4'"):
        to_module(model)
