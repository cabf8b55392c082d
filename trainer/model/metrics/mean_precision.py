"""Mean average precision of detections, as COCO measures it: pycocotools by way of torchmetrics.

each rank      what was found in its images, and their objects, with a number for each image
rank 0         all of them, sorted by these numbers, so that neither ranks nor batches matter

All metrics of a loss are read from the results of the first one. Boxes are compared in the pixels of
`loss.image_size`, by which objects are small, medium or large. Crowds and difficult objects are neither missed nor
found.
"""

from __future__ import annotations

import contextlib
import io
import logging
import math
import tempfile
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from onward.trainer.data.schema.box_cells import BOX_NUMBERS, COUNTED
from onward.trainer.errors import ConfigError
from onward.trainer.events import ClassPrecision
from onward.trainer.extras import how_to_install
from onward.trainer.model.metrics.library_measure import import_torchmetrics

if TYPE_CHECKING:
    from onward.trainer.config.losses import LossConfig
    from onward.trainer.config.sections.metrics import MetricConfig
    from onward.trainer.data.schema.columns import Array
    from onward.trainer.model.metrics.measured import Measured

log = logging.getLogger(__name__)

Detections = dict[str, Tensor]
MOST_CLASSES = 100
"""The most classes of which each has its precision."""
RECALLS = slice(None, None, 5)
"""Of the 101 recalls at which COCO measures precisions, those that a curve has."""
LEAST_SCORE, SAME_OBJECT = 0.25, 0.5
"""Of the detections that `object_confusion` counts, and the intersection over union with their object."""
FIRST_IOU, ALL_SIZES, MOST_FOUND = 0, 0, 2
"""Places in torchmetrics' table of precisions: an intersection over union of 0.50, objects of all sizes, the 100 best
detections of an image."""


class MeanPrecision:
    """The metrics `map`, over IoU 0.50 to 0.95, `map_50`, and `map` of small, medium and large objects."""

    on_first_rank = True

    def __init__(self, metric: MetricConfig, device: torch.device) -> None:
        self.key = metric.key
        self.classes: list[ClassPrecision] = []
        """After `value`, of the first metric: the precision of each class; [] of more than MOST_CLASSES."""
        self.first = self
        """The metric of the same loss that keeps the detections."""
        self._results: dict[str, Any] = {}
        self.name = metric.name
        self._device = device
        self.num_images = 0
        """Seen by this rank, of the metric that keeps the detections."""
        self._first_image = (dist.get_rank() if dist.is_initialized() else 0) << 32
        # image, class, score, corners [n, 7]; image, class, corners, flag [n, 7]
        self._found: list[Tensor] = []
        self._objects: list[Tensor] = []
        _check_library()

    def update(self, batch: Measured) -> None:
        # the detections are kept and gathered once, not once for each metric
        if self.first is self:
            self.add(*batch.objects, batch.config)

    def add(self, found: Sequence[Tensor], labels: Tensor, loss: LossConfig) -> None:
        """Add what was found in each image: class, score, corners in shares of it, [n, 6]. labels: [B, objects x 6]."""
        boxes = labels.reshape(len(labels), -1, BOX_NUMBERS)
        size = torch.tensor(loss.image_size or (1, 1), dtype=torch.float64, device=labels.device).repeat(2)
        for image, own in enumerate(found):
            self.num_images += 1
            there = boxes[image][boxes[image][:, 0] >= 0]
            self._found.append(self._numbered(own[:, :2], own[:, 2:] * size))
            self._objects.append(self._numbered(there[:, :1], there[:, 1:5] * size, there[:, 5:]))

    def _numbered(self, *columns: Tensor) -> Tensor:
        # fp64 holds the numbers of images of all ranks
        image = columns[0].new_full((len(columns[0]), 1), self._first_image + self.num_images, dtype=torch.float64)
        return torch.cat([image, *(each.double() for each in columns)], 1)

    def sums(self, size: int) -> list[Tensor]:
        return []

    def lists(self) -> list[Tensor]:
        if self.first is not self:
            return []
        empty = torch.empty(0, 7, dtype=torch.float64, device=self._device)
        return [torch.cat([empty, *self._found]), torch.cat([empty, *self._objects])]

    def value(self, sums: Sequence[list[float]], lists: Sequence[Tensor], size: int) -> float:
        if self.first is self:
            self._measure(*(rows.cpu().reshape(-1, 7) for rows in lists))
        result = float(self.first._results.get(self.name, math.nan))
        # -1: there is no object that counts
        return math.nan if result < 0 else result

    def _measure(self, found: Tensor, objects: Tensor) -> None:
        """Compute the results of all metrics, and the precision of each class."""
        if found.isnan().any():
            return
        predictions: list[Detections] = []
        targets: list[Detections] = []
        for image in sorted({*found[:, 0].tolist(), *objects[:, 0].tolist()}):
            own = found[found[:, 0] == image]
            there = objects[objects[:, 0] == image]
            predictions.append({"labels": own[:, 1].long(), "scores": own[:, 2], "boxes": own[:, 3:]})
            is_left_out = (there[:, 6] != COUNTED).long()
            targets.append({"labels": there[:, 1].long(), "boxes": there[:, 2:6], "iscrowd": is_left_out})
        if not predictions:
            return
        measured = new_measure()
        measured.update(predictions, targets)
        with contextlib.redirect_stdout(io.StringIO()):  # pycocotools prints a table
            self._results = measured.compute()
        # a scalar where only one class is known
        classes = self._results["classes"].reshape(-1).tolist()
        if len(classes) <= MOST_CLASSES:
            # classes that were found but are in no label have a row without objects
            counted = objects[objects[:, 6] == COUNTED][:, 1].tolist()
            confused = None
            try:
                confused = object_confusion(predictions, targets, classes)
            except OSError as error:  # a full disk for temporary files, which ends no training
                log.warning("which classes are found for which is not counted: %s", error)
            for place, each in enumerate(classes):
                self.classes.append(self._of_class(each, place, counted.count(each), confused))

    def _of_class(self, of_class: int, place: int, objects: int, confused: Array | None) -> ClassPrecision:
        """Return the precision of one class. place: its place in torchmetrics' table and in that of `confused`."""
        # [overlaps, recalls, sizes]; -1 where there are no objects
        precisions = self._results["precision"][:, :, place, :, MOST_FOUND]
        whole, small, medium, large = (_mean(precisions[:, :, size]) for size in range(4))
        counts: dict[str, Any] = {}
        if confused is not None:
            found = confused[place].tolist()
            counts = {"found_as": [*found, objects - sum(found)], "without_object": int(confused[-1, place])}
        return ClassPrecision(
            **counts,
            of_class=of_class,
            objects=objects,
            map=whole,
            map_50=_mean(precisions[FIRST_IOU, :, ALL_SIZES]),
            map_small=small,
            map_medium=medium,
            map_large=large,
            curve=[round(max(each, 0.0), 4) for each in precisions[FIRST_IOU, RECALLS, ALL_SIZES].tolist()],
        )


def _mean(precisions: Tensor) -> float | None:
    """Return the mean, without the entries -1 of absent objects; None if there are no others."""
    known = precisions[precisions >= 0]
    return float(known.mean()) if len(known) else None


def new_measure() -> Any:
    """Return the metric of torchmetrics without any image."""
    import_torchmetrics()
    from torchmetrics.detection import MeanAveragePrecision

    made = MeanAveragePrecision(backend="pycocotools", sync_on_compute=False, extended_summary=True)
    made.warn_on_many_detections = False  # that COCO counts the 100 best ones of an image
    return made


def object_confusion(predictions: Sequence[Detections], targets: Sequence[Detections], classes: Sequence[int]) -> Array:
    """Return the numbers of objects by class (rows) and found class (columns), int64 [n + 1, n].

    The last row has what was found where no object is. pycocotools matches the boxes of all classes at once.
    predictions, targets: of each image, as torchmetrics takes them.
    """
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    certain = [{key: rows[each["scores"] >= LEAST_SCORE] for key, rows in each.items()} for each in predictions]
    measured = new_measure()
    measured.update(certain, targets)
    # pycocotools prints what it does
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        measured.tm_to_coco(f"{folder}/boxes")
        truth = COCO(f"{folder}/boxes_target.json")
        found = COCO()
        # loadRes takes no empty list
        if any(len(each["scores"]) for each in certain):
            found = truth.loadRes(f"{folder}/boxes_preds.json")
        evaluator = COCOeval(truth, found, "bbox")
        params = evaluator.params
        params.useCats = 0
        params.catIds = list(classes)
        params.iouThrs = np.array([SAME_OBJECT])
        params.areaRng = [[0, math.inf]]
        evaluator.evaluate()
    counts = np.zeros((len(classes) + 1, len(classes)), np.int64)
    for image in filter(None, evaluator.evalImgs):
        for number, match, ignored in zip(image["dtIds"], image["dtMatches"][0], image["dtIgnore"][0], strict=True):
            row = classes.index(truth.anns[match]["category_id"]) if match else -1
            counts[row, classes.index(found.anns[number]["category_id"])] += not ignored
    return counts


def _check_library() -> None:
    try:
        import pycocotools  # noqa: F401
    except ImportError as error:
        raise ConfigError(f"pycocotools cannot be imported ({error}): {how_to_install('metrics')}") from error
