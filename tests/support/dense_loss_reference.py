"""Write the loss and the gradients of ultralytics or YOLOX for raw outputs and boxes in an .npz, where they are.

python dense_loss_reference.py GIVEN.npz NAME WRITTEN.npz

NAME: of the loss. given: output 0, 1, ... of all levels, labels [B, objects x 6] and strides.
"""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from onward.trainer.onnx_graph.torchvision_import import import_torchvision

GAINS = SimpleNamespace(box=7.5, cls=0.5, dfl=1.5)
ASSIGNED = {"yolov8": (10, None), "yolo26": (10, None), "yolov10": (1, None), "yolo26_end2end": (7, 1)}
"""Predictions of an object: as E2EDetectLoss (YOLOv10) and E2ELoss (YOLO26) have them for their one-to-one heads."""


def centres(objects: Tensor) -> Tensor:
    """Centre and size of objects [n, 6], in shares of the image."""
    first, last = objects[:, 1:3], objects[:, 3:5]
    return torch.cat([(first + last) / 2, last - first], 1)


def ultralytics_loss(kind: str, outputs: list[Tensor], labels: list[Tensor], strides: Tensor) -> Tensor:
    from ultralytics.utils.loss import v8DetectionLoss  # type: ignore[import-not-found]

    boxes, scores = outputs[::2], outputs[1::2]
    model: Any = torch.nn.Linear(1, 1)
    model.args = GAINS
    model.model = [SimpleNamespace(stride=strides, nc=scores[0].shape[1], reg_max=boxes[0].shape[1] // 4)]
    first, second = ASSIGNED[kind]
    images = [image for image, objects in enumerate(labels) for _ in objects]
    objects = torch.cat(labels)
    batch = {"batch_idx": torch.tensor(images), "cls": objects[:, 0], "bboxes": centres(objects)}
    found = {
        "boxes": torch.cat([each.flatten(2) for each in boxes], 2),
        "scores": torch.cat([each.flatten(2) for each in scores], 2),
        "feats": boxes,
    }
    total, _ = v8DetectionLoss(model, tal_topk=first, tal_topk2=second)(found, batch)
    # it multiplies by the number of images
    mean: Tensor = total.sum() / len(labels)
    return mean


def yolox_loss(outputs: list[Tensor], labels: list[Tensor], strides: Tensor) -> Tensor:
    from yolox.models.yolo_head import YoloxHead  # type: ignore[import-not-found]

    head = YoloxHead(outputs[2].shape[1], strides=strides.tolist(), in_channels=[4] * len(strides))
    size = strides[0] * outputs[0].shape[3]
    tables, grids, of_cells = [], [], []
    for level, stride in enumerate(strides.tolist()):
        joined = torch.cat(outputs[3 * level : 3 * level + 3], 1)
        table, grid = head.get_output_and_grid(joined, level, stride, joined.type())
        tables.append(table)
        grids.append(grid)
        of_cells.append(torch.full((1, grid.shape[1]), stride))
    most = max(map(len, labels))
    rows = torch.zeros(len(labels), most, 5)
    for image, objects in enumerate(labels):
        rows[image, : len(objects)] = torch.cat([objects[:, :1], centres(objects) * size], 1)
    columns = [[grid[:, :, axis] for grid in grids] for axis in (0, 1)]
    loss: Tensor = head.get_losses(None, *columns, of_cells, rows, torch.cat(tables, 1), [], tables[0].dtype)[0]
    return loss


def main(given: str, kind: str, written: str) -> None:
    import_torchvision()
    found = np.load(given)
    number = sum(name.startswith("output") for name in found)
    outputs = [torch.from_numpy(found[f"output {place}"]).requires_grad_() for place in range(number)]
    labels = []
    for row in torch.from_numpy(found["labels"]):
        objects = row.reshape(-1, 6)
        labels.append(objects[(objects[:, 0] >= 0) & (objects[:, 5] == 0)])
    strides = torch.from_numpy(found["strides"])
    compute = yolox_loss if kind == "yolox" else lambda *words: ultralytics_loss(kind, *words)
    loss = compute(outputs, labels, strides)
    gradients = torch.autograd.grad(loss, outputs)
    results = {f"gradient {place}": gradient.numpy() for place, gradient in enumerate(gradients)}
    np.savez(written, loss=loss.detach().numpy(), **results)


if __name__ == "__main__":
    main(*sys.argv[1:])
