"""The mean average precision of drawn images is that of a data set which has them as often."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from onward.trainer.config.losses import LossConfig
from onward.trainer.config.sections.metrics import MetricConfig
from onward.trainer.export.measuring import comparison
from onward.trainer.export.measuring.comparison import gain_interval
from onward.trainer.model.metrics.mean_precision import MeanPrecision
from onward.trainer.model.metrics.resampled_precision import ResampledPrecision

IMAGES = 40
LOSS = LossConfig.model_validate({"name": "yolov8", "image_size": [200, 200], "strides": [8], "ignore_index": -100})


def images(seed: int = 0, noise: float = 0.03) -> tuple[list[Tensor], Tensor]:
    """What was found in each image [n, 6], and the labels [B, 4 x 6]; images have equal scores."""
    random = np.random.default_rng(7)  # the objects are the same for all seeds
    labels = np.full((IMAGES, 4, 6), -1.0)
    for image in range(IMAGES):
        for number in range(image % 5 and 1 + image % 4):
            first, size = random.random(2) * 0.5, random.choice([0.1, 0.3, 0.49]) * (0.8 + 0.2 * random.random(2))
            labels[image, number] = [random.integers(3), *first, *(first + size), random.random() < 0.1]
    random, found = np.random.default_rng(seed), []
    for own in labels:
        there = own[own[:, 0] >= 0]
        moved = there[:, 1:5] + noise * random.normal(size=(len(there), 4))
        wrong = np.concatenate([there[:, :2], there[:, :2] + 0.2], 1)
        boxes = np.concatenate([moved, wrong]).reshape(-1, 4)
        classes = np.concatenate([there[:, 0], np.full(len(there), 3.0)])
        scores = (random.permutation(20)[: len(boxes)] + 1) / 20
        found.append(torch.from_numpy(np.column_stack([classes, scores, boxes])))
    return found, torch.from_numpy(labels)


def measured(name: str, found: list[Tensor], labels: Tensor) -> MeanPrecision:
    measure = MeanPrecision(MetricConfig.model_validate({"name": name}), torch.device("cpu"))
    measure.add(found, labels.flatten(1), LOSS)
    return measure


@pytest.mark.parametrize("name", ["map", "map_50", "map_medium"])
def test_drawn_images_have_the_precision_of_a_data_set_of_them(name: str) -> None:
    found, labels = images()
    resampled = ResampledPrecision(measured(name, found, labels))
    random = np.random.default_rng(3)
    for draw in range(3):
        drawn = np.sort(random.integers(0, IMAGES, IMAGES)) if draw else np.arange(IMAGES)
        again = measured(name, [found[image] for image in drawn], labels[torch.from_numpy(drawn)])
        expected = again.value((), again.lists(), 1)
        assert 0.1 < expected < 0.9
        times = np.bincount(drawn, minlength=IMAGES).astype(float)
        assert resampled.value(times) == pytest.approx(expected, abs=1e-7)
    alone = np.zeros(IMAGES)
    alone[0] = 3  # has no object
    assert math.isnan(resampled.value(alone))


def test_an_improvement_is_told_from_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparison, "RESAMPLES", 400)
    before, same, better = (
        ResampledPrecision(measured("map", *images(*of))) for of in ((1, 0.03), (2, 0.03), (3, 0.015))
    )

    def interval(new: ResampledPrecision) -> tuple[float, float]:
        return gain_interval(IMAGES, lambda times: new.value(times.numpy()) - before.value(times.numpy()), 0.95)

    low, high = interval(same)
    assert low < 0 < high
    low, high = interval(better)
    assert 0.02 < low < high
