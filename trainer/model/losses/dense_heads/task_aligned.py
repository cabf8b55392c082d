"""YOLOv8 and its successors: distances as distributions, and objects assigned by class score and overlap together.

    channel of a box    16 logits for each of left, top, right, bottom; the distance is the mean of 0 .. 15 under their
                        softmax, in cells (distribution focal loss, arXiv:2006.04388). YOLO26: the distances themselves
    alignment           score^0.5 x CIoU^6 of each prediction and each object that its point is in; an object shorter
                        than the second stride counts as that long here, so that it has points
    assigned            the 10 best of each object; of several objects that with the greatest CIoU. YOLOv10: the best of
                        each object; YOLO26 end to end: of its 7 best that which is the best of those left to it
    target score        the alignment, scaled so that the best of an object has the object's greatest CIoU

Source: task alignment learning (arXiv:2108.07755), with the numbers of YOLOv8; for YOLOv10 arXiv:2405.14458. Three
terms: classes 0.5, boxes (CIoU) 7.5, distributions (YOLO26: distances in shares of the image) 1.5, all divided by the
sum of the target scores.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from onward.trainer.config.losses import LossConfig
from onward.trainer.model.losses.dense_heads.assigned import (
    DividedLoss,
    around,
    boxes_of,
    ciou,
    classes_of,
    distances,
    inside,
    of_distances,
)
from onward.trainer.model.losses.dense_heads.head import Head

OFFSET = 0.5
BEST, SCORE_POWER, OVERLAP_POWER = 10, 0.5, 6.0
CLASS_WEIGHT, BOX_WEIGHT, DISTANCE_WEIGHT = 0.5, 7.5, 1.5
TINY = 1e-9


@dataclass(frozen=True)
class _Assigned:
    places: Tensor
    """Of the object of each prediction [B, P]; -1 = none."""
    scores: Tensor
    """Target scores [B, P, C]."""


def decode(head: Head) -> Tensor:
    """Return the corners of all boxes, in pixels: [B, P, 4]."""
    cells = head.codes
    if cells.shape[-1] > 4:
        logits = _by_side(cells)
        numbers = torch.arange(logits.shape[-1], device=logits.device, dtype=logits.dtype)
        cells = logits.softmax(-1) @ numbers
    return of_distances(head.points, cells * head.strides[:, None])


def confidence(head: Head) -> Tensor:
    """Return the probability of each class [B, P, C]."""
    return head.scores.sigmoid()


def loss(head: Head, labels: Tensor, config: LossConfig, *, best: int = BEST, kept: int = BEST) -> DividedLoss:
    """Return the three terms, added up. labels: [B, objects x 6].

    best: predictions that an object is assigned to at first. kept: how many of those left to it stay.
    """
    # the assignment needs boxes and scores, and no gradient
    classes, boxes, is_trained = head.objects(labels)
    found = decode(head)
    strides = sorted(config.strides)
    least = strides[min(1, len(strides) - 1)]
    objects = classes, boxes, is_trained
    assigned = assign(
        confidence(head).detach(), found.detach(), head.points, *objects, least=least, most=best, kept=kept
    )
    # all predictions, most of them against 0
    of_classes = F.binary_cross_entropy_with_logits(head.scores, assigned.scores, reduction="sum")
    weights = assigned.scores.sum(-1)
    wanted = boxes_of(assigned.places, boxes)
    # predictions without an object have weight 0, and their own box as target: the CIoU of any other may be infinite
    wanted = torch.where((assigned.places >= 0)[..., None], wanted, found.detach())
    of_boxes = ((1 - ciou(found, wanted)) * weights).sum()
    of_distance = (_distance_terms(head, wanted) * weights).sum()
    total = CLASS_WEIGHT * of_classes + BOX_WEIGHT * of_boxes + DISTANCE_WEIGHT * of_distance
    return DividedLoss(total, weights.sum())


@torch.no_grad()
def assign(
    scores: Tensor,
    found: Tensor,
    points: Tensor,
    classes: Tensor,
    boxes: Tensor,
    is_trained: Tensor,
    *,
    least: float,
    most: int,
    kept: int,
) -> _Assigned:
    """Assign objects to predictions. scores [B, P, C]; found [B, P, 4]; objects: classes [B, M], boxes [B, M, 4].

    least: the shortest side of a box in which points are looked for, in pixels. most, kept: see `loss`.
    """
    centres = (boxes[..., :2] + boxes[..., 2:]) / 2
    sides = (boxes[..., 2:] - boxes[..., :2]).clamp(min=least)
    may = inside(points, around(centres, sides), TINY) & is_trained[..., None]
    # the score of each prediction for the class of each object
    of_class = scores.transpose(1, 2).gather(1, classes[..., None].expand(-1, -1, len(points)))
    overlap = ciou(found[:, None], boxes[:, :, None]).clamp(min=0) * may
    alignment = of_class**SCORE_POWER * overlap**OVERLAP_POWER * may
    # those that are not inside do not count, also where fewer are
    is_assigned = _best(alignment, most) & may
    # a prediction that several objects chose has the one of the greatest overlap
    is_shared = is_assigned.sum(1, keepdim=True) > 1
    greatest = F.one_hot(overlap.argmax(1), overlap.shape[1]).transpose(1, 2).bool()
    is_assigned = torch.where(is_shared, greatest, is_assigned)
    if kept < most:
        is_assigned &= _best(alignment * is_assigned, kept)
    places = torch.where(is_assigned.any(1), is_assigned.int().argmax(1), -1)
    # each object's alignments, scaled so that the greatest is its greatest overlap
    # of assigned pairs alone, so that the best of an object has its greatest overlap
    alignment = alignment * is_assigned
    best_overlap = (overlap * is_assigned).amax(-1, keepdim=True)
    scaled = alignment * best_overlap / (alignment.amax(-1, keepdim=True) + TINY)
    targets = classes_of(places, classes, scores.shape[-1]) * scaled.amax(1)[..., None]
    return _Assigned(places, targets)


def _best(alignment: Tensor, number: int) -> Tensor:
    """Return which predictions are the best of an object: bool [B, M, P]."""
    best = alignment.topk(min(number, alignment.shape[-1]), -1).indices
    return torch.zeros_like(alignment, dtype=torch.bool).scatter(-1, best, True)


def _distance_terms(head: Head, wanted: Tensor) -> Tensor:
    """Return how far the distances of each prediction are off: [B, P].

    The distribution focal loss is the cross-entropy of the two bins beside a distance; without bins it is the error.
    """
    if head.codes.shape[-1] == 4:
        errors = head.codes * head.strides[:, None] - distances(head.points, wanted)
        return (errors / head.size.repeat(2)).abs().mean(-1)
    logits = _by_side(head.codes)
    bins = logits.shape[-1]
    cells = (distances(head.points, wanted) / head.strides[:, None]).clamp(0, bins - 1 - 0.01)
    # the distance lies between two bins
    lower = cells.floor().long()
    share = cells - lower
    entropy = -logits.log_softmax(-1)
    terms = entropy.gather(-1, lower[..., None])[..., 0] * (1 - share)
    terms = terms + entropy.gather(-1, lower[..., None] + 1)[..., 0] * share
    return terms.mean(-1)


def _by_side(codes: Tensor) -> Tensor:
    """Return [B, P, 4 x bins] as [B, P, 4, bins]."""
    return codes.reshape(*codes.shape[:-1], 4, -1)
