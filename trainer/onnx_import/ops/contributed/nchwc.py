"""Rules for operators in blocked layout (com.microsoft.nchwc), which onnxruntime's optimiser writes for one processor.

    weight, as stored --- reshape, permute, reshape --- F.conv2d        the parameter is the stored tensor
    x [batch, channels, ...] --- ReorderInput --- ... --- ReorderOutput --- y

Activations are computed in the ordinary layout: between ReorderInput and ReorderOutput, channels are padded with zeros
to whole blocks, and nothing else differs. The block size is an attribute that onnx_graph/surgery/blocked_layout.py
adds.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from onward.trainer.errors import UnsupportedNode
from onward.trainer.onnx_graph.surgery.blocked_layout import BLOCK, DOMAIN
from onward.trainer.onnx_import.lowering.converter_table import Call, lower
from onward.trainer.onnx_import.ops.contributed.contrib import fused
from onward.trainer.onnx_import.ops.conv import conv
from onward.trainer.onnx_import.ops.pool import average_pool_, global_pool, max_pool_
from onward.trainer.onnx_import.tracing.values import Value


def _block(c: Call) -> int:
    size = int(c.attr(BLOCK, 0))
    if not size:
        raise UnsupportedNode(
            "its weights are stored in blocks for another kind of processor than this one; "
            "optimise the model with ORT_ENABLE_EXTENDED rather than ORT_ENABLE_ALL"
        )
    return size


def unblocked(weight: torch.Tensor, block: int, few_inputs: bool) -> torch.Tensor:
    """Return a weight [outputs, inputs, ...] in the ordinary order. few_inputs: only outputs are in blocks."""
    outputs, inputs, *kernel = weight.shape
    size = len(kernel)
    if few_inputs:
        blocks = weight.reshape(outputs // block, inputs, *kernel, block)
        return blocks.movedim(-1, 1).reshape(weight.shape)
    blocks = weight.reshape(outputs // block, inputs // block, *kernel, block, block)
    # [O, I, *kernel, i, o] -> [O, o, I, i, *kernel]: blocks in front of what is in them
    order = [0, size + 3, 1, size + 2, *range(2, size + 2)]
    return blocks.permute(order).reshape(weight.shape)


@lower(f"{DOMAIN}.Conv", since=(1,))
def blocked_conv(c: Call, x: Value, weight: Value, bias: Value = None, added: Value = None) -> Value:
    block, (outputs, inputs) = _block(c), (c.size(weight, 0), c.size(weight, 1))
    group = c.attr("group", 1)
    # such a weight has no whole block of inputs, and is stored in blocks of outputs alone
    depthwise = group > 1 and inputs == 1 and outputs == group
    few = depthwise or (group == 1 and inputs < block)
    if outputs % block or (not few and inputs % block):
        raise UnsupportedNode(f"its weight {[outputs, inputs]} is not in blocks of {block}, those of this processor")
    return fused(c, conv(c, x, c(unblocked, weight, block, few), bias), added)


@lower(f"{DOMAIN}.ReorderInput", since=(1,))
def reorder_input(c: Call, x: Value) -> Value:
    """Pad channels with zeros to whole blocks; channels_last: x is [batch, ..., channels]."""
    if c.attr("channels_last", 0):
        x = c("movedim", x, -1, 1)
    missing = -c.size(x, 1) % _block(c)
    return c(F.pad, x, [0] * (2 * (x.ndim - 2)) + [0, missing]) if missing else x


@lower(f"{DOMAIN}.ReorderOutput", since=(1,))
def reorder_output(c: Call, x: Value) -> Value:
    """Remove the padded channels; channels_last: the result is [batch, ..., channels]."""
    c.attr(BLOCK)
    channels = c.attr("channels")
    y = x if c.size(x, 1) == channels else c("narrow", x, 1, 0, channels)
    return c("movedim", y, 1, -1) if c.attr("channels_last", 0) else y


@lower(f"{DOMAIN}.MaxPool", f"{DOMAIN}.AveragePool", since=(1,))
def blocked_pool(c: Call, x: Value) -> Value:
    c.attr(BLOCK)
    return max_pool_(c, x) if c.op == "MaxPool" else average_pool_(c, x)


@lower(f"{DOMAIN}.GlobalMaxPool", f"{DOMAIN}.GlobalAveragePool", since=(1,))
def blocked_global_pool(c: Call, x: Value) -> Value:
    c.attr(BLOCK)
    return global_pool(c, x)


@lower(f"{DOMAIN}.Upsample", since=(1,))
def blocked_upsample(c: Call, x: Value) -> Value:
    c.attr(BLOCK)
    factors = [int(n) for n in c.attr("scales")][-(x.ndim - 2) :]
    mode = c.attr("mode", "nearest")
    where = c.attr("coordinate_transformation_mode", "asymmetric")
    if mode == "nearest":
        for dim, factor in enumerate(factors):
            x = c(torch.repeat_interleave, x, factor, dim + 2)
        return x
    if where == "asymmetric":
        raise UnsupportedNode(f"mode {mode!r} with coordinates {where!r}")
    return c(F.interpolate, x, scale_factor=factors, mode="bilinear", align_corners=where == "align_corners")
