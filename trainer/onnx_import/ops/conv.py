"""Rules for Conv and ConvTranspose in one to three spatial dimensions, Col2Im and DeformConv; padding for pools."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from onward.trainer.errors import UnsupportedNode
from onward.trainer.onnx_import.lowering.converter_table import Call, lower
from onward.trainer.onnx_import.tracing.values import Traced, Value

CONV = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
CONV_TRANSPOSE: dict[int, Any] = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}


def for_spatial_dims(table: dict[int, Any], x: Value) -> Any:
    """Return the function of a table for the number of spatial dimensions of `x`."""
    if x.ndim - 2 not in table:
        raise UnsupportedNode(f"its input has {x.ndim} dimensions; 3 to 5 are implemented")
    return table[x.ndim - 2]


# -- padding, for pools too. Pads are listed as in ONNX: all starts, then all ends; F.pad wants pairs, last dim first


def same_pads(lengths: Sequence[int], window: Sequence[Sequence[int]], upper: bool) -> list[int]:
    """Return the pads for which the output length is ceil(length / stride) (auto_pad SAME): starts, then ends.

    window: kernel, strides, dilations. Of an odd total, `upper` puts the larger half at the end.
    """
    # the last window begins at (n - 1) s and reaches (k - 1) d + 1 further: what is missing there is padded
    totals = [
        max((-(-length // s) - 1) * s + (k - 1) * d + 1 - length, 0)
        for length, k, s, d in zip(lengths, *window, strict=True)
    ]
    small = [total // 2 for total in totals]
    large = [total - total // 2 for total in totals]
    return small + large if upper else large + small


def pad_spatial(x: torch.Tensor, pads: Sequence[int], fill: float = 0.0) -> torch.Tensor:
    """Pad the last dimensions of x [..., *lengths] by `pads` (starts, then ends); negative pads crop."""
    rank = len(pads) // 2
    # F.pad wants (start, end) of the last dimension first
    flat = [n for dim in reversed(range(rank)) for n in (pads[dim], pads[dim + rank])]
    return F.pad(x, flat, "constant", fill) if any(flat) else x


def pad_same(x: torch.Tensor, window: Sequence[Sequence[int]], upper: bool, fill: float = 0.0) -> torch.Tensor:
    """Pad x [batch, channels, *lengths] for auto_pad SAME with lengths that are known when the graph runs.

    window: kernel, strides, dilations.
    """
    return pad_spatial(x, same_pads(x.shape[2:], window, upper), fill)


def pads_of(c: Call, x: Value, window: Sequence[Sequence[int]]) -> list[int] | None:
    """Return the pads (starts, then ends); None if auto_pad makes them depend on a dynamic dimension."""
    rank = len(window[0])
    mode = c.attr("auto_pad", "NOTSET")
    pads = list(c.attr("pads", [0] * 2 * rank))
    if mode == "NOTSET":
        return pads
    if mode == "VALID":
        return [0] * 2 * rank
    # auto_pad SAME: the pads depend on the lengths
    lengths = []
    for dim, stride in zip(range(rank), window[1], strict=True):
        length = c.size(x, dim + 2)
        # with a stride of 1 the pads do not depend on the length
        lengths.append(1 if isinstance(length, Traced) and stride == 1 else length)
    if any(isinstance(length, Traced) for length in lengths):
        return None
    return same_pads(lengths, window, mode == "SAME_UPPER")


def _kernel(c: Call, weight: Value) -> list[int]:
    """Return the lengths of the kernel: of the weight, since the attribute is optional."""
    given = c.attr("kernel_shape")
    lengths = [c.size(weight, dim) for dim in range(2, weight.ndim)]
    if given is not None and list(given) != lengths:
        raise UnsupportedNode(f"kernel_shape {given} is not that of the weight, {lengths}")
    return lengths


# -- convolution


@lower("Conv", since=(1, 11, 22))
def conv(c: Call, x: Value, weight: Value, bias: Value = None) -> Value:
    function = for_spatial_dims(CONV, x)
    rank = x.ndim - 2
    strides = c.attr("strides", [1] * rank)
    dilations = c.attr("dilations", [1] * rank)
    window = [_kernel(c, weight), strides, dilations]
    pads = pads_of(c, x, window)
    # auto_pad SAME on a dynamic length: the pads are computed when the graph runs
    if pads is None:
        x = c(pad_same, x, window, c.attr("auto_pad") == "SAME_UPPER")
        pads = [0] * 2 * rank
    # torch pads both sides by the same number: unequal pads are a call of their own
    elif pads[:rank] != pads[rank:]:
        x = c(pad_spatial, x, pads)
        pads = [0] * 2 * rank
    return c(function, x, weight, bias, strides, pads[:rank], dilations, c.attr("group", 1))


@lower("ConvTranspose", since=(1, 11, 22))
def conv_transpose(c: Call, x: Value, weight: Value, bias: Value = None) -> Value:
    function = for_spatial_dims(CONV_TRANSPOSE, x)
    rank = x.ndim - 2
    kernel = _kernel(c, weight)
    strides = c.attr("strides", [1] * rank)
    dilations = c.attr("dilations", [1] * rank)
    extra = c.attr("output_padding", [0] * rank)
    mode = c.attr("auto_pad", "NOTSET")
    wanted = c.attr("output_shape")
    pads = list(c.attr("pads", [0] * 2 * rank))
    group = c.attr("group", 1)
    window = [kernel, strides, dilations, extra]
    if wanted is not None or mode.startswith("SAME"):
        lengths = c.sizes(x)[2:]
        # output_shape may list batch and channels, too
        target = None if wanted is None else wanted[-rank:]
        if any(isinstance(n, Traced) for n in lengths):
            return c(conv_transpose_to, x, weight, bias, window, group, target, mode == "SAME_UPPER")
        pads, extra = pads_to(lengths, window, target, mode == "SAME_UPPER")
    # VALID has no pads, whatever the attribute says
    elif mode == "VALID":
        pads = [0] * 2 * rank
    # torch requires the output padding to be smaller than the stride or the dilation
    if pads[:rank] == pads[rank:] and all(e < max(s, d) for e, s, d in zip(extra, strides, dilations, strict=True)):
        return c(function, x, weight, bias, strides, pads[:rank], extra, group, dilations)
    return c(conv_transpose_cut, x, weight, bias, [kernel, strides, dilations, extra], group, pads)


def conv_transpose_cut(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    window: Sequence[Sequence[int]],
    group: int,
    pads: Sequence[int],
) -> torch.Tensor:
    """Convolve without padding, then crop: for unequal pads and large output paddings, which torch does not accept.

    x: [batch, inputs, *lengths]; weight: [inputs, outputs / group, *kernel] -> [batch, outputs, *lengths].
    """
    _, strides, dilations, extra = window
    rank = len(strides)
    # the bias is added after cropping, because it also counts where output padding extends the result with zeros
    y = CONV_TRANSPOSE[rank](x, weight, None, strides, [0] * rank, [0] * rank, group, dilations)
    # what ONNX pads is cut off here; output padding extends the ends instead
    cut = [-pads[i] if i < rank else extra[i - rank] - pads[i] for i in range(2 * rank)]
    y = pad_spatial(y, cut)
    return y if bias is None else y + bias.reshape(-1, *[1] * rank)


def pads_to(
    lengths: Sequence[int], window: Sequence[Sequence[int]], wanted: Sequence[int] | None, upper: bool
) -> tuple[list[int], list[int]]:
    """Return pads and output padding that give the wanted lengths, or (auto_pad SAME) length x stride."""
    begins = []
    ends = []
    extras = []
    for dim, (length, k, s, d, e) in enumerate(zip(lengths, *window, strict=True)):
        target = length * s if wanted is None else wanted[dim]
        # what has to be cut from the full result; where it is too short, the rest becomes output padding
        total = s * (length - 1) + e + (k - 1) * d + 1 - target
        extras.append(e + max(-total, 0))
        total = max(total, 0)
        # as ONNX's formula has it: the smaller half at the start for SAME_UPPER, at the end otherwise
        first = total // 2 if upper else total - total // 2
        begins.append(first)
        ends.append(total - first)
    return begins + ends, extras


def conv_transpose_to(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    window: Sequence[Sequence[int]],
    group: int,
    wanted: Sequence[int] | None,
    upper: bool,
) -> torch.Tensor:
    """Convolve to the wanted lengths, from lengths that are known when the graph runs: see `conv_transpose_cut`."""
    pads, extra = pads_to(x.shape[2:], window, wanted, upper)
    return conv_transpose_cut(x, weight, bias, [*window[:3], extra], group, pads)


# -- columns and offsets


def col2im(x: torch.Tensor, image: Sequence[int], window: Sequence[Sequence[int]], pads: Sequence[int]) -> torch.Tensor:
    """Sum overlapping blocks: [batch, channels x block, blocks] -> [batch, channels, *image]."""
    block, strides, dilations = window
    rank = len(block)
    padded = [n + pads[i] + pads[i + rank] for i, n in enumerate(image)]
    # the number of blocks along each dimension, the formula of a convolution's output
    counts = [(n - (k - 1) * d - 1) // s + 1 for n, k, s, d in zip(padded, *window, strict=True)]
    # the flat index in the padded image of each element of each block: [*block, *blocks]
    where = torch.zeros([1] * 2 * rank, dtype=torch.int64, device=x.device)
    for dim in range(rank):
        inside = torch.arange(block[dim], device=x.device).reshape([-1] + [1] * (2 * rank - 1 - dim)) * dilations[dim]
        blocks = torch.arange(counts[dim], device=x.device).reshape([-1] + [1] * (rank - 1 - dim)) * strides[dim]
        # each dimension adds its part of the flat index, by broadcasting
        where = where + (inside + blocks) * math.prod(padded[dim + 1 :])
    channels = x.shape[1] // math.prod(block)
    summed = x.new_zeros(x.shape[0], channels, math.prod(padded))
    # elements of several blocks at one place add up: the transpose of reading the blocks
    summed = summed.index_add(2, where.reshape(-1), x.reshape(x.shape[0], channels, -1))
    return pad_spatial(summed.reshape(x.shape[0], channels, *padded), [-n for n in pads])


@lower("Col2Im", since=(18,))
def col2im_(c: Call, x: Value, image: Value, block: Value) -> Value:
    kernel = c.ints(block)
    rank = len(kernel)
    window = [kernel, c.attr("strides", [1] * rank), c.attr("dilations", [1] * rank)]
    return c(col2im, x, c.ints(image), window, list(c.attr("pads", [0] * 2 * rank)))


def deform_conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    offset: torch.Tensor,
    bias: torch.Tensor | None,
    mask: torch.Tensor | None,
    window: Sequence[Sequence[int]],
    groups: tuple[int, int],
) -> torch.Tensor:
    """Convolve with taps that are interpolated at positions moved by `offset`, times `mask`; zero outside.

    x: [batch, channels, height, width]; offset: [batch, offset groups x taps x (row, column), rows, columns];
    mask: [batch, offset groups x taps, rows, columns]. window: strides, dilations, pads; groups: of channels, of
    offsets.
    """
    (strides, dilations, pads), (group, offset_groups) = window, groups
    (batch, channels, height, width), (kh, kw), (rows, columns) = x.shape, weight.shape[2:], offset.shape[-2:]
    # offset groups take the place of the batch, so that grid_sample moves each by its own offsets
    moved = offset.reshape(batch * offset_groups, kh * kw, 2, rows, columns)

    # the positions of the taps of each output along one dimension, before they are moved: [k, count]
    def taps(k: int, count: int, dim: int) -> torch.Tensor:
        inside = torch.arange(k, device=x.device).unsqueeze(1) * dilations[dim] - pads[dim]
        return (inside + torch.arange(count, device=x.device) * strides[dim]).to(x.dtype)

    at_row = taps(kh, rows, 0).reshape(kh, 1, rows, 1).expand(kh, kw, rows, 1).reshape(kh * kw, rows, 1)
    at_column = taps(kw, columns, 1).reshape(1, kw, 1, columns).expand(kh, kw, 1, columns).reshape(kh * kw, 1, columns)
    # grid_sample wants coordinates from -1 to 1 between the outer edges of the image
    down = (2 * (moved[:, :, 0] + at_row) + 1) / height - 1
    across = (2 * (moved[:, :, 1] + at_column) + 1) / width - 1
    grid = torch.stack([across, down], dim=-1).reshape(batch * offset_groups, -1, columns, 2)
    parts = x.reshape(batch * offset_groups, channels // offset_groups, height, width)
    # bilinear between pixels and zero outside of the image, which is the operator's own rule
    read = F.grid_sample(parts, grid, mode="bilinear", padding_mode="zeros", align_corners=False)
    read = read.reshape(batch, offset_groups, -1, kh * kw, rows, columns)
    if mask is not None:
        read = read * mask.reshape(batch, offset_groups, 1, kh * kw, rows, columns)
    read = read.reshape(batch, group, channels // group * kh * kw, rows * columns)
    # what was read, [inputs x taps] for each position, times the kernel: a convolution as a product
    y = torch.matmul(weight.reshape(group, weight.shape[0] // group, -1), read)
    y = y.reshape(batch, weight.shape[0], rows, columns)
    return y if bias is None else y + bias.reshape(-1, 1, 1)


@lower("DeformConv", since=(19, 22))
def deform_conv_(c: Call, x: Value, weight: Value, offset: Value, bias: Value = None, mask: Value = None) -> Value:
    if x.ndim != 4:
        raise UnsupportedNode(f"its input has {x.ndim} dimensions; 4 are implemented")
    _kernel(c, weight)
    window = [c.attr("strides", [1, 1]), c.attr("dilations", [1, 1]), list(c.attr("pads", [0] * 4))]
    return c(deform_conv, x, weight, offset, bias, mask, window, (c.attr("group", 1), c.attr("offset_group", 1)))
