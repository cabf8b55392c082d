"""Import torchvision, also where its native operators cannot be loaded.

onnx2torch imports torchvision. Its wheel is built for one build of torch. Beside another build (the
CUDA wheel beside a CPU torch) its native library is not loaded, and the import fails with "operator torchvision::nms
does not exist". Onward never calls these operators, so declaring their schemas is enough.
"""

from __future__ import annotations

import functools

import torch


@functools.cache
def import_torchvision() -> None:
    """Import torchvision; call this before importing onnx2torch."""
    try:
        import torchvision
    except RuntimeError as error:
        if "torchvision::" not in str(error):
            raise
        for name in ("nms", "qnms"):
            schema = f"torchvision::{name}"
            torch.library.define(schema, "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        import torchvision  # noqa: F401
