"""Rewrites of spelled-out normalisations.

    d = x - mean(x);  d / sqrt(mean(d * d) + epsilon) [* weight] [+ bias]   ->  layer_norm
    x / sqrt(mean(x * x) + epsilon) [* weight]                              ->  rms_norm

The mean is over the last dimensions, which must be static; weight and bias have exactly these.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from onward.trainer.onnx_import.ops.reduce import reduce_mean
from onward.trainer.onnx_import.passes.rewriter import NoMatch, Rewriter, has_one_user, is_call, require


def fuse_layer_norms(r: Rewriter) -> int:
    """Fuse every layer norm; returns how many."""
    count = r.apply(_centred, torch.div, torch.mul)
    r.apply(_scaled, torch.mul)
    r.apply(_shifted, torch.add)
    return count


def fuse_rms_norms(r: Rewriter) -> int:
    """Fuse every RMS norm; after the layer norms, of which it would take the inner part. Returns how many."""
    count = r.apply(_uncentred, torch.div, torch.mul)
    r.apply(_scaled, torch.mul)
    return count


def _centred(r: Rewriter, node: Any) -> fx.Node:
    for difference, mean_square, epsilon in _over_root(r, node):
        if not is_call(difference, torch.sub) or len(difference.args) != 2:
            continue
        x, mean = difference.args
        if is_call(mean, reduce_mean) and mean.args[0] is x:
            lengths = _normalised(r, x, mean, mean_square)
            return r.call(F.layer_norm, x, lengths, None, None, epsilon)
    raise NoMatch


def _uncentred(r: Rewriter, node: Any) -> fx.Node:
    for x, mean_square, epsilon in _over_root(r, node):
        return r.call(F.rms_norm, x, _normalised(r, x, mean_square), None, epsilon)
    raise NoMatch


def _over_root(r: Rewriter, node: Any) -> list[tuple[Any, Any, float]]:
    """Every way to read a node as x / sqrt(mean(x * x) + epsilon): (x, the mean, epsilon)."""
    if is_call(node, torch.div):
        x, root = node.args[:2]
        pairs = [(x, _under_root(root))]
    else:
        pairs = [(x, _under_inverse_root(r, root)) for x, root in (node.args, node.args[::-1])]
    found = []
    for x, sum_ in pairs:
        if not (is_call(sum_, torch.add) and has_one_user(sum_) and isinstance(x, fx.Node)):
            continue
        mean, epsilon = sum_.args[0], r.number(sum_.args[1])
        if epsilon is None:
            mean, epsilon = sum_.args[1], r.number(sum_.args[0])
        if epsilon is not None and is_call(mean, reduce_mean) and has_one_user(mean) and _squared(r, mean.args[0]) is x:
            found.append((x, mean, epsilon))
    return found


def _under_root(value: Any) -> Any:
    """y, of sqrt(y) or y ** 0.5."""
    root = is_call(value, torch.sqrt) or (is_call(value, torch.pow) and value.args[1] == 0.5)
    return value.args[0] if root and has_one_user(value) else None


def _under_inverse_root(r: Rewriter, value: Any) -> Any:
    """y, of 1 / sqrt(y) in any spelling."""
    if not has_one_user(value):
        return None
    if is_call(value, torch.rsqrt) or (is_call(value, torch.pow) and value.args[1] == -0.5):
        return value.args[0]
    if is_call(value, torch.reciprocal):
        return _under_root(value.args[0])
    return _under_root(value.args[1]) if is_call(value, torch.div) and r.number(value.args[0]) == 1.0 else None


def _squared(r: Rewriter, value: Any) -> Any:
    """x, of x * x in any spelling."""
    if not has_one_user(value):
        return None
    if is_call(value, torch.mul):
        return value.args[0] if value.args[0] is value.args[1] else None
    squares = is_call(value, torch.square) or (is_call(value, torch.pow) and r.number(value.args[1]) == 2.0)
    return value.args[0] if squares else None


def _normalised(r: Rewriter, x: Any, *means: Any) -> list[int]:
    """The lengths of the dimensions that each of the means is over. Raises NoMatch if they are not the last ones."""
    rank, lengths = r.rank(x), r.static(x)
    require(rank > 0 and r.dtype(x).is_floating_point)
    axes = [sorted(axis % rank for axis in mean.args[1]) for mean in means]
    first = axes[0][0] if axes[0] else rank
    require(
        all(mean.args[2] is True and these == list(range(first, rank)) for mean, these in zip(means, axes, strict=True))
    )
    static = [length for length in lengths[first:] if length is not None]
    require(static and len(static) == rank - first)
    return static


def _scaled(r: Rewriter, node: Any) -> fx.Node:
    """A norm without a weight, multiplied by one."""
    for norm, weight in (node.args, node.args[::-1]):
        if is_call(norm, F.layer_norm, F.rms_norm) and has_one_user(norm) and norm.args[2] is None and not norm.kwargs:
            if norm.target is F.layer_norm and norm.args[3] is not None:
                continue
            _check_weight(r, norm, weight)
            x, lengths, _, *rest = norm.args
            return r.call(norm.target, x, lengths, weight, *rest)
    raise NoMatch


def _shifted(r: Rewriter, node: Any) -> fx.Node:
    """A layer norm without a bias, and one added."""
    for norm, bias in (node.args, node.args[::-1]):
        if is_call(norm, F.layer_norm) and has_one_user(norm) and norm.args[3] is None and not norm.kwargs:
            _check_weight(r, norm, bias)
            x, lengths, weight, _, epsilon = norm.args
            return r.call(F.layer_norm, x, lengths, weight, bias, epsilon)
    raise NoMatch


def _check_weight(r: Rewriter, norm: Any, weight: Any) -> None:
    require(isinstance(weight, fx.Node) and r.rank(weight) > 0)
    require(r.static(weight) == norm.args[1] and r.dtype(weight) == r.dtype(norm))
