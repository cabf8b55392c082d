"""RetinaNet and SSD: offsets from anchor boxes, which have the object that they overlap.

                   RetinaNet                                      SSD
    object         IoU >= 0.5; between 0.4 and 0.5 the anchor     IoU >= 0.5
                   does not count
    every object   the anchors of its greatest IoU as well        the anchor of its greatest IoU as well
    classes        focal loss of all anchors                      cross-entropy with the background as class 0, of
                                                                  assigned anchors and the 3 times as many worst others
    boxes          L1 of offsets                                  smooth L1 of offsets x 10, 10, 5, 5
    divided by     assigned anchors of each image, and images     assigned anchors

Source: arXiv:1708.02002 and arXiv:1512.02325, with the numbers of torchvision.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from onward.trainer.config.losses import LossConfig
from onward.trainer.model.losses.dense_heads.assigned import (
    DividedLoss,
    around,
    boxes_of,
    classes_of,
    focal_terms,
    of_offsets,
    overlaps,
    to_offsets,
)
from onward.trainer.model.losses.dense_heads.head import Head

RETINANET_OFFSET, SSD_OFFSET = 0.0, 0.5
RETINANET_SCALES, SSD_SCALES = (1.0, 1.0, 1.0, 1.0), (10.0, 10.0, 5.0, 5.0)
MATCHED, BACKGROUND = 0.5, 0.4
WORST_OTHERS = 3
NONE, NOT_COUNTED = -1, -2


def decode_retinanet(head: Head) -> Tensor:
    """Return the corners of all boxes, in pixels: [B, P, 4]."""
    return of_offsets(head.codes, head.points, head.anchors, head.codes.new_tensor(RETINANET_SCALES))


def decode_ssd(head: Head) -> Tensor:
    """Return the corners of all boxes, in pixels: [B, P, 4]."""
    return of_offsets(head.codes, head.points, head.anchors, head.codes.new_tensor(SSD_SCALES))


def confidence_ssd(head: Head) -> Tensor:
    """Return the probability of each class but the background [B, P, C - 1]."""
    return head.scores.softmax(-1)[..., 1:]


def retinanet_loss(head: Head, labels: Tensor, config: LossConfig) -> DividedLoss:
    """Return both terms, added up. labels: [B, objects x 6]."""
    classes, boxes, is_trained = head.objects(labels)
    overlap = _overlap(head, boxes, is_trained)
    greatest, places = overlap.max(1)
    # between the two limits an anchor neither has an object nor is background
    matched = torch.where(greatest < MATCHED, NOT_COUNTED, places)
    matched = torch.where(greatest < BACKGROUND, NONE, matched)
    # anchors that are the best of some object keep theirs, however little they overlap
    best = overlap.amax(-1, keepdim=True)
    is_best = ((overlap == best) & is_trained[..., None]).any(1)
    matched = torch.where(is_best, places, matched)
    hits = classes_of(matched, classes, head.scores.shape[-1]).to(head.scores.dtype)
    terms = focal_terms(head.scores, hits, alpha=config.alpha, gamma=config.gamma).sum(-1)
    of_classes = (terms * (matched != NOT_COUNTED)).sum(1)
    has_object = matched >= 0
    of_boxes = (_offset_errors(head, matched, boxes, RETINANET_SCALES).abs().sum(-1) * has_object).sum(1)
    # each image weighs the same, however many objects it has
    of_images = (of_classes + of_boxes) / has_object.sum(1).clamp(min=1)
    return DividedLoss(of_images.sum(), of_images.new_full((), len(of_images)))


def ssd_loss(head: Head, labels: Tensor, config: LossConfig) -> DividedLoss:
    """Return both terms, added up. labels: [B, objects x 6]."""
    classes, boxes, is_trained = head.objects(labels)
    overlap = _overlap(head, boxes, is_trained)
    greatest, places = overlap.max(1)
    matched = torch.where(greatest < MATCHED, NONE, places)
    # the best anchor of each object has it; of two objects with one best anchor, the later one
    # so that no object is without an anchor
    best = overlap.argmax(-1)
    is_best = F.one_hot(best, overlap.shape[-1]).bool() & is_trained[..., None]
    order = torch.arange(1, overlap.shape[1] + 1, device=best.device)[:, None]
    last = (is_best * order).amax(1)
    matched = torch.where(last > 0, last - 1, matched)
    has_object = matched >= 0
    errors = _offset_errors(head, matched, boxes, SSD_SCALES)
    of_boxes = F.smooth_l1_loss(errors, torch.zeros_like(errors), reduction="none").sum(-1)
    # class 0 is the background
    targets = torch.where(has_object, classes.gather(1, matched.clamp(min=0)) + 1, 0)
    entropy = F.cross_entropy(head.scores.transpose(1, 2), targets, reduction="none")
    # the worst background of each image
    others = entropy.detach().masked_fill(has_object, -torch.inf)
    rank = others.argsort(1, descending=True).argsort(1)
    is_worst = rank < WORST_OTHERS * has_object.sum(1, keepdim=True)
    counted = has_object | is_worst
    return DividedLoss((of_boxes * has_object).sum() + (entropy * counted).sum(), has_object.sum())


@torch.no_grad()
def _overlap(head: Head, boxes: Tensor, is_trained: Tensor) -> Tensor:
    """Return the intersections over unions of objects and anchors [B, M, P]; -1 of objects that do not count."""
    found = overlaps(around(head.points, head.anchors), boxes[:, :, None])
    return torch.where(is_trained[..., None], found, -1.0)


def _offset_errors(head: Head, matched: Tensor, boxes: Tensor, scales: tuple[float, ...]) -> Tensor:
    """Return by how much the codes miss those of the objects: [B, P, 4], 0 without an object."""
    anchors = around(head.points, head.anchors)
    has_object = (matched >= 0)[..., None]
    wanted = torch.where(has_object, boxes_of(matched, boxes), anchors)
    codes = to_offsets(wanted, head.points, head.anchors, head.codes.new_tensor(scales))
    return torch.where(has_object, head.codes - codes, 0.0)
