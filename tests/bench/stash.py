"""What convolution networks keep for their backward pass, and what keeping less costs: each recompute.mode beside none.

    python -m tests.bench.stash [--models squeezenet ...] [--batch 16] [--size 64] [--rounds 7]     minutes on 2 cores

All modes are the same imported graph and batch; one update is forward, cross-entropy and backward. The columns:

    kept       bytes alive between the forward and the backward pass, beyond weights and data; each storage once
    peak       the most that is alive during either, counted alike, without the gradients of weights
    resident   growth of the process's resident memory in one update, as the operating system measures it
    time       processor time of an update: the modes take turns, the median of the ratios to none, least and greatest
    error      norm of the difference of all gradients over the norm of those of `none`; 0 = every bit is the same

`whole` and `selective` have 8 units. One thread, unless `--threads` says otherwise.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import onnx
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from onward.trainer.onnx_graph.examples.reference_models import build_squeezenet
from onward.trainer.onnx_graph.examples.small_models import build_unet
from onward.trainer.onnx_graph.torchvision_import import import_torchvision
from onward.trainer.onnx_import.driver import to_module
from onward.trainer.parallel.cost import estimate_costs
from onward.trainer.parallel.pipeline.balance import choose_unit_cuts, node_work
from onward.trainer.parallel.pipeline.cut_points import find_cut_points
from onward.trainer.parallel.pipeline.split import split
from onward.trainer.parallel.pipeline.stage import Chain, build_stages
from onward.trainer.parallel.planning.dry_run import MemoryCounter
from onward.trainer.parallel.recomputation.compressed_activations import compress_stages
from onward.trainer.parallel.recomputation.recompute import recompute
from tests.bench.handwritten import exported

CLASSES, UNITS = 10, 8
ROUND_S = 0.3
"""Processor time of one mode in one round, at least."""
LIBRARY = ctypes.CDLL("libc.so.6")
M_MMAP_THRESHOLD = -3
MODES = ("none", "whole", "selective", "exact", "bf16", "fp8")
"""The last three are `recompute.mode = "compressed"`, `"compressed_bf16"` and `"compressed_fp8"`."""


def vision(name: str) -> Callable[[int], onnx.ModelProto]:
    """Return a function that exports a model of torchvision for training."""

    def build(size: int) -> onnx.ModelProto:
        import_torchvision()
        import torchvision

        module: nn.Module = getattr(torchvision.models, name)(num_classes=CLASSES)
        if name.startswith("vgg"):  # its classifier is for 224 x 224, and has most of the weights
            module = nn.Sequential(module.features, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, CLASSES))
        return exported(module, {"image": torch.randn(2, 3, size, size)}, convolutional=True)

    return build


MODELS: dict[str, Callable[[int], onnx.ModelProto]] = {
    "squeezenet": lambda size: build_squeezenet(num_classes=CLASSES, image_size=size),
    "resnet50": vision("resnet50"),
    "mobilenet": vision("mobilenet_v2"),
    "vgg16": vision("vgg16"),
    "unet": lambda size: build_unet(num_classes=CLASSES, image_size=size),
}


def chain_of(model: onnx.ModelProto, mode: str, image: Tensor) -> Chain:
    """Return the model in one mode."""
    module = to_module(model)
    costs = estimate_costs(module, [image])
    cuts = []
    if mode in ("whole", "selective"):
        work = node_work(module.graph, costs)
        cuts = choose_unit_cuts(module, find_cut_points(module.graph, costs), work, (), UNITS)
    (stage,) = build_stages(module, [split(module, cuts)], costs)
    if mode in ("exact", "bf16", "fp8"):
        compress_stages([stage], mode)  # type: ignore[arg-type]
    elif mode != "none":
        recompute(stage.chain, mode, range(len(stage.chain.units)))  # type: ignore[arg-type]
    return stage.chain.train()


def loss_of(chain: Chain, image: Tensor) -> Tensor:
    """Return the loss of the forward pass, with the same dropout each time."""
    torch.manual_seed(0)
    output = chain(image)[0]
    rows = output.movedim(1, -1).reshape(-1, CLASSES)
    return F.cross_entropy(rows, torch.arange(len(rows)) % CLASSES)


def update(chain: Chain, image: Tensor) -> None:
    """Run one forward and one backward pass."""
    chain.zero_grad()
    loss_of(chain, image).backward()  # type: ignore[no-untyped-call]


# -- what is measured


def counted(chain: Chain, image: Tensor) -> tuple[int, int]:
    """Return (kept, peak) in bytes, gradients of weights left out."""
    update(chain, image)
    counter = MemoryCounter()
    gradients = [weight.grad for weight in chain.parameters() if weight.grad is not None]
    for tensor in (*chain.parameters(), *chain.buffers(), *gradients, image):
        counter.ignore(tensor)
    with counter:
        loss = loss_of(chain, image)
        kept = counter.current_bytes
        loss.backward()  # type: ignore[no-untyped-call]
    return kept, counter.peak_bytes


def resident(key: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))
    return 1024 * int(line.split()[1])


def resident_growth(chain: Chain, image: Tensor) -> int:
    """Return by how many bytes resident memory grows in one update at most. Gradients of weights are there before."""
    update(chain, image)
    gc.collect()
    LIBRARY.malloc_trim(0)  # what earlier updates have freed
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    with torch.no_grad():
        for weight in chain.parameters():
            if weight.grad is not None:
                weight.grad.zero_()
    loss_of(chain, image).backward()  # type: ignore[no-untyped-call]
    return resident("VmHWM") - before


def gradients_of(chain: Chain, image: Tensor) -> dict[str, Tensor]:
    update(chain, image)
    # units have paths of their own
    named = {
        path: tensor for part in chain.parts for path, tensor in part.module.named_parameters() if tensor.requires_grad
    }
    return {path: tensor.grad for path, tensor in named.items() if tensor.grad is not None}


def gradient_error(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    """Return the norm of the difference of all gradients over the norm of the wanted ones."""
    assert found.keys() == wanted.keys()
    difference = sum((found[path] - tensor).double().square().sum() for path, tensor in wanted.items())
    return float((difference / sum(tensor.double().square().sum() for tensor in wanted.values())) ** 0.5)


def timed(chains: dict[str, Chain], image: Tensor, rounds: int) -> dict[str, list[float]]:
    """Return the processor time of an update in each round, for each mode."""
    times: dict[str, list[float]] = {mode: [] for mode in chains}
    for turn in range(rounds + 1):
        for mode, chain in chains.items():
            began, updates = time.process_time(), 0
            while not updates or time.process_time() - began < ROUND_S:
                update(chain, image)
                updates += 1
            if turn:  # the first turn warms up
                times[mode].append((time.process_time() - began) / updates)
    return times


def chains_of(name: str, batch: int, size: int) -> tuple[dict[str, Chain], Tensor]:
    """Return a model in each mode, and its input."""
    torch.manual_seed(0)
    model, image = MODELS[name](size), torch.randn(batch, 3, size, size)
    return {mode: chain_of(model, mode, image) for mode in MODES}, image


def residents(name: str, batch: int, *, size: int) -> dict[str, int]:
    """Return the growth of resident memory in each mode."""
    chains, image = chains_of(name, batch, size)
    return {mode: resident_growth(chain, image) for mode, chain in chains.items()}


def compare(name: str, batch: int, residents: dict[str, int], *, size: int, rounds: int) -> list[str]:
    """Return the rows of one model."""
    chains, image = chains_of(name, batch, size)
    wanted = gradients_of(chains["none"], image)
    errors = {mode: gradient_error(gradients_of(chain, image), wanted) for mode, chain in chains.items()}
    times = timed(chains, image, rounds)
    kept = {mode: (*counted(chain, image), residents[mode]) for mode, chain in chains.items()}
    rows = []
    for mode in MODES:
        ratios = [one / none for one, none in zip(times[mode], times["none"], strict=True)]
        cells = [f"{mine / 2**20:.1f} ({mine / of:.2f})" for mine, of in zip(kept[mode], kept["none"], strict=True)]
        spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        rows.append(f"| {name} | {mode} | {' | '.join(cells)} | {spread} | {errors[mode]:.2g} |")
    return rows


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--size", type=int, default=64, help="height and width of the images")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    print("| model | mode | kept, MiB | peak, MiB | resident, MiB | time | error |\n|---|---|---|---|---|---|---|")
    # resident memory first, while each large tensor gets pages of its own, which are given back when it is freed
    LIBRARY.mallopt(M_MMAP_THRESHOLD, 64 * 1024)
    grown = {name: residents(name, arguments.batch, size=arguments.size) for name in arguments.models}
    LIBRARY.mallopt(M_MMAP_THRESHOLD, 32 * 2**20)  # where the library's own threshold ends after a while
    for name in arguments.models:
        for row in compare(name, arguments.batch, grown[name], size=arguments.size, rounds=arguments.rounds):
            print(row, flush=True)


if __name__ == "__main__":
    main()
