"""FCOS: a box and its centrality for each cell, and objects assigned to the cells near their centre.

    assigned      cells whose point is in the object and within 1.5 strides of its centre, on the level of the object's
                  size; of several objects the smallest one
    centrality    sqrt(least / greatest of left and right  x  least / greatest of top and bottom)

Source: arXiv:1904.01355, with the numbers of torchvision. Terms: focal loss of classes, generalised IoU of boxes,
binary cross-entropy of the centrality; all divided by the number of assigned cells.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from onward.trainer.config.losses import LossConfig
from onward.trainer.model.losses.dense_heads.assigned import (
    DividedLoss,
    boxes_of,
    classes_of,
    distances,
    focal_terms,
    giou,
    inside,
    of_distances,
)
from onward.trainer.model.losses.dense_heads.head import Head

OFFSET = 0.0
RADIUS = 1.5
LEAST_SIZE, GREATEST_SIZE = 4, 8
"""Of the greatest distance from a point to a side, in strides: what a level is for; the first and last have no end."""


def decode(head: Head) -> Tensor:
    """Return the corners of all boxes, in pixels: [B, P, 4]."""
    return of_distances(head.points, head.codes * head.strides[:, None])


def confidence(head: Head) -> Tensor:
    """Return the geometric mean of class probability and centrality [B, P, C]."""
    assert head.objectness is not None
    return (head.scores.sigmoid() * head.objectness.sigmoid()[..., None]).sqrt()


def loss(head: Head, labels: Tensor, config: LossConfig) -> DividedLoss:
    """Return the three terms, added up. labels: [B, objects x 6]."""
    assert head.objectness is not None
    classes, boxes, is_trained = head.objects(labels)
    places = assign(head, boxes, is_trained)
    has_object = places >= 0
    hits = classes_of(places, classes, head.scores.shape[-1]).to(head.scores.dtype)
    of_classes = focal_terms(head.scores, hits, alpha=config.alpha, gamma=config.gamma).sum()
    found = decode(head)
    # cells without an object are compared with themselves, whose terms weigh 0
    cells = of_distances(head.points, head.strides[:, None].expand(-1, 4))
    wanted = torch.where(has_object[..., None], boxes_of(places, boxes), cells)
    of_boxes = ((1 - giou(found, wanted)) * has_object).sum()
    sides = distances(head.points, wanted)
    ratios = sides[..., [0, 1]].minimum(sides[..., [2, 3]]) / sides[..., [0, 1]].maximum(sides[..., [2, 3]])
    entropy = F.binary_cross_entropy_with_logits(head.objectness, ratios.prod(-1).sqrt(), reduction="none")
    of_centres = (entropy * has_object).sum()
    return DividedLoss(of_classes + of_boxes + of_centres, has_object.sum())


@torch.no_grad()
def assign(head: Head, boxes: Tensor, is_trained: Tensor) -> Tensor:
    """Return the place of the object of each prediction [B, P], -1 = none. boxes: [B, M, 4]."""
    centres = (boxes[..., None, :2] + boxes[..., None, 2:]) / 2
    is_near = (head.points - centres).abs().amax(-1) < RADIUS * head.strides
    # the greatest distance to a side decides the level
    sizes = distances(head.points, boxes[:, :, None]).amax(-1)
    least = torch.where(head.strides == head.strides.amin(), 0.0, LEAST_SIZE * head.strides)
    greatest = torch.where(head.strides == head.strides.amax(), torch.inf, GREATEST_SIZE * head.strides)
    may = inside(head.points, boxes) & is_near & (sizes > least) & (sizes < greatest) & is_trained[..., None]
    # of several objects the smallest one
    areas = (boxes[..., 2:] - boxes[..., :2]).prod(-1)[..., None]
    smallest, places = torch.where(may, areas, torch.inf).min(1)
    return torch.where(smallest.isfinite(), places, -1)
