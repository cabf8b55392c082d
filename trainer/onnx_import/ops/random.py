"""Rules for random operators, which draw in train() and in eval() as ONNX defines them, and for stochastic depth."""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from onward.trainer.onnx_graph.surgery.stochastic_depth import DOMAIN, OPERATOR
from onward.trainer.onnx_import.lowering.converter_table import Call, lower
from onward.trainer.onnx_import.tracing.values import Traced, Value, element_type

Distribution = Literal["normal", "uniform", "bernoulli", "multinomial"]


class RandomNode(nn.Module):
    """Draw random numbers, and ignore the file's seed, so that a resumed run continues the same numbers.

    They are made from keys of the samples where these are given, else by torch's generator.
    """

    def __init__(
        self,
        distribution: Distribution,
        dtype: torch.dtype,
        *arguments: float,
        shape: Sequence[int] = (),
        name: str = "",
        axis: int | None = None,
    ) -> None:
        super().__init__()
        self.distribution = distribution
        self.name = name
        """The ONNX tensor that it computes."""
        self.axis = axis
        """Of the samples in the result; None = the samples share the numbers."""
        self.dtype = dtype
        self.arguments = arguments
        """normal: mean and deviation; uniform: low and high; multinomial: number of samples."""
        self.shape = tuple(shape)
        """Of the result, if no operand gives it."""

    def forward(
        self, anchor: torch.Tensor, x: torch.Tensor | None = None, keys: torch.Tensor | None = None
    ) -> torch.Tensor:
        """x: probabilities (bernoulli), log-probabilities [batch, classes] (multinomial), else only a shape.

        keys: int64 [B, 2] as below.
        """
        if keys is not None:
            return self._of_keys(keys, x).to(self.dtype)
        # the anchor is a buffer of the module, on its device
        if x is None:
            return self._fill(torch.empty(self.shape, dtype=self.dtype, device=anchor.device))
        if self.distribution == "bernoulli":
            return torch.bernoulli(x).to(self.dtype)
        if self.distribution == "multinomial":
            return torch.multinomial(x.softmax(-1), int(self.arguments[0]), replacement=True).to(self.dtype)
        return self._fill(torch.empty(x.shape, dtype=self.dtype, device=x.device))

    def _of_keys(self, keys: torch.Tensor, x: torch.Tensor | None) -> torch.Tensor:
        if self.distribution == "multinomial":
            assert x is not None
            # the cumulative distribution of each row, [batch, classes]
            shares = x.detach().double().softmax(-1).cumsum(-1)
            drawn = uniform(keys, (len(x), int(self.arguments[0])), self.axis, self.name)
            # inverse of the cumulative distribution; its last element is 1 only up to rounding
            return torch.searchsorted(shares, drawn * shares[:, -1:]).clamp(max=x.shape[-1] - 1)
        shape = self.shape if x is None else x.shape
        if self.distribution == "normal":
            # numbers of the standard normal distribution, moved and scaled
            mean, deviation = self.arguments
            return mean + deviation * normal(keys, shape, self.axis, self.name)
        drawn = uniform(keys, shape, self.axis, self.name)
        if self.distribution == "bernoulli":
            assert x is not None
            # 1 with the probability of the element, of which the draw is uniform
            return drawn < x.detach()
        low, high = self.arguments
        return low + (high - low) * drawn

    def _fill(self, empty: torch.Tensor) -> torch.Tensor:
        return empty.normal_(*self.arguments) if self.distribution == "normal" else empty.uniform_(*self.arguments)

    def extra_repr(self) -> str:
        return ", ".join([self.distribution, *(f"{argument:g}" for argument in self.arguments)])


def _place(c: Call, like: Value) -> dict[str, Any]:
    """Return the name of a node's result, and the axis whose length grows with the batch in the two trial sizes."""
    name = c.output_name
    # the two trial sizes differ in the batch, which shows the axis that follows it
    known = isinstance(like, Traced) and like.known
    batch = c.trial_batch
    if not known or batch is None:
        return {"name": name}
    first, second = (probe.shape for probe in like.probes)
    for axis, length in enumerate(first):
        grows = length * batch[1] == second[axis] * batch[0]
        # a multiple of the batch, such as batch x heads, grows with it as well
        if grows and length % batch[0] == 0:
            return {"name": name, "axis": axis}
    return {"name": name, "axis": None}


@lower("RandomNormal", "RandomUniform", "RandomNormalLike", "RandomUniformLike", since=(1, 22))
def random(c: Call, like: Value = None) -> Value:
    c.attr("seed")
    dtype = c.dtype(c.attr("dtype", 1 if like is None else element_type(like)))
    # the operators that end in Like take the shape of their operand
    shape = c.attr("shape") if like is None else ()
    if "Normal" in c.op:
        node = RandomNode("normal", dtype, c.attr("mean", 0.0), c.attr("scale", 1.0), shape=shape, **_place(c, like))
    else:
        node = RandomNode("uniform", dtype, c.attr("low", 0.0), c.attr("high", 1.0), shape=shape, **_place(c, like))
    return c.module(node, c.tracer.anchor, like)


@lower("Bernoulli", since=(15, 22))
def bernoulli(c: Call, probability: Value) -> Value:
    c.attr("seed")
    dtype = c.dtype(c.attr("dtype", element_type(probability)))
    return c.module(RandomNode("bernoulli", dtype, **_place(c, probability)), c.tracer.anchor, probability)


@lower("Multinomial", since=(7, 22))
def multinomial(c: Call, logarithms: Value) -> Value:
    c.attr("seed")
    # element type 6, int32, is the operator's default
    node = RandomNode("multinomial", c.dtype(c.attr("dtype", 6)), c.attr("sample_size", 1), **_place(c, logarithms))
    return c.module(node, c.tracer.anchor, logarithms)


# -- stochastic depth, which onnx_graph/surgery/stochastic_depth.py recognises


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


# -- make random numbers that depend on the sample and the place in the tensor alone, not on what was drawn before
#
#     keys [B, 2]     a number for each sample (its position in the stream), and one for the whole step
#     element         hash(key of its sample, number of the node, index along each axis)
#
# A generator gives other numbers to other ranks, to micro-batches of another size and to a pass that is computed again.
# These are the same on any number of ranks, in any division into micro-batches and pipeline stages, after a resume, and
# when activations are recomputed; padding a row does not change its numbers, either.

# the constants of splitmix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators), as signed integers
GOLDEN, FIRST, SECOND = (constant - 2**64 for constant in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def uniform(keys: Tensor, shape: Sequence[int], axis: int | None, name: str, draw: int = 0) -> Tensor:
    """Return numbers in (0, 1), fp64 of `shape`.

    keys: int64 [B, 2]. axis: that of the samples, of length m B for m of each sample one after the other; None = all
    samples share the numbers, which are those of the step. name: of the node. draw: of several of a node.
    """
    # each node has numbers of its own, whatever its place in the graph
    begin = (zlib.crc32(f"{name} {draw}".encode()) * GOLDEN) % 2**63
    if axis is None:
        lengths = list(shape)
        rows = -1
        state = keys[:1, 1].view([1] * max(len(lengths), 1))
    else:
        # the axis of m B elements becomes two, so that each of the m has an index within its sample
        lengths = [*shape[:axis], len(keys), shape[axis] // len(keys), *shape[axis + 1 :]]
        rows = axis
        state = keys[:, 0].view([-1 if place == axis else 1 for place in range(len(lengths))])
    state = _mixed(state + begin)
    for place, length in enumerate(lengths):
        if place != rows:
            index = torch.arange(length, device=keys.device)
            index = index.view([-1 if dim == place else 1 for dim in range(len(lengths))])
            # one axis after the other: equal indices on different axes give different numbers
            state = _mixed(state + (index + 1) * GOLDEN)
    # the upper 53 bits, and half of the last one, so that 0 and 1 are left out
    return ((_shifted(state, 11).double() + 0.5) * 2.0**-53).reshape(tuple(shape))


def normal(keys: Tensor, shape: Sequence[int], axis: int | None, name: str) -> Tensor:
    """Return numbers of the standard normal distribution, fp64 of `shape`, by the formula of Box and Muller."""
    radius, angle = (uniform(keys, shape, axis, name, draw) for draw in (0, 1))
    # u is above 0, so that its logarithm is finite
    return (-2 * radius.log()).sqrt() * (2 * math.pi * angle).cos()


def _mixed(x: Tensor) -> Tensor:
    # the finalizer of splitmix64; products wrap around, as of unsigned 64-bit integers
    x = (x ^ _shifted(x, 30)) * FIRST
    x = (x ^ _shifted(x, 27)) * SECOND
    return x ^ _shifted(x, 31)


def _shifted(x: Tensor, bits: int) -> Tensor:
    """Return x shifted to the right with zeros: torch repeats the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
