"""Rules for MoE and QMoE, mixtures of experts (com.microsoft), as onnxruntime's CPU kernels compute them.

    for each token      the k experts with the greatest router scores
                        y = sum over them of  share x (W2 activation(W1 x + b1) + b2)

    share               MoE     softmax over all experts, divided by the sum of the k if normalize_routing_weights
                        QMoE    softmax over the k (onnxruntime's CPU kernel ignores normalize_routing_weights here)
                        router_weights, if given: their values, divided by their sum if normalize_routing_weights

The weights of MoE are trained; those of QMoE are integers in blocks, which stay packed and frozen (blockwise.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from onward.trainer.errors import UnsupportedNode
from onward.trainer.onnx_import.lowering.converter_table import Call, lower
from onward.trainer.onnx_import.ops.quantized.blockwise import BITS, packed_linear, unpack
from onward.trainer.onnx_import.tracing.values import Value

Tensor = torch.Tensor
Projection = tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]
"""Weights of all experts [experts, outputs, inputs] (packed: bytes), scales, zero points, biases [experts, outputs]."""


@dataclass(frozen=True)
class Mixture:
    """The attributes of a mixture of experts."""

    k: int
    activation: str
    alpha: float
    beta: float
    limit: float | None
    normalizes: bool
    of_chosen: bool
    """Whether the softmax is over the chosen experts alone."""
    bits: tuple[int, int]
    block: int

    def shares(self, scores: Tensor, mixing: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the share and the number of each chosen expert, [tokens, k]."""
        greatest, chosen = scores.topk(self.k, -1)
        if mixing is None and self.of_chosen:
            return greatest.softmax(-1), chosen
        shares = (scores.softmax(-1) if mixing is None else mixing).gather(-1, chosen)
        return (shares / shares.sum(-1, keepdim=True) if self.normalizes else shares), chosen

    def activate(self, x: Tensor) -> Tensor:
        """Apply the activation to x [tokens, features]; of swiglu, x has gates and linear parts by turns."""
        if self.activation == "swiglu":
            gate = x[..., 0::2]
            linear = x[..., 1::2]
            if self.limit is not None:
                gate = gate.clamp(max=self.limit)
                linear = linear.clamp(-self.limit, self.limit)
            return gate * torch.sigmoid(self.alpha * gate) * (linear + self.beta)
        if self.activation == "gelu":
            return F.gelu(x, approximate="tanh")
        return {"relu": torch.relu, "silu": F.silu, "identity": torch.clone}[self.activation](x)

    def project(self, x: Tensor, expert: int, of: Projection, bits: int) -> Tensor:
        """Multiply the tokens of an expert by one of its matrices: [tokens, inputs] -> [tokens, outputs]."""
        weight, scales, zero, bias = (None if tensor is None else tensor[expert] for tensor in of)
        assert weight is not None
        if scales is None:
            return F.linear(x, weight, bias)
        rows = len(weight)
        if zero is not None and zero.ndim == 1:  # one for each row, packed along the rows
            zero = unpack(zero, bits)[:rows, None].to(scales.dtype)
        layout = (x.shape[-1], self.block or x.shape[-1], bits)
        return packed_linear(x, weight, scales.reshape(rows, -1), zero, None, bias, layout)


# torch.compile cannot trace it: how many tokens an expert has depends on data
@torch._disable_dynamo  # type: ignore[attr-defined]
def mix_experts(
    x: Tensor, scores: Tensor, mixing: Tensor | None, first: Projection, second: Projection, mixture: Mixture
) -> Tensor:
    """x: [..., features]; scores, mixing: [tokens, experts]. An expert computes its own tokens only."""
    # how many tokens an expert has depends on values, which tensors without data do not have
    if x.is_meta:
        return torch.empty_like(x)
    tokens = x.reshape(-1, x.shape[-1])
    shares, chosen = mixture.shares(scores, mixing)
    total = torch.zeros_like(tokens)
    for expert in range(scores.shape[-1]):
        # the tokens that chose this expert, and as which of their k choices
        token, place = (chosen == expert).nonzero(as_tuple=True)
        hidden = mixture.activate(mixture.project(tokens[token], expert, first, mixture.bits[0]))
        y = mixture.project(hidden, expert, second, mixture.bits[1])
        # a token occurs at most once in an expert, so that the order of the additions is that of the experts
        total = total.index_add(0, token, (y * shares[token, place, None]).to(total.dtype))
    return total.reshape(x.shape)


class Experts(nn.Module):
    """Call `mix_experts` with the attributes of a node."""

    def __init__(self, mixture: Mixture) -> None:
        super().__init__()
        self.mixture = mixture

    def forward(
        self, x: Tensor, scores: Tensor, mixing: Tensor | None, first: Projection, second: Projection
    ) -> Tensor:
        return mix_experts(x, scores, mixing, first, second, self.mixture)

    def extra_repr(self) -> str:
        return f"k={self.mixture.k}, {self.mixture.activation}"


def _mixture(c: Call, **own: Any) -> Mixture:
    activation = c.attr("activation_type", "relu")
    c.require("activation_type", "relu", "gelu", "silu", "swiglu", "identity")
    # onnxruntime's CPU kernels run gates and linear parts by turns only
    c.require("swiglu_fusion", 1 if activation == "swiglu" else 0)
    c.require("use_sparse_mixer", 0)
    return Mixture(
        k=c.attr("k", 1),
        activation=activation,
        alpha=c.attr("activation_alpha", 1.0),
        beta=c.attr("activation_beta", 0.0),
        limit=c.attr("swiglu_limit"),
        normalizes=bool(c.attr("normalize_routing_weights", 0)),
        **own,
    )


def _refuse_third(operands: Sequence[Value]) -> None:
    if any(operand is not None for operand in operands):
        raise UnsupportedNode("it has a third matrix (FC3), which onnxruntime's CPU kernels do not run")


@lower("com.microsoft.MoE", since=(1,))
def mixture_of_experts(
    c: Call, x: Value, scores: Value, w1: Value, b1: Value, w2: Value, b2: Value = None, *third: Value
) -> Value:
    _refuse_third(third)
    mixture = _mixture(c, of_chosen=False, bits=(0, 0), block=0)
    return c.module(Experts(mixture), x, scores, None, (w1, None, None, b1), (w2, None, None, b2))


@lower("com.microsoft.QMoE", since=(1,))
def quantized_mixture_of_experts(
    c: Call,
    x: Value,
    scores: Value,
    w1: Value,
    scales1: Value,
    b1: Value,
    w2: Value,
    scales2: Value,
    b2: Value = None,
    w3: Value = None,
    scales3: Value = None,
    b3: Value = None,
    zero1: Value = None,
    zero2: Value = None,
    zero3: Value = None,
    mixing: Value = None,
) -> Value:
    c.require("quant_type", "int")
    c.require("weights_prepacked", -1, 0)
    c.attr("accuracy_level")  # how far onnxruntime may round x (export/measuring/kernel_rounding.py)
    _refuse_third((w3, scales3, b3, zero3))
    # one number of bits for all matrices, unless a matrix has its own
    shared = c.attr("expert_weight_bits", BITS[0])
    bits = (c.attr("fc1_expert_weight_bits", shared), c.attr("fc2_expert_weight_bits", shared))
    c.attr("fc3_expert_weight_bits")
    if not set(bits) <= set(BITS):
        raise UnsupportedNode(f"its weights have {bits[0]} and {bits[1]} bits; 2, 4 and 8 are implemented")
    mixture = _mixture(c, of_chosen=True, bits=bits, block=c.attr("block_size", 0))
    return c.module(Experts(mixture), x, scores, mixing, (w1, scales1, zero1, b1), (w2, scales2, zero2, b2))
