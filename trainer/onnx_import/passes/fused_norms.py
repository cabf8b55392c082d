"""Fuse layer norm and RMS norm that are written as elementary functions.

    d = x - mean(x);  d / sqrt(mean(d * d) + epsilon) [* weight] [+ bias]   ->  layer_norm
    x / sqrt(mean(x * x) + epsilon) [* weight]                              ->  rms_norm

The mean is over the last dimensions, which must be static; weight and bias must have the shape of these dimensions.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from onward.trainer.onnx_import.ops.reduce import reduce_mean
from onward.trainer.onnx_import.passes.rewriter import NoMatch, Rewriter, has_one_user, is_call, require


def fuse_layer_norms(r: Rewriter) -> int:
    """Fuse every layer norm; return how many."""
    # first the core without weight and bias, then one after the other is taken in
    count = r.apply(_layer_norm, torch.div, torch.mul)
    # the weight before the bias: in norm * weight + bias the addition is the last node
    r.apply(_with_weight, torch.mul)
    r.apply(_with_bias, torch.add)
    return count


def fuse_rms_norms(r: Rewriter) -> int:
    """Fuse every RMS norm; return how many. Call it after `fuse_layer_norms`: a layer norm contains an RMS norm."""
    count = r.apply(_rms_norm, torch.div, torch.mul)
    r.apply(_with_weight, torch.mul)
    return count


def _layer_norm(r: Rewriter, node: Any) -> fx.Node:
    for difference, mean_square, epsilon in _quotients(r, node):
        if not is_call(difference, torch.sub) or len(difference.args) != 2:
            continue
        x, mean = difference.args
        if is_call(mean, reduce_mean) and mean.args[0] is x:
            lengths = _normalised_lengths(r, x, mean, mean_square)
            return r.call(F.layer_norm, x, lengths, None, None, epsilon)
    raise NoMatch


def _rms_norm(r: Rewriter, node: Any) -> fx.Node:
    for x, mean_square, epsilon in _quotients(r, node):
        return r.call(F.rms_norm, x, _normalised_lengths(r, x, mean_square), None, epsilon)
    raise NoMatch


def _quotients(r: Rewriter, node: Any) -> list[tuple[Any, Any, float]]:
    """Return every (x, mean, epsilon) for which a node is x / sqrt(mean(x * x) + epsilon)."""
    if is_call(node, torch.div):
        x, root = node.args[:2]
        pairs = [(x, _radicand(root))]
    else:
        # a multiplication is symmetric, so either operand may be the 1 / sqrt
        pairs = [(x, _inverse_radicand(r, root)) for x, root in (node.args, node.args[::-1])]
    quotients = []
    for x, sum_ in pairs:
        if not (is_call(sum_, torch.add) and has_one_user(sum_) and isinstance(x, fx.Node)):
            continue
        mean = sum_.args[0]
        epsilon = r.number(sum_.args[1])
        if epsilon is None:
            mean = sum_.args[1]
            epsilon = r.number(sum_.args[0])
        if epsilon is None or not (is_call(mean, reduce_mean) and has_one_user(mean)):
            continue
        if _square_root(r, mean.args[0]) is x:
            quotients.append((x, mean, epsilon))
    return quotients


def _radicand(value: Any) -> Any:
    """Return y of sqrt(y) or y ** 0.5, else None."""
    root = is_call(value, torch.sqrt) or (is_call(value, torch.pow) and value.args[1] == 0.5)
    return value.args[0] if root and has_one_user(value) else None


def _inverse_radicand(r: Rewriter, value: Any) -> Any:
    """Return y of 1 / sqrt(y), rsqrt(y) or y ** -0.5, else None."""
    if not has_one_user(value):
        return None
    if is_call(value, torch.rsqrt) or (is_call(value, torch.pow) and value.args[1] == -0.5):
        return value.args[0]
    # reciprocal(sqrt(y)) and 1 / sqrt(y) are rsqrt in two steps
    if is_call(value, torch.reciprocal):
        return _radicand(value.args[0])
    return _radicand(value.args[1]) if is_call(value, torch.div) and r.number(value.args[0]) == 1.0 else None


def _square_root(r: Rewriter, value: Any) -> Any:
    """Return x of x * x, square(x) or x ** 2, else None."""
    if not has_one_user(value):
        return None
    if is_call(value, torch.mul):
        return value.args[0] if value.args[0] is value.args[1] else None
    squares = is_call(value, torch.square) or (is_call(value, torch.pow) and r.number(value.args[1]) == 2.0)
    return value.args[0] if squares else None


def _normalised_lengths(r: Rewriter, x: Any, *means: Any) -> list[int]:
    """Return the lengths of the dimensions that all means are over. Raises NoMatch unless they are the last ones."""
    rank = r.rank(x)
    lengths = r.static(x)
    require(rank > 0 and r.dtype(x).is_floating_point)
    axes = [sorted(axis % rank for axis in mean.args[1]) for mean in means]
    # F.layer_norm normalises the last dimensions only, and every mean must be over all of them
    first = axes[0][0] if axes[0] else rank
    require(
        all(mean.args[2] is True and these == list(range(first, rank)) for mean, these in zip(means, axes, strict=True))
    )
    # F.layer_norm takes the lengths as numbers, not as traced integers
    static = [length for length in lengths[first:] if length is not None]
    require(static and len(static) == rank - first)
    return static


def _with_weight(r: Rewriter, node: Any) -> fx.Node:
    """Rewrite the multiplication of a norm without weight by a weight."""
    for norm, weight in (node.args, node.args[::-1]):
        is_norm = is_call(norm, F.layer_norm, F.rms_norm) and has_one_user(norm)
        if is_norm and norm.args[2] is None and not norm.kwargs:
            # (norm + bias) * weight is not norm * weight + bias
            if norm.target is F.layer_norm and norm.args[3] is not None:
                continue
            _check_weight(r, norm, weight)
            x, lengths, _, *rest = norm.args
            return r.call(norm.target, x, lengths, weight, *rest)
    raise NoMatch


def _with_bias(r: Rewriter, node: Any) -> fx.Node:
    """Rewrite the addition of a bias to a layer norm without bias."""
    for norm, bias in (node.args, node.args[::-1]):
        is_norm = is_call(norm, F.layer_norm) and has_one_user(norm)
        if is_norm and norm.args[3] is None and not norm.kwargs:
            _check_weight(r, norm, bias)
            x, lengths, weight, _, epsilon = norm.args
            return r.call(F.layer_norm, x, lengths, weight, bias, epsilon)
    raise NoMatch


def _check_weight(r: Rewriter, norm: Any, weight: Any) -> None:
    require(isinstance(weight, fx.Node) and r.rank(weight) > 0)
    require(r.static(weight) == norm.args[1] and r.dtype(weight) == r.dtype(norm))
