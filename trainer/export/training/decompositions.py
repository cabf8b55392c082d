"""Decompose calls whose gradients torch computes with kernels that ONNX does not have.

    F.batch_norm, dropout, attention --`DecomposedCalls`--> arithmetic --differentiation--> arithmetic
    convolution, pooling             ------------------ differentiation --> aten.*_backward --`DECOMPOSITIONS`--> ONNX

`DecomposedCalls` replaces calls before differentiation, so that their gradients are arithmetic as well.
`DECOMPOSITIONS` replaces ATen operators that differentiation leaves.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._decomp import core_aten_decompositions
from torch.overrides import TorchFunctionMode

aten = torch.ops.aten

# -- before differentiation


class DecomposedCalls(TorchFunctionMode):
    """Within this context, the calls in `REPLACEMENTS` and F.batch_norm are computed by basic arithmetic.

    `statistics`: id of a running statistic -> its new value. Nothing is changed in place, because functions that are
    differentiated by torch.func must not have side effects.
    """

    def __init__(self) -> None:
        super().__init__()
        self.statistics: dict[int, Tensor] = {}

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is F.batch_norm:
            return self._batch_norm(*args, **(kwargs or {}))
        return REPLACEMENTS.get(func, func)(*args, **(kwargs or {}))

    def _batch_norm(
        self,
        x: Tensor,
        running_mean: Tensor,
        running_var: Tensor,
        weight: Tensor,
        bias: Tensor,
        training: bool = False,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> Tensor:
        """Normalise x [batch, channels, ...]; by the running statistics where a channel has a single value."""
        shape = [1, -1, *[1] * (x.ndim - 2)]
        mean = running_mean
        variance = running_var
        if training is not False:  # true, or unknown until the graph runs
            dims = [dim for dim in range(x.ndim) if dim != 1]
            # as a tensor, because a comparison of sizes in Python would be decided once, when the graph is recorded
            count = torch.ones_like(x).sum(dims)
            many = count > 1
            batch_mean = x.mean(dims)
            squares = (x - batch_mean.view(shape)).square().sum(dims)
            mean = torch.where(many, batch_mean, running_mean)
            variance = torch.where(many, squares / count, running_var)
            # torch normalises by the biased variance, and keeps the unbiased one
            unbiased = torch.where(many, squares / (count - 1).clamp(min=1), running_var)
            for old, new in ((running_mean, mean), (running_var, unbiased)):
                self.statistics[id(old)] = (old + momentum * (new - old)).detach()
        scale = torch.rsqrt(variance + eps) * weight
        return (x - mean.view(shape)) * scale.view(shape) + bias.view(shape)


def _dropout(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    if not training or p == 0.0:
        return x
    # inverted dropout: what is kept is scaled up, so that evaluation needs no factor
    return x * (torch.rand_like(x) >= p) / (1.0 - p)


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    # the query heads of a group are neighbours, so each key head is repeated in place (repeat_interleave)
    if enable_gqa:
        heads = query.shape[-3] // key.shape[-3]
        key = key.repeat_interleave(heads, -3)
        value = value.repeat_interleave(heads, -3)
    scores = query @ key.transpose(-2, -1) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        # aligned at the upper left corner, as torch's is_causal
        rows = torch.arange(scores.shape[-2])
        columns = torch.arange(scores.shape[-1])
        attn_mask = rows[:, None] >= columns
    if attn_mask is not None:
        scores = scores + attn_mask if attn_mask.is_floating_point() else scores.where(attn_mask, -torch.inf)
    return _dropout(scores.softmax(-1), dropout_p) @ value


REPLACEMENTS: dict[Callable[..., Any], Callable[..., Any]] = {
    F.dropout: _dropout,
    F.scaled_dot_product_attention: _attention,
}

# -- after differentiation


def _convolution_backward(
    gradient: Tensor,
    x: Tensor,
    weight: Tensor,
    bias_sizes: Sequence[int] | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
    wanted: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return the gradients of input, weight and bias.

    The input gradient of a convolution is a transposed convolution of the output gradient, and the reverse.
    """
    to_x = to_weight = to_bias = None
    # only the gradients that something reads are computed
    if wanted[0] and transposed:
        to_x = aten.convolution(gradient, weight, None, stride, padding, dilation, False, [0], groups)
    elif wanted[0]:
        to_x = _transposed_convolution(gradient, weight, x.shape[2:], stride, padding, dilation, groups)
    if wanted[1]:
        # a transposed convolution exchanges input and output
        seen, given = (gradient, x) if transposed else (x, gradient)
        to_weight = _weight_gradient(seen, given, weight.shape[2:], stride, padding, dilation, groups)
    if wanted[2]:
        to_bias = gradient.sum([dim for dim in range(gradient.ndim) if dim != 1])
    return to_x, to_weight, to_bias


def _transposed_convolution(
    gradient: Tensor,
    weight: Tensor,
    lengths: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> Tensor:
    """Compute the transposed convolution whose result has these lengths.

    With a stride, up to stride - 1 elements at the end are in no window. Their gradient is zero: they are padded
    before the result is sliced.
    """
    rank = len(lengths)
    if all(step == 1 for step in stride):
        # with a stride of 1 every element is in a window, and the operator's own padding cuts the result
        reached: Tensor = aten.convolution(gradient, weight, None, stride, padding, dilation, True, [0] * rank, groups)
        return reached
    full = aten.convolution(gradient, weight, None, stride, [0] * rank, dilation, True, [0] * rank, groups)
    return _pad_and_slice(full, lengths, begins=padding, spare=[step - 1 for step in stride])


def _pad_and_slice(full: Tensor, lengths: Sequence[int], *, begins: Sequence[int], spare: Sequence[int]) -> Tensor:
    """Append `spare` zeros, then slice [begin, begin + length) of every dimension after the channels."""
    full = aten.constant_pad_nd(full, [n for more in reversed(spare) for n in (0, more)], 0.0)
    for dim, (begin, length) in enumerate(zip(begins, lengths, strict=True), start=2):
        full = aten.slice(full, dim, begin, begin + length)
    return full


def _weight_gradient(
    x: Tensor,
    gradient: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> Tensor:
    """Return the gradient of a weight [out, in / groups, *kernel]: the input convolved with the output gradient.

    Batch and channels are exchanged, because the sum is over the batch; so are stride and dilation.
    """
    batch, channels, *lengths = x.shape
    # each group sees its own channels: groups join the batch, which becomes the channels
    exchanged = x.reshape(batch, groups, channels // groups, *lengths).transpose(0, 2)
    exchanged = exchanged.reshape(channels // groups, groups * batch, *lengths)
    zeros = [0] * len(kernel)
    found: Tensor = aten.convolution(
        exchanged, gradient.transpose(0, 1), None, dilation, padding, stride, False, zeros, groups
    )  # [in / groups, out, at least the kernel]
    # with a stride the last windows may end before the input, and the result is longer than the kernel
    for dim, length in enumerate(kernel, start=2):
        found = aten.slice(found, dim, 0, length)
    return found.transpose(0, 1)


def _max_pool_backward(gradient: Tensor, x: Tensor, *window: Any) -> Tensor:
    """Add each element of the gradient at the index of its maximum; `window` ends with those indices."""
    indices = window[-1]
    spatial = len(window[0])
    # batch and channels, or channels alone
    lead = list(x.shape[: x.ndim - spatial])
    # torch's indices count within one channel, over its flattened dimensions
    zeros = torch.zeros_like(x).reshape([*lead, math.prod(x.shape[x.ndim - spatial :])])
    gradients = zeros.scatter_add(-1, indices.flatten(-spatial), gradient.flatten(-spatial))
    return gradients.reshape(x.shape)


def _avg_pool_backward(
    gradient: Tensor,
    x: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    ceil_mode: bool,
    count_padding: bool,
    divisor: int | None,
) -> Tensor:
    """Add each element of the gradient, divided by the size of its window, to every element of the window."""
    rank = len(kernel)
    # no stride means windows side by side
    stride = list(stride) or list(kernel)
    ones = torch.ones([1, 1, *kernel], dtype=x.dtype)
    lengths = list(x.shape[-rank:])
    results = list(gradient.shape[-rank:])
    # each channel becomes a sample, so that one kernel of ones serves all
    flat = gradient.reshape([-1, 1, *results])
    spare = [size + step for size, step in zip(kernel, stride, strict=True)]  # as far as the last window may reach
    if divisor is not None:
        flat = flat / divisor
    else:
        inside = torch.ones_like(x.reshape([-1, 1, *lengths])[:1])
        pads = [n for pad in reversed(padding) for n in (pad, pad)]
        # the padding counts as elements of a window, or not, as the pool was told
        inside = aten.constant_pad_nd(inside, pads, 1.0 if count_padding else 0.0)
        inside = aten.constant_pad_nd(inside, [n for more in reversed(spare) for n in (0, more)], 0.0)
        # without a divisor a window at the border is divided by the elements it holds, counted here by a convolution of
        # ones
        counts = aten.convolution(inside, ones, None, stride, [0] * rank, [1] * rank, False, [0] * rank, 1)
        flat = flat / _pad_and_slice(counts, results, begins=[0] * rank, spare=[0] * rank)
    # the transpose of a sum over windows: each element of the gradient goes to all elements of its window
    full = aten.convolution(flat, ones, None, stride, [0] * rank, [1] * rank, True, [0] * rank, 1)
    return _pad_and_slice(full, lengths, begins=padding, spare=spare).reshape(x.shape)


def _empty(size: Sequence[int], *order: Any, dtype: torch.dtype | None = None, **others: Any) -> Tensor:
    """Return zeros: ONNX has no uninitialised tensors."""
    return torch.zeros(size, dtype=dtype)


def _sort(x: Tensor, *, stable: bool | None = None, dim: int = -1, descending: bool = False) -> tuple[Tensor, Tensor]:
    """Sort without the flag `stable`: ONNX's TopK keeps the order of equal elements anyway."""
    values, indices = aten.sort.default(x, dim, descending)
    return values, indices


DECOMPOSITIONS: dict[Any, Callable[..., Any]] = {
    **core_aten_decompositions(),
    aten.convolution_backward.default: _convolution_backward,
    aten.max_pool2d_with_indices_backward.default: _max_pool_backward,
    aten.max_pool3d_with_indices_backward.default: _max_pool_backward,
    aten.avg_pool2d_backward.default: _avg_pool_backward,
    aten.avg_pool3d_backward.default: _avg_pool_backward,
    aten.sort.stable: _sort,
    aten.empty.memory_format: _empty,
    aten.empty_permuted.default: _empty,
}
"""ATen operator -> the same in operators that torch.onnx translates."""
