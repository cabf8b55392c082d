"""Losses of detectors that predict a set: values and gradients are those of transformers, and sums over images."""

from __future__ import annotations

from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from onward.trainer.config.losses import LossConfig
from onward.trainer.data.schema.target_counts import count_targets
from onward.trainer.errors import ConfigError, DataError
from onward.trainer.model.losses import set_prediction
from onward.trainer.model.losses.set_prediction import assign, centres, corners, detections, objects_of
from onward.trainer.onnx_graph.torchvision_import import import_torchvision
from tests.support.own_environment import TRANSFORMERS, run_script, with_packages

FORMULAS = {
    "set_classes": set_prediction.set_classes,
    "set_l1": set_prediction.set_l1,
    "set_giou": set_prediction.set_giou,
}
REFERENCES = {"set_classes": "loss_ce", "set_l1": "loss_bbox", "set_giou": "loss_giou"}
KINDS = ("softmax", "sigmoid", "varifocal")
IMAGES, QUERIES, CLASSES, OBJECTS = 3, 12, 5, 4


def given(kind: str) -> dict[str, np.ndarray[Any, Any]]:
    """Outputs and labels: four objects, of which one is a crowd; three; none."""
    random = np.random.default_rng(0)
    boxes = (0.1 + 0.3 * random.random((IMAGES, QUERIES, 4))).astype(np.float32)
    boxes[..., :2] += 0.2
    labels = np.full((IMAGES, OBJECTS, 6), -1, np.float32)
    for image in range(2):
        for place in range(OBJECTS - image):
            corner = random.random(2) * 0.6
            size = 0.05 + random.random(2) * 0.3
            labels[image, place] = [random.integers(CLASSES), *corner, *(corner + size), 0]
    labels[0, 1, 5] = 1
    scores = random.normal(size=(IMAGES, QUERIES, CLASSES + (kind == "softmax"))).astype(np.float32)
    return {"scores": scores, "boxes": boxes, "labels": labels.reshape(IMAGES, -1)}


def config(name: Any, kind: Any) -> LossConfig:
    return LossConfig(name=name, scores=kind, num_queries=QUERIES, ignore_index=-100, output=("logits", "boxes"))


def computed(name: str, kind: str, found: dict[str, np.ndarray[Any, Any]]) -> tuple[float, float, Any, Any]:
    """The sum, the count, and the gradients of the sum."""
    loss = config(name, kind)
    scores, boxes = (torch.from_numpy(found[key]).requires_grad_() for key in ("scores", "boxes"))
    labels = torch.from_numpy(found["labels"])
    total = FORMULAS[name](scores, boxes, labels, loss)
    gradients = torch.autograd.grad(total, (scores, boxes), allow_unused=True)
    return total.item(), float(count_targets(labels, len(labels), loss)), *gradients


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", FORMULAS)
def test_sums_and_counts_of_two_halves_are_those_of_the_whole(name: str, kind: str) -> None:
    found = given(kind)
    whole = computed(name, kind, found)
    parts = [
        computed(name, kind, {key: value[part] for key, value in found.items()}) for part in (slice(0, 1), slice(1, 3))
    ]
    assert whole[0] == pytest.approx(sum(part[0] for part in parts), rel=1e-6)
    assert whole[1] == pytest.approx(sum(part[1] for part in parts), rel=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_the_assignment_is_the_one_of_the_least_cost_and_crowds_have_no_query(kind: str) -> None:
    found = given(kind)
    loss = config("set_classes", kind)
    scores, boxes, labels = (torch.from_numpy(found[key]) for key in ("scores", "boxes", "labels"))
    objects = objects_of(labels)
    for image, (queries, places) in enumerate(assign(scores, boxes, objects, loss)):
        trained = torch.nonzero(objects[image, :, 0] >= 0)[:, 0]
        assert sorted(places.tolist()) == trained.tolist()
        assert 1 not in places.tolist() or image
        if len(trained):
            costs = set_prediction._costs(scores[image], boxes[image], objects[image, trained], loss)
            least = min(
                sum(float(costs[query, place]) for place, query in enumerate(order))
                for order in permutations(range(QUERIES), len(trained))
            )
            order = {place: number for number, place in enumerate(trained.tolist())}
            pairs = zip(queries.tolist(), places.tolist(), strict=True)
            assert sum(float(costs[query, order[place]]) for query, place in pairs) == pytest.approx(least, abs=1e-5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", FORMULAS)
def test_images_without_objects_have_a_finite_loss_with_gradients(name: str, kind: str) -> None:
    found = given(kind)
    for labels in (np.zeros((IMAGES, 0), np.float32), np.full((IMAGES, 12), -1, np.float32)):
        total, count, _, of_boxes = computed(name, kind, {**found, "labels": labels})
        assert np.isfinite(total)
        assert (total > 0) == (name == "set_classes")
        assert (count > 0) == (name == "set_classes" and kind == "softmax")
        assert of_boxes is None or not of_boxes.any()


def test_more_objects_than_queries_weigh_as_many_as_have_one() -> None:
    loss = config("set_classes", "softmax")
    labels = torch.zeros(1, 20 * 6)
    scores, boxes = torch.zeros(1, QUERIES, CLASSES + 1), torch.full((1, QUERIES, 4), 0.5)
    # equal scores: each query has -log of a sixth, times its weight
    total = set_prediction.set_classes(scores, boxes, labels, loss)
    assert total.item() / float(count_targets(labels, 1, loss)) == pytest.approx(float(np.log(CLASSES + 1)), rel=1e-6)


def test_another_number_of_queries_than_the_setting_says_is_refused() -> None:
    found = given("softmax")
    found["scores"], found["boxes"] = found["scores"][:, :9], found["boxes"][:, :9]
    with pytest.raises(ConfigError, match=r"num_queries is 12, but output 'logits' has 9 queries .*: set it to 9"):
        computed("set_classes", "softmax", found)


def test_a_class_that_the_scores_do_not_have_is_named() -> None:
    found = given("softmax")
    found["labels"][0, 0] = CLASSES
    with pytest.raises(DataError, match=r"a box has class 5, but output 'logits' has the classes 0\.\.4"):
        computed("set_classes", "softmax", found)


def test_detections_are_those_of_the_best_class_of_each_query() -> None:
    found = given("softmax")
    scores, boxes = (torch.from_numpy(found[key]) for key in ("scores", "boxes"))
    [first, *_] = detections(scores, boxes, config("set_classes", "softmax"))
    assert first.shape == (QUERIES, 6)
    assert (first[:-1, 1] >= first[1:, 1]).all()
    best = scores[0].softmax(-1)[:, :-1].max(-1)
    query = int(best.values.argmax())
    assert int(first[0, 0]) == int(best.indices[query])
    torch.testing.assert_close(first[0, 2:], corners(boxes[0, query]))
    torch.testing.assert_close(centres(corners(boxes)), boxes)
    assert len(detections(scores, boxes, config("set_classes", "sigmoid"), most=7)[0]) == 7


def test_the_overlap_is_torchvisions() -> None:
    import_torchvision()
    from torchvision.ops import generalized_box_iou

    found = given("softmax")
    loss = config("set_giou", "softmax")
    scores, boxes, labels = (torch.from_numpy(found[key]) for key in ("scores", "boxes", "labels"))
    ours, wanted = set_prediction.pairs(scores, boxes, labels, loss)
    by_torchvision = (1 - generalized_box_iou(corners(ours), corners(wanted)).diag()).sum()
    torch.testing.assert_close(set_prediction.set_giou(scores, boxes, labels, loss), by_torchvision)


@pytest.fixture(scope="module")
def with_transformers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_packages(tmp_path_factory.mktemp("transformers") / "env", *TRANSFORMERS)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", KINDS)
def test_losses_and_gradients_are_those_of_transformers(kind: str, with_transformers: Path, tmp_path: Path) -> None:
    found = given(kind)
    np.savez(tmp_path / "given.npz", **found)
    run_script(with_transformers, "set_loss_reference.py", tmp_path / "given.npz", kind, tmp_path / "reference.npz")
    reference = np.load(tmp_path / "reference.npz")
    for name, title in REFERENCES.items():
        total, count, of_scores, of_boxes = computed(name, kind, found)
        assert total / count == pytest.approx(float(reference[title]), rel=1e-5)
        for key, gradient in (("scores", of_scores), ("boxes", of_boxes)):
            if f"{title}/{key}" in reference:
                np.testing.assert_allclose(gradient.numpy() / count, reference[f"{title}/{key}"], rtol=1e-4, atol=1e-7)
