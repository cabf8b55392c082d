"""Losses of detectors that predict a set of boxes (DETR, YOLOS, RT-DETR): one query for each object.

    queries        q0     q1     q2     q3            outputs [B, Q, C] and [B, Q, 4]
    objects        cat           dog                  labels [B, objects x 6]
                    \\             \\
    costs           class, L1 and IoU of each pair    Hungarian method: the assignment of the least sum
    assigned       q3-cat  q0-dog, all others: no object

set_classes compares the class scores of all queries, set_l1 and set_giou the boxes of the assigned ones. Each finds the
same assignment, from outputs without gradient. Boxes of outputs are centre and size, in shares of the image.

Source: arXiv:2005.12872 (DETR), arXiv:2010.04159 (Deformable DETR), arXiv:2304.08069 (RT-DETR), with the weights of
their repositories, which transformers' losses have as well. Sums divided by the counts of data/schema/target_counts.py
are their means.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake

from onward.trainer.config.losses import LossConfig
from onward.trainer.data.schema.box_cells import BOX_NUMBERS, COUNTED, NO_CLASS
from onward.trainer.data.schema.target_counts import NO_OBJECT_WEIGHT
from onward.trainer.errors import ConfigError, DataError
from onward.trainer.model.losses.dense_heads.assigned import around, box_operations, focal_terms, overlaps

L1_COST, GIOU_COST = 5.0, 2.0
MOST_DETECTIONS = 100
CLASS_COSTS = {"softmax": 1.0, "sigmoid": 2.0, "varifocal": 2.0}
"""What the costs of a pair are multiplied by, in DETR, in Deformable DETR and in RT-DETR."""
COST_ALPHA, COST_GAMMA = 0.25, 2.0
"""Of the focal cost of classes with sigmoid."""

Assigned = list[tuple[Tensor, Tensor]]
"""For each image the queries and the places of their objects among the labels, int64 [n] both."""


def set_classes(scores: Tensor, boxes: Tensor, labels: Tensor, loss: LossConfig) -> Tensor:
    """Return the loss of the classes, a scalar. scores [B, Q, C], boxes [B, Q, 4], labels [B, objects x 6].

    With softmax the last class is no object, and weighs NO_OBJECT_WEIGHT; with sigmoid it is the focal loss. Varifocal
    (arXiv:2008.13367) trains the class of an assigned query towards the overlap of its box.
    """
    objects = objects_of(labels)
    assigned = assign(scores, boxes, objects, loss)
    if loss.scores == "softmax" and scores.shape[1] != loss.num_queries:
        raise ConfigError(
            f"loss.num_queries is {loss.num_queries}, but output {loss.outputs[0]!r} has {scores.shape[1]} queries for "
            f"each image: set it to {scores.shape[1]}"
        )
    if loss.scores == "softmax":
        nothing = scores.shape[-1] - 1
        targets = torch.full(scores.shape[:2], nothing, device=scores.device)
        for image, (queries, places) in enumerate(assigned):
            targets[image, queries] = objects[image, places, 0].long()
        weights = torch.ones(scores.shape[-1], dtype=scores.dtype, device=scores.device)
        weights[nothing] = NO_OBJECT_WEIGHT
        return F.cross_entropy(scores.transpose(1, 2), targets, weights, reduction="sum")
    hits, qualities = torch.zeros_like(scores), torch.zeros_like(scores)
    for image, (queries, places) in enumerate(assigned):
        classes = objects[image, places, 0].long()
        hits[image, queries, classes] = 1.0
        if loss.scores == "varifocal":
            overlap = overlaps(corners(boxes[image, queries].detach()), objects[image, places, 1:5])
            qualities[image, queries, classes] = overlap.to(scores.dtype)
    if loss.scores == "varifocal":
        weights = (1 - loss.alpha) * scores.detach().sigmoid() ** loss.gamma * (1 - hits) + qualities
        return F.binary_cross_entropy_with_logits(scores, qualities, weights, reduction="sum")
    return focal_terms(scores, hits, alpha=loss.alpha, gamma=loss.gamma).sum()


def set_l1(scores: Tensor, boxes: Tensor, labels: Tensor, loss: LossConfig) -> Tensor:
    """Return the sum over assigned pairs of |box - object| over centre and size, a scalar."""
    found, wanted = pairs(scores, boxes, labels, loss)
    return (found - wanted).abs().sum()


def set_giou(scores: Tensor, boxes: Tensor, labels: Tensor, loss: LossConfig) -> Tensor:
    """Return the sum over assigned pairs of 1 - generalised intersection over union (arXiv:1902.09630), a scalar."""
    found, wanted = pairs(scores, boxes, labels, loss)
    # torchvision's eps would change the value of small boxes; two boxes without any area still have a number
    total: Tensor = box_operations().generalized_box_iou_loss(
        corners(found), corners(wanted), reduction="sum", eps=1e-12
    )
    return total


def pairs(scores: Tensor, boxes: Tensor, labels: Tensor, loss: LossConfig) -> tuple[Tensor, Tensor]:
    """Return the boxes of assigned queries and those of their objects, centre and size, [pairs, 4] both."""
    objects = objects_of(labels)
    found, wanted = [boxes[:0, 0]], [boxes[:0, 0].detach()]
    for image, (queries, places) in enumerate(assign(scores, boxes, objects, loss)):
        found.append(boxes[image, queries])
        wanted.append(centres(objects[image, places, 1:5]).to(boxes.dtype))
    return torch.cat(found), torch.cat(wanted)


def objects_of(labels: Tensor) -> Tensor:
    """Return the boxes of labels [B, objects x 6] as [B, objects, 6]; those that are not trained on have no class."""
    objects = labels.reshape(len(labels), -1, BOX_NUMBERS)
    is_trained = objects[..., 5:] == COUNTED
    return torch.where(is_trained, objects, torch.full_like(objects, NO_CLASS))


@torch.no_grad()
def assign(scores: Tensor, boxes: Tensor, objects: Tensor, loss: LossConfig) -> Assigned:
    """Return the assignment of the least cost for each image. Raises DataError for a class that scores do not have."""
    from scipy.optimize import linear_sum_assignment

    if is_fake(scores):  # while memory is estimated: the first queries
        some = torch.arange(min(objects.shape[1], scores.shape[1]), device=scores.device)
        return [(some, some)] * len(scores)
    num_classes = scores.shape[-1] - (loss.scores == "softmax")
    # one copy from the device for all images
    classes = objects[..., 0].long()
    if classes.numel() and (most := int(classes.max())) >= num_classes:
        raise DataError(
            f"a box has class {most}, but output {loss.outputs[0]!r} has the classes 0..{num_classes - 1}; name the "
            "classes in data.classes, or give the model a new head (model.num_classes)"
        )
    assigned = []
    for image, own in enumerate(classes):
        places = torch.nonzero(own >= 0)[:, 0]
        costs = _costs(scores[image], boxes[image], objects[image, places], loss).cpu()
        if not torch.isfinite(costs).all():
            costs = costs.nan_to_num(0.0, 0.0, 0.0)  # the loss itself is not finite, which the loop reports
        queries, order = linear_sum_assignment(costs.double().numpy())
        assigned.append(
            (torch.from_numpy(queries).to(scores.device), places[torch.from_numpy(order).to(places.device)])
        )
    return assigned


def _costs(scores: Tensor, boxes: Tensor, objects: Tensor, loss: LossConfig) -> Tensor:
    """Return what each pair costs: [Q, objects]. scores [Q, C], boxes [Q, 4]; objects [objects, 6]."""
    classes = objects[:, 0].long()
    if loss.scores == "softmax":
        of_class = -scores.softmax(-1)[:, classes]
    else:
        p = scores.sigmoid()[:, classes]
        hit = COST_ALPHA * (1 - p) ** COST_GAMMA * -(p + 1e-8).log()
        miss = (1 - COST_ALPHA) * p**COST_GAMMA * -(1 - p + 1e-8).log()
        of_class = hit - miss
    wanted = objects[:, 1:5].to(boxes.dtype)
    distance = torch.cdist(boxes, centres(wanted), p=1)
    overlap = box_operations().generalized_box_iou(corners(boxes), wanted)
    total: Tensor = CLASS_COSTS[loss.scores] * of_class + L1_COST * distance - GIOU_COST * overlap
    return total


def centres(found: Tensor) -> Tensor:
    """Return x1, y1, x2, y2 as centre x, y, width, height: [..., 4]."""
    first, last = found[..., :2], found[..., 2:]
    return torch.cat([(first + last) / 2, last - first], -1)


def corners(found: Tensor) -> Tensor:
    """Return centre x, y, width, height as x1, y1, x2, y2: [..., 4]."""
    return around(found[..., :2], found[..., 2:])


def detections(scores: Tensor, boxes: Tensor, loss: LossConfig, most: int = MOST_DETECTIONS) -> Sequence[Tensor]:
    """Return what a set of outputs has found in each image: class, score, x1, y1, x2, y2 by score, [n, 6].

    As the post-processing of DETR: with softmax each query is one object, of its best class; with sigmoid the best
    pairs of query and class count.
    """
    if loss.scores == "softmax":
        # without the last class, which is no object
        best, classes = scores.softmax(-1)[..., :-1].max(-1)
        queries = torch.arange(scores.shape[1], device=scores.device).expand_as(classes)
    else:
        # a query may be found as several classes
        best = scores.sigmoid().flatten(1)
        numbers = torch.arange(best.shape[1], device=scores.device).expand_as(best)
        queries, classes = numbers // scores.shape[-1], numbers % scores.shape[-1]
    found = []
    for image in range(len(scores)):
        top = best[image].topk(min(most, best.shape[1])).indices
        columns = classes[image, top, None], best[image, top, None], corners(boxes[image, queries[image, top]])
        found.append(torch.cat([column.to(boxes.dtype) for column in columns], 1))
    return found
