"""Makes torchvision importable where its native operators cannot load.

onnx2torch and torchmetrics import torchvision. Its wheel is built for one build of torch; beside another
(a CPU torch next to the CUDA wheel), its native library stays unloaded and the import then fails on
*describing* two operators that nobody will call: "operator torchvision::nms does not exist". Declaring
their schemas is enough.
"""

from __future__ import annotations

import functools

import torch


@functools.cache
def import_torchvision() -> None:
    """Call before importing onnx2torch or torchmetrics."""
    try:
        import torchvision
    except RuntimeError as error:
        if "torchvision::" not in str(error):
            raise
        for name in ("nms", "qnms"):
            schema = f"torchvision::{name}"
            torch.library.define(schema, "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        import torchvision  # noqa: F401
