"""The families of dense detectors, by the name of their loss: how raw outputs are read, decoded and trained."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake

from onward.trainer.config.loss_rules import LOSS_RULES, LossName, LossRule
from onward.trainer.config.losses import LossConfig
from onward.trainer.model.losses.dense_heads import (
    anchor_overlap,
    anchor_ratio,
    centre_sampled,
    heat_map,
    simota,
    task_aligned,
)
from onward.trainer.model.losses.dense_heads.assigned import DividedLoss, overlaps
from onward.trainer.model.losses.dense_heads.head import Head, check_classes, read_head

MOST_DETECTIONS = 300
LEAST_SCORE = 0.001
SAME_OBJECT = 0.65
"""Intersection over union from which the lesser of two boxes of one class is left out."""
MOST_COMPARED = 1000
"""Pairs of box and class of an image, the best ones, among which such boxes are looked for."""


@dataclass(frozen=True)
class Family:
    """One family of dense detectors."""

    rule: LossRule
    offset: float
    """Where the point of a cell is, in cells from its left upper corner."""
    decode: Callable[[Head], Tensor]
    """Return the corners of all boxes in pixels [B, P, 4]."""
    confidence: Callable[[Head], Tensor]
    """Return the probability of each class [B, P, C]."""
    loss: Callable[[Head, Tensor, LossConfig], DividedLoss]
    may_be_coded: bool = False
    """Whether files leave the decoding to their users."""
    keeps_all: bool = False
    """Whether boxes that overlap are kept, as where only the greatest score of some cells is left."""
    one_to_one: bool = False
    """Whether it has one prediction for each object, so that its files choose boxes by TopK alone."""

    def head(self, outputs: Sequence[Tensor], loss: LossConfig) -> Head:
        """Return the raw outputs [B, channels, H, W] as one table."""
        return read_head(outputs, loss, offset=self.offset)


def _task_aligned(name: LossName, best: int = task_aligned.BEST, kept: int = task_aligned.BEST) -> Family:
    loss = functools.partial(task_aligned.loss, best=best, kept=kept)
    is_one = best < task_aligned.BEST
    return Family(
        LOSS_RULES[name],
        task_aligned.OFFSET,
        task_aligned.decode,
        task_aligned.confidence,
        loss,
        keeps_all=is_one,
        one_to_one=is_one,
    )


FAMILIES: Mapping[str, Family] = {
    # before the others, whose boxes are coded alike
    "yolov10": _task_aligned("yolov10", best=1),
    "yolo26_end2end": _task_aligned("yolo26_end2end", best=7, kept=1),
    "yolov8": _task_aligned("yolov8"),
    "yolo26": _task_aligned("yolo26"),
    "yolov5": Family(
        LOSS_RULES["yolov5"],
        anchor_ratio.OFFSET,
        anchor_ratio.decode,
        anchor_ratio.confidence,
        anchor_ratio.loss,
    ),
    "yolox": Family(
        LOSS_RULES["yolox"], simota.OFFSET, simota.decode, anchor_ratio.confidence, simota.loss, may_be_coded=True
    ),
    "fcos": Family(
        LOSS_RULES["fcos"],
        centre_sampled.OFFSET,
        centre_sampled.decode,
        centre_sampled.confidence,
        centre_sampled.loss,
    ),
    "retinanet": Family(
        LOSS_RULES["retinanet"],
        anchor_overlap.RETINANET_OFFSET,
        anchor_overlap.decode_retinanet,
        task_aligned.confidence,
        anchor_overlap.retinanet_loss,
    ),
    "ssd": Family(
        LOSS_RULES["ssd"],
        anchor_overlap.SSD_OFFSET,
        anchor_overlap.decode_ssd,
        anchor_overlap.confidence_ssd,
        anchor_overlap.ssd_loss,
    ),
    "centernet": Family(
        LOSS_RULES["centernet"], heat_map.OFFSET, heat_map.decode, heat_map.confidence, heat_map.loss, keeps_all=True
    ),
}


def dense_loss(outputs: Sequence[Tensor], labels: Tensor, loss: LossConfig) -> DividedLoss:
    """Return the loss of a dense detector. outputs: raw, [B, channels, H, W] each; labels: [B, objects x 6]."""
    family = FAMILIES[loss.name]
    head = family.head(outputs, loss)
    if not is_fake(head.scores):  # they are while memory is estimated
        check_classes(labels, head.scores.shape[-1] - loss.rule.background, loss.name)
    return family.loss(head, labels, loss)


@torch.no_grad()
def dense_detections(outputs: Sequence[Tensor], loss: LossConfig) -> Sequence[Tensor]:
    """Return what raw outputs have found in each image: class, score, x1, y1, x2, y2 by score, [n, 6].

    Corners are in shares of the model's input. Boxes of one class that overlap are one object, that of the best score.
    """
    family = FAMILIES[loss.name]
    head = family.head(outputs, loss)
    boxes = family.decode(head) / head.size.repeat(2)
    confidence = family.confidence(head)
    return [
        best_detections(corners, scores, keeps_all=family.keeps_all)
        for corners, scores in zip(boxes, confidence, strict=True)
    ]


def best_detections(corners: Tensor, scores: Tensor, *, keeps_all: bool) -> Tensor:
    """Return what was found in one image, as `dense_detections`. corners: [P, 4]; scores: of each class [P, C].

    keeps_all: whether boxes of one class that overlap are kept.
    """
    best = scores.flatten().topk(min(MOST_COMPARED, scores.numel()))
    is_found = best.values > LEAST_SCORE
    values, pairs = best.values[is_found], best.indices[is_found]
    rows, classes = pairs // scores.shape[-1], pairs % scores.shape[-1]
    if not keeps_all:
        kept = _not_suppressed(corners[rows], classes)
        values, rows, classes = values[kept], rows[kept], classes[kept]
    columns = torch.cat([classes[:, None].to(corners.dtype), values[:, None], corners[rows]], 1)
    return columns[:MOST_DETECTIONS]


def _not_suppressed(boxes: Tensor, classes: Tensor) -> Tensor:
    """Return which boxes [n, 4], the best first, no better box of their class overlaps: bool [n].

    torchvision's operator is not there beside another build of torch (onnx_graph/torchvision_import.py).
    """
    is_same = (overlaps(boxes[:, None], boxes) > SAME_OBJECT) & (classes[:, None] == classes)
    suppresses = is_same.triu(1).cpu()
    kept = torch.ones(len(boxes), dtype=torch.bool)
    for place, others in enumerate(suppresses):
        # a box that is left out suppresses none itself
        if kept[place]:
            kept &= ~others
    return kept.to(boxes.device)
