"""Rules for object detection: NonMaxSuppression, and RoiAlign with gradients, in plain torch calls."""

from __future__ import annotations

import torch

from onward.trainer.onnx_import.lowering.converter_table import Call, lower
from onward.trainer.onnx_import.tracing.values import NeedsRuntimeValues, Value


def box_corners(boxes: torch.Tensor, center_point_box: bool) -> torch.Tensor:
    """Return boxes [..., (y1, x1, y2, x2)], smaller corner first.

    center_point_box: they are given as (x centre, y centre, width, height), else as two corners in any order.
    """
    if center_point_box:
        middle = boxes[..., :2].flip(-1)
        # x before y becomes y before x, as in the corners
        half = boxes[..., 2:].flip(-1) / 2
        return torch.cat([middle - half, middle + half], -1)
    # any two opposite corners: the operator leaves their order open
    a = boxes[..., :2]
    b = boxes[..., 2:]
    return torch.cat([torch.minimum(a, b), torch.maximum(a, b)], -1)


def intersection_over_union(box: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    """Return the intersection over union of a box [4] with others [n, 4] -> [n]; 0 where they do not intersect."""
    # sides below 0 mean that the boxes do not meet; two of them would multiply to an area above 0
    sides = (torch.minimum(box[2:], others[:, 2:]) - torch.maximum(box[:2], others[:, :2])).clamp_min(0)
    common = sides.prod(-1)
    union = (box[2:] - box[:2]).prod() + (others[:, 2:] - others[:, :2]).prod(-1) - common
    # boxes without an area have no union, and do not overlap
    return torch.where(common > 0, common / union, 0.0)


def non_max_suppression(
    boxes: torch.Tensor,
    scores: torch.Tensor,
    count: int,
    *,
    iou: float,
    score_threshold: float | None,
    center_point_box: bool,
) -> torch.Tensor:
    """Return [chosen, (batch, class, box)]: the best boxes of each class without those that overlap a better one.

    boxes: [batch, boxes, 4]; scores: [batch, classes, boxes]. Two boxes overlap if their intersection over union
    exceeds `iou`. A score must exceed `score_threshold`; at most `count` boxes are chosen of each class.
    """
    kept: list[list[int]] = []
    # the result is indices, which have no gradient. On the host: a GPU would wait at each box for how many are left
    device = boxes.device
    boxes = boxes.detach().cpu()
    scores = scores.detach().cpu()
    boxes = box_corners(boxes, center_point_box)
    for sample, by_class in enumerate(scores):
        # greedy, best score first; equal scores in the order of the boxes
        for label, score in enumerate(by_class):
            order = torch.sort(score, descending=True, stable=True).indices
            left = order if score_threshold is None else order[score[order] > score_threshold]
            taken = 0
            while len(left) and taken < count:
                best = left[0]
                left = left[1:]
                kept.append([sample, label, int(best)])
                taken += 1
                # what overlaps a chosen box can no longer be chosen itself
                left = left[intersection_over_union(boxes[sample, best], boxes[sample, left]) <= iou]
    return torch.tensor(kept, dtype=torch.int64, device="cpu").reshape(-1, 3).to(device)


@lower("NonMaxSuppression", since=(10, 11))
def non_max_suppression_(
    c: Call, boxes: Value, scores: Value, count: Value = None, iou: Value = None, score_threshold: Value = None
) -> Value:
    if not isinstance(boxes, torch.Tensor) or not isinstance(scores, torch.Tensor):
        raise NeedsRuntimeValues("how many boxes are chosen is known only at run time")
    # without the operand no box is chosen, as the operator's text says: its default is 0
    most = 0 if count is None else int(c.number(count))
    limits = {
        "iou": 0.0 if iou is None else float(c.number(iou)),
        "score_threshold": None if score_threshold is None else float(c.number(score_threshold)),
    }
    return c(non_max_suppression, boxes, scores, most, center_point_box=bool(c.attr("center_point_box", 0)), **limits)


def bilinear_taps(at: torch.Tensor, length: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return (index, weight) of the two elements around each coordinate, all in the shape of `at`.

    A coordinate up to 1 beyond the border is clamped to it.
    """
    # points further outside than one pixel count as zero
    inside = (at >= -1) & (at <= length)
    at = at.clamp(0, length - 1)
    # the last pixel but one at most, so that its neighbour exists
    low = torch.floor(at).clamp(max=max(length - 2, 0))
    share = at - low
    high = (low + 1).clamp(max=length - 1)
    return [
        (low.to(torch.int64), torch.where(inside, 1 - share, 0.0)),
        (high.to(torch.int64), torch.where(inside, share, 0.0)),
    ]


def roi_align(
    x: torch.Tensor,
    rois: torch.Tensor,
    samples: torch.Tensor,
    size: tuple[int, int],
    *,
    ratio: int,
    scale: float,
    half_pixel: bool,
    use_max: bool,
) -> torch.Tensor:
    """Return [regions, channels, *size]: the mean (or maximum) of points interpolated in each cell of each region.

    x: [batch, channels, height, width]; rois: [regions, (x1, y1, x2, y2)]; samples: the batch index of each region.
    ratio: points along a side of a cell; 0: as many as a cell has pixels, which differs between regions.
    """
    # half_pixel moves the regions by half a pixel, so that the centre of a pixel is at an integer
    places = rois * scale - (0.5 if half_pixel else 0.0)
    pools = []
    for axis, cells in ((1, size[0]), (0, size[1])):  # rows, then columns
        begin = places[:, axis]
        extent = places[:, axis + 2] - places[:, axis]
        # without half_pixel a region is at least one pixel long, as version 10 has it
        extent = extent if half_pixel else extent.clamp_min(1.0)
        step = extent / cells
        # ratio 0: as many points as a cell is long in pixels, rounded up, for each region
        points = torch.full_like(step, ratio) if ratio > 0 else torch.ceil(step).clamp_min(0)
        most = ratio if ratio > 0 else max(int(points.max()) if len(points) else 0, 1)
        k = torch.arange(most, device=x.device)
        # points in the middle of equal parts of a cell; regions with fewer points than `most` are masked by `used`
        inner = (k + 0.5) * (step / points.clamp_min(1))[:, None]  # [regions, most]
        cell = torch.arange(cells, device=x.device) * step[:, None]
        at = begin[:, None, None] + cell[:, :, None] + inner[:, None]  # [regions, cells, most]
        pools.append((bilinear_taps(at, x.shape[2 if axis else 3]), k < points[:, None], points))
    # rows and columns are independent: a point is used if its row and its column are
    (down, in_rows, rows), (across, in_columns, columns) = pools
    used = (in_rows[:, None, :, None, None] & in_columns[:, None, None, None, :]).unsqueeze(1)
    terms = []  # each [regions, channels, rows, points down, columns, points across]
    # the four neighbours of each point, with their bilinear weights
    for i, wi in down:
        for j, wj in across:
            value = x[samples[:, None, None, None, None], :, i[:, :, :, None, None], j[:, None, None]]
            terms.append(value.movedim(-1, 1) * (wi[:, :, :, None, None] * wj[:, None, None]).unsqueeze(1))
    if use_max:  # ONNX takes the largest weighted neighbour, not the largest interpolated point
        best = torch.stack(terms).amax(0).masked_fill(~used, -torch.inf).amax((3, 5))
        return torch.where(used.any(5).any(3), best, 0.0)
    # the mean over the points that are used; regions without any have the value 0
    total = (terms[0] + terms[1] + terms[2] + terms[3]).masked_fill(~used, 0.0).sum((3, 5))
    return total / (rows * columns).clamp_min(1)[:, None, None, None]


@lower("RoiAlign", since=(10, 16, 22))
def roi_align_(c: Call, x: Value, rois: Value, samples: Value) -> Value:
    c.require("mode", "avg", "max")
    ratio = c.attr("sampling_ratio", 0)
    if ratio <= 0 and not isinstance(rois, torch.Tensor):
        raise NeedsRuntimeValues("how many points are read depends on the regions")
    # version 10 has no such attribute, and does not move the regions
    half_pixel = c.version > 10 and c.attr("coordinate_transformation_mode", "half_pixel") == "half_pixel"
    return c(
        roi_align,
        x,
        rois,
        samples,
        (c.attr("output_height", 1), c.attr("output_width", 1)),
        ratio=ratio,
        scale=c.attr("spatial_scale", 1.0),
        half_pixel=half_pixel,
        use_max=c.attr("mode", "avg") == "max",
    )
