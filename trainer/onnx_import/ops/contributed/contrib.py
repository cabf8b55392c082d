"""Rules for the fused operators that onnxruntime's optimisers write, in the domain com.microsoft."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F

from onward.trainer.errors import UnsupportedNode
from onward.trainer.onnx_import.lowering.converter_table import Call, Rule, lower
from onward.trainer.onnx_import.ops.contributed.attention import (
    attend,
    combine_masks,
    explicit_attention,
    join_heads,
    rotate,
    split_heads,
    window_mask,
)
from onward.trainer.onnx_import.ops.conv import conv
from onward.trainer.onnx_import.ops.elementwise import hard_sigmoid, swish
from onward.trainer.onnx_import.ops.gather import gather_rows
from onward.trainer.onnx_import.ops.matmul import gemm
from onward.trainer.onnx_import.ops.norm import layer_normalization
from onward.trainer.onnx_import.ops.shape import trilu
from onward.trainer.onnx_import.tracing.values import NeedsRuntimeValues, Value

BEFORE_17 = tuple(range(7, 17))


def _microsoft(*names: str) -> Callable[[Rule], Rule]:
    return lower(*(f"com.microsoft.{name}" for name in names), since=(1,))


_microsoft("Trilu")(trilu)
# onnxruntime puts its fused norms in ONNX's domain, whatever the opset of the file
lower("LayerNormalization", since=BEFORE_17)(layer_normalization)


# -- activations


@_microsoft("Gelu")
def gelu(c: Call, x: Value) -> Value:
    return c(F.gelu, x)


@_microsoft("BiasGelu")
def bias_gelu(c: Call, x: Value, bias: Value) -> Value:
    return c(F.gelu, c(torch.add, x, bias))


@_microsoft("FastGelu")
def fast_gelu(c: Call, x: Value, bias: Value = None) -> Value:
    return c(F.gelu, x if bias is None else c(torch.add, x, bias), approximate="tanh")


@_microsoft("QuickGelu")
def quick_gelu(c: Call, x: Value) -> Value:
    return c(swish, x, c.attr("alpha", 1.702))


@_microsoft("BiasSplitGelu")
def bias_split_gelu(c: Call, x: Value, bias: Value) -> Value:
    # GEGLU: the second half is the gate (arXiv:2002.05202)
    left, right = c(torch.chunk, c(torch.add, x, bias), 2, -1)
    return c(torch.mul, left, c(F.gelu, right))


@_microsoft("BiasAdd")
def bias_add(c: Call, x: Value, bias: Value, skip: Value) -> Value:
    return c(torch.add, c(torch.add, x, bias), skip)


def activate(c: Call, x: Value, name: str, numbers: Sequence[float]) -> Value:
    """Apply the activation of a fused product or convolution. numbers: its alpha and beta, or the bounds of Clip."""
    plain = {"Relu": torch.relu, "Tanh": torch.tanh, "Sigmoid": torch.sigmoid, "Softplus": F.softplus}
    plain |= {"HardSwish": F.hardswish, "Gelu": F.gelu}
    if not name:
        return x
    if name in plain:
        return c(plain[name], x)
    # activations with fewer numbers than two are filled up with zeros
    first, second = [*numbers, 0.0, 0.0][:2]
    if name == "LeakyRelu":
        return c(F.leaky_relu, x, first)
    if name == "Clip":
        return c(torch.clamp, x, first, second)
    if name == "HardSigmoid":
        return c(hard_sigmoid, x, first, second)
    raise UnsupportedNode(f"activation {name!r}")


# -- products and convolutions


def fused_matmul(a: torch.Tensor, b: torch.Tensor, alpha: float, transposed: Sequence[bool]) -> torch.Tensor:
    """Return alpha a b, [..., rows, inner] x [..., inner, columns] -> [..., rows, columns].

    transposed: the last two dimensions of a, of b; the batch and row dimensions of a, of b.
    """
    turn_a, turn_b, batch_a, batch_b = transposed
    a, b = (x.movedim(0, -2) if batch else x for x, batch in ((a, batch_a), (b, batch_b)))
    a = a.transpose(-2, -1) if turn_a and a.ndim > 1 else a
    b = b.transpose(-2, -1) if turn_b and b.ndim > 1 else b
    # the axes are in the order of a product by now
    product = torch.matmul(a, b)
    return product if alpha == 1.0 else product * alpha


@_microsoft("FusedMatMul", "TransposeMatMul")
def fused_matmul_(c: Call, a: Value, b: Value) -> Value:
    turns = [bool(c.attr(name, 0)) for name in ("transA", "transB", "transBatchA", "transBatchB")]
    return c(fused_matmul, a, b, c.attr("alpha", 1.0), turns)


@_microsoft("FusedGemm")
def fused_gemm(c: Call, a: Value, b: Value, bias: Value = None) -> Value:
    name, first, second = c.attr("activation", ""), c.attr("activation_alpha"), c.attr("activation_beta")
    c.attr("activation_gamma")
    # those of ONNX's operators of the same name
    defaults = {"LeakyRelu": (0.01, 0.0), "HardSigmoid": (0.2, 0.5)}.get(name, (0.0, 0.0))
    numbers = [d if given is None else given for given, d in zip((first, second), defaults, strict=True)]
    return activate(c, gemm(c, a, b, bias), name, numbers)


@_microsoft("FusedConv")
def fused_conv(c: Call, x: Value, weight: Value, bias: Value = None, added: Value = None) -> Value:
    return fused(c, conv(c, x, weight, bias), added)


def fused(c: Call, y: Value, added: Value) -> Value:
    """Lower what is fused behind a convolution: a sum, unless `added` is None, and an activation."""
    y = y if added is None else c(torch.add, y, added)
    return activate(c, y, c.attr("activation", ""), c.attr("activation_params", []))


@_microsoft("NhwcConv", "NhwcFusedConv")
def refuse_nhwc_conv(c: Call, *operands: Value) -> Value:
    raise UnsupportedNode(
        "onnxruntime runs it on GPUs only, which differ in the order of its weight; optimise the model for the CPU "
        "(or with ORT_ENABLE_BASIC)"
    )


# -- norms


@lower("SimplifiedLayerNormalization", since=(1, *BEFORE_17, *range(17, 29)))
def simplified_layer_normalization(c: Call, x: Value, scale: Value) -> Value:
    """Lower as RMSNormalization, which is the same in opset 23."""
    c.require("stash_type", 1)
    axis, epsilon = c.axis(x, c.attr("axis", -1)), c.attr("epsilon", 1e-5)
    y = c(F.rms_norm, x, c.sizes(x)[axis:], scale, epsilon)
    return (y, c(inverse_rms, x, axis, epsilon)) if c.wants(1) else y


def inverse_rms(x: torch.Tensor, axis: int, epsilon: float) -> torch.Tensor:
    """Return 1 / the root mean square over the dimensions from `axis` on, each of length 1 in the result."""
    return torch.rsqrt(x.square().mean(list(range(axis, x.ndim)), keepdim=True) + epsilon)


def _add_skip(c: Call, x: Value, skip: Value, bias: Value) -> Value:
    if c.wants(1) or c.wants(2):
        raise UnsupportedNode("its outputs mean and inv_std_var are used")
    total = c(torch.add, x, skip)
    return total if bias is None else c(torch.add, total, bias)


@_microsoft("SkipLayerNormalization")
def skip_layer_norm(c: Call, x: Value, skip: Value, scale: Value, shift: Value = None, bias: Value = None) -> Value:
    total = _add_skip(c, x, skip, bias)
    y = c(F.layer_norm, total, [c.size(x, -1)], scale, shift, c.attr("epsilon", 1e-5))
    # the fourth result is the sum itself
    return y, None, None, total


@_microsoft("SkipSimplifiedLayerNormalization")
def skip_rms_norm(c: Call, x: Value, skip: Value, scale: Value, bias: Value = None) -> Value:
    total = _add_skip(c, x, skip, bias)
    return c(F.rms_norm, total, [c.size(x, -1)], scale, c.attr("epsilon", 1e-5)), None, None, total


def positions_of(ids: torch.Tensor) -> torch.Tensor:
    """Return [sequence]: the position of each token."""
    return torch.arange(ids.shape[1], device=ids.device)


@_microsoft("EmbedLayerNormalization")
def embed_layer_norm(
    c: Call,
    ids: Value,
    segments: Value,
    words: Value,
    places: Value,
    segment_table: Value = None,
    scale: Value = None,
    shift: Value = None,
    mask: Value = None,
    positions: Value = None,
) -> Value:
    """Sum the embeddings of words, positions and segments, and normalise them."""
    counts = None
    c.attr("mask_index_type")
    if c.wants(1):
        # without a mask onnxruntime returns zeros; the sum has their shape
        counts = c(torch.sum, ids if mask is None else mask, 1, dtype=torch.int32)
        counts = c(torch.zeros_like, counts) if mask is None else counts
    total = c(
        torch.add,
        c(gather_rows, words, ids),
        c(gather_rows, places, c(positions_of, ids) if positions is None else positions),
    )
    if segment_table is not None and segments is not None:
        total = c(torch.add, total, c(gather_rows, segment_table, segments))
    y = c(F.layer_norm, total, [c.size(words, 1)], scale, shift, c.attr("epsilon", 1e-12))
    return y, counts, total


# -- attention


def padding_bias(mask: torch.Tensor, keys: torch.Tensor, filler: float) -> torch.Tensor:
    """Return what is added to scores, [batch, 1, 1 or queries, keys]: `filler` where `mask` [batch, .., keys] is 0."""
    bias = torch.zeros_like(mask, dtype=keys.dtype).masked_fill(mask == 0, filler)
    if bias.ndim == 2:
        return bias[:, None, None]
    return bias[:, None] if bias.ndim == 3 else bias


def length_bias(lengths: torch.Tensor, keys: torch.Tensor, filler: float) -> torch.Tensor:
    """Return such a bias from lengths [batch]: the number of keys of each sample; or [2 x batch]: ends, then starts."""
    at = torch.arange(keys.shape[2], device=keys.device)
    batch = keys.shape[0]
    seen = at < lengths[:batch, None]
    # samples that are padded in front begin at a start of their own
    if len(lengths) == 2 * batch:
        seen = seen & (at >= lengths[batch:, None])
    return padding_bias(seen.to(torch.int32), keys, filler)


def _attended(c: Call, q: Value, k: Value, v: Value, mask: Value, added: Value, past: Value) -> Value:
    """Call attention with a padding mask and what is added to scores; causal if the node is unidirectional."""
    causal, filler = bool(c.attr("unidirectional", 0)), c.attr("mask_filter_value", -10000.0)
    # 0 stands for the usual scale, 1 over the root of the width of a head
    scale = c.attr("scale", 0.0) or 1 / math.sqrt(c.size(q, 3))
    padding = None if mask is None else c(length_bias if mask.ndim == 1 else padding_bias, mask, k, filler)
    masks = [bias for bias in (padding, added) if bias is not None]
    # torch takes either is_causal or a mask; with a cache its causal mask would begin at the wrong key
    if causal and (masks or past is not None):
        masks.append(c(window_mask, q, k, 0 if past is None else c.size(past, -2), left=-1, right=0))
        causal = False
    total = functools.reduce(lambda a, b: c(combine_masks, a, b), masks) if masks else None
    return join_heads(c, attend(c, (q, k, v), total, causal=causal, scale=scale))


@_microsoft("Attention")
def packed_attention(
    c: Call,
    x: Value,
    weight: Value,
    bias: Value = None,
    mask: Value = None,
    past: Value = None,
    added: Value = None,
    past_length: Value = None,
) -> Value:
    """Lower self-attention with its projection, one matrix [width, queries | keys | values]."""
    projected = c(torch.matmul, x, weight)
    projected = projected if bias is None else c(torch.add, projected, bias)
    return attend_packed(c, projected, mask, past, added)


def attend_packed(c: Call, projected: Value, mask: Value, past: Value, added: Value) -> Value:
    """Lower what follows the projection to [batch, sequence, queries | keys | values]."""
    c.require("do_rotary", 0)
    c.require("past_present_share_buffer", 0)
    c.attr("rotary_embedding_dim")
    heads = c.attr("num_heads")
    # three equal parts, unless the file says how wide each is
    widths = c.attr("qkv_hidden_sizes") or [c.size(projected, 2) // 3] * 3
    q, k, v = (split_heads(c, part, heads) for part in c(torch.split, projected, list(widths), -1))
    if past is not None:  # [2, batch, heads, sequence, width]
        k, v = c(torch.cat, [c(torch.select, past, 0, 0), k], 2), c(torch.cat, [c(torch.select, past, 0, 1), v], 2)
    y = _attended(c, q, k, v, mask, added, past)
    return (y, c(torch.stack, [k, v])) if c.wants(1) else y


@_microsoft("MultiHeadAttention")
def multi_head_attention(
    c: Call,
    query: Value,
    key: Value = None,
    value: Value = None,
    bias: Value = None,
    mask: Value = None,
    added: Value = None,
    past_key: Value = None,
    past_value: Value = None,
    past_length: Value = None,
    indirection: Value = None,
) -> Value:
    """Lower attention after its projections; keys and values are [batch, sequence, width], packed, or by heads."""
    heads = c.attr("num_heads")
    if past_length is not None or indirection is not None or c.wants(3):
        raise UnsupportedNode("it shares its cache with the next step, or returns its scores")
    if query.ndim == 5:  # [batch, sequence, heads, 3, width]
        query, key, value = (c("flatten", part, 2) for part in c(torch.unbind, query, 3))
    elif key.ndim == 5:
        key, value = (c("flatten", part, 2) for part in c(torch.unbind, key, 3))
    if bias is not None:
        # one bias for the three projections, side by side; keys by heads have been projected, and need none
        widths = [c.size(query, 2), c.size(query, 2) if key.ndim == 4 else c.size(key, 2)]
        parts = c(torch.split, bias, [*widths, c.size(bias, 0) - sum(widths)], 0)
        query = c(torch.add, query, parts[0])
        if key.ndim == 3:
            key, value = c(torch.add, key, parts[1]), c(torch.add, value, parts[2])
    # keys and values by heads are as attention reads them
    q, k, v = (x if x.ndim == 4 else split_heads(c, x, heads) for x in (query, key, value))
    if past_key is not None:
        k, v = c(torch.cat, [past_key, k], 2), c(torch.cat, [past_value, v], 2)
    if mask is not None and mask.ndim == 1 and c.size(mask, 0) == 3 * c.size(q, 0) + 2:
        raise UnsupportedNode("its key_padding_mask holds cumulated lengths")
    return _attended(c, q, k, v, mask, added, past_key), k, v


@_microsoft("GroupQueryAttention")
def group_query_attention(
    c: Call,
    query: Value,
    key: Value,
    value: Value,
    past_key: Value = None,
    past_value: Value = None,
    lengths: Value = None,
    total: Value = None,
    cos: Value = None,
    sin: Value = None,
    positions: Value = None,
    added: Value = None,
    sink: Value = None,
) -> Value:
    """Lower causal attention with shared key heads. The keys of a cache come first; all its steps must be filled."""
    c.require("smooth_softmax", 0, -1)
    c.require("causal", 1)
    c.require("qk_output", 0)
    if sink is not None or c.wants(3):
        raise UnsupportedNode("it has a head_sink, or returns its scores")
    heads, groups = c.attr("num_heads"), c.attr("kv_num_heads")
    if key is None:  # packed: queries, keys and values side by side
        width = c.size(query, 2) // (heads + 2 * groups)
        query, key, value = c(torch.split, query, [heads * width, groups * width, groups * width], 2)
    q, k, v = (split_heads(c, x, n) for x, n in ((query, heads), (key, groups), (value, groups)))
    # the position of the first query: behind all keys of the cache
    before = 0 if past_key is None else c.size(past_key, 2)
    if past_key is not None:
        if not isinstance(lengths, torch.Tensor):
            raise NeedsRuntimeValues("how far its cache is filled is known only at run time")
        # onnxruntime gives the index of each sample's last key
        if bool((lengths + 1 != before + c.size(q, 2)).any()):
            raise UnsupportedNode(f"its cache of {before} steps is filled in part: lengths {(lengths + 1).tolist()}")
    # before the cache is joined, whose keys were rotated when they were new
    if c.attr("do_rotary", 0):
        q, k = (c(rotate_from, x, cos, sin, positions, before, bool(c.attr("rotary_interleaved", 0))) for x in (q, k))
    c.attr("rotary_interleaved")
    if past_key is not None:
        k, v = c(torch.cat, [past_key, k], 2), c(torch.cat, [past_value, v], 2)
    window, softcap = c.attr("local_window_size", -1), c.attr("softcap", 0.0)
    scale = c.attr("scale", 0.0) or 1 / math.sqrt(c.size(q, 3))
    # the window counts the query itself
    mask = c(window_mask, q, k, before, left=window - 1 if window > 0 else -1, right=0)
    mask = mask if added is None else c(combine_masks, mask, added)
    if softcap > 0:
        y, _ = c(explicit_attention, q, k, v, mask, scale=scale, softcap=softcap, score_output=0)
    else:
        y = attend(c, (q, k, v), mask, causal=False, scale=scale)
    return join_heads(c, y), k, v


def rotate_from(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor | None,
    first: int,
    interleaved: bool,
) -> torch.Tensor:
    """Apply rotary positions to x [batch, heads, sequence, width], counted from `first` unless they are given."""
    if positions is None:
        steps = slice(first, first + x.shape[2])
        return rotate(x, cos[steps], sin[steps], interleaved=interleaved)
    # the angles of each token, the same for all heads
    return rotate(x, cos[positions].unsqueeze(1), sin[positions].unsqueeze(1), interleaved=interleaved)


def positions_from(first: torch.Tensor, x: torch.Tensor, axis: int) -> torch.Tensor:
    """Return [sequence]: the positions from `first` (one number) on."""
    return first.reshape(1) + torch.arange(x.shape[axis], device=x.device)


@_microsoft("RotaryEmbedding")
def rotary_embedding(c: Call, x: Value, positions: Value, cos: Value, sin: Value) -> Value:
    """Rotate x, flat or by heads [batch, heads, sequence, width]; positions: of all tokens, or of the first one."""
    c.require("scale", 1.0)
    c.require("is_packed_batching", 0)
    interleaved, width, heads = (
        bool(c.attr("interleaved", 0)),
        c.attr("rotary_embedding_dim", 0),
        c.attr("num_heads", 0),
    )
    flat = x.ndim == 3
    if positions.ndim == 1:
        positions = c(positions_from, positions, x, 1 if flat else 2)
    cos, sin = c(gather_rows, cos, positions), c(gather_rows, sin, positions)  # [(batch,) sequence, half]
    if flat:
        batch, sequence, features = c.sizes(x)
        # the width of a head, by the attributes where the tables cover only a part of it
        each = features // heads if heads and width else 2 * c.size(cos, -1)
        x = c("reshape", x, [batch, sequence, features // each, each])
    cos, sin = (c("unsqueeze", table, -2 if flat else -3) for table in (cos, sin))
    y = c(rotate, x, cos, sin, interleaved=interleaved)
    return c("flatten", y, 2) if flat else y
