"""The mean average precision of images that are drawn with replacement, as the paired bootstrap needs it.

    pycocotools          which detections of each image match an object, at each overlap       once
    running sums         of matches and misses by score, each counted as often as its image    for each draw

The precision of each recall is read as pycocotools' `accumulate` does, which would take a hundred times as long. Where
an image has a match and a miss of the same class and score, an image that counts twice has both in the same order.
"""

from __future__ import annotations

import contextlib
import io
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from onward.trainer.data.schema.box_cells import COUNTED
from onward.trainer.data.schema.columns import Array
from onward.trainer.model.metrics.mean_precision import MOST_DETECTIONS, SIZES, MeanPrecision, new_measure


class _OfClass(NamedTuple):
    """What was found of one class in all images, by score, and how many objects of it each image has."""

    images: Array
    """The number of the image of each detection [n]."""
    matches: Array
    misses: Array
    """Of each detection at each overlap, bool [overlaps, n]; one that counts as neither is in none."""
    objects: Array
    """[images]."""


class ResampledPrecision:
    """The value of a metric that has seen all images, in one process, for any numbers of these images."""

    def __init__(self, measure: MeanPrecision) -> None:
        from pycocotools.cocoeval import COCOeval

        found, objects = measure.first.lists()
        self.num_images = measure.first.num_images
        if found.isnan().any():
            found = objects = found[:0]  # as the metric itself, which is NaN
        classes = sorted({int(number) for rows in (found, objects) for number in rows[:, 1].tolist()})
        with contextlib.redirect_stdout(io.StringIO()):  # pycocotools prints what it does
            sets = [self._images(rows, classes, first) for rows, first in ((objects, 2), (found, 3))]
            evaluation = COCOeval(*sets, "bbox")
            settings = evaluation.params
            settings.maxDets = [MOST_DETECTIONS]
            settings.areaRng = [settings.areaRng[SIZES.get(measure.name, 0)]]
            # as the metric itself, which rounds them to fp32
            library = new_measure()
            settings.iouThrs = np.array(library.iou_thresholds[: 1 if measure.name == "map_50" else None])
            settings.recThrs = np.array(library.rec_thresholds)
            evaluation.evaluate()
        self._recalls: Array = settings.recThrs
        of_all = evaluation.evalImgs
        starts = range(0, len(of_all), self.num_images)
        self._classes = [
            self._of_class(of_all[start : start + self.num_images], len(settings.iouThrs)) for start in starts
        ]

    def value(self, times: Array) -> float:
        """Return the metric of the images, each counted `times` [images]; NaN without an object."""
        found = []
        for each in self._classes:
            if number := float((times * each.objects).sum()):
                weights = times[each.images]
                found.append(
                    self._precisions((each.matches * weights).cumsum(1), (each.misses * weights).cumsum(1), number)
                )
        return float(np.mean(found)) if found else float("nan")

    def _precisions(self, matches: Array, misses: Array, objects: float) -> Array:
        """Return the precision at each overlap and recall, as pycocotools interpolates it."""
        recalls = matches / objects
        precisions = matches / (misses + matches + np.spacing(1))
        # the best precision of this recall or a greater one; 0 of recalls that are not reached
        best = np.maximum.accumulate(precisions[:, ::-1], 1)[:, ::-1]
        best = np.concatenate([best, np.zeros((len(best), 1))], 1)
        return np.stack([row[np.searchsorted(own, self._recalls)] for row, own in zip(best, recalls, strict=True)])

    def _images(self, rows: Tensor, classes: list[int], first: int) -> Any:
        """Return rows of numbers [n, 7] in the form of pycocotools. first: the column in which the corners begin."""
        from pycocotools.coco import COCO

        found = COCO()
        annotations = []
        for number, row in enumerate(rows.tolist(), start=1):
            x1, y1, x2, y2 = row[first : first + 4]
            box = {
                "id": number,
                "image_id": int(row[0]),
                "category_id": int(row[1]),
                "bbox": [x1, y1, x2 - x1, y2 - y1],
            }
            is_left_out = first == 2 and row[6] != COUNTED
            annotations.append(box | {"area": (x2 - x1) * (y2 - y1), "iscrowd": int(is_left_out), "score": row[2]})
        images = [{"id": number} for number in range(1, self.num_images + 1)]
        found.dataset = {"images": images, "categories": [{"id": each} for each in classes], "annotations": annotations}
        found.createIndex()
        return found

    def _of_class(self, of_images: list[Any], overlaps: int) -> _OfClass:
        """Join what pycocotools has found in each image; None stands for one without objects and detections."""
        known = [(number, each) for number, each in enumerate(of_images) if each]
        objects = np.zeros(len(of_images))
        for number, each in known:
            objects[number] = np.count_nonzero(np.asarray(each["gtIgnore"]) == 0)
        nothing = np.zeros((overlaps, 0), bool)
        scores = np.concatenate([[], *(each["dtScores"] for _, each in known)])
        order = np.argsort(-scores, kind="stable")
        images = np.repeat([number for number, _ in known], [len(each["dtScores"]) for _, each in known]).astype(
            np.int64
        )
        matched = np.concatenate([nothing, *(each["dtMatches"] != 0 for _, each in known)], 1)
        counts = ~np.concatenate([nothing, *(each["dtIgnore"] != 0 for _, each in known)], 1)
        return _OfClass(images[order], (matched & counts)[:, order], (~matched & counts)[:, order], objects)
