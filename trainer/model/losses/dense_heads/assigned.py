"""What a loss of a dense detector returns, and the box arithmetic that several families share."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from onward.trainer.onnx_graph.torchvision_import import import_torchvision

EPSILON = 1e-7
"""Added to divisors, as in torchvision."""


class DividedLoss(NamedTuple):
    """A sum whose divisor depends on what the model has predicted, or on which anchors meet an object.

    Of a loss of several terms (`LossConfig.num_terms`) both are vectors, and the loss of a step adds the terms up.
    """

    total: Tensor
    """A scalar, differentiable."""
    divisor: Tensor
    """A scalar without gradient. The loss of a step is the sum of the totals / max(1, the sum of the divisors)."""


def box_operations() -> Any:
    """Return torchvision.ops."""
    import_torchvision()
    from torchvision import ops

    return ops


def inside(points: Tensor, boxes: Tensor, least: float = 0.0) -> Tensor:
    """Return which points [P, 2] are inside which boxes [B, M, 4], by more than `least`: bool [B, M, P]."""
    return distances(points, boxes[:, :, None]).amin(-1) > least


def distances(points: Tensor, boxes: Tensor) -> Tensor:
    """Return how far the points [P, 2] are from left, top, right and bottom of boxes [..., P or 1, 4]: [..., P, 4]."""
    return torch.cat([points - boxes[..., :2], boxes[..., 2:] - points], -1)


def of_distances(points: Tensor, found: Tensor) -> Tensor:
    """Return the corners of boxes that end so far left, top, right and bottom of the points: [..., P, 4]."""
    return torch.cat([points - found[..., :2], points + found[..., 2:]], -1)


def of_offsets(codes: Tensor, points: Tensor, anchors: Tensor, scales: Tensor) -> Tensor:
    """Return the corners of boxes coded as offsets from anchors (Faster R-CNN, arXiv:1506.01497): [..., P, 4].

    codes: shift of the centre in sides of the anchor, logarithm of the ratio of sides, both multiplied by `scales` [4].
    """
    shifts, sides = (codes / scales).chunk(2, -1)
    # as in torchvision: no box is more than 62.5 times as large as its anchor
    greatest = torch.log(torch.tensor(1000.0 / 16, device=codes.device))
    return around(points + shifts * anchors, anchors * sides.clamp(max=greatest).exp())


def to_offsets(boxes: Tensor, points: Tensor, anchors: Tensor, scales: Tensor) -> Tensor:
    """Return the codes of boxes [..., P, 4], the reverse of `of_offsets`."""
    first, last = boxes.chunk(2, -1)
    shifts = ((first + last) / 2 - points) / anchors
    return torch.cat([shifts, ((last - first) / anchors).log()], -1) * scales


def around(centres: Tensor, sides: Tensor) -> Tensor:
    """Return the corners of boxes, [..., 4], with these centres and sides, [..., 2]."""
    return torch.cat([centres - sides / 2, centres + sides / 2], -1)


def overlaps(ours: Tensor, theirs: Tensor) -> Tensor:
    """Return the intersection over union of boxes [..., 4], paired by broadcasting; 0 of two without any area.

    Written out, as `ciou` and `giou` are: torchvision's losses do not broadcast, and select by values, which the
    estimate of memory cannot follow.
    """
    common, union = _areas(ours, theirs)
    return common / union.clamp(min=1e-16)


def giou(ours: Tensor, theirs: Tensor) -> Tensor:
    """Return the generalised intersection over union (arXiv:1902.09630) of boxes [..., 4], paired by broadcasting."""
    common, union = _areas(ours, theirs)
    hull = _hull(ours, theirs).prod(-1)
    return common / (union + EPSILON) - (hull - union) / (hull + EPSILON)


def ciou(ours: Tensor, theirs: Tensor) -> Tensor:
    """Return the complete intersection over union (arXiv:1911.08287) of boxes [..., 4], paired by broadcasting."""
    common, union = _areas(ours, theirs)
    iou = common / (union + EPSILON)
    diagonal = _hull(ours, theirs).square().sum(-1) + EPSILON
    apart = ((ours[..., :2] + ours[..., 2:] - theirs[..., :2] - theirs[..., 2:]) / 2).square().sum(-1)
    angles = []
    for boxes in (ours, theirs):
        width, height = (boxes[..., 2:] - boxes[..., :2]).unbind(-1)
        angles.append((width / (height + EPSILON)).atan())
    aspect = (4 / math.pi**2) * (angles[0] - angles[1]).square()
    with torch.no_grad():
        weight = aspect / (1 - iou + aspect + EPSILON)
    return iou - apart / diagonal - weight * aspect


def _areas(ours: Tensor, theirs: Tensor) -> tuple[Tensor, Tensor]:
    """Return the areas of intersections and unions."""
    first = torch.maximum(ours[..., :2], theirs[..., :2])
    last = torch.minimum(ours[..., 2:], theirs[..., 2:])
    common = (last - first).clamp(min=0).prod(-1)
    areas = [(boxes[..., 2:] - boxes[..., :2]).prod(-1) for boxes in (ours, theirs)]
    return common, areas[0] + areas[1] - common


def _hull(ours: Tensor, theirs: Tensor) -> Tensor:
    """Return the sides of the smallest boxes around both: [..., 2]."""
    first = torch.minimum(ours[..., :2], theirs[..., :2])
    return torch.maximum(ours[..., 2:], theirs[..., 2:]) - first


def classes_of(assigned: Tensor, classes: Tensor, num_classes: int) -> Tensor:
    """Return the class of each prediction as 0 and 1: [B, P, C], all 0 where it has no object.

    assigned: the place of its object among the objects [B, P], -1 = none. classes: of the objects, int64 [B, M].
    """
    own = classes.gather(1, assigned.clamp(min=0))
    return F.one_hot(own, num_classes) * (assigned >= 0)[..., None]


def boxes_of(assigned: Tensor, boxes: Tensor) -> Tensor:
    """Return the box of the object of each prediction [B, P, 4], of the first object where it has none."""
    return boxes.gather(1, assigned.clamp(min=0)[..., None].expand(-1, -1, 4))


def focal_terms(scores: Tensor, hits: Tensor, *, alpha: float, gamma: float) -> Tensor:
    """Return the focal loss (arXiv:1708.02002) of yes-or-no scores, of each by itself."""
    terms: Tensor = box_operations().sigmoid_focal_loss(scores, hits, alpha, gamma, reduction="none")
    return terms
