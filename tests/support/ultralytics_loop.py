"""Train the weights of an ONNX file of YOLOv8 by the loop of ultralytics: in an environment that has it.

python ultralytics_loop.py MODEL.onnx DATA.yaml EPOCHS LEARNING_RATE BATCH SIDE WRITTEN.onnx
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import onnx
import torch
from onnx import numpy_helper

from onward.trainer.onnx_graph.torchvision_import import import_torchvision

import_torchvision()
from ultralytics.models.yolo.detect import DetectionTrainer  # type: ignore[import-not-found] # noqa: E402
from ultralytics.nn.tasks import DetectionModel  # type: ignore[import-not-found] # noqa: E402

OFF = ("mosaic", "mixup", "copy_paste", "hsv_h", "hsv_s", "hsv_v", "translate", "scale", "erasing", "warmup_epochs")
"""What another loop does not do; flips stay."""


def main(model: str, data: str, epochs: str, rate: str, batch: str, side: str, written: str) -> None:
    stored = {t.name: torch.from_numpy(numpy_helper.to_array(t).copy()) for t in onnx.load(model).graph.initializer}

    class Loop(DetectionTrainer):  # type: ignore[misc]
        def get_model(self, *_: Any, **__: Any) -> Any:
            made = DetectionModel("yolov8n.yaml", nc=self.data["nc"], verbose=False)
            # as the file has it: normalisations are part of the convolutions
            made.fuse(verbose=False)
            own = made.state_dict()
            start = {name: value for name, value in stored.items() if name in own and own[name].shape == value.shape}
            # but for the layers of the classes, whose number is another
            assert len(own) - len(start) <= 6 + 1, sorted(own.keys() - start.keys())
            made.load_state_dict(start, strict=False)
            return made

        def validate(self) -> tuple[dict[str, float], float]:
            """Measure nothing here: torchvision has no operators beside another build of torch."""
            return {}, 0.0

        def final_eval(self) -> None:
            pass

    settings = {"optimizer": "AdamW", "lr0": float(rate), "lrf": 0.0, "cos_lr": True, "momentum": 0.9}
    settings |= {"weight_decay": 5e-4, "batch": int(batch), "nbs": int(batch), "fliplr": 0.5, **dict.fromkeys(OFF, 0.0)}
    settings |= {"data": data, "imgsz": int(side), "epochs": int(epochs), "workers": 0, "device": "cpu", "amp": False}
    settings |= {"val": False, "plots": False, "verbose": False, "project": str(Path(written).parent), "name": "loop"}
    loop = Loop(overrides={"model": "yolov8n.yaml", **settings})
    loop.train()
    made = loop.ema.ema.eval().float()
    head = made.model[-1]
    head.export, head.format = True, "onnx"
    pixels = torch.zeros(1, 3, int(side), int(side))
    torch.onnx.export(made, (pixels,), written, dynamo=False, input_names=["images"], output_names=["output0"])


if __name__ == "__main__":
    main(*sys.argv[1:])
