"""YOLOX: one box for each cell, and objects assigned by cost with a number of cells that the overlaps decide (SimOTA).

    may have an object     cells whose centre is within 1.5 cells of an object's centre
    cost                   binary cross-entropy of sqrt(class x objectness) + 3 x -log IoU, and a million for the cells
                           of other objects
    number                 of each object: the sum of its 10 greatest overlaps, at least 1
    assigned               the cheapest ones; of several objects that of the least cost

Source: arXiv:2107.08430 and its repository. Terms: 1 - IoU^2 (5), objectness of all cells, classes of assigned cells
with the overlap as target; all divided by the number of assigned cells.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from onward.trainer.config.losses import LossConfig
from onward.trainer.model.losses.dense_heads.anchor_ratio import confidence
from onward.trainer.model.losses.dense_heads.assigned import DividedLoss, around, boxes_of, classes_of, overlaps
from onward.trainer.model.losses.dense_heads.head import Head

OFFSET = 0.0
RADIUS, BEST = 1.5, 10
MOST_CODE = 20.0
OVERLAP_COST, ELSEWHERE_COST, BOX_WEIGHT = 3.0, 1e6, 5.0


def decode(head: Head) -> Tensor:
    """Return the corners of all boxes, in pixels: [B, P, 4]."""
    shifts, sides = head.codes.chunk(2, -1)
    centres = head.points + shifts * head.strides[:, None]
    # far beyond any image; the areas of still greater boxes would not be finite
    return around(centres, sides.clamp(max=MOST_CODE).exp() * head.strides[:, None])


def loss(head: Head, labels: Tensor, config: LossConfig) -> DividedLoss:
    """Return the three terms, added up. labels: [B, objects x 6]."""
    assert head.objectness is not None
    classes, boxes, is_trained = head.objects(labels)
    found = decode(head)
    places = assign(head, found.detach(), classes, boxes, is_trained)
    has_object = places >= 0
    wanted = torch.where(has_object[..., None], boxes_of(places, boxes), found.detach())
    # of assigned cells; the others overlap themselves, and weigh 0
    overlap = overlaps(found, wanted)
    of_boxes = ((1 - overlap**2) * has_object).sum()
    hits = has_object.to(head.scores.dtype)
    of_objects = F.binary_cross_entropy_with_logits(head.objectness, hits, reduction="sum")
    # how certain a class should be: as certain as its box is exact
    targets = classes_of(places, classes, head.scores.shape[-1]) * overlap.detach()[..., None]
    terms = F.binary_cross_entropy_with_logits(head.scores, targets, reduction="none")
    of_classes = (terms * has_object[..., None]).sum()
    return DividedLoss(BOX_WEIGHT * of_boxes + of_objects + of_classes, hits.sum())


@torch.no_grad()
def assign(head: Head, found: Tensor, classes: Tensor, boxes: Tensor, is_trained: Tensor) -> Tensor:
    """Return the place of the object of each prediction [B, P], -1 = none. found: corners [B, P, 4]."""
    # points are corners of cells here
    middles = head.points + 0.5 * head.strides[:, None]
    from_centre = (middles - (boxes[:, :, None, :2] + boxes[:, :, None, 2:]) / 2).abs().amax(-1)
    is_near = (from_centre < RADIUS * head.strides) & is_trained[..., None]
    # a cell near any object may have each of them, at a high cost
    may = is_near.any(1, keepdim=True) & is_trained[..., None]
    overlap = overlaps(found[:, None], boxes[:, :, None]) * may
    cost = _class_cost(head, classes) - OVERLAP_COST * (overlap + 1e-8).log() + ELSEWHERE_COST * ~is_near
    cost = torch.where(may, cost, torch.inf)
    most = min(BEST, cost.shape[-1])
    # well predicted objects get more cells
    numbers = overlap.topk(most, -1).values.sum(-1).int().clamp(min=1)
    # the cheapest ones of each object, as many as its number says
    values, cheapest = cost.topk(most, -1, largest=False)
    is_taken = (torch.arange(most, device=cost.device) < numbers[..., None]) & values.isfinite()
    is_assigned = torch.zeros_like(may).scatter(-1, cheapest, is_taken)
    is_shared = is_assigned.sum(1, keepdim=True) > 1
    least = F.one_hot(cost.argmin(1), cost.shape[1]).transpose(1, 2).bool()
    is_assigned = torch.where(is_shared, least, is_assigned)
    return torch.where(is_assigned.any(1), is_assigned.int().argmax(1), -1)


def _class_cost(head: Head, classes: Tensor) -> Tensor:
    """Return the binary cross-entropy of each prediction's classes against those of each object: [B, M, P]."""
    probabilities = confidence(head).sqrt().clamp(max=1)
    # torch's binary cross-entropy limits logarithms to -100
    of_yes = -probabilities.log().clamp(min=-100)
    of_no = -(1 - probabilities).log().clamp(min=-100)
    own = (of_yes - of_no).transpose(1, 2).gather(1, classes[..., None].expand(-1, -1, of_no.shape[1]))
    return own + of_no.sum(-1)[:, None]
