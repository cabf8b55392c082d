"""One update of convolution networks in channels-last format beside the format of the file.

    python -m tests.bench.memory_format [--models squeezenet ...] [--batches 1 16 64] [--rounds 7] [--size 64]

Both sides are the same imported graph, with the same batch and AdamW, and differ in `graph.memory_format` alone. They
run turn and turn about; the time is the processor time of the process, so that others on the machine hardly count. The
ratio is channels_last over contiguous (below 1: channels_last is faster), the median over the rounds, and the least
and the greatest. `graph.memory_format = "fastest"` follows these figures.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Literal

import onnx
import torch
import torch.nn.functional as F

from onward.trainer.config.sections.model import GraphConfig
from onward.trainer.onnx_graph.examples.reference_models import build_squeezenet
from onward.trainer.onnx_graph.examples.small_models import build_resnet18, build_unet
from onward.trainer.onnx_graph.torchvision_import import import_torchvision
from onward.trainer.onnx_import.driver import to_module
from tests.bench.handwritten import exported
from tests.support.accelerated import accelerate

CLASSES = 10
ROUND_S = 0.5
"""How much processor time one side takes in one round, at least."""


def mobilenet(size: int) -> onnx.ModelProto:
    """Return torchvision's MobileNet v2, with depthwise convolutions, as the exporter writes it for training."""
    import_torchvision()
    from torchvision.models import mobilenet_v2

    return exported(mobilenet_v2(num_classes=CLASSES), {"image": torch.randn(2, 3, size, size)}, convolutional=True)


MODELS: dict[str, Callable[[int], onnx.ModelProto]] = {
    "squeezenet": lambda size: build_squeezenet(num_classes=CLASSES, image_size=size),
    "resnet18": lambda size: build_resnet18(num_classes=CLASSES, image_size=size),
    "mobilenet": mobilenet,
    "unet": lambda size: build_unet(num_classes=CLASSES, image_size=size),
}


def update_of(
    model: onnx.ModelProto, memory_format: Literal["contiguous", "channels_last"], image: torch.Tensor
) -> Callable[[], None]:
    """Return one update of an imported model: forward, loss, backward, AdamW."""
    module = to_module(model).train()
    accelerate(module, GraphConfig(memory_format=memory_format), image.device)
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, fused=True)

    def update() -> None:
        optimizer.zero_grad()
        output = module(image)
        classes = output.movedim(1, -1).reshape(-1, CLASSES) if output.ndim == 4 else output
        F.cross_entropy(classes, torch.zeros(len(classes), dtype=torch.int64)).backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return update


def compare(name: str, batch: int, *, size: int, rounds: int) -> str:
    """Return a row of the table: the processor time of both formats, and their ratio."""
    model, image = MODELS[name](size), torch.randn(batch, 3, size, size)
    sides = {each: update_of(model, each, image) for each in ("contiguous", "channels_last")}  # type: ignore[arg-type]
    times: dict[str, list[float]] = {side: [] for side in sides}
    for turn in range(rounds + 1):
        for side, update in sides.items():
            began, updates = time.process_time(), 0
            while not updates or time.process_time() - began < ROUND_S:
                update()
                updates += 1
            if turn:  # the first turn warms up
                times[side].append((time.process_time() - began) / updates)
    ratios = [last / first for first, last in zip(times["contiguous"], times["channels_last"], strict=True)]
    medians = " | ".join(f"{1e3 * statistics.median(values):.1f}" for values in times.values())
    return (
        f"| {name} | {batch} | {medians} | {statistics.median(ratios):.2f} | {min(ratios):.2f} .. {max(ratios):.2f} |"
    )


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 16, 64])
    parser.add_argument("--size", type=int, default=64, help="height and width of the images")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(arguments.threads)
    print(
        "| model | batch | contiguous, ms | channels_last, ms | ratio | least .. greatest |\n|---|---|---|---|---|---|"
    )
    for name in arguments.models:
        for batch in arguments.batches:
            print(compare(name, batch, size=arguments.size, rounds=arguments.rounds), flush=True)


if __name__ == "__main__":
    main()
