"""Rules for random operators, which draw in train() and in eval() as ONNX defines them, and for stochastic depth."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import nn

from onward.trainer.onnx_graph.stochastic_depth import DOMAIN, OPERATOR
from onward.trainer.onnx_import.registry import Call, lower
from onward.trainer.onnx_import.values import Value, element_type

Distribution = Literal["normal", "uniform", "bernoulli", "multinomial"]


class RandomNode(nn.Module):
    """Draw from torch's generator, and ignore the file's seed, so that a resumed run continues the same numbers."""

    def __init__(
        self, distribution: Distribution, dtype: torch.dtype, *arguments: float, shape: Sequence[int] = ()
    ) -> None:
        super().__init__()
        self.distribution = distribution
        self.dtype = dtype
        self.arguments = arguments
        """normal: mean and deviation; uniform: low and high; multinomial: number of samples."""
        self.shape = tuple(shape)
        """Of the result, if no operand gives it."""

    def forward(self, anchor: torch.Tensor, x: torch.Tensor | None = None) -> torch.Tensor:
        """x: probabilities (bernoulli), log-probabilities [batch, classes] (multinomial), else only a shape."""
        # the anchor is a buffer of the module, on its device
        if x is None:
            return self._fill(torch.empty(self.shape, dtype=self.dtype, device=anchor.device))
        if self.distribution == "bernoulli":
            return torch.bernoulli(x).to(self.dtype)
        if self.distribution == "multinomial":
            return torch.multinomial(x.softmax(-1), int(self.arguments[0]), replacement=True).to(self.dtype)
        return self._fill(torch.empty(x.shape, dtype=self.dtype, device=x.device))

    def _fill(self, empty: torch.Tensor) -> torch.Tensor:
        return empty.normal_(*self.arguments) if self.distribution == "normal" else empty.uniform_(*self.arguments)

    def extra_repr(self) -> str:
        return ", ".join([self.distribution, *(f"{argument:g}" for argument in self.arguments)])


@lower("RandomNormal", "RandomUniform", "RandomNormalLike", "RandomUniformLike", since=(1, 22))
def random(c: Call, like: Value = None) -> Value:
    c.attr("seed")
    dtype = c.dtype(c.attr("dtype", 1 if like is None else element_type(like)))
    shape = c.attr("shape") if like is None else ()
    if "Normal" in c.op:
        node = RandomNode("normal", dtype, c.attr("mean", 0.0), c.attr("scale", 1.0), shape=shape)
    else:
        node = RandomNode("uniform", dtype, c.attr("low", 0.0), c.attr("high", 1.0), shape=shape)
    return c.module(node, c.tracer.anchor, like)


@lower("Bernoulli", since=(15, 22))
def bernoulli(c: Call, probability: Value) -> Value:
    c.attr("seed")
    dtype = c.dtype(c.attr("dtype", element_type(probability)))
    return c.module(RandomNode("bernoulli", dtype), c.tracer.anchor, probability)


@lower("Multinomial", since=(7, 22))
def multinomial(c: Call, logarithms: Value) -> Value:
    c.attr("seed")
    node = RandomNode("multinomial", c.dtype(c.attr("dtype", 6)), c.attr("sample_size", 1))
    return c.module(node, c.tracer.anchor, logarithms)


# -- stochastic depth, which onnx_graph/stochastic_depth.py recognises


class StochasticDepth(nn.Module):
    """Zero a residual branch for some samples in training, each with probability 1 - keep, and scale up the rest."""

    def __init__(self, keep: float, mask_dims: int = 1) -> None:
        super().__init__()
        self.keep = keep
        self.mask_dims = mask_dims
        """Leading dimensions with a draw for each index: 1 samples, 2 samples and channels, 0 one draw for all."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [batch, ...]."""
        if not self.training:
            return x
        shape = [*x.shape[: self.mask_dims], *[1] * (x.ndim - self.mask_dims)]
        return x * x.new_empty(shape).bernoulli_(self.keep).div_(self.keep)

    def extra_repr(self) -> str:
        return f"keep={self.keep:g}, mask_dims={self.mask_dims}"


@lower(f"{DOMAIN}.{OPERATOR}", since=(1,))
def stochastic_depth(c: Call, x: Value) -> Value:
    return c.module(StochasticDepth(c.attr("keep"), c.attr("mask_dims")), x)
