"""Rules for Attention and RotaryEmbedding, by torch's fused kernel where it computes the same."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F

from onward.trainer.onnx_import.lowering.converter_table import Call, lower
from onward.trainer.onnx_import.ops.gather import gather_rows
from onward.trainer.onnx_import.tracing.values import Value

# -- masks


def window_mask(
    queries: torch.Tensor, keys: torch.Tensor, first: torch.Tensor | int, *, left: int, right: int
) -> torch.Tensor:
    """Return [(batch, 1,) queries, keys]: whether key j is in [p - left, p + right] for the query at position p.

    left 1, right 0, 3 queries, 4 keys, first 1:      1 1 0 0
                                                      0 1 1 0
                                                      0 0 1 1

    first: the position of the first query, of all samples or of each; a bound of -1 means no bound.
    """
    at = torch.arange(queries.shape[-2], device=queries.device)[:, None]
    # the keys of a cache come first, so that the first query is at a later position
    at = at + (first if isinstance(first, int) else first.reshape(-1, 1, 1, 1))
    key = torch.arange(keys.shape[-2], device=queries.device)
    seen = torch.ones_like(at - key, dtype=torch.bool)
    # a bound of -1 leaves that side open
    seen = seen & (key <= at + right) if right >= 0 else seen
    return seen & (key >= at - left) if left >= 0 else seen


def combine_masks(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Combine two masks that broadcast: booleans (True: attend) or numbers that are added to the scores [..., keys]."""
    if one.dtype == other.dtype == torch.bool:
        return one & other
    # -inf in one of them stays -inf in the sum
    return as_bias(one) + as_bias(other)


def as_bias(mask: torch.Tensor) -> torch.Tensor:
    """Return a mask [..., queries, keys] as numbers that are added to the scores."""
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=torch.float32).masked_fill(~mask, -math.inf)


def fit_mask(mask: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Extend a mask [..., fewer] to [..., keys], the rest masked; [keys] alone becomes [1, keys]."""
    # ONNX lets a mask end before the keys
    rest = keys.shape[-2] - mask.shape[-1]
    nothing: Any = False if mask.dtype == torch.bool else -math.inf
    mask = F.pad(mask, (0, rest), value=nothing) if rest > 0 else mask
    return mask.unsqueeze(0) if mask.ndim == 1 else mask


def valid_keys(keys: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Return [batch, 1, 1, keys]: whether a key is among the first `lengths` of its sample."""
    return (torch.arange(keys.shape[-2], device=keys.device) < lengths[:, None])[:, None, None]


# -- attention


def grouped_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = True,
) -> torch.Tensor:
    """Call torch's attention where groups of query heads share key heads, in a form that a fused kernel takes.

    query [batch, query heads, sequence, width]; key, value [batch, key heads, sequence, width]. Of torch's kernels for
    GPUs only flash attention reads shared heads, and the one that stores all scores:

        flash         bf16, fp16    causal or no mask
        efficient     any type      any mask             needs a key head for each query head
        math          any type      any mask             stores scores [batch, query heads, sequence, sequence]
    """
    # under autocast the kernel computes in half precision whatever the type of its operands
    half = query.dtype in (torch.bfloat16, torch.float16) or torch.is_autocast_enabled("cuda")
    if enable_gqa and repeats_heads(query.device.type, masked=attn_mask is not None, half=half):
        # copies of keys and values are smaller than the scores
        groups = query.shape[-3] // key.shape[-3]
        key = key.repeat_interleave(groups, -3)
        value = value.repeat_interleave(groups, -3)
        enable_gqa = False
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )


def repeats_heads(kind: str, *, masked: bool, half: bool) -> bool:
    """Return whether shared key heads keep a device of this kind from every fused kernel."""
    return kind == "cuda" and (masked or not half)


def attend(c: Call, operands: tuple[Value, Value, Value], mask: Value, *, causal: bool, scale: float) -> Value:
    """Call torch's attention over [batch, heads, sequence, width]; fewer key heads than query heads are shared."""
    shared = c.size(operands[0], 1) != c.size(operands[1], 1)
    extra = {"enable_gqa": True} if shared else {}
    function = grouped_attention if shared else F.scaled_dot_product_attention
    return c(function, *operands, attn_mask=mask, is_causal=causal, scale=scale, **extra)


def explicit_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    *,
    scale: float,
    softcap: float,
    score_output: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute attention with soft-capped scores; returns also the scores: 0 raw, 1 capped, 2 masked, 3 softmax.

    query: [batch, heads, queries, width]; key, value: [batch, key heads, keys, width]; mask: broadcasts with the scores
    [batch, heads, queries, keys]. Returns [batch, heads, queries, width] and the scores.
    """
    # grouped-query attention: each head of key and value serves `groups` heads of the query
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
    raw = torch.matmul(query, key.transpose(-2, -1)) * scale
    capped = softcap * torch.tanh(raw / softcap) if softcap > 0 else raw
    if mask is None:
        masked = capped
        weights = F.softmax(capped, dim=-1)
    else:
        bias = as_bias(mask)
        masked = capped + bias
        # the softmax of a row of -inf is NaN: a query that may attend to no key gets zeros, and no gradient
        empty = (bias == -math.inf).all(-1, keepdim=True)
        weights = F.softmax(masked.masked_fill(empty, 0.0), dim=-1).masked_fill(empty, 0.0)
    return torch.matmul(weights, value), (raw, capped, masked, weights)[score_output]


def split_heads(c: Call, x: Value, heads: int) -> Value:
    """Reshape [batch, sequence, heads x width] -> [batch, heads, sequence, width]."""
    batch, sequence, width = c.sizes(x)
    return c("transpose", c("reshape", x, [batch, sequence, heads, width // heads]), 1, 2)


def join_heads(c: Call, x: Value) -> Value:
    """Reshape [batch, heads, sequence, width] -> [batch, sequence, heads x width]."""
    return c("flatten", c("transpose", x, 1, 2), 2)


@lower("Attention", since=(23, 24, 25))
def attention(
    c: Call,
    query: Value,
    key: Value,
    value: Value,
    mask: Value = None,
    past_key: Value = None,
    past_value: Value = None,
    lengths: Value = None,
) -> Value:
    # keys and values have the same number of heads, the query perhaps more
    heads = (c.attr("q_num_heads"), c.attr("kv_num_heads"), c.attr("kv_num_heads"))
    flat = query.ndim == 3
    if flat:
        query, key, value = (split_heads(c, x, n) for x, n in zip((query, key, value), heads, strict=True))
    # the cache holds the keys and values of earlier positions
    if past_key is not None:
        key = c(torch.cat, [past_key, key], 2)
        value = c(torch.cat, [past_value, value], 2)
    causal = bool(c.attr("is_causal", 0))
    left = c.attr("left_window_size", -1)
    right = c.attr("right_window_size", -1)
    c.attr("softmax_precision")  # halves are computed in fp32 anyway
    # `is`: the same traced length, or small ints; two dynamic lengths may differ at another size
    if mask is not None and (c.size(mask, -1) is not c.size(key, 2) or mask.ndim == 1):
        mask = c(fit_mask, mask, key)
    window = left >= 0 or right >= 0
    # torch aligns its causal mask with the first key; that is right only without a cache
    plain = causal and mask is None and not window
    if past_key is not None or lengths is not None:
        plain = False
    # torch's kernel has no window, and its causal mask begins at the first key
    if window or (causal and not plain):
        first = 0 if past_key is None else c.size(past_key, 2)
        # the queries are the last ones of each sample, whose keys are in the operand already
        if lengths is not None and past_key is None:
            first = c(torch.sub, lengths, c.size(query, 2))
        # causal is a window that ends at the query
        seen = c(window_mask, query, key, first, left=left, right=0 if causal else right)
        mask = seen if mask is None else c(combine_masks, mask, seen)
    if lengths is not None:
        valid = c(valid_keys, key, lengths)
        mask = valid if mask is None else c(combine_masks, mask, valid)
    given = c.attr("scale")
    # the default of the operator: 1 over the root of the width of a head
    scale = 1 / math.sqrt(c.size(query, 3)) if given is None else given
    softcap = c.attr("softcap", 0.0)
    score_output = c.attr("qk_matmul_output_mode", 0)
    scores = None
    if softcap > 0 or c.wants(3):
        # the explicit form has no causal flag: the mask says it
        if plain:
            mask = c(window_mask, query, key, 0, left=-1, right=0)
        y, scores = c(
            explicit_attention, query, key, value, mask, scale=scale, softcap=softcap, score_output=score_output
        )
    else:
        y = attend(c, (query, key, value), mask, causal=plain, scale=scale)
    return (join_heads(c, y) if flat else y, key, value, scores)[: max(c.num_outputs, 1)]


# -- rotary positions


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, interleaved: bool) -> torch.Tensor:
    """Rotate pairs of features by angles: neighbours if interleaved, else one of each half.

    x: [..., width]; cos, sin: [..., half]. The first 2 x half features are rotated, the others are kept.
    """
    width = 2 * cos.shape[-1]
    rotated = x[..., :width]
    kept = x[..., width:]
    # a and b are the real and the imaginary part of the pairs (arXiv:2104.09864)
    a, b = (rotated[..., 0::2], rotated[..., 1::2]) if interleaved else rotated.chunk(2, -1)
    real = a * cos - b * sin
    imaginary = a * sin + b * cos
    y = torch.stack([real, imaginary], -1).flatten(-2) if interleaved else torch.cat([real, imaginary], -1)
    return torch.cat([y, kept], -1) if kept.shape[-1] else y


@lower("RotaryEmbedding", since=(23,))
def rotary_embedding(c: Call, x: Value, cos: Value, sin: Value, positions: Value = None) -> Value:
    heads = c.attr("num_heads", 0)
    interleaved = bool(c.attr("interleaved", 0))
    c.attr("rotary_embedding_dim")  # twice the width of the tables
    # with positions the tables have a row for each of them; without, the angles of each token
    if positions is not None:
        cos = c(gather_rows, cos, positions)
        sin = c(gather_rows, sin, positions)
    flat = x.ndim == 3
    if flat:
        batch, sequence, width = c.sizes(x)
        x = c("reshape", x, [batch, sequence, heads, width // heads])
    cos, sin = (c("unsqueeze", table, 2 if flat else 1) for table in (cos, sin))  # one angle for all heads
    y = c(rotate, x, cos, sin, interleaved=interleaved)
    return c("flatten", y, 2) if flat else y
