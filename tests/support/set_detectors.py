"""Export small detectors of transformers that predict a set, with their loss on a batch: in an environment that has it.

python set_detectors.py FOLDER

For rt_detr, yolos and detr it writes NAME.onnx, with random weights, and NAME.npz: images, labels [B, objects x 6], the
loss of the outputs, and its gradients by the names of the weights.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from onward.trainer.onnx_graph.torchvision_import import import_torchvision

import_torchvision()
import transformers as t  # noqa: E402

SIDE, CLASSES = 64, 2
HIDDEN = {"embedding_size": 16, "hidden_sizes": [16, 32, 32, 64], "depths": [1, 1, 1, 1], "layer_type": "basic"}
HEADS = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32}


def rt_detr() -> Any:
    backbone = t.RTDetrResNetConfig(**HIDDEN, out_features=["stage2", "stage3", "stage4"])
    config = t.RTDetrConfig(
        backbone_config=backbone,
        **HEADS,
        encoder_hidden_dim=32,
        encoder_in_channels=[32, 32, 64],
        decoder_in_channels=[32, 32, 32],
        d_model=32,
        decoder_layers=2,
        decoder_n_points=2,
        hidden_expansion=0.5,
        num_queries=20,
        num_denoising=0,
        num_labels=CLASSES,
    )
    return t.RTDetrForObjectDetection(config)


def yolos() -> Any:
    sizes = {"hidden_size": 32, "intermediate_size": 32, "image_size": [SIDE, SIDE]}
    layers = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_detection_tokens": 12}
    return t.YolosForObjectDetection(t.YolosConfig(**sizes, **layers, num_labels=CLASSES))


def detr() -> Any:
    backbone = t.ResNetConfig(**HIDDEN, out_features=["stage4"])
    layers = {"encoder_layers": 1, "decoder_layers": 1, "d_model": 32, "num_queries": 12}
    config = t.DetrConfig(
        use_timm_backbone=False,
        use_pretrained_backbone=False,
        backbone=None,
        backbone_config=backbone,
        **HEADS,
        **layers,
        num_labels=CLASSES,
    )
    return t.DetrForObjectDetection(config)


class OutputsOf(nn.Module):
    def __init__(self, detector: Any) -> None:
        super().__init__()
        self.detector = detector

    def forward(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        found = self.detector(pixel_values=pixels)
        return found.logits, found.pred_boxes


def main(folder: str) -> None:
    warnings.filterwarnings("ignore")
    for make in (rt_detr, yolos, detr):
        generator = torch.Generator().manual_seed(0)
        module = OutputsOf(make().eval())
        with torch.no_grad():
            # no two weights are equal, which exporters would merge, nor two scores, by which queries are chosen
            for weight in module.parameters():
                noise = torch.randn(weight.shape, generator=generator)
                if weight.ndim > 1:
                    # RT-DETR has many convolutions with SiLU, which halves small numbers
                    gain = 3.0 if weight.ndim == 4 and make is rt_detr else 1.0
                    weight.copy_(gain * noise / weight[0].numel() ** 0.5)
                else:
                    weight += 0.02 * noise
        pixels = torch.randn(3, 3, SIDE, SIDE, generator=generator)
        corners = torch.rand(3, 2, 2, generator=generator) * 0.5
        boxes = torch.cat([corners, corners + 0.1 + 0.4 * torch.rand(3, 2, 2, generator=generator)], -1)
        classes = torch.tensor([[0, 1], [1, 1], [0, 0]])
        centres = torch.cat([(boxes[..., :2] + boxes[..., 2:]) / 2, boxes[..., 2:] - boxes[..., :2]], -1)
        targets = [{"class_labels": own, "boxes": at} for own, at in zip(classes, centres, strict=True)]
        losses = module.detector(pixel_values=pixels, labels=targets).loss_dict
        # of the last layer: the file has no other; RT-DETR's are multiplied by their weights already
        weights = {"loss_vfl": 1, "loss_ce": 1, "loss_bbox": 5, "loss_giou": 2}
        own = {name: value for name, value in losses.items() if name in weights}
        loss = sum(value if make is rt_detr else weights[name] * value for name, value in own.items())
        loss.backward()
        gradients = {name: value.grad.numpy() for name, value in module.named_parameters() if value.grad is not None}
        labels = torch.cat([classes[..., None].float(), boxes, torch.zeros(3, 2, 1)], -1).flatten(1)
        given = {"pixels": pixels.numpy(), "labels": labels.numpy(), "loss": loss.detach().numpy()}
        np.savez(Path(folder) / f"{make.__name__}.npz", **given, **gradients)
        names = ["logits", "boxes"]
        torch.onnx.export(
            module,
            (pixels,),
            Path(folder) / f"{make.__name__}.onnx",
            dynamo=False,
            opset_version=18,
            input_names=["pixels"],
            output_names=names,
            dynamic_axes={name: {0: "batch"} for name in ("pixels", *names)},
        )


if __name__ == "__main__":
    main(*sys.argv[1:])
