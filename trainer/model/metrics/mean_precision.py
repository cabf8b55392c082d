"""Mean average precision of detections, as COCO measures it: pycocotools by way of torchmetrics.

each rank      what was found in its images, and their objects, with a number for each image
rank 0         all of them, sorted by these numbers, so that neither ranks nor batches matter

Intersections over unions are the same in any unit, so that boxes in shares of the model's input will do. Crowds and
difficult objects are neither missed nor found.
"""

from __future__ import annotations

import contextlib
import io
import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from onward.trainer.config.sections.metrics import MetricConfig
from onward.trainer.data.schema.box_cells import BOX_NUMBERS, COUNTED
from onward.trainer.errors import ConfigError
from onward.trainer.extras import how_to_install
from onward.trainer.model.metrics.library_measure import import_torchmetrics
from onward.trainer.model.metrics.measured import Measured


class MeanPrecision:
    """The metrics `map`, over IoU 0.50 to 0.95, and `map_50`."""

    on_first_rank = True

    def __init__(self, metric: MetricConfig, device: torch.device) -> None:
        self.key = metric.key
        self._name = metric.name
        self._device = device
        self._images = (dist.get_rank() if dist.is_initialized() else 0) << 32
        # image, class, score, corners [n, 7]; image, class, corners, flag [n, 7]
        self._found: list[Tensor] = []
        self._objects: list[Tensor] = []
        _check_library()

    def update(self, batch: Measured) -> None:
        found, labels = batch.objects
        boxes = labels.reshape(len(labels), -1, BOX_NUMBERS)
        for image, own in enumerate(found):
            self._images += 1
            there = boxes[image][boxes[image][:, 0] >= 0]
            self._found.append(self._numbered(own))
            self._objects.append(self._numbered(there))

    def _numbered(self, rows: Tensor) -> Tensor:
        # fp64 holds the numbers of images of all ranks
        return torch.cat([rows.new_full((len(rows), 1), self._images, dtype=torch.float64), rows.double()], 1)

    def sums(self, size: int) -> list[Tensor]:
        return []

    def lists(self) -> list[Tensor]:
        empty = torch.empty(0, 7, dtype=torch.float64, device=self._device)
        return [torch.cat([empty, *self._found]), torch.cat([empty, *self._objects])]

    def value(self, sums: Sequence[list[float]], lists: Sequence[Tensor], size: int) -> float:
        found, objects = (rows.cpu().reshape(-1, 7) for rows in lists)
        if found.isnan().any():
            return math.nan
        predictions: list[dict[str, Tensor]] = []
        targets: list[dict[str, Tensor]] = []
        for image in sorted({*found[:, 0].tolist(), *objects[:, 0].tolist()}):
            own = found[found[:, 0] == image]
            there = objects[objects[:, 0] == image]
            predictions.append({"labels": own[:, 1].long(), "scores": own[:, 2], "boxes": own[:, 3:]})
            is_left_out = (there[:, 6] != COUNTED).long()
            targets.append({"labels": there[:, 1].long(), "boxes": there[:, 2:6], "iscrowd": is_left_out})
        if not predictions:
            return math.nan
        measured = _library().MeanAveragePrecision(backend="pycocotools", sync_on_compute=False)
        measured.update(predictions, targets)
        with contextlib.redirect_stdout(io.StringIO()):  # pycocotools prints a table
            result = float(measured.compute()[self._name])
        # -1: there is no object that counts
        return math.nan if result < 0 else result


def _library() -> Any:
    import_torchmetrics()
    import torchmetrics.detection

    return torchmetrics.detection


def _check_library() -> None:
    try:
        import pycocotools  # noqa: F401
    except ImportError as error:
        raise ConfigError(f"pycocotools cannot be imported ({error}): {how_to_install('metrics')}") from error
