"""Print the losses and gradients of transformers for outputs and boxes in an .npz: in an environment that has it.

python set_loss_reference.py GIVEN.npz softmax|sigmoid|varifocal WRITTEN.npz
"""

from __future__ import annotations

import sys

import numpy as np
import torch

from onward.trainer.onnx_graph.torchvision_import import import_torchvision

import_torchvision()
from transformers.loss.loss_deformable_detr import DeformableDetrHungarianMatcher, DeformableDetrImageLoss  # noqa: E402
from transformers.loss.loss_for_object_detection import HungarianMatcher, ImageLoss  # noqa: E402
from transformers.loss.loss_rt_detr import RTDetrLoss  # noqa: E402
from transformers.models.rt_detr.configuration_rt_detr import RTDetrConfig  # noqa: E402


def main(given: str, kind: str, written: str) -> None:
    found = np.load(given)
    scores, boxes = (torch.from_numpy(found[name]).requires_grad_() for name in ("scores", "boxes"))
    targets = []
    for row in torch.from_numpy(found["labels"]):
        own = row.reshape(-1, 6)
        own = own[(own[:, 0] >= 0) & (own[:, 5] == 0)]
        corners = own[:, 1:5]
        centres = torch.cat([(corners[:, :2] + corners[:, 2:]) / 2, corners[:, 2:] - corners[:, :2]], 1)
        targets.append({"class_labels": own[:, 0].long(), "boxes": centres})
    names = ["labels", "boxes"]
    if kind == "softmax":
        matcher = HungarianMatcher(class_cost=1, bbox_cost=5, giou_cost=2)
        criterion = ImageLoss(matcher, scores.shape[-1] - 1, 0.1, names)
    elif kind == "varifocal":
        # its own settings, but for the weights of the terms
        weights = {"weight_loss_bbox": 1.0, "weight_loss_giou": 1.0}
        criterion = RTDetrLoss(RTDetrConfig(num_labels=scores.shape[-1], **weights))
    else:
        matcher = DeformableDetrHungarianMatcher(class_cost=2, bbox_cost=5, giou_cost=2)
        criterion = DeformableDetrImageLoss(matcher, scores.shape[-1], 0.25, names)
    losses = criterion({"logits": scores, "pred_boxes": boxes}, targets)
    results = {}
    losses["loss_ce"] = losses.pop("loss_vfl", losses.get("loss_ce"))
    for name in ("loss_ce", "loss_bbox", "loss_giou"):
        gradients = torch.autograd.grad(losses[name], (scores, boxes), retain_graph=True, allow_unused=True)
        results[name] = losses[name].detach().numpy()
        for what, gradient in zip(("scores", "boxes"), gradients, strict=True):
            if gradient is not None:
                results[f"{name}/{what}"] = gradient.numpy()
    np.savez(written, **results)


if __name__ == "__main__":
    main(*sys.argv[1:])
