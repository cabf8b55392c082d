"""Measure ResNet-50 with 128 images of 224 pixels beside torchvision's module. About 4 minutes on an H200.

The loop written by hand keeps the module as torchvision makes it (contiguous). Onward's `graph.memory_format` is
`fastest` (channels_last on a GPU) and contiguous in turn, and of both the share of the kernels that only change the
layout is recorded: convolutions want channels_last.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import onnx
import torch
from torch import nn

from onward.trainer.distributed.processes import MPIContext
from onward.trainer.onnx_graph.torchvision_import import import_torchvision
from tests.bench.handwritten import exported
from tests.bench.memory_prediction import images
from tests.gpu.device import REHEARSAL
from tests.gpu.measure import compare, connected, run_of
from tests.gpu.results import attempt
from tests.gpu.traces import profile_training, slowest_kernels, step_figures

BATCH, SIDE = (2, 32) if REHEARSAL else (128, 224)
FORMATS = ("auto", "contiguous")
CHECKS = (*(f"ResNet-50 bf16, {name}" for name in FORMATS), *(f"kernels of ResNet-50, {name}" for name in FORMATS))


def resnet50() -> tuple[onnx.ModelProto, nn.Module]:
    """Return ResNet-50 with ten classes as an ONNX model for training, and the module; in a rehearsal a small one."""
    import_torchvision()
    import torchvision

    torch.manual_seed(0)
    resnet = torchvision.models.resnet
    kind = (resnet.BasicBlock, [1, 1, 1, 1]) if REHEARSAL else (resnet.Bottleneck, [3, 4, 6, 3])
    module: nn.Module = resnet.ResNet(*kind, num_classes=10)
    return exported(module, {"image": torch.randn(2, 3, SIDE, SIDE)}, convolutional=True), module


def kernels(mpi: MPIContext, model: onnx.ModelProto, memory_format: str) -> dict[str, Any]:
    """Return what a step's trace says of layouts."""
    sections = {"precision": {"compute": "bf16"}, "graph": {"memory_format": memory_format}}
    with run_of(model, images(BATCH, SIDE), **sections) as run:
        events = profile_training(run, mpi)
    figures = step_figures(events)
    return {key: figures[key] for key in ("layout_share", "kernels", "busy_ms")} | {"slowest": slowest_kernels(events)}


def main() -> None:
    """Time both formats, then profile them."""
    model, module = resnet50()
    columns = images(BATCH, SIDE)
    with connected() as mpi:
        for name in FORMATS:
            graph = {"memory_format": name}
            options = {"compute": "bf16", "unit": "images", "graph": graph}
            attempt(f"ResNet-50 bf16, {name}", partial(compare, mpi, model, module, columns, **options))
            attempt(f"kernels of ResNet-50, {name}", partial(kernels, mpi, model, name))


if __name__ == "__main__":
    main()
