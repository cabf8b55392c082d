"""Ensembles of trees are computed exactly, and nothing in them is trained."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper

from onward.trainer.errors import UnsupportedModel
from onward.trainer.onnx_import.driver import to_module
from tests.trainer.onnx_import.ops.test_ml import Array, assert_equal, imported, model_of, under_onnxruntime

ROWS = np.random.default_rng(0).integers(-3, 4, (64, 4)).astype(np.float32) / 2
MODES = ("BRANCH_LEQ", "BRANCH_LT", "BRANCH_GTE", "BRANCH_GT", "BRANCH_EQ", "BRANCH_NEQ")


def forest(num_trees: int, targets: list[int], *, seed: int = 0, positive: bool = False, mode: str = "") -> Any:
    """Random trees of depth 0 to 4: the attributes of the nodes, and (tree, node, target, weight) of the leaves."""
    rng = np.random.default_rng(seed)
    nodes: dict[str, list[Any]] = {
        f"nodes_{name}": []
        for name in ("treeids", "nodeids", "featureids", "modes", "values", "truenodeids", "falsenodeids",
                     "missing_value_tracks_true")
    }  # fmt: skip
    scores: list[tuple[int, int, int, float]] = []

    def grow(tree: int, depth: int, number: list[int]) -> int:
        own, leaf = number[0], depth == 0 or (number[0] > 0 and rng.random() < 0.2)
        number[0] += 1
        place = len(nodes["nodes_treeids"])
        entries = (tree, own, int(rng.integers(4)), "LEAF" if leaf else mode or MODES[int(rng.integers(6))],
                   0.0 if leaf else float(rng.integers(-3, 4)) / 2, 0, 0, int(rng.integers(2)))  # fmt: skip
        for column, entry in zip(nodes.values(), entries, strict=True):
            column.append(entry)
        if leaf:
            weights = rng.normal(size=len(targets)).astype(np.float32)
            scores.extend(
                (tree, own, target, float(abs(w) if positive else w))
                for target, w in zip(targets, weights, strict=True)
            )
        else:
            nodes["nodes_truenodeids"][place] = grow(tree, depth - 1, number)
            nodes["nodes_falsenodeids"][place] = grow(tree, depth - 1, number)
        return own

    for tree in range(num_trees):
        grow(tree, tree % 5, [0])
    return nodes, scores


def attributes(what: str, nodes: Any, scores: Any, **others: Any) -> dict[str, Any]:
    trees, ids, targets, weights = map(list, zip(*scores, strict=True))
    return {
        **nodes,
        f"{what}_treeids": trees,
        f"{what}_nodeids": ids,
        f"{what}_ids": targets,
        f"{what}_weights": weights,
        **others,
    }


def assert_as_onnxruntime(model: onnx.ModelProto, x: Array) -> None:
    assert_equal(imported(model, [x]), under_onnxruntime(model, [x]))


@pytest.mark.parametrize(("dtype", "mode"), [(np.float32, ""), (np.float64, ""), (np.float32, "BRANCH_LEQ")])
def test_a_regressor_of_every_comparison_equals_onnxruntime(dtype: Any, mode: str) -> None:
    nodes, scores = forest(7, [0, 1, 2], mode=mode)
    model = model_of("TreeEnsembleRegressor", [ROWS.astype(dtype)], **attributes("target", nodes, scores, n_targets=3))
    assert_as_onnxruntime(model, ROWS.astype(dtype))


@pytest.mark.parametrize("dtype", [np.float64, np.int64, np.int32])
def test_a_classifier_of_other_types_equals_onnxruntime(dtype: Any) -> None:
    nodes, scores = forest(7, [0, 1, 2])
    given = attributes("class", nodes, scores, classlabels_int64s=[7, 5, 9])
    assert_as_onnxruntime(model_of("TreeEnsembleClassifier", [ROWS.astype(dtype)], 2, **given), ROWS.astype(dtype))


@pytest.mark.parametrize("aggregate", ["SUM", "AVERAGE", "MIN", "MAX"])
@pytest.mark.parametrize("targets", [[0], [0, 1]])
@pytest.mark.parametrize("base", [False, True])
def test_a_regressor_aggregates_as_onnxruntime_does(aggregate: str, targets: list[int], base: bool) -> None:
    nodes, scores = forest(6, targets, seed=1)
    others = {"base_values": [0.5, -1.0][: len(targets)]} if base else {}
    given = attributes("target", nodes, scores, n_targets=len(targets), aggregate_function=aggregate, **others)
    assert_as_onnxruntime(model_of("TreeEnsembleRegressor", [ROWS], **given), ROWS)


@pytest.mark.parametrize("transform", ["NONE", "SOFTMAX", "LOGISTIC", "SOFTMAX_ZERO"])
@pytest.mark.parametrize("targets", [1, 2])
def test_a_regressor_transforms_as_onnxruntime_does(transform: str, targets: int) -> None:
    nodes, scores = forest(5, list(range(targets)), seed=2)
    given = attributes("target", nodes, scores, n_targets=targets, post_transform=transform)
    assert_as_onnxruntime(model_of("TreeEnsembleRegressor", [ROWS], **given), ROWS)


def test_missing_values_go_where_the_file_says() -> None:
    nodes, scores = forest(9, [0], seed=3)
    x = ROWS.copy()
    x[np.random.default_rng(1).random(x.shape) < 0.3] = np.nan
    assert_as_onnxruntime(model_of("TreeEnsembleRegressor", [x], **attributes("target", nodes, scores, n_targets=1)), x)


@pytest.mark.parametrize("transform", ["NONE", "SOFTMAX", "LOGISTIC", "SOFTMAX_ZERO"])
@pytest.mark.parametrize("base", [False, True])
@pytest.mark.parametrize("classes", [2, 3])
def test_a_classifier_of_several_classes_equals_onnxruntime(transform: str, base: bool, classes: int) -> None:
    nodes, scores = forest(6, list(range(classes)), seed=4)
    others = {"base_values": [0.25, -0.5, 1.0][: classes if classes > 2 else 1]} if base else {}
    given = attributes(
        "class", nodes, scores, classlabels_int64s=[7, 5, 9][:classes], post_transform=transform, **others
    )
    assert_as_onnxruntime(model_of("TreeEnsembleClassifier", [ROWS], 2, **given), ROWS)


@pytest.mark.parametrize("transform", ["NONE", "SOFTMAX", "LOGISTIC", "SOFTMAX_ZERO"])
@pytest.mark.parametrize("base", [[], [0.25]])
@pytest.mark.parametrize("positive", [False, True])
@pytest.mark.parametrize("target", [0, 1])
def test_a_classifier_with_scores_of_one_class_equals_onnxruntime(
    transform: str, base: list[float], positive: bool, target: int
) -> None:
    nodes, scores = forest(4, [target], seed=5, positive=positive)
    others = {"base_values": base} if base else {}
    given = attributes("class", nodes, scores, classlabels_int64s=[7, 5], post_transform=transform, **others)
    assert_as_onnxruntime(model_of("TreeEnsembleClassifier", [ROWS], 2, **given), ROWS)


@pytest.mark.parametrize("aggregate", [0, 1, 2, 3])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_tree_ensemble_5_equals_onnxruntime(aggregate: int, dtype: str) -> None:
    x = ROWS.astype(dtype)
    model = model_of("TreeEnsemble", [x], version=5, **version_5(dtype, aggregate_function=aggregate))
    assert_as_onnxruntime(model, x)


def version_5(dtype: str, **others: Any) -> dict[str, Any]:
    """Two trees: one of a comparison and a set, one of a single leaf."""

    def tensor(values: list[float], kind: str = dtype) -> onnx.TensorProto:
        return numpy_helper.from_array(np.array(values, kind))

    return {
        "n_targets": 2,
        "tree_roots": [0, 2],
        "nodes_featureids": [0, 1, 0],
        "nodes_modes": tensor([0, 6, 0], "uint8"),
        "nodes_splits": tensor([0.5, 0.0, 0.0]),
        "membership_values": tensor([1.0, 2.0, float("nan")]),
        "nodes_truenodeids": [1, 0, 3],
        "nodes_falsenodeids": [2, 1, 3],
        "nodes_trueleafs": [0, 1, 1],
        "nodes_falseleafs": [1, 1, 1],
        "leaf_targetids": [0, 1, 0, 1],
        "leaf_weights": tensor([1.5, -2.0, 0.75, 0.125]),
        **others,
    }


def test_a_tree_passes_no_gradient_and_has_no_parameters() -> None:
    nodes, scores = forest(3, [0])
    module = to_module(model_of("TreeEnsembleRegressor", [ROWS], **attributes("target", nodes, scores, n_targets=1)))
    assert not list(module.parameters())
    x = torch.from_numpy(ROWS).requires_grad_()
    assert not module(x).requires_grad


def test_trees_with_a_cycle_are_refused() -> None:
    nodes, scores = forest(1, [0])
    nodes["nodes_modes"][0], nodes["nodes_treeids"] = "BRANCH_LEQ", nodes["nodes_treeids"]
    nodes["nodes_truenodeids"][0] = nodes["nodes_falsenodeids"][0] = 0
    two = {name: [*column, *column] for name, column in nodes.items()}
    two["nodes_nodeids"], two["nodes_truenodeids"], two["nodes_falsenodeids"] = [0, 1], [1, 0], [1, 0]
    model = model_of("TreeEnsembleRegressor", [ROWS], **attributes("target", two, scores, n_targets=1))
    with pytest.raises(UnsupportedModel, match="its nodes form a cycle"):
        to_module(model)


@pytest.mark.parametrize(
    ("given", "why"),
    [({"base_values": [0.5, 0.5]}, "several base values"), ({"post_transform": "PROBIT"}, "post_transform PROBIT")],
)
def test_two_classes_that_onnxruntime_computes_oddly_are_refused(given: dict[str, Any], why: str) -> None:
    nodes, scores = forest(3, [0])
    all_given = attributes("class", nodes, scores, classlabels_int64s=[0, 1], **given)
    with pytest.raises(UnsupportedModel, match=why):
        to_module(model_of("TreeEnsembleClassifier", [ROWS], 2, **all_given))


@pytest.mark.parametrize("classes", [1, 3])
def test_thresholds_and_scores_in_fp64_equal_onnxruntime(classes: int) -> None:
    """0.1 in fp64 is not 0.1 in fp32, so that rows of 0.1 go the other way if thresholds are rounded."""
    nodes, scores = forest(5, list(range(classes)), seed=6, mode="BRANCH_LEQ")
    x = ROWS.astype(np.float64) + 0.1
    nodes = {**nodes, "nodes_values": [value + 0.1 for value in nodes["nodes_values"]]}
    labels = [3, 1] if classes == 1 else [3, 1, 2]
    given = attributes("class", nodes, scores, classlabels_int64s=labels)
    for name in ("nodes_values", "class_weights"):
        given[f"{name}_as_tensor"] = numpy_helper.from_array(np.array(given.pop(name), np.float64))
    model = model_of("TreeEnsembleClassifier", [x], 2, 3, **given)
    assert_as_onnxruntime(model, x)
