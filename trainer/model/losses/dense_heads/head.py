"""The raw outputs of a dense detector as tables: a row for each prediction, the levels one after the other.

    level       raw outputs [B, anchors x channels, H, W]        rows
    stride 8    [B, 4, 40, 40]   [B, 20, 40, 40]                 0 .. 1599
    stride 16   [B, 4, 20, 20]   [B, 20, 20, 20]                 1600 .. 1999
    stride 32   [B, 4, 10, 10]   [B, 20, 10, 10]                 2000 .. 2099
                boxes            scores

A level has one tensor for each role, in the order of the family, or one tensor with the channels of all roles. Rows of
one level are in the order height, width, anchor. All lengths are in pixels of the model's input.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from onward.trainer.config.losses import LossConfig
from onward.trainer.data.schema.anchor_matches import objects_of
from onward.trainer.data.schema.box_cells import BOX_NUMBERS
from onward.trainer.data.schema.detection_grids import Cells, size_of
from onward.trainer.errors import ConfigError, DataError


@dataclass(frozen=True)
class Head:
    """The predictions of one micro-batch: B images, P predictions in each."""

    codes: Tensor
    """What the box of each prediction is computed from: [B, P, 4], or [B, P, 4 x bins] with distances of bins. A family
    with outputs for sizes has them behind those of the role boxes."""
    scores: Tensor
    """Logits of the classes [B, P, C]."""
    objectness: Tensor | None
    """Logits of whether there is an object, or of how central it is: [B, P]; None for families without it."""
    points: Tensor
    """The point that the code refers to, x and y [P, 2]."""
    strides: Tensor
    """The side of the cell [P]."""
    anchors: Tensor
    """Width and height of the anchor box [P, 2]; the sides of the cell where there are no anchors."""
    size: Tensor
    """Width and height of the model's input [2]."""
    levels: Sequence[Cells]
    """Height and width of each level, in cells."""

    def objects(self, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return classes, corners in pixels and which objects are trained on, as `objects_of`. labels: [B, M x 6]."""
        return objects_of(labels, self.size)


def read_head(outputs: Sequence[Tensor], loss: LossConfig, *, offset: float) -> Head:
    """Return the raw outputs [B, channels, H, W] of all levels as one table.

    offset: where the point of a cell is, in cells: 0.5 = its centre. Raises ConfigError for outputs that do not fit the
    strides and anchors of the loss.
    """
    roles = loss.rule.roles
    per_level = _tensors_of_a_level(outputs, loss, len(roles))
    tables: list[list[Tensor]] = []
    points, strides, anchors, levels = [], [], [], list[Cells]()
    for level, stride in enumerate(loss.strides):
        raw = [outputs[level * per_level + place].float() for place in range(per_level)]
        height, width = raw[0].shape[2:]
        sides = loss.anchors[level] if loss.anchors else ((stride, stride),)
        rows = [_rows(value, len(sides), loss, level) for value in raw]
        tables.append(_of_roles(rows, roles, loss))
        own_points, own_anchors = _grid(height, width, sides, stride, offset, raw[0])
        points.append(own_points)
        anchors.append(own_anchors)
        strides.append(own_points.new_full((len(own_points),), stride))
        levels.append((height, width))
    of_image = size_of(levels, loss.strides)
    _check_strides(levels, loss, of_image)
    size = outputs[0].new_tensor(of_image[::-1], dtype=torch.float32)
    columns: dict[str, Tensor] = dict(
        zip(roles, (torch.cat(each, 1) for each in zip(*tables, strict=True)), strict=True)
    )
    objectness = columns["objectness"][..., 0] if "objectness" in columns else None
    codes = torch.cat([columns[role] for role in ("boxes", "sizes") if role in columns], -1)
    grid = torch.cat(points), torch.cat(strides), torch.cat(anchors)
    return Head(codes, columns["scores"], objectness, *grid, size, levels)


def _check_strides(levels: Sequence[Cells], loss: LossConfig, sides: tuple[float, float]) -> None:
    """Raise ConfigError unless all levels are grids of one input, but for cells that reach beyond it."""
    for cells, stride in zip(levels, loss.strides, strict=True):
        # a cell that is wholly outside of the input belongs to a larger one
        if (np.array(cells) * stride - sides >= stride).any():
            raise ConfigError(
                f"loss.strides {list(loss.strides)}: a level of {cells[0]} x {cells[1]} cells is no grid of an input "
                f"of {sides[0]:g} x {sides[1]:g} pixels, as another level is; correct loss.strides or loss.output"
            )


def _tensors_of_a_level(outputs: Sequence[Tensor], loss: LossConfig, num_roles: int) -> int:
    per_level, others = divmod(len(outputs), len(loss.strides))
    if others or per_level not in (1, num_roles):
        raise ConfigError(
            f"loss.output names {len(outputs)} tensors and loss.strides {len(loss.strides)} levels; {loss.name} reads "
            f"1 or {num_roles} tensors for each level"
        )
    if loss.anchors and len(loss.anchors) != len(loss.strides):
        raise ConfigError(f"loss.anchors has {len(loss.anchors)} levels, but loss.strides {len(loss.strides)}")
    for name, value in zip(loss.outputs, outputs, strict=True):
        if value.ndim != 4:
            raise ConfigError(
                f"loss {loss.name} reads raw outputs [batch, channels, height, width], but {name!r} is "
                f"{list(value.shape)}; name the results of the last convolutions in loss.output"
            )
    return per_level


def _rows(value: Tensor, anchors: int, loss: LossConfig, level: int) -> Tensor:
    """Return [B, anchors x K, H, W] as [B, H x W x anchors, K]."""
    batch, channels, height, width = value.shape
    if channels % anchors:
        raise ConfigError(
            f"an output of level {level} has {channels} channels, which {anchors} anchors do not divide; correct "
            "loss.anchors"
        )
    by_anchor = value.reshape(batch, anchors, channels // anchors, height, width)
    return by_anchor.permute(0, 3, 4, 1, 2).reshape(batch, height * width * anchors, channels // anchors)


def _of_roles(rows: list[Tensor], roles: Mapping[str, int], loss: LossConfig) -> list[Tensor]:
    """Return one table for each role; a single one with the channels of all roles is divided."""
    if len(rows) == len(roles):
        for (role, channels), table in zip(roles.items(), rows, strict=True):
            if channels and table.shape[-1] != channels:
                raise ConfigError(
                    f"loss.output: {loss.name} reads {', '.join(roles)} of each level in this order, and {role} have "
                    f"{channels} channels for each anchor, not {table.shape[-1]}; correct the order"
                )
        return rows
    (table,) = rows
    rest = table.shape[-1] - sum(roles.values())
    if rest < 1:
        raise ConfigError(
            f"an output of loss {loss.name} has {table.shape[-1]} channels for each anchor; boxes, objectness and at "
            f"least one class need {sum(roles.values()) + 1}"
        )
    return list(torch.split(table, [channels or rest for channels in roles.values()], -1))


def _grid(
    height: int, width: int, sides: Sequence[Sequence[float]], stride: float, offset: float, like: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the points [H x W x anchors, 2] and the sides of the anchors, alike."""
    rows = torch.arange(height, device=like.device, dtype=torch.float32)
    columns = torch.arange(width, device=like.device, dtype=torch.float32)
    y, x = torch.meshgrid(rows, columns, indexing="ij")
    points = (torch.stack([x, y], -1).reshape(-1, 1, 2) + offset) * stride
    own = torch.tensor(sides, device=like.device, dtype=torch.float32)
    return points.expand(-1, len(own), 2).reshape(-1, 2), own.expand(len(points), -1, 2).reshape(-1, 2)


def check_classes(labels: Tensor, num_classes: int, name: str) -> None:
    """Raise DataError for boxes of classes that the scores do not have."""
    classes = labels.reshape(len(labels), -1, BOX_NUMBERS)[..., 0]
    if classes.numel() and (most := int(classes.max())) >= num_classes:
        raise DataError(
            f"a box has class {most}, but the scores of loss {name} have the classes 0..{num_classes - 1}; name the "
            "classes in data.classes, or give the model a new head (model.num_classes)"
        )
