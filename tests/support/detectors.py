"""Small detectors with a grid, whose files decode their boxes as those of published families do, in their own nodes."""

from __future__ import annotations

import functools
import io
import warnings
from collections.abc import Callable
from typing import Any

import onnx
import torch
from onnx import TensorProto, helper
from torch import Tensor, nn

SIDE = 64
CLASSES = 2
STRIDES = (8, 16, 32)
ANCHORS = tuple(tuple((3.0 * s * w, 3.0 * s / w) for w in (0.7, 1.0, 1.4)) for s in (8, 16, 32))
HEADS = {
    "yolov5": (3 * (5 + CLASSES),),
    "yolov8": (64, CLASSES),
    "yolov10": (64, CLASSES),
    "yolo26": (4, CLASSES),
    "yolo26_end2end": (4, CLASSES),
    "yolox": (4, 1, CLASSES),
    "fcos": (4, 1, CLASSES),
    "retinanet": (3 * 4, 3 * CLASSES),
    "ssd": (3 * 4, 3 * (CLASSES + 1)),
    "centernet": (CLASSES, 2, 2),
}


def _layer(before: int, after: int, stride: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(before, after, 3, stride, 1), nn.ReLU())


class Detector(nn.Module):
    """A trunk, a convolution for each raw output of each level, and the decoding of the family."""

    def __init__(self, family: str, width: int = 16) -> None:
        super().__init__()
        self.decoded = DECODED[family]
        family = family.split()[0]
        self.trunk = nn.Sequential(_layer(3, width, 2), _layer(width, width, 2), _layer(width, 2 * width, 2))
        levels = 1 if family == "centernet" else 3
        self.down = nn.ModuleList(_layer(2 * width, 2 * width, 2) for _ in range(levels - 1))
        self.before = nn.ModuleList(
            nn.ModuleList(_layer(2 * width, 2 * width, 1) for _ in HEADS[family]) for _ in range(levels)
        )
        self.heads = nn.ModuleList(
            nn.ModuleList(nn.Conv2d(2 * width, channels, 1) for channels in HEADS[family]) for _ in range(levels)
        )
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for weight in self.parameters():
                fan_in = weight[0].numel() if weight.ndim > 1 else 1
                scale = (2 / fan_in) ** 0.5 if weight.ndim > 1 else 0.02
                weight.copy_(torch.randn(weight.shape, generator=generator) * scale)
            for level in self.heads:
                for head, channels in zip(level, HEADS[family], strict=True):
                    # few objects, as detectors begin
                    if channels % CLASSES == 0 and channels in (CLASSES, 3 * CLASSES):
                        head.bias -= 4.0
                if family.startswith("yolo26"):
                    # distances, which are positive
                    level[0].bias += 1.0
            if family == "centernet":
                # sizes and offsets, of which the sizes are positive
                self.heads[0][1].bias += 6.0
                self.heads[0][2].bias += 4.0

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        features = [self.trunk(x)]
        for layer in self.down:
            features.append(layer(features[-1]))
        raw = [
            [head(layer(feature)) for head, layer in zip(heads, layers, strict=True)]
            for feature, heads, layers in zip(features, self.heads, self.before, strict=True)
        ]
        return self.decoded(raw)


def _grid(raw: list[list[Tensor]], offset: float) -> tuple[Tensor, Tensor]:
    points, strides = [], []
    for (first, *_), stride in zip(raw, STRIDES, strict=False):
        height, width = int(first.shape[2]), int(first.shape[3])
        y, x = torch.meshgrid(torch.arange(height) + offset, torch.arange(width) + offset, indexing="ij")
        points.append(torch.stack([x, y], -1).reshape(-1, 2))
        strides.append(torch.full((height * width, 1), float(stride)))
    return torch.cat(points), torch.cat(strides)


def _rows(raw: list[list[Tensor]], kind: int) -> Tensor:
    """[B, channels, H, W] of all levels as [B, cells, channels]."""
    return torch.cat([level[kind].flatten(2) for level in raw], 2).transpose(1, 2)


def _by_anchor(raw: list[list[Tensor]], kind: int, per_cell: int = 3) -> Tensor:
    found = []
    for level in raw:
        _, channels, height, width = level[kind].shape
        # as torchvision's: batch and grid from shapes, and the anchors open
        table = level[kind].view(level[kind].shape[0], -1, int(channels) // per_cell, height, width)
        found.append(
            table.permute(0, 3, 4, 1, 2).reshape(-1, int(height * width) * per_cell, int(channels) // per_cell)
        )
    return torch.cat(found, 1)


def _distances(raw: list[list[Tensor]]) -> tuple[Tensor, Tensor]:
    """Corners in pixels [B, 4, cells], and probabilities [B, classes, cells]."""
    points, strides = _grid(raw, 0.5)
    cells = torch.cat([level[0].flatten(2) for level in raw], 2)
    if cells.shape[1] == 64:
        bins = cells.reshape(-1, 4, 16, cells.shape[2]).softmax(2)
        cells = (bins * torch.arange(16.0).reshape(1, 1, 16, 1)).sum(2)
    corners = torch.cat([points.T - cells[:, :2], points.T + cells[:, 2:]], 1) * strides.T
    return corners, torch.cat([level[1].flatten(2) for level in raw], 2).sigmoid()


def _yolov8(raw: list[list[Tensor]]) -> tuple[Tensor, ...]:
    """[B, 4 + classes, cells]: centre and size in pixels, and probabilities."""
    corners, scores = _distances(raw)
    first, last = corners[:, :2], corners[:, 2:]
    return (torch.cat([(first + last) / 2, last - first, scores], 1),)


def _one_to_one(raw: list[list[Tensor]]) -> tuple[Tensor, ...]:
    """[B, 20, 6]: corners in pixels, score and class of the greatest scores, as YOLOv10 and YOLO26 choose them."""
    corners, scores = (value.transpose(1, 2) for value in _distances(raw))
    rows = scores.amax(-1).topk(20).indices
    values, pairs = scores.gather(1, rows[..., None].expand(-1, -1, CLASSES)).flatten(1).topk(20)
    chosen = rows.gather(1, pairs // CLASSES)[..., None].expand(-1, -1, 4)
    return (torch.cat([corners.gather(1, chosen), values[..., None], (pairs % CLASSES)[..., None].float()], -1),)


def _yolov5(raw: list[list[Tensor]]) -> tuple[Tensor, ...]:
    """[B, cells x anchors, 5 + classes]: centre and size in pixels, objectness, and probabilities."""
    found = []
    for (first,), stride, sides in zip(raw, STRIDES, ANCHORS, strict=True):
        height, width = int(first.shape[2]), int(first.shape[3])
        y, x = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
        values = first.reshape(-1, len(sides), 5 + CLASSES, height, width).permute(0, 1, 3, 4, 2).sigmoid()
        centres, sizes, others = values.split((2, 2, 1 + CLASSES), -1)
        centres = (centres * 2 - 0.5 + torch.stack([x, y], -1)) * stride
        sizes = (sizes * 2) ** 2 * torch.tensor(sides).reshape(1, len(sides), 1, 1, 2)
        found.append(torch.cat([centres, sizes, others], -1).reshape(-1, len(sides) * height * width, 5 + CLASSES))
    return (torch.cat(found, 1),)


def _yolox(raw: list[list[Tensor]]) -> tuple[Tensor, ...]:
    """[B, cells, 5 + classes]: centre and size in pixels, objectness, and probabilities."""
    points, strides = _grid(raw, 0.0)
    code = _rows(raw, 0)
    boxes = torch.cat([(code[..., :2] + points) * strides, code[..., 2:].exp() * strides], -1)
    return (torch.cat([boxes, _rows(raw, 1).sigmoid(), _rows(raw, 2).sigmoid()], -1),)


def _yolox_coded(raw: list[list[Tensor]]) -> tuple[Tensor, ...]:
    """The same without decoding, as the export of its repository writes it by default."""
    return (torch.cat([_rows(raw, 0), _rows(raw, 1).sigmoid(), _rows(raw, 2).sigmoid()], -1),)


def _fcos(raw: list[list[Tensor]]) -> tuple[Tensor, ...]:
    points, strides = _grid(raw, 0.0)
    sides = torch.cat([level[0].relu().flatten(2) for level in raw], 2).transpose(1, 2) * strides
    points = points * strides
    scores = (_rows(raw, 1).sigmoid() * _rows(raw, 2).sigmoid()).sqrt()
    return torch.cat([points - sides[..., :2], points + sides[..., 2:]], -1), scores


def _anchored(raw: list[list[Tensor]], offset: float, scales: tuple[float, float]) -> Tensor:
    """[B, cells x anchors, 4]: corners in pixels."""
    points, strides = _grid(raw, offset)
    number = len(ANCHORS[0])
    sides = []
    for (first, *_), own in zip(raw, ANCHORS, strict=True):
        sides.append(torch.tensor(own).repeat(int(first.shape[2] * first.shape[3]), 1))
    anchors = torch.cat(sides)
    middles = (points * strides).repeat_interleave(number, 0)
    code = _by_anchor(raw, 0)
    centres = middles + code[..., :2] / scales[0] * anchors
    halves = (code[..., 2:] / scales[1]).exp() * anchors / 2
    return torch.cat([centres - halves, centres + halves], -1)


def _retinanet(raw: list[list[Tensor]]) -> tuple[Tensor, ...]:
    return _anchored(raw, 0.0, (1.0, 1.0)), _by_anchor(raw, 1).sigmoid()


def _ssd(raw: list[list[Tensor]]) -> tuple[Tensor, ...]:
    """Corners in shares of the image, and probabilities with the background in front."""
    return _anchored(raw, 0.5, (10.0, 5.0)) / SIDE, _by_anchor(raw, 1).softmax(-1)


def _centernet(raw: list[list[Tensor]]) -> tuple[Tensor, ...]:
    """[B, 20, 6]: corners in pixels, score and class of the greatest peaks of the heat map."""
    heat, sizes, offsets = raw[0]
    heat = heat.sigmoid()
    peaks = heat * (nn.functional.max_pool2d(heat, 3, 1, 1) == heat)
    height, width = int(heat.shape[2]), int(heat.shape[3])
    scores, places = peaks.flatten(1).topk(20)
    classes, cells = places // (height * width), places % (height * width)
    index = cells[..., None].expand(-1, -1, 2)
    own = [value.flatten(2).transpose(1, 2).gather(1, index) for value in (offsets, sizes)]
    centres = (torch.stack([cells % width, cells // width], -1) + own[0]) * STRIDES[0]
    halves = own[1] * STRIDES[0] / 2
    columns = [centres - halves, centres + halves, scores[..., None], classes[..., None].float()]
    return (torch.cat(columns, -1),)


DECODED: dict[str, Callable[[list[list[Tensor]]], tuple[Tensor, ...]]] = {
    "yolov5": _yolov5,
    "yolov8": _yolov8,
    "yolov10": _one_to_one,
    "yolo26": _yolov8,
    "yolo26_end2end": _one_to_one,
    "yolox": _yolox,
    "yolox coded": _yolox_coded,
    "fcos": _fcos,
    "retinanet": _retinanet,
    "ssd": _ssd,
    "centernet": _centernet,
}


def detector_file(family: str) -> onnx.ModelProto:
    """The file of a small detector: input images [batch, 3, SIDE, SIDE], outputs as the family has them."""
    return onnx.load_from_string(_exported(family))


@functools.cache
def _exported(family: str) -> bytes:
    module = Detector(family).eval()
    names = ["boxes", "scores"] if family in ("fcos", "retinanet", "ssd") else ["found"]
    content = io.BytesIO()
    with warnings.catch_warnings(action="ignore"):
        torch.onnx.export(
            module,
            (torch.zeros(2, 3, SIDE, SIDE),),
            content,
            dynamo=False,
            opset_version=17,
            input_names=["image"],
            output_names=names,
            dynamic_axes={name: {0: "batch"} for name in ("image", *names)},
        )
    return content.getvalue()


PIXEL_MEAN = (0.4, 0.5, 0.6)
PIXEL_STD = (0.2, 0.25, 0.3)
INPUT = (36, 48)
"""Height and width of the input of `image_file`, which is resized to 48 x 64 and padded to SIDE."""


class _OfOneImage(nn.Module):
    """A detector that normalises, resizes and pads one image, and finds the boxes in its pixels, as torchvision's."""

    def __init__(self, family: str) -> None:
        super().__init__()
        self.detector = Detector(family)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        mean, std = (torch.tensor(values).reshape(3, 1, 1) for values in (PIXEL_MEAN, PIXEL_STD))
        images = nn.functional.interpolate(((x - mean) / std)[None], scale_factor=SIDE / INPUT[1], mode="bilinear")
        images = nn.functional.pad(images, (0, 0, 0, SIDE - SIDE * INPUT[0] // INPUT[1]))
        boxes, scores = self.detector(images)
        return boxes[0] * (INPUT[1] / SIDE), scores[0]


def image_file(family: str) -> onnx.ModelProto:
    """The file of `retinanet` or `fcos` for one image: [3, 36, 48] -> boxes [n, 4], scores [n, CLASSES]."""
    content = io.BytesIO()
    with warnings.catch_warnings(action="ignore"):
        torch.onnx.export(
            _OfOneImage(family).eval(),
            (torch.zeros(3, *INPUT),),
            content,
            dynamo=False,
            opset_version=17,
            input_names=["image"],
            output_names=["boxes", "scores"],
        )
    return onnx.load_from_string(content.getvalue())


RETURNED: dict[str, list[tuple[str, list[str], str, dict[str, Any]]]] = {
    "boxes": [],
    "table": [("Concat", ["chosen", "of each", "class of each"], "found", {"axis": 1})],
    "table of a batch": [
        ("Concat", ["chosen", "of each", "class of each"], "one", {"axis": 1}),
        ("Unsqueeze", ["one", "zero"], "found", {}),
    ],
    "table with the image": [("Concat", ["image of each", "chosen", "of each", "class of each"], "found", {"axis": 1})],
    "choice": [],
    "three": [("Add", ["classes", "one class"], "labels", {}), ("Identity", ["scored"], "scored boxes", {})],
}
"""What a file with a selection returns -> the nodes that make it: operator, inputs, output, attributes."""


def with_selection(
    model: onnx.ModelProto, returns: str = "boxes", *, overlap: float = 0.5, least: float = 0.05, most: int = 50
) -> onnx.ModelProto:
    """The file of `retinanet` or `fcos` with NonMaxSuppression behind it: the boxes of one image that are kept.

    returns: the form of its outputs. "three" are boxes, labels and scores as torchvision has them: the labels from 1.
    "choice" are all boxes and scores, and the numbers of those that NonMaxSuppression keeps.
    """
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    graph = copy.graph
    numbers = {"most": most, "third": 2, "second": 1, "first": 0, "row": -1, "zero": 0, "one class": 1}
    for name, value in numbers.items():
        graph.initializer.append(helper.make_tensor(name, TensorProto.INT64, [1], [value]))
    for name, share in {"overlap": overlap, "least": least}.items():
        graph.initializer.append(helper.make_tensor(name, TensorProto.FLOAT, [1], [share]))
    graph.initializer.append(helper.make_tensor("column", TensorProto.INT64, [2], [-1, 1]))
    nodes = [
        ("Transpose", ["scores"], "by_class", {"perm": [0, 2, 1]}),
        ("NonMaxSuppression", ["boxes", "by_class", "most", "overlap", "least"], "kept", {}),
        ("Gather", ["kept", "third"], "places", {"axis": 1}),
        ("Reshape", ["places", "row"], "flat", {}),
        ("Squeeze", ["boxes", "zero"], "of_one", {}),
        ("Gather", ["of_one", "flat"], "chosen", {"axis": 0}),
    ]
    if returns != "boxes":
        nodes += [
            ("Gather", ["kept", "second"], "class column", {"axis": 1}),
            ("Gather", ["kept", "first"], "image column", {"axis": 1}),
            ("Cast", ["class column"], "class of each", {"to": TensorProto.FLOAT}),
            ("Cast", ["image column"], "image of each", {"to": TensorProto.FLOAT}),
            ("Reshape", ["class column", "row"], "classes", {}),
            ("Concat", ["image column", "class column", "places"], "triples", {"axis": 1}),
            ("GatherND", ["by_class", "triples"], "scored", {}),
            ("Reshape", ["scored", "column"], "of each", {}),
        ]
    nodes += RETURNED[returns]
    graph.node.extend(helper.make_node(kind, read, [made], **given) for kind, read, made, given in nodes)
    del graph.output[:]
    outputs = {
        "boxes": ["chosen"],
        "choice": ["boxes", "scores", "kept"],
        "three": ["chosen", "labels", "scored boxes"],
    }.get(returns, ["found"])
    for name in outputs:
        kind = TensorProto.INT64 if name in ("labels", "kept") else TensorProto.FLOAT
        graph.output.append(helper.make_tensor_value_info(name, kind, None))
    return copy
