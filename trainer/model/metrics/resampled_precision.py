"""The mean average precision of images that are drawn with replacement, as the paired bootstrap needs it.

    pycocotools          which detections of each image match an object, at each overlap       once
    running sums         of matches and misses by score, each counted as often as its image    for each draw

The precision of each recall is read as pycocotools' `accumulate` does, which would take a hundred times as long. Where
an image has a match and a miss of the same class and score, an image that counts twice has both in the same order.
"""

from __future__ import annotations

import contextlib
import io
from typing import Any

import numpy as np

from onward.trainer.data.schema.columns import Array
from onward.trainer.model.metrics.mean_precision import MeanPrecision, new_measure

MOST_DETECTIONS = 100
"""Of an image that COCO measures, the best ones."""
SIZES = ("map", "map_small", "map_medium", "map_large")
"""In the order in which pycocotools has the sizes of objects."""


class ResampledPrecision:
    """The value of a metric that has seen all images, in one process, for any numbers of these images."""

    def __init__(self, measure: MeanPrecision) -> None:
        from pycocotools.cocoeval import COCOeval

        found, objects = measure.first.lists()
        self.num_images = measure.first.num_images
        if found.isnan().any():
            found = objects = found[:0]  # as the metric itself, which is NaN
        # a class without an object in the drawn images counts in none
        classes = {int(number) for rows in (found, objects) for number in rows[:, 1].tolist()}
        with contextlib.redirect_stdout(io.StringIO()):  # pycocotools prints what it does
            # the flag of an object where the others have their score
            sets = [self._images(rows.tolist(), classes) for rows in (objects[:, [0, 1, 6, 2, 3, 4, 5]], found)]
            evaluation = COCOeval(*sets, "bbox")
            settings = evaluation.params
            settings.maxDets = [MOST_DETECTIONS]
            settings.areaRng = [settings.areaRng[SIZES.index(measure.name) if measure.name in SIZES else 0]]
            # as the metric itself, which rounds them to fp32
            library = new_measure()
            settings.iouThrs = np.array(library.iou_thresholds[: 1 if measure.name == "map_50" else None])
            settings.recThrs = self._recalls = np.array(library.rec_thresholds)
            evaluation.evaluate()
        # class by class, and of each class image by image
        starts = range(0, len(evaluation.evalImgs), self.num_images)
        self._classes = [_of_class(evaluation.evalImgs[start : start + self.num_images]) for start in starts]

    def value(self, times: Array) -> float:
        """Return the metric of the images, each counted `times` [images]; NaN without an object."""
        found = []
        for images, is_match, counts, objects in self._classes:
            if number := times @ objects:
                # an image that is not drawn has the weight 0
                weights = times[images] * counts
                matches, all_found = (is_match * weights).cumsum(1), weights.cumsum(1)
                precisions = matches / (all_found + np.spacing(1))
                # the best precision of this recall or a greater one; 0 of recalls that are not reached
                best = np.maximum.accumulate(precisions[:, ::-1], 1)[:, ::-1]
                best = np.pad(best, ((0, 0), (0, 1)))
                recalls = zip(best, matches / number, strict=True)
                found += [precision[np.searchsorted(recall, self._recalls)] for precision, recall in recalls]
        return float(np.mean(found)) if found else float("nan")

    def _images(self, rows: list[list[float]], classes: set[int]) -> Any:
        """Return rows of image, class, flag or score, x1, y1, x2, y2 in the form of pycocotools."""
        from pycocotools.coco import COCO

        annotations = []
        for number, (image, of_class, value, x1, y1, x2, y2) in enumerate(rows, start=1):
            width, height = x2 - x1, y2 - y1
            box = {"bbox": [x1, y1, width, height], "area": width * height, "score": value, "iscrowd": int(value > 0)}
            annotations.append({"id": number, "image_id": int(image), "category_id": int(of_class), **box})
        found = COCO()
        found.dataset = {"categories": [{"id": each} for each in sorted(classes)], "annotations": annotations}
        found.dataset["images"] = [{"id": number} for number in range(1, self.num_images + 1)]
        found.createIndex()
        return found


def _of_class(of_images: list[Any]) -> tuple[Array, ...]:
    """Return what was found of a class in all images, by score: the number of the image of each detection [n], whether
    it matches an object and whether it counts at each overlap [overlaps, n]; and the objects of each image [images].

    of_images: what pycocotools has found in each image; None of one without objects and detections.
    """
    objects = np.array([np.count_nonzero(np.equal(each["gtIgnore"], 0)) if each else 0 for each in of_images])
    # at least one image has some: else the class would not be listed
    known = [(number, each) for number, each in enumerate(of_images) if each]
    order = np.argsort(-np.concatenate([each["dtScores"] for _, each in known]), kind="stable")
    images = np.concatenate([np.full(len(each["dtScores"]), number) for number, each in known])
    matches, ignored = (np.concatenate([each[key] for _, each in known], 1) for key in ("dtMatches", "dtIgnore"))
    return images[order], matches[:, order] > 0, ignored[:, order] == 0, objects
