"""CenterNet: a heat map of object centres for each class, and the size and exact centre of the object in each cell.

    target    1 in the cell of a centre, and a Gaussian around it as wide as a box may be moved at an IoU of 0.7
    classes   focal loss in which cells near a centre count less: (1 - target)^4
    boxes     L1 of width and height (0.1) and of the centre within the cell (1), in cells, where the centres are

Source: arXiv:1904.07850, the radius from arXiv:1808.01244. All is divided by the number of objects; the mean over the
two numbers of a size or centre is part of the terms.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from onward.trainer.config.losses import LossConfig
from onward.trainer.model.losses.dense_heads.assigned import DividedLoss, around
from onward.trainer.model.losses.dense_heads.head import Head

OFFSET = 0.0
LEAST_OVERLAP = 0.7
SIZE_WEIGHT = 0.1
CERTAIN = 1e-4
"""Probabilities are kept this far from 0 and 1."""


def decode(head: Head) -> Tensor:
    """Return the corners of all boxes, in pixels: [B, P, 4]."""
    shifts, sizes = head.codes.chunk(2, -1)
    centres = head.points + shifts * head.strides[:, None]
    return around(centres, sizes * head.strides[:, None])


def confidence(head: Head) -> Tensor:
    """Return the probability of each class [B, P, C], 0 where a cell beside it has a greater one."""
    width, height = (head.size / head.strides[0]).round().int().tolist()
    heat = head.scores.sigmoid()
    maps = heat.transpose(1, 2).reshape(len(heat), -1, height, width)
    peaks = F.max_pool2d(maps, 3, stride=1, padding=1).flatten(2).transpose(1, 2)
    return heat * (peaks == heat)


def loss(head: Head, labels: Tensor, config: LossConfig) -> DividedLoss:
    """Return the three terms, added up. labels: [B, objects x 6]."""
    classes, boxes, is_trained = head.objects(labels)
    stride = head.strides[0]
    # in cells
    centres = (boxes[..., :2] + boxes[..., 2:]) / 2 / stride
    sizes = (boxes[..., 2:] - boxes[..., :2]) / stride
    width, height = (head.size / stride).round()
    # a centre on the border of the image belongs to the last cell
    cells = torch.minimum(centres.floor(), torch.stack([width, height]) - 1).clamp(min=0)
    targets = _heat(head, cells, sizes, classes, is_trained)
    # the row of the cell in the table
    places = (cells[..., 1] * width + cells[..., 0]).long()
    found = head.codes.gather(1, places[..., None].expand(-1, -1, 4))
    errors = (found - torch.cat([centres - cells, sizes], -1)).abs() * is_trained[..., None]
    of_boxes = (errors[..., :2].sum() + SIZE_WEIGHT * errors[..., 2:].sum()) / 2
    return DividedLoss(_focal(head.scores, targets) + of_boxes, is_trained.sum())


def _focal(scores: Tensor, targets: Tensor) -> Tensor:
    probability = scores.sigmoid().clamp(CERTAIN, 1 - CERTAIN)
    is_centre = targets == 1
    of_centres = -probability.log() * (1 - probability) ** 2
    of_others = -(1 - probability).log() * probability**2 * (1 - targets) ** 4
    return torch.where(is_centre, of_centres, of_others).sum()


@torch.no_grad()
def _heat(head: Head, cells: Tensor, sizes: Tensor, classes: Tensor, is_trained: Tensor) -> Tensor:
    """Return the targets [B, P, C]: of objects that meet, the greater one."""
    # in whole cells, as the published code draws it
    radius = gaussian_radius(sizes.ceil()).floor().clamp(min=0)[..., None]
    apart = head.points / head.strides[:, None] - cells[:, :, None]
    # a diameter is six deviations
    sigma = (2 * radius + 1) / 6
    values = (-apart.square().sum(-1) / (2 * sigma**2)).exp()
    values = values * (apart.abs().amax(-1) <= radius) * is_trained[..., None]
    targets = torch.zeros_like(head.scores).transpose(1, 2)
    index = classes[..., None].expand(-1, -1, values.shape[-1])
    return targets.scatter_reduce(1, index, values, "amax").transpose(1, 2)


def gaussian_radius(sizes: Tensor) -> Tensor:
    """Return how far two corners of boxes [..., 2] may be moved so that the IoU stays 0.7, the least of three ways.

    The formulas are those of CornerNet's code, with its roots: every repository of the family trains with them.
    """
    width, height = sizes.unbind(-1)
    total, area = width + height, width * height
    # one corner inside and one outside; both inside; both outside: a r^2 + b r + c = 0
    overlap = LEAST_OVERLAP
    forms = (
        (1.0, total, area * (1 - overlap) / (1 + overlap)),
        (4.0, 2 * total, (1 - overlap) * area),
        (4 * overlap, -2 * overlap * total, (overlap - 1) * area),
    )
    radii = [(b + (b**2 - 4 * a * c).clamp(min=0).sqrt()) / 2 for a, b, c in forms]
    return torch.stack(radii).amin(0)
