r"""Fuse attention that is written as matrix products and a softmax into torch's scaled_dot_product_attention.

    before                                          after

    q [b, h, n, w]   k [b, h, m, w]                 q   k   v   [mask]
         |                |                          \   \   |   /
         |            permute(-1, -2)             Attention(scale, causal, dropout)
         +-- matmul ------+                                |
               |  scores [b, h, n, m]               [b, h, n, w]
        mul or div by a number
               |
        add(mask) or where(condition, scores, number)
               |
          softmax(dim=-1)
               |
        [where(isnan(w), 0, w)]  [dropout]
               |
             matmul ---- v [b, h, m, w]
               |
          [b, h, n, w]

What is recognised: the scale may be on the scores, on q, on k or divided between them. Batch and heads may be merged
into one dimension. Key and value heads that are repeated for groups of query heads are read once (grouped-query
attention). A causal mask becomes is_causal (attention_masks.py); every other mask is kept and added to the scores.

Rows in which every score is masked keep their result: NaN for -inf, zeros if the file replaces NaN, the mean of all
values if the mask is a finite number. Their gradient is kept with two exceptions, both in torch's kernel: it is zero
where the file replaces NaN (NaN without the fusion), and where a large finite number is *added* to a whole row, the
kernel rounds log(number of keys) away.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

from onward.trainer.onnx_import.ops.contributed.attention import grouped_attention
from onward.trainer.onnx_import.ops.norm import Dropout
from onward.trainer.onnx_import.ops.shape import expand
from onward.trainer.onnx_import.passes.attention_masks import MASKED, is_causal_mask, magnitude, triangular_condition
from onward.trainer.onnx_import.passes.rewriter import NoMatch, Rewriter, has_one_user, is_call, require

MIN_MASK_VALUE = -1e30
"""Replaces lower finite mask values. It also leaves no weight after softmax, and bf16 can represent it."""


class Attention(nn.Module):
    """softmax(q k.T * scale + mask) v, its weights dropped out in training. Holds no weights of its own."""

    def __init__(self, *, scale: float, causal: bool, dropout: float, grouped: bool = False) -> None:
        super().__init__()
        self.scale = scale
        self.causal = causal
        self.dropout = dropout
        self.grouped = grouped
        """Whether several query heads share one key head."""

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the attended values, in the shape of the query.

        query, key, value: [batch, heads, sequence, width] or [batch x heads, sequence, width].
        mask: added to the scores [..., queries, keys]; False or -inf masks a score.
        """
        # one head of batch x heads sequences is the same computation
        flat = query.ndim == 3  # torch's fused kernels need four dimensions
        if flat:
            query = query.unsqueeze(0)
            key = key.unsqueeze(0)
            value = value.unsqueeze(0)
        if mask is not None and mask.dtype != torch.bool:
            mask = mask.to(query.dtype)
        dropout = self.dropout if self.training else 0.0
        attend = grouped_attention if self.grouped else F.scaled_dot_product_attention
        attended = attend(query, key, value, attn_mask=mask, dropout_p=dropout, is_causal=self.causal, scale=self.scale)
        return attended.squeeze(0) if flat else attended

    def extra_repr(self) -> str:
        grouped = ", grouped" if self.grouped else ""
        return f"scale={self.scale:g}, causal={self.causal}, dropout={self.dropout:g}{grouped}"


@dataclass
class Masks:
    """The masks that are applied to the scores before softmax, the last one first."""

    added: list[fx.Node] = field(default_factory=list)
    chosen: list[tuple[fx.Node, bool, float]] = field(default_factory=list)
    """(condition, its value where the score is kept, the number that replaces the other scores)"""


def fuse_attentions(r: Rewriter) -> int:
    """Fuse every attention; return how many."""
    return r.apply(_attention, torch.matmul, torch.bmm)


def _attention(r: Rewriter, node: Any) -> fx.Node:
    weights, value = node.args
    # from the result back to the operands, in the reverse of the order in which they are computed
    weights, dropout = _without_dropout(r, weights)
    weights, nan_guarded = _without_nan_guard(r, weights)
    rank = r.rank(weights)
    require(is_call(weights, F.softmax) and rank in (3, 4))
    # the guard reads the weights twice: in isnan, and to return them
    require(has_one_user(weights) or nan_guarded)
    # softmax must be over the keys, the last dimension
    require(set(weights.kwargs) == {"dim"} and weights.kwargs["dim"] in (-1, rank - 1))
    product, masks, scale = _scores(r, weights.args[0])
    query, transposed = product.args
    query, by = _unscaled(r, query)
    scale *= by
    transposed, by = _unscaled(r, transposed)
    key, by_source = _untransposed_key(r, transposed)
    scale *= by * by_source
    _check_shapes(r, query, key, value, product)
    mask, causal, query = _combined_mask(r, masks, query, product, nan_guarded=nan_guarded)
    # only now, because the shapes above are compared with the repeated heads
    key, value, grouped = _without_head_repeat(r, key, value)
    # a module rather than a call: its dropout follows train() and eval()
    module = Attention(scale=scale, causal=causal, dropout=dropout, grouped=grouped)
    operands = [query, key, value]
    if mask is not None:
        operands.append(mask)
    return r.call_module("attention", module, *operands)


# -- around softmax


def _without_dropout(r: Rewriter, weights: Any) -> tuple[Any, float]:
    if not (has_one_user(weights) and weights.op == "call_module"):
        return weights, 0.0
    module = r.root.get_submodule(str(weights.target))
    require(isinstance(module, Dropout) and not module.with_mask)
    assert isinstance(module, Dropout)
    return weights.args[0], module.ratio


def _without_nan_guard(r: Rewriter, weights: Any) -> tuple[Any, bool]:
    """Return (w, True) of where(isnan(w), 0, w), else (the weights, False)."""
    if not (is_call(weights, torch.where) and has_one_user(weights)):
        return weights, False
    condition, zero, inner = weights.args
    if is_call(condition, torch.logical_not) and has_one_user(condition):
        condition, zero, inner = condition.args[0], inner, zero
    is_guard = is_call(condition, torch.isnan) and has_one_user(condition)
    require(is_guard and condition.args[0] is inner)
    # the two readers are isnan and where
    require(len(inner.users) == 2 and r.number(zero) == 0.0)
    return inner, True


def _scores(r: Rewriter, value: Any) -> tuple[fx.Node, Masks, float]:
    """Return (product of query and key, masks, scale) of the operand of softmax."""
    masks = Masks()
    # Several masks may follow each other, such as a causal and a padding mask; the walk ends at the product, and a
    # value that another node reads as well ends the match, because it would still have to be computed.
    while not is_call(_unscaled(r, value, shared=False)[0], torch.matmul, torch.bmm):
        require(has_one_user(value))
        if is_call(value, torch.add):
            value = _through_added_mask(r, value, masks)
        elif is_call(value, torch.where):
            value = _through_where_mask(r, value, masks)
        else:
            raise NoMatch
    # a scale directly behind the product: one behind a mask would scale the mask, too
    product, scale = _unscaled(r, value, shared=False)
    require(has_one_user(product))
    return product, masks, scale


def _through_added_mask(r: Rewriter, node: Any, masks: Masks) -> Any:
    """Return the operand of an addition that holds the scores, and record the other one as a mask."""
    require(not node.kwargs)
    for scores, mask in (node.args, node.args[::-1]):
        if isinstance(mask, fx.Node) and _leads_to_product(r, scores):
            masks.added.append(mask)
            return scores
    raise NoMatch


def _through_where_mask(r: Rewriter, node: Any, masks: Masks) -> Any:
    """Return the operand of a where that holds the scores, and record the condition as a mask."""
    condition, yes, no = node.args
    for scores, otherwise, kept in ((yes, no, True), (no, yes, False)):
        number = r.number(otherwise)
        if number is not None and number <= MASKED and _leads_to_product(r, scores):
            masks.chosen.append((condition, kept, number))
            return scores
    raise NoMatch


def _leads_to_product(r: Rewriter, value: Any) -> bool:
    """Return whether a value is the scores, possibly with masks applied."""
    value = _unscaled(r, value, shared=False)[0]
    if is_call(value, torch.matmul, torch.bmm):
        return has_one_user(value)
    if is_call(value, torch.add):
        operands = value.args
    elif is_call(value, torch.where):
        operands = value.args[1:]
    else:
        return False
    return has_one_user(value) and any(_leads_to_product(r, operand) for operand in operands)


def _unscaled(r: Rewriter, value: Any, *, shared: bool = True) -> tuple[Any, float]:
    """Return (x, number) of a value that is number * x. shared: also where other nodes read the product."""
    scale = 1.0
    while shared or has_one_user(value):
        if not is_call(value, torch.mul, torch.div) or len(value.args) != 2 or value.kwargs:
            break
        x = value.args[0]
        number = r.number(value.args[1])
        if number is None and value.target is torch.mul:
            x = value.args[1]
            number = r.number(value.args[0])
        # the rank differs if the number is a tensor that broadcasts x to more dimensions
        if not number or not math.isfinite(number) or r.rank(x) != r.rank(value):
            break
        if is_call(value, torch.mul):
            scale *= number
        else:
            scale /= number
        value = x
    return value, scale


# -- keys


def _untransposed_key(r: Rewriter, transposed: Any) -> tuple[fx.Node, float]:
    """Return (key [..., sequence, width], scale) of the operand [..., width, sequence] of the product."""
    if (source := _untransposed_merged_key(r, transposed)) is not None:
        return source, 1.0
    if not is_call(transposed, "permute"):
        return r.call("transpose", transposed, -1, -2), 1.0
    source, order = transposed.args
    source, scale = _unscaled(r, source)
    # the kernel takes the key untransposed: swap the last two dimensions of the permutation, and drop it if nothing is
    # left
    order = [*order[:-2], order[-1], order[-2]]
    return (source if order == sorted(order) else r.call("permute", source, order)), scale


def _untransposed_merged_key(r: Rewriter, transposed: Any) -> fx.Node | None:
    """Return key [batch, heads, sequence, width] that was transposed with batch and heads merged.

    key -> reshape [batch x heads, sequence, width] -> permute(0, 2, 1) -> reshape [batch, heads, width, sequence]
    """
    if not (
        is_call(transposed, "reshape")
        and is_call(transposed.args[0], "permute")
        and is_call(transposed.args[0].args[0], "reshape")
    ):
        return None
    permuted = transposed.args[0]
    merged = transposed.args[0].args[0]
    x = merged.args[0]
    if r.rank(merged) != 3 or r.rank(x) != 4 or list(permuted.args[1]) != [0, 2, 1]:
        return None
    shapes = list(zip(r.shapes(x), r.shapes(merged), r.shapes(transposed), strict=True))
    kept = all(a[-2:] == b[-2:] and c == (*a[:-2], a[-1], a[-2]) for a, b, c in shapes)
    return x if kept and isinstance(x, fx.Node) else None


def _without_head_repeat(r: Rewriter, key: fx.Node, value: Any) -> tuple[fx.Node, Any, bool]:
    """Return key and value before their heads were repeated for groups of query heads, and whether they were."""
    sources = [_before_repeat(r, x) for x in (key, value)]
    # the kernel's enable_gqa repeats both by the same factor
    if None in sources or r.shapes(sources[0]) != r.shapes(sources[1]):
        return key, value, False
    assert sources[0] is not None
    return sources[0], sources[1], True


def _before_repeat(r: Rewriter, x: Any) -> fx.Node | None:
    """Return x [batch, heads, ...] of a value whose heads are repeated by unsqueeze, expand and reshape."""
    if not (is_call(x, "reshape") and is_call(x.args[0], expand) and is_call(x.args[0].args[0], torch.unsqueeze)):
        return None
    wide = x.args[0]
    narrow = x.args[0].args[0]
    source, place = narrow.args
    if r.rank(source) != 4 or r.rank(wide) != 5 or place not in (2, -3):
        return None
    for before, stretched, after in zip(r.shapes(source), r.shapes(wide), r.shapes(x), strict=True):
        times = stretched[2]
        if stretched != (*before[:2], times, *before[2:]) or after != (before[0], before[1] * times, *before[2:]):
            return None
    return source if isinstance(source, fx.Node) else None


def _check_shapes(r: Rewriter, query: Any, key: Any, value: Any, product: fx.Node) -> None:
    """Raise NoMatch if an operand is broadcast, if types differ or if shapes are not those of attention."""
    rank = r.rank(product)
    require(all(r.rank(x) == rank for x in (query, key, value)))
    require(r.dtype(query) == r.dtype(key) == r.dtype(value) and r.dtype(query).is_floating_point)
    for q, k, v, scores in zip(*(r.shapes(x) for x in (query, key, value, product)), strict=True):
        require(q[:-2] == k[:-2] == v[:-2] and k[-2] == v[-2] and q[-1] == k[-1])
        require(scores == (*q[:-1], k[-2]))


# -- masks


def _combined_mask(
    r: Rewriter, masks: Masks, query: Any, product: fx.Node, *, nan_guarded: bool
) -> tuple[fx.Node | None, bool, Any]:
    """Return (mask to add or None, is_causal, query)."""
    if not masks.added and not masks.chosen:
        return None, False, query
    _check_masks(r, masks, product)
    # is_causal saves the mask's memory, but torch takes it only without attn_mask
    if len(masks.added) + len(masks.chosen) == 1 and _is_causal(r, masks):
        return None, True, query
    finite = [choice for choice in masks.chosen if math.isfinite(choice[2])]
    # what is done below for rows in which every score is masked holds for a single mask only
    if finite:
        require(len(masks.chosen) == 1 and not masks.added)
    parts = []
    # -inf in a whole row makes its softmax NaN; the fused kernel would return zeros
    may_be_empty = bool(masks.chosen) and not finite
    for condition, kept, otherwise in masks.chosen:
        filler = max(otherwise, MIN_MASK_VALUE) if finite else otherwise
        parts.append(r.call(additive_mask, condition, kept, filler, r.dtype(query)))
    total = functools.reduce(lambda one, other: r.call(torch.add, one, other), [*parts, *masks.added])
    # a finite number in a whole row gives equal weights; with a zero query all scores are equal and have no gradient
    if finite:
        query = r.call(without_empty_rows, query, finite[0][0], finite[0][1])
    if not nan_guarded and (may_be_empty or math.isinf(magnitude(r, total))):
        total = r.call(nan_where_empty, total)
    return total, False, query


def _check_masks(r: Rewriter, masks: Masks, product: fx.Node) -> None:
    """Raise NoMatch if a mask would broadcast the scores to a larger shape, or has another type."""
    for mask in (*masks.added, *(condition for condition, _, _ in masks.chosen)):
        for shape, scores in zip(r.shapes(mask), r.shapes(product), strict=True):
            # such a mask would give the result more dimensions than the query has
            require(len(shape) <= len(scores))
            require(all(a in (1, b) for a, b in zip(reversed(shape), reversed(scores), strict=False)))
    for mask in masks.added:
        require(r.dtype(mask) == r.dtype(product))


def _is_causal(r: Rewriter, masks: Masks) -> bool:
    if masks.added:
        return is_causal_mask(r, masks.added[0])
    condition, kept, _ = masks.chosen[0]
    return triangular_condition(r, condition) is kept


def additive_mask(condition: torch.Tensor, kept: bool, otherwise: float, dtype: torch.dtype) -> torch.Tensor:
    """Return 0 where the condition [..., keys] equals `kept`, and `otherwise` elsewhere.

    A row in which nothing is kept gets zeros if `otherwise` is finite: its weights are equal then (see
    `without_empty_rows`), while torch's kernel would return a wrong gradient for it.
    """
    shown = condition == kept
    if math.isfinite(otherwise):
        shown = shown | ~shown.any(-1, keepdim=True)
    zero = torch.zeros((), dtype=dtype, device=condition.device)
    return torch.where(shown, zero, zero + otherwise)


def nan_where_empty(mask: torch.Tensor) -> torch.Tensor:
    """Return the mask [..., queries, keys] with NaN in the rows that are -inf in all columns, whose softmax is NaN."""
    return mask.masked_fill((mask == -math.inf).all(-1, keepdim=True), math.nan)


def without_empty_rows(query: torch.Tensor, condition: torch.Tensor, kept: bool) -> torch.Tensor:
    """Return the query [..., queries, width] with zeros where no score is kept: all scores of the row are then equal.

    condition: broadcasts with the scores [..., queries, keys].
    """
    some = (condition == kept).any(-1, keepdim=True)
    return torch.where(some, query, torch.zeros_like(query[..., :1]))
