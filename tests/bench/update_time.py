"""One weight update of Onward, by default, beside a hand-written PyTorch loop: the same model, batch and machine.

    python -m tests.bench.update_time [--models squeezenet squeezenet96 gpt2 gpt] [--compiled] [--rounds 7] [--json]

Both sides run in one process, turn and turn about, so that whatever else the machine does hits both.
A round is a few updates of one side, then of the other; the figure is the median over the rounds of the
ratio of their times (below 1: Onward is faster): the process's own time on one rank, of one thread; wall time
with 2 ranks, where the hand-written side is DistributedDataParallel. Hand-written means: the module in plain torch
(torchvision's SqueezeNet v1.1 in channels-last format; a GPT-2 with scaled_dot_product_attention), fused AdamW,
clip_grad_norm_, cross-entropy - what one would write without Onward. With --compiled Onward's side has
graph.compile = true, on one rank; the loop by hand stays eager, and is compiled as a third side.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from typing import cast

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from onward.trainer.config.sections.model import GraphConfig, ModelConfig
from onward.trainer.config.sections.ranks import ParallelConfig
from onward.trainer.config.sections.training import OptimizerConfig
from onward.trainer.data.batches.batches import Batch
from onward.trainer.distributed.mesh import ParallelDims, make_mesh
from onward.trainer.distributed.processes import MPIContext
from onward.trainer.distributed.weights import Placement, Weight
from onward.trainer.model.channels_last import use_channels_last
from onward.trainer.model.losses.loss import Losses
from onward.trainer.onnx_graph.examples.reference_models import build_squeezenet
from onward.trainer.onnx_graph.torchvision_import import import_torchvision
from onward.trainer.onnx_import.driver import to_module
from onward.trainer.onnx_import.imported_graph import ImportedGraph, named_weights
from onward.trainer.optim.optimizers import build_optimizer, clip_factor
from onward.trainer.parallel.compile_stages import compile_stages
from onward.trainer.parallel.pipeline.engine import Pipeline
from onward.trainer.parallel.pipeline.split import split
from onward.trainer.parallel.pipeline.stage import build_stages
from onward.trainer.parallel.replicas.norms import sum_over_world
from onward.trainer.parallel.replicas.reducer import Reducer
from tests.bench.handwritten import gpt2_from, gpt2_model
from tests.support.losses import loss_of
from tests.support.ranks import run_ranks

UPDATES = 5
GPT2_SIZES = {"vocabulary": 256, "length": 256, "layers": 4, "heads": 4, "width": 128}
GPT_SIZES = {"vocabulary": 256, "length": 128, "layers": 4, "heads": 4, "width": 256}


def squeezenet(batch_size: int, side: int = 32) -> tuple[nn.Module, nn.Module, Batch]:
    """(imported, hand-written in channels-last format, as PyTorch's guide for CPUs advises, batch)."""
    import_torchvision()
    from torchvision.models import squeezenet1_1

    imported = to_module(build_squeezenet(num_classes=10, image_size=side))
    batch = Batch(
        (torch.randn(batch_size, 3, side, side),), (torch.randint(0, 10, (batch_size,)),), batch_size, (batch_size,)
    )
    return imported, squeezenet1_1(num_classes=10).to(memory_format=torch.channels_last), batch


def gpt2(batch_size: int, sizes: Mapping[str, int] = GPT2_SIZES) -> tuple[nn.Module, nn.Module, Batch]:
    """(imported, hand-written, batch)."""
    model = gpt2_model(sizes)
    shape = (batch_size, sizes["length"])
    batch = Batch((torch.randint(0, 256, shape),), (torch.randint(0, 256, shape),), batch_size, (math.prod(shape),))
    return to_module(model), gpt2_from(model, sizes), batch


MODELS = {
    "squeezenet": (squeezenet, 32),
    "squeezenet96": (partial(squeezenet, side=96), 16),
    "gpt2": (gpt2, 8),
    "gpt": (partial(gpt2, sizes=GPT_SIZES), 8),
}
"""`squeezenet96`: images of 96 x 96; `gpt`: 4 layers of width 256, 128 tokens."""


def onward_update(
    module: ImportedGraph, batch: Batch, mpi: MPIContext, *, compiled: bool = False
) -> Callable[[], float]:
    """One update with the nouns of the loop, of a graph as a run computes it by default."""
    graph = GraphConfig(compile=compiled)
    use_channels_last(module, graph, mpi.device, rows=batch.size)
    mesh = make_mesh(mpi, ParallelDims(data=mpi.world_size), timeout_s=60)
    (stage,) = build_stages(module, [split(module, ())], {})  # the graph as one unit
    compile_stages(
        [stage],
        module,
        graph,
        ParallelConfig(),
        "fp32",
        batch.inputs,
        device=mpi.device,
        one_shape=True,
        autocast=nullcontext,
        beat=lambda: None,
    )
    pipeline = Pipeline(
        [stage],
        # the GPT-2 has as many tokens in a row as in its vocabulary
        Losses([loss_of(ModelConfig(path="-")).model_copy(update={"class_axis": -1})], ["output"]),
        schedule="1f1b",
        stages_for=lambda inputs: [stage],
        autocast=nullcontext,
        device=mpi.device,
        group_pipeline=mesh.get_group("pipeline"),
        group_data=mesh.get_group("data"),
    )
    weights = [
        Weight(name, tensor, Placement.full(tensor.shape), trained=tensor.requires_grad)
        for name, tensor in named_weights(module).items()
    ]
    reducer = Reducer(weights, mesh=mesh, mpi=mpi, config=ParallelConfig(), shared={}, timeout_s=60)
    optimizer = build_optimizer(OptimizerConfig(), [weight for weight in weights if weight.trained])

    def update() -> float:
        part = pipeline.run([batch], reducer, scale=1.0)
        squares, loss, _ = sum_over_world([reducer.reduce(), part, False], part.device)
        reducer.multiply(clip_factor(math.sqrt(squares), 1.0))
        optimizer.step()
        return loss

    return update


def handwritten_update(
    module: nn.Module, batch: Batch, mpi: MPIContext, *, compiled: bool = False
) -> Callable[[], float]:
    """One update as one writes it; DDP when there are several ranks."""
    module.train()
    model = DistributedDataParallel(module) if mpi.world_size > 1 else module
    model = cast("nn.Module", torch.compile(model)) if compiled else model
    optimizer = torch.optim.AdamW(module.parameters(), weight_decay=0.0, fused=True)

    def update() -> float:
        optimizer.zero_grad(set_to_none=True)
        outputs = model(*batch.inputs)
        loss = F.cross_entropy(outputs.flatten(0, -2), batch.labels[0].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        return float(loss)

    return update


def compare(mpi: MPIContext, name: str, rounds: int, compiled: bool = False) -> dict[str, float]:
    """Medians in ms of both sides, and the median of the rounds' ratios. Collective: every rank."""
    torch.manual_seed(mpi.rank)
    build, batch_size = MODELS[name]
    imported, handwritten, batch = build(batch_size)
    sides = {
        "onward": onward_update(cast("ImportedGraph", imported), batch, mpi, compiled=compiled),
        "handwritten": handwritten_update(handwritten, batch, mpi),
    }
    if compiled:
        sides["handwritten_compiled"] = handwritten_update(copy.deepcopy(handwritten), batch, mpi, compiled=True)
    clock = time.process_time if mpi.world_size == 1 else time.perf_counter
    times: dict[str, list[float]] = {side: [] for side in sides}
    for turn in range(rounds + 1):
        # in each turn another side begins
        for side, update in list(sides.items())[:: 1 if turn % 2 else -1]:
            started_at = clock()
            for _ in range(UPDATES):
                update()
            if turn:  # the first turn warms up
                times[side].append((clock() - started_at) / UPDATES)
    ratios = [ours / theirs for ours, theirs in zip(times["onward"], times["handwritten"], strict=True)]
    medians = {f"{side}_ms": 1e3 * statistics.median(values) for side, values in times.items()}
    return medians | {"ratio": statistics.median(ratios), "ratio_min": min(ratios), "ratio_max": max(ratios)}


def main() -> None:
    """Run every comparison and print a table (or JSON)."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=["squeezenet", "gpt2"], choices=list(MODELS))
    parser.add_argument("--compiled", action="store_true", help="with graph.compile = true, on one rank: minutes more")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    what = (arguments.rounds, arguments.compiled)
    results = {
        f"{name}, {ranks} rank{'s' * (ranks > 1)}": run_ranks(
            ranks, "tests.bench.update_time:compare", name, *what, timeout_s=900
        )[0]
        for name in arguments.models
        for ranks in ((1,) if arguments.compiled else (1, 2))
    }
    if arguments.json:
        print(json.dumps(results, indent=2))
        return
    print(f"{'':24}{'Onward':>12}{'by hand':>12}{'ratio':>8}   (least .. greatest round)")
    for label, row in results.items():
        print(
            f"{label:24}{row['onward_ms']:>9.1f} ms{row['handwritten_ms']:>9.1f} ms{row['ratio']:>8.2f}   "
            f"({row['ratio_min']:.2f} .. {row['ratio_max']:.2f})"
            + (f"; by hand, compiled: {row['handwritten_compiled_ms']:.1f} ms" if arguments.compiled else "")
        )


if __name__ == "__main__":
    main()
