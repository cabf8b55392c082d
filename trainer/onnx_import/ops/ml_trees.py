"""Rules for ensembles of decision trees: computed exactly, for all rows and trees at once, without gradients.

All nodes of all trees are rows of one table. A leaf is its own successor, so that every row and tree takes the same
number of steps, that of the deepest tree:

    place [rows, trees]    roots ---> true or false successor, by x[row, feature[place]] and threshold[place] ---> ...
    result                 scores[place], summed over the trees

Thresholds and scores stay constants: a comparison has no gradient. Gradients do not pass to what the trees read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from onward.trainer.errors import UnsupportedNode
from onward.trainer.onnx_graph.tensor_protos import read_tensor
from onward.trainer.onnx_import.ops.ml import as_float, class_labels, label_of, post_transform, transformed_targets
from onward.trainer.onnx_import.registry import Call, lower
from onward.trainer.onnx_import.values import Value

Tensor = torch.Tensor

MODES = ("BRANCH_LEQ", "BRANCH_LT", "BRANCH_GTE", "BRANCH_GT", "BRANCH_EQ", "BRANCH_NEQ", "BRANCH_MEMBER")
"""In the order in which TreeEnsemble-5 numbers them."""
TRANSFORMS = ("NONE", "SOFTMAX", "LOGISTIC", "SOFTMAX_ZERO", "PROBIT")
AGGREGATES = ("AVERAGE", "SUM", "MIN", "MAX")


@dataclass(frozen=True)
class Trees:
    """The nodes of an ensemble, leaves included, as rows of tables of length `nodes`."""

    roots: Tensor
    feature: Tensor
    mode: Tensor
    threshold: Tensor
    successors: Tensor
    """[nodes, 2]: the node to go to where the comparison is false, and where it is true."""
    missing: Tensor
    """Whether a NaN counts as true."""
    members: Tensor
    """[nodes, longest set]: for BRANCH_MEMBER, filled up with NaN."""
    scores: Tensor
    """[nodes, targets]: what a leaf contributes; NaN where it says nothing about a target."""
    depth: int


# -- the rules


@lower("ai.onnx.ml.TreeEnsembleRegressor", since=(1, 3, 5))
def tree_ensemble_regressor(c: Call, x: Value) -> Value:
    trees = _older_trees(c, "target", c.attr("n_targets"))
    scores = _evaluated(c, x, trees, c.attr("aggregate_function", "SUM"))
    base = _numbers(c, "base_values")
    if base is not None:
        scores = c(torch.add, scores, base)
    transform = c.attr("post_transform", "NONE")
    return as_float(c, transformed_targets(c, scores, c.attr("n_targets"), transform))


@lower("ai.onnx.ml.TreeEnsembleClassifier", since=(1, 3, 5))
def tree_ensemble_classifier(c: Call, x: Value) -> Value:
    labels, transform = class_labels(c, "classlabels_int64s"), c.attr("post_transform", "NONE")
    base, ids = _numbers(c, "base_values"), sorted(set(c.attr("class_ids")))
    trees = _older_trees(c, "class", max(len(labels), 2))
    scores = _evaluated(c, x, trees, "SUM")
    if len(labels) == 2:
        found, scores = _two_classes(c, scores, labels, ids)
        return found, as_float(c, scores)
    if len(labels) < 2:
        raise UnsupportedNode(f"it has {len(labels)} class labels")
    scores = scores if base is None else c(torch.add, scores, base)
    found = c(label_of, c(torch.argmax, scores, -1), labels) if c.wants(0) else None
    return found, as_float(c, post_transform(c, scores, transform))


def _two_classes(c: Call, scores: Value, labels: Tensor, ids: Sequence[int]) -> Value:
    """Return label and scores of two classes as onnxruntime does; `ids` are the classes that leaves have scores of.

    The second class is chosen where its score is positive; where only probabilities of one class are stored, above 0.5.
    """
    base, transform = _numbers(c, "base_values"), c.attr("post_transform", "NONE")
    weights = _numbers(c, "class_weights")
    if (base is not None and len(base) > 1) or transform == "PROBIT":
        raise UnsupportedNode(f"its two classes have several base values or post_transform {transform}")
    if base is not None:
        scores = c(torch.add, scores, torch.tensor([float(base[0]), 0.0]))
    probabilities = weights is not None and bool((weights >= 0).all())
    one = c(torch.narrow, scores, -1, 0 if ids == [0] else 1, 1)
    above = c("long", c(torch.gt, c(torch.squeeze, one, -1), 0.5 if probabilities and len(ids) == 1 else 0.0))
    # onnxruntime returns 0 or 1, and not the label, if leaves have scores of both
    found = c(label_of, above, labels if len(ids) == 1 else labels[:0]) if c.wants(0) else None
    if ids == [0]:
        return found, c(of_one_class, one, probabilities, transform == "LOGISTIC")
    if ids == [1]:
        scores = c(torch.mul, scores, torch.tensor([0.0, 1.0]))  # without the base value
    return found, post_transform(c, scores, transform)


def of_one_class(score: Tensor, probability: bool, logistic: bool) -> Tensor:
    """Return the scores of both classes from one, [N, 1] -> [N, 2]."""
    if logistic:
        return torch.cat([-score, score], -1).sigmoid()
    return torch.cat([1 - score if probability else -score, score], -1)


@lower("ai.onnx.ml.TreeEnsemble", since=(5,))
def tree_ensemble(c: Call, x: Value) -> Value:
    c.attr("nodes_hitrates")
    scores = _evaluated(c, x, _trees(c), AGGREGATES[c.attr("aggregate_function", 1)])
    return transformed_targets(c, scores, c.attr("n_targets"), TRANSFORMS[c.attr("post_transform", 0)])


def _evaluated(c: Call, x: Value, trees: Trees, aggregate: str) -> Value:
    if not x.dtype.is_floating_point:
        x = as_float(c, x)
    t = trees
    place = c(leaves, x, t.roots, t.feature, t.mode, t.threshold, t.successors, t.missing, t.members, t.depth)
    return c(aggregated, place, t.scores, aggregate)


# -- what they call


def leaves(
    x: Tensor, roots: Tensor, feature: Tensor, mode: Tensor, threshold: Tensor, successors: Tensor, missing: Tensor,
    members: Tensor, depth: int,
) -> Tensor:  # fmt: skip
    """Return the leaf that each row of x [N, features] reaches in each tree: [N, trees]. No gradient."""
    x = x.detach()
    place = roots.expand(x.shape[0], -1)
    for _ in range(depth):
        value, limit, kind = x.gather(1, feature[place]), threshold[place], mode[place]
        compared = (value <= limit, value < limit, value >= limit, value > limit, value == limit, value != limit)
        truth = torch.zeros_like(value, dtype=torch.bool)
        for number, result in enumerate(compared):
            truth = torch.where(kind == number, result, truth)
        if members.shape[1]:
            among = (value[..., None] == members[place]).any(-1)
            truth = torch.where(kind == len(compared), among, truth)
        truth = truth | (value.isnan() & missing[place])
        place = successors[place].gather(-1, truth[..., None].long())[..., 0]
    return place


def aggregated(place: Tensor, scores: Tensor, aggregate: str) -> Tensor:
    """Return the sum, mean, minimum or maximum over the trees of the scores of their leaves: [N, targets]."""
    found = scores[place]  # [N, trees, targets]
    if aggregate in ("SUM", "AVERAGE"):
        return found.nan_to_num().sum(1) / (place.shape[1] if aggregate == "AVERAGE" else 1)
    neutral = torch.inf if aggregate == "MIN" else -torch.inf
    filled = torch.where(found.isnan(), neutral, found)
    best = filled.amin(1) if aggregate == "MIN" else filled.amax(1)
    return torch.where(best.isinf(), 0, best)  # no tree says anything about the target


# -- from attributes to tables


def _numbers(c: Call, name: str) -> Tensor | None:
    """Return an attribute of floats, or its variant as a tensor, which may be fp64; None without both."""
    tensor, floats = c.attr(f"{name}_as_tensor"), c.attr(name)
    if tensor is not None:
        return read_tensor(tensor)
    return torch.tensor(floats, dtype=torch.float32) if floats else None


def _older_trees(c: Call, what: str, num_targets: int) -> Trees:
    """Read the attributes of TreeEnsembleClassifier (`what` is "class") or TreeEnsembleRegressor ("target")."""
    for name in ("nodes_hitrates", "nodes_hitrates_as_tensor"):
        c.attr(name)
    ids = list(zip(c.attr("nodes_treeids"), c.attr("nodes_nodeids"), strict=True))
    row = {pair: number for number, pair in enumerate(ids)}
    modes = c.attr("nodes_modes")
    successors = [
        (own, own) if modes[own] == "LEAF" else (row[tree, false], row[tree, true])
        for own, ((tree, _), false, true) in enumerate(
            zip(ids, c.attr("nodes_falsenodeids"), c.attr("nodes_truenodeids"), strict=True)
        )
    ]
    roots = {tree: number for number, (tree, _) in reversed(list(enumerate(ids)))}
    values, weights = _numbers(c, "nodes_values"), _numbers(c, f"{what}_weights")
    if values is None or weights is None:
        raise UnsupportedNode("it has no thresholds or no scores")
    scores = np.full((len(ids), num_targets), np.nan)
    places = zip(c.attr(f"{what}_treeids"), c.attr(f"{what}_nodeids"), c.attr(f"{what}_ids"), strict=True)
    for (tree, node, target), weight in zip(places, weights.tolist(), strict=True):
        place = row[tree, node], target
        scores[place] = weight + (0 if np.isnan(scores[place]) else scores[place])
    return Trees(
        roots=torch.tensor([roots[tree] for tree in sorted(roots)]),
        feature=torch.tensor(c.attr("nodes_featureids")),
        mode=torch.tensor([0 if mode == "LEAF" else MODES.index(mode) for mode in modes]),
        threshold=values,
        successors=torch.tensor(successors),
        missing=torch.tensor(c.attr("nodes_missing_value_tracks_true") or [0] * len(ids)).bool(),
        members=torch.empty(len(ids), 0),
        scores=torch.from_numpy(scores).to(weights.dtype),
        depth=_depth(successors, list(roots.values())),
    )


def _trees(c: Call) -> Trees:
    """Read the attributes of TreeEnsemble-5, whose leaves are numbered apart from its inner nodes."""
    modes, splits, weights = (read_tensor(c.attr(name)) for name in ("nodes_modes", "nodes_splits", "leaf_weights"))
    num_inner, targets = len(modes), c.attr("leaf_targetids")
    edges = [
        [place + num_inner if leaf else place for place, leaf in zip(c.attr(ids), c.attr(leafs), strict=True)]
        for ids, leafs in (("nodes_falsenodeids", "nodes_falseleafs"), ("nodes_truenodeids", "nodes_trueleafs"))
    ]
    own = range(num_inner, num_inner + len(weights))
    successors = [*zip(*edges, strict=True), *((place, place) for place in own)]
    scores = torch.full((len(successors), c.attr("n_targets")), torch.nan, dtype=weights.dtype)
    scores[torch.tensor(own), torch.tensor(targets)] = weights
    padding = len(weights)
    nothing = torch.zeros(padding, dtype=torch.int64)
    missing = c.attr("nodes_missing_value_tracks_true") or [0] * num_inner
    return Trees(
        roots=torch.tensor(c.attr("tree_roots")),
        feature=torch.cat([torch.tensor(c.attr("nodes_featureids")), nothing]),
        mode=torch.cat([modes.long(), nothing]),
        threshold=torch.cat([splits, nothing.to(splits.dtype)]),
        successors=torch.tensor(successors),
        missing=torch.cat([torch.tensor(missing), nothing]).bool(),
        members=_member_sets(c, modes, padding),
        scores=scores,
        depth=_depth(successors, c.attr("tree_roots")),
    )


def _member_sets(c: Call, modes: Tensor, padding: int) -> Tensor:
    """Return the sets of BRANCH_MEMBER, which the file stores one after the other, each ended by a NaN."""
    given = c.attr("membership_values")
    values: list[Any] = [] if given is None else read_tensor(given).tolist()
    sets: list[list[float]] = [[]]
    for value in values:
        if value == value:
            sets[-1].append(value)
        else:
            sets.append([])
    each = iter(sets)
    rows = [next(each, []) if mode == MODES.index("BRANCH_MEMBER") else [] for mode in modes.tolist()]
    width = max(map(len, rows), default=0)
    filled = [row + [torch.nan] * (width - len(row)) for row in [*rows, *([[]] * padding)]]
    return torch.tensor(filled, dtype=torch.float64).reshape(len(filled), width)


def _depth(successors: Sequence[Sequence[int]], roots: Sequence[int]) -> int:
    """Return the number of steps from a root to its most distant leaf. Raises UnsupportedNode for a cycle."""
    depth, level = 0, set(roots)
    while level := {after for place in level for after in successors[place] if after != place}:
        depth += 1
        if depth > len(successors):
            raise UnsupportedNode("its nodes form a cycle")
    return depth
