"""Rules for products and look-ups with frozen weights of 2, 4 or 8 bits, quantized in blocks (com.microsoft).

    B [N, blocks, bytes of a block]  uint8      the lowest bits of a byte are its first weight
    scales [N, blocks], zero points             weight = (integer - zero point) scale, one of each for a block

    x --- packed_linear(B, scales, zero points) --- y        the weights in fp32 exist while a product is computed

B stays packed in memory, and both passes unpack it: 4-bit weights take 0.5 bytes each and their scales, in place of
4 bytes, and one matrix in fp32 at a time. The weights are not trained; x has its exact gradient, and the bias and
(by model.train) the scales and zero points that are stored as floats can be trained.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from onward.trainer.errors import UnsupportedNode
from onward.trainer.onnx_import.lowering.converter_table import Call, lower
from onward.trainer.onnx_import.ops.cast import is_packed
from onward.trainer.onnx_import.ops.gather import non_negative_indices
from onward.trainer.onnx_import.tracing.values import Value

Tensor = torch.Tensor

BITS = (4, 2, 8)
"""The numbers of bits that fit a byte without a rest; the first is the default of the operators."""


def unpack(packed: Tensor, bits: int) -> Tensor:
    """Return the integers of the last dimension of bytes, int32 [..., bytes x 8 / bits], lowest bits first."""
    if bits == 8:
        return packed.to(torch.int32)
    # each byte is shifted by the place of each of its numbers, and the bits above are cut off
    shifts = torch.arange(0, 8, bits, dtype=torch.int32, device=packed.device)
    integers: Tensor = (packed.to(torch.int32)[..., None] >> shifts) & (2**bits - 1)
    return integers.flatten(-2)


def dequantize_blocks(
    packed: Tensor, scales: Tensor, zero: Tensor | None, groups: Tensor | None, layout: Sequence[int]
) -> Tensor:
    """Return the weights [..., columns] in the type of `scales`.

    packed: uint8 [..., bytes]; scales: [..., blocks]; zero: zero points as floats [..., blocks], or packed like the
    weights [..., bytes], None: the middle of the range; groups: [columns], the block of each column, None: blocks of
    equal length one after the other; layout: (columns, length of a block, bits).
    """
    columns, block, bits = layout
    integers = unpack(packed, bits).to(scales.dtype)[..., :columns]
    if zero is None:
        # the integers are unsigned: without zero points the middle of their range stands for 0
        start: Tensor | float = float(2 ** (bits - 1))
    else:
        start = zero if zero.is_floating_point() else unpack(zero, bits)[..., : scales.shape[-1]].to(scales.dtype)
    # g_idx: the columns of a block need not be neighbours
    if groups is not None:
        at = groups.to(torch.int64)
        start = start[..., at] if isinstance(start, Tensor) else start
        return (integers - start) * scales[..., at]

    def of_columns(of: Tensor) -> Tensor:
        return of.repeat_interleave(block, -1)[..., :columns]

    # one number for each block, repeated over its columns; the last block may be shorter
    start = of_columns(start) if isinstance(start, Tensor) else start
    return (integers - start) * of_columns(scales)


class _PackedLinear(torch.autograd.Function):
    """x W', which unpacks W again in the backward pass, so that no W in fp32 is kept between the passes."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        layout: Sequence[int],
        packed: Tensor,
        scales: Tensor,
        zero: Tensor | None,
        groups: Tensor | None,
    ) -> Tensor:
        # the packed bytes are kept, and no weights in floating point
        ctx.save_for_backward(packed, scales, zero, groups)
        ctx.layout = layout
        ctx.dtype = x.dtype
        return F.linear(x, dequantize_blocks(packed, scales, zero, groups, layout).to(x.dtype))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        packed, scales, zero, groups = ctx.saved_tensors
        # unpacked anew, in the type of the gradient
        weight = dequantize_blocks(packed, scales, zero, groups, ctx.layout).to(gradient.dtype)
        return (gradient @ weight).to(ctx.dtype), None, None, None, None, None


def packed_linear(
    x: Tensor,
    packed: Tensor,
    scales: Tensor,
    zero: Tensor | None,
    groups: Tensor | None,
    bias: Tensor | None,
    layout: Sequence[int],
) -> Tensor:
    """Return x W' + bias, x: [..., columns], W [rows, columns]: see `dequantize_blocks`."""
    # _PackedLinear has no gradient for them; torch's own backward pass keeps the weights in fp32
    if scales.requires_grad or (zero is not None and zero.requires_grad):
        return F.linear(x, dequantize_blocks(packed, scales, zero, groups, layout), bias)
    y: Tensor = _PackedLinear.apply(x, layout, packed, scales, zero, groups)  # type: ignore[no-untyped-call]
    return y if bias is None else y + bias


def _of_rows(c: Call, x: Value, rows: Sequence[Any]) -> Value:
    """Return scales or zero points [*rows, blocks or bytes]; older files store them flat."""
    return None if x is None else c("reshape", x, [*rows, -1])


@lower("com.microsoft.MatMulNBits", since=(1,))
def matmul_nbits(
    c: Call,
    x: Value,
    packed: Value,
    scales: Value,
    zero: Value = None,
    groups: Value = None,
    bias: Value = None,
) -> Value:
    c.require("bits", *BITS)
    c.require("weight_prepacked", 0)
    # how far onnxruntime may round x; here x is not rounded (export/measuring/kernel_rounding.py)
    c.attr("accuracy_level")
    rows = c.attr("N")
    layout = (c.attr("K"), c.attr("block_size"), c.attr("bits", BITS[0]))
    # the last block is filled up to its whole length in the file
    blocks = -(-layout[0] // layout[1])
    needed = rows * blocks * layout[1] * layout[2] // 8
    if packed.dtype != torch.uint8 or (isinstance(packed, Tensor) and packed.numel() != needed):
        raise UnsupportedNode(
            f"its weight B is {packed.dtype} {list(packed.shape)}; N={rows}, K={layout[0]}, block_size={layout[1]} and "
            f"{layout[2]} bits need uint8 of {needed} elements"
        )
    packed_zero = zero is not None and not zero.dtype.is_floating_point
    if groups is not None and (layout[2] != 4 or packed_zero):
        raise UnsupportedNode(
            f"it has g_idx with {layout[2]} bits{'' if zero is None else ' and packed zero points'}: onnxruntime runs "
            "g_idx with 4 bits and without packed zero points only, and computes other numbers else"
        )
    # several files store B as [N, bytes], and scales and zero points flat
    packed = packed if packed.ndim == 2 else c("reshape", packed, [rows, -1])
    scales = _of_rows(c, scales, [rows])
    zero = _of_rows(c, zero, [rows])
    return c(packed_linear, x, packed, scales, zero, groups, bias, layout)


def gather_blocks(
    packed: Tensor, indices: Tensor, scales: Tensor, zero: Tensor | None, layout: Sequence[int]
) -> Tensor:
    """Return the weights of rows [*shape of indices, ..., columns]; only these rows are unpacked."""
    # negative indices count from the end, as in Gather
    at = non_negative_indices(indices, packed.shape[0])
    return dequantize_blocks(packed[at], scales[at], None if zero is None else zero[at], None, layout)


@lower("com.microsoft.GatherBlockQuantized", since=(1,))
def gather_block_quantized(c: Call, packed: Value, indices: Value, scales: Value, zero: Value = None) -> Value:
    bits = c.attr("bits", BITS[0])
    block = c.attr("block_size", 128)
    c.require("gather_axis", 0)
    if is_packed(packed) or packed.dtype != torch.uint8:
        raise UnsupportedNode("its table is stored as INT4 or UINT4; tables packed in uint8 are implemented")
    if bits not in BITS or c.axis(packed, c.attr("quantize_axis", 1)) != packed.ndim - 1:
        raise UnsupportedNode(f"bits={bits}, quantize_axis={c.attr('quantize_axis', 1)}; the last axis is implemented")
    return c(gather_blocks, packed, indices, scales, zero, (c.size(packed, -1) * 8 // bits, block, bits))
