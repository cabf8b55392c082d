"""One update of an imported ONNX graph beside the module it was exported from: forward, backward and AdamW.

    python -m tests.bench.imported_graph [--models gpt2 bert ...] [--exporters legacy-14 ...] [--compiled] [--rounds 7]

The module is what one writes by hand: torch's Linear and LayerNorm, its fused attention and GELU, torchvision's
ResNet-18 and SqueezeNet. What is imported is the file that the exporter makes of it: the older exporter at opset 14
spells everything out, and this is what has to be found again. Convolution networks are exported for training, or the
file would have no BatchNormalization left to compute. Both sides have the same weights, batch, loss and optimizer;
that their losses are equal is checked. They run turn and turn about; the ratio is that of Onward's time to the
module's (below 1: Onward is faster), the median over the rounds, and the least and the greatest. On a CPU the time is
the process's own, so that others on the machine hardly count. On a GPU everything is in bf16 autocast, too.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from onward.trainer.config.sections.model import GraphConfig
from onward.trainer.onnx_graph.torchvision_import import import_torchvision
from onward.trainer.onnx_import.driver import to_module
from tests.bench.handwritten import BERT, GPT2, Block, exported
from tests.support.accelerated import accelerate

WIDTH, HEADS, LAYERS, LENGTH, VOCABULARY, CLASSES = 128, 4, 3, 64, 512, 10
SIZES = {"vocabulary": VOCABULARY, "length": LENGTH, "layers": LAYERS, "heads": HEADS, "width": WIDTH}
ROUND_S = 0.4
"""How long one side runs in one round, about."""


# -- the hand-written modules


class ViT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, WIDTH, 8, 8)
        self.cls = nn.Parameter(0.02 * torch.randn(1, 1, WIDTH))
        self.positions = nn.Parameter(0.02 * torch.randn(1, 65, WIDTH))
        block = {"causal": False, "pre": True, "approximate": "none"}
        self.blocks = nn.ModuleList(Block(WIDTH, HEADS, **block) for _ in range(LAYERS))  # type: ignore[arg-type]
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, image: Tensor) -> Tensor:
        x = self.patch(image).flatten(2).transpose(1, 2)
        x = torch.cat((self.cls.expand(x.shape[0], -1, -1), x), dim=1) + self.positions
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)[:, 0])  # type: ignore[no-any-return]


def _torchvision(name: str) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        import_torchvision()
        import torchvision

        options = {"dropout": 0.0} if name == "squeezenet1_1" else {}  # two sides would draw two masks
        module: nn.Module = getattr(torchvision.models, name)(num_classes=CLASSES, **options)
        return module

    return build


def _tokens(batch: int) -> Tensor:
    return torch.randint(0, VOCABULARY, (batch, LENGTH))


def _mask(batch: int) -> Tensor:
    return (torch.arange(LENGTH)[None] < LENGTH - 2 * torch.arange(batch)[:, None] % LENGTH).long()


def _image(side: int) -> Callable[[int], Tensor]:
    return lambda batch: torch.randn(batch, 3, side, side)


@dataclass(frozen=True)
class Model:
    build: Callable[[], nn.Module]
    inputs: dict[str, Callable[[int], Tensor]]
    large: int
    """The batch that is not 1."""
    convolutional: bool = False


MODELS = {
    "gpt2": Model(partial(GPT2, **SIZES), {"tokens": _tokens}, 16),
    "bert": Model(partial(BERT, **SIZES, classes=CLASSES), {"tokens": _tokens, "attention_mask": _mask}, 16),
    "vit": Model(ViT, {"image": _image(64)}, 16),
    "resnet18": Model(_torchvision("resnet18"), {"image": _image(64)}, 8, convolutional=True),
    "squeezenet": Model(_torchvision("squeezenet1_1"), {"image": _image(64)}, 16, convolutional=True),
}


# -- one update


def updates(
    module: nn.Module, batch: list[Tensor], labels: Tensor, autocast: Callable[[], AbstractContextManager[Any]]
) -> Callable[[], Tensor]:
    """A function that makes one update and gives the loss before it."""
    optimizer = torch.optim.AdamW([w for w in module.parameters() if w.requires_grad], lr=1e-4, fused=True)
    module.train()

    def update() -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        with autocast():
            outputs = module(*batch)
            loss = F.cross_entropy(outputs.flatten(0, -2).float(), labels.flatten())
        loss.backward()
        optimizer.step()
        return loss.detach()

    return update


def compare(name: str, exporter: str, batch_size: int, *, compiled: bool, device: torch.device, rounds: int) -> str:
    """One row of the table."""
    torch.manual_seed(0)
    model = MODELS[name]
    native = model.build()
    probe = {key: make(2) for key, make in model.inputs.items()}
    imported = to_module(exported(native, probe, exporter=exporter, convolutional=model.convolutional))
    native.to(device), imported.to(device)
    ours = accelerate(imported, GraphConfig(compile=compiled), device)
    theirs = torch.compile(native, dynamic=True) if compiled else native
    batch = [make(batch_size).to(device) for make in model.inputs.values()]
    labels = torch.randint(0, CLASSES, (batch_size, LENGTH) if name == "gpt2" else (batch_size,), device=device)
    gpu = device.type == "cuda"

    def autocast() -> AbstractContextManager[Any]:
        return torch.autocast("cuda", torch.bfloat16) if gpu else nullcontext()

    sides = [updates(side, batch, labels, autocast) for side in (ours, theirs)]  # type: ignore[arg-type]
    first = [float(update()) for update in sides]
    if abs(first[0] - first[1]) > (2e-2 if gpu else 1e-4) * max(1.0, abs(first[1])):
        raise AssertionError(f"{name} {exporter}: the losses are {first[0]:g} and {first[1]:g}; nothing to compare")
    times = measured(sides, rounds, gpu=gpu)
    ratios = [mine / other for mine, other in zip(*times, strict=True)]
    mine, other = (1e3 * statistics.median(side) for side in times)
    what = f"{name}, {exporter}, batch {batch_size}{', bf16' if gpu else ''}, {'compiled' if compiled else 'eager'}"
    return (
        f"| {what} | {mine:.1f} ms | {other:.1f} ms | {statistics.median(ratios):.2f} | "
        f"{min(ratios):.2f} .. {max(ratios):.2f} |"
    )


def measured(sides: Iterable[Callable[[], Tensor]], rounds: int, *, gpu: bool) -> list[list[float]]:
    """Seconds of one update, for each side, in each round."""
    clock = time.perf_counter if gpu else time.process_time

    def run(update: Callable[[], Tensor], times: int) -> float:
        started_at = clock()
        for _ in range(times):
            update()
        if gpu:
            torch.cuda.synchronize()
        return (clock() - started_at) / times

    sides = list(sides)
    for update in sides:  # warms up
        run(update, 3)
    times = max(2, int(ROUND_S / max(run(sides[1], 3), 1e-5)))
    turns = [[run(update, times) for update in (sides if turn % 2 else sides[::-1])] for turn in range(rounds)]
    turns = [turn if number % 2 else turn[::-1] for number, turn in enumerate(turns)]
    return [list(side) for side in zip(*turns, strict=True)]


def main() -> None:
    """Run every comparison and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--exporters", nargs="+", default=["legacy-14"])
    parser.add_argument("--compiled", action="store_true", help="compiled, too: minutes more")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    devices = [torch.device("cpu")] + [torch.device("cuda")] * torch.cuda.is_available()
    print("| | Onward | by hand | ratio | least .. greatest |\n|---|---|---|---|---|")
    modes = [False, True] if arguments.compiled else [False]
    for device, compiled, name, exporter in itertools.product(devices, modes, arguments.models, arguments.exporters):
        for batch_size in (1, MODELS[name].large):
            torch.compiler.reset()
            print(
                compare(name, exporter, batch_size, compiled=compiled, device=device, rounds=arguments.rounds),
                flush=True,
            )


if __name__ == "__main__":
    main()
