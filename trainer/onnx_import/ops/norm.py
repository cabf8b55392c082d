"""Rules for normalisations, softmax and dropout; modules follow train() and eval() where these differ."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from onward.trainer.onnx_import.lowering.converter_table import Call, lower
from onward.trainer.onnx_import.tracing.values import Traced, Value


class Dropout(nn.Module):
    """Zero a fraction of the elements in training and scale up the rest; with_mask: return the mask, too."""

    def __init__(self, ratio: float, *, with_mask: bool = False) -> None:
        super().__init__()
        self.ratio = ratio
        self.with_mask = with_mask

    def forward(self, x: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """x: any shape."""
        # without the mask, the fused kernel
        if not self.with_mask:
            return F.dropout(x, self.ratio, self.training)
        if not self.training or self.ratio == 0:
            return x, torch.ones_like(x, dtype=torch.bool)
        mask = torch.rand_like(x) >= self.ratio
        return x * mask / (1.0 - self.ratio), mask

    def extra_repr(self) -> str:
        return f"ratio={self.ratio:g}"


@lower("Dropout", since=(7, 10, 12, 13, 22))
def dropout(c: Call, x: Value, ratio: Value = None, training_mode: Value = None) -> Value:
    # the seed is read and not used: draws are functions of the run's own seed and the step
    c.attr("seed")
    share = c.attr("ratio", 0.5) if ratio is None else float(c.number(ratio))
    return c.module(Dropout(share, with_mask=c.wants(1)), x)


# -- normalisation over the features of one sample


@lower("LayerNormalization", since=(17,))
def layer_normalization(c: Call, x: Value, scale: Value, bias: Value = None) -> Value:
    c.require("stash_type", 1)
    axis = c.axis(x, c.attr("axis", -1))
    epsilon = c.attr("epsilon", 1e-5)
    shape = c.sizes(x)[axis:]
    # F.layer_norm takes weights of the normalised shape only; ONNX lets them broadcast
    fits = all(weight is None or _static(c.sizes(weight)) == shape for weight in (scale, bias))
    if fits:
        y = c(F.layer_norm, x, shape, scale, bias, epsilon)
    else:
        y = c(torch.mul, c(F.layer_norm, x, shape, None, None, epsilon), scale)
        y = y if bias is None else c(torch.add, y, bias)
    # mean and inverse standard deviation are computed only where something reads them
    return (y, *c(moments, x, axis, epsilon)) if c.wants(1) or c.wants(2) else y


def _static(sizes: list[Value]) -> list[Value] | None:
    return None if any(isinstance(n, Traced) for n in sizes) else sizes


def moments(x: torch.Tensor, axis: int, epsilon: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return mean and inverse standard deviation over the dimensions from `axis` on, each of length 1 in both."""
    axes = list(range(axis, x.ndim))
    mean = x.mean(axes, keepdim=True)
    # the variance divides by the number of elements, as in the normalisation
    return mean, torch.rsqrt((x - mean).square().mean(axes, keepdim=True) + epsilon)


@lower("RMSNormalization", since=(23,))
def rms_normalization(c: Call, x: Value, scale: Value) -> Value:
    c.require("stash_type", 1)
    axis = c.axis(x, c.attr("axis", -1))
    epsilon = c.attr("epsilon", 1e-5)
    shape = c.sizes(x)[axis:]
    if _static(c.sizes(scale)) == shape:
        return c(F.rms_norm, x, shape, scale, epsilon)
    return c(torch.mul, c(rms_norm, x, axis, epsilon), scale)


def rms_norm(x: torch.Tensor, axis: int, epsilon: float) -> torch.Tensor:
    """Return x / its root mean square over the dimensions from `axis` on, in the shape of x."""
    return F.rms_norm(x, x.shape[axis:], eps=epsilon)


@lower("InstanceNormalization", since=(6, 22))
def instance_normalization(c: Call, x: Value, scale: Value, bias: Value) -> Value:
    return c(instance_norm, x, scale, bias, c.attr("epsilon", 1e-5))


def instance_norm(x: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor, epsilon: float) -> torch.Tensor:
    """Normalise each channel of each sample of x [batch, channels, ...], by scale and bias [channels].

    A plane of one pixel becomes the bias (torch raises an error).
    """
    if math.prod(x.shape[2:]) > 1:
        # with more axes torch's gradient on the CPU is wrong in some orders in memory (see BatchNorm)
        return F.instance_norm(x.flatten(2), weight=scale, bias=bias, eps=epsilon).reshape(x.shape)
    # zeros with a gradient of zero, but NaN where x is NaN
    return (x - x) + bias.reshape(-1, *[1] * (x.ndim - 2))


@lower("GroupNormalization", since=(18, 21))
def group_normalization(c: Call, x: Value, scale: Value, bias: Value) -> Value:
    """Repeat the scales of version 18, one for each group; version 21 has one for each channel."""
    c.require("stash_type", 1)
    groups = c.attr("num_groups")
    epsilon = c.attr("epsilon", 1e-5)
    if c.version == 18:
        each = c.size(x, 1) // groups
        scale, bias = (c(torch.repeat_interleave, weight, each, output_size=groups * each) for weight in (scale, bias))
    return c(F.group_norm, x, groups, scale, bias, epsilon)


@lower("LpNormalization", since=(1, 22))
def lp_normalization(c: Call, x: Value) -> Value:
    return c(lp_normalize, x, c.attr("p", 2), c.attr("axis", -1))


def lp_normalize(x: torch.Tensor, p: int, axis: int) -> torch.Tensor:
    """Return x / its p-norm along `axis`, in the shape of x; zero where the norm is zero."""
    norm = torch.linalg.vector_norm(x, p, axis, keepdim=True)
    return x / torch.where(norm == 0, 1.0, norm)  # never divides by zero, whose gradient would be NaN


@lower("LRN", since=(1, 13))
def lrn(c: Call, x: Value) -> Value:
    # ONNX's alpha is divided by the size, as torch's is: the mean below does it
    size = c.attr("size")
    return c(local_response, x, size, c.attr("alpha", 1e-4), c.attr("beta", 0.75), c.attr("bias", 1.0))


def local_response(x: torch.Tensor, size: int, alpha: float, beta: float, bias: float) -> torch.Tensor:
    """Return x / (bias + alpha mean(x^2))^beta, the mean over `size` neighbouring channels; if even, one more above.

    x: [batch, channels, ...].
    """
    # the channels as the rows of an image, over which an average pool of `size` rows runs
    squares = x.square().flatten(2).unsqueeze(1)  # [batch, 1, channels, pixels]
    # padding by zeros, which count: the mean always divides by `size`
    squares = F.pad(squares, (0, 0, (size - 1) // 2, size - 1 - (size - 1) // 2))
    mean = F.avg_pool2d(squares, (size, 1), stride=1).reshape(x.shape)
    return x / (bias + alpha * mean) ** beta


# -- softmax


@lower("Softmax", "LogSoftmax", "Hardmax", since=(1, 11, 13))
def softmax(c: Call, x: Value) -> Value:
    """Apply it along `axis`; before version 13, over all dimensions from `axis` (default 1) on together."""
    functions: dict[str, Callable[..., torch.Tensor]] = {"Softmax": F.softmax, "LogSoftmax": F.log_softmax}
    function = functions.get(c.op, hard_max)
    if c.version >= 13:
        return c(function, x, dim=c.attr("axis", -1))
    return over_trailing_axes(c, function, x, c.axis(x, c.attr("axis", 1)))


def over_trailing_axes(c: Call, function: Callable[..., torch.Tensor], x: Value, axis: int) -> Value:
    """Apply a function of one dimension to all dimensions from `axis` on together, as opsets before 13 define it."""
    # the last axis alone needs no flattening
    if axis == x.ndim - 1:
        return c(function, x, dim=axis)
    flat = c("reshape", x, [*c.sizes(x)[:axis], -1])
    return c("reshape", c(function, flat, dim=axis), c.sizes(x))


def hard_max(x: torch.Tensor, dim: int) -> torch.Tensor:
    """Return 1 at the first maximum along a dimension, 0 elsewhere, in the shape of x."""
    # argmax gives the first of equal elements, as ONNX asks for
    return torch.zeros_like(x).scatter(dim, x.argmax(dim, keepdim=True), 1)
