"""YOLOv5, YOLOv7, and YOLOv3 and v4 coded alike: objects matched with the anchors whose sides are like theirs.

    centre        (2 sigmoid - 0.5 + cell) x stride
    sides         (2 sigmoid)^2 x anchor
    matches       data/schema/anchor_matches.py; an object may have several, on several levels

    term          sum over                    divided by              weight
    boxes         1 - CIoU of matches         matches of the level    0.05
    classes       matches                     the same, x classes     0.5 x classes / 80; none of a single class
    objectness    all cells and anchors       cells, anchors, images  area / 640^2 x 4, 1, 0.4 by level

All terms are multiplied by 3 / levels, and the sums of a level are added up. The target of the objectness is the CIoU
of the match, at least 0, without gradient; of several matches of one cell and anchor, the greatest CIoU. Classes and
objectness are binary cross-entropies. The divisors are known before the forward pass, so the loss is a vector:

    [objectness, level 0, level 1, ...]  divided by  [images, matches of level 0, matches of level 1, ...]

Source: the formulas that https://docs.ultralytics.com/yolov5/tutorials/architecture_description publishes. An object
whose centre is exactly on the border of two cells counts once in its cell here.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from onward.trainer.config.losses import LossConfig
from onward.trainer.data.schema.anchor_matches import anchor_matches
from onward.trainer.model.losses.dense_heads.assigned import DividedLoss, around, ciou
from onward.trainer.model.losses.dense_heads.head import Head

OFFSET = 0.0
BOX_WEIGHT, CLASS_WEIGHT, USUAL_CLASSES, USUAL_SIDE, USUAL_LEVELS = 0.05, 0.5, 80, 640, 3
BALANCE_OF_THREE, BALANCE = (4.0, 1.0, 0.4), (4.0, 1.0, 0.25, 0.06, 0.02)
"""Weights of the objectness by level, that of the smallest cells first."""


def decode(head: Head) -> Tensor:
    """Return the corners of all boxes, in pixels: [B, P, 4]."""
    shifts, sides = (2 * head.codes.sigmoid()).chunk(2, -1)
    centres = head.points + (shifts - 0.5) * head.strides[:, None]
    return around(centres, sides.square() * head.anchors)


def confidence(head: Head) -> Tensor:
    """Return the probability of each class [B, P, C]."""
    assert head.objectness is not None
    return head.scores.sigmoid() * head.objectness.sigmoid()[..., None]


def loss(head: Head, labels: Tensor, config: LossConfig) -> DividedLoss:
    """Return the sums of the objectness and of each level, and what they are divided by. labels: [B, objects x 6]."""
    assert head.objectness is not None
    classes, corners, is_trained = head.objects(labels)
    found = decode(head)
    num_classes = head.scores.shape[-1]
    targets = torch.zeros_like(head.objectness)
    sums, counts = [], []
    for matches in anchor_matches(corners, is_trained, config, head.levels):
        rows = matches.rows[..., None]
        own = found.gather(1, rows.expand(-1, -1, 4))
        # where nothing matches, the box itself: the CIoU of any other may be infinite
        wanted = torch.where(matches.is_match[..., None], corners[:, matches.objects], own.detach())
        overlap = ciou(own, wanted)
        of_level = BOX_WEIGHT * ((1 - overlap) * matches.is_match).sum()
        if num_classes > 1:
            hits = F.one_hot(classes[:, matches.objects], num_classes).to(head.scores.dtype)
            scores = head.scores.gather(1, rows.expand(-1, -1, num_classes))
            entropy = F.binary_cross_entropy_with_logits(scores, hits, reduction="none")
            # classes / 80, of a mean over the classes
            of_level = of_level + CLASS_WEIGHT / USUAL_CLASSES * (entropy * matches.is_match[..., None]).sum()
        sums.append(of_level)
        counts.append(matches.is_match.sum())
        values = overlap.detach().clamp(min=0) * matches.is_match
        targets = targets.scatter_reduce(1, matches.rows, values, "amax")
    entropy = F.binary_cross_entropy_with_logits(head.objectness, targets, reduction="none")
    of_objects = (entropy * _cell_weights(head, config)).sum() * (head.size.prod() / USUAL_SIDE**2)
    images = of_objects.new_full((), len(entropy))
    return DividedLoss(torch.stack([of_objects, *sums]) * (USUAL_LEVELS / len(sums)), torch.stack([images, *counts]))


def _cell_weights(head: Head, config: LossConfig) -> Tensor:
    """Return the weight of the objectness of each prediction [P]: that of its level / predictions of the level."""
    weights = balance(config.strides)
    numbers = [height * width * len(own) for (height, width), own in zip(head.levels, config.anchors, strict=True)]
    return torch.cat([head.strides.new_full((n,), weight / n) for n, weight in zip(numbers, weights, strict=True)])


def balance(strides: Sequence[float]) -> list[float]:
    """Return the weight of the objectness of each level."""
    known = BALANCE_OF_THREE if len(strides) == len(BALANCE_OF_THREE) else BALANCE
    places = [sorted(strides).index(stride) for stride in strides]
    return [known[min(place, len(known) - 1)] for place in places]
