"""One weight update of Onward, by default, beside a hand-written PyTorch loop: the same model, batch and machine.

    python -m tests.bench.update_time [--rounds 7] [--json]

Both sides run in one process, turn and turn about, so that whatever else the machine does hits both.
A round is a few updates of one side, then of the other; the figure is the median over the rounds of the
ratio of their wall times (below 1: Onward is faster). With 2 ranks the hand-written side is
DistributedDataParallel. Hand-written means: the module in plain torch (torchvision's SqueezeNet v1.1 in
channels-last format; a GPT-2 with scaled_dot_product_attention), fused AdamW, clip_grad_norm_,
cross-entropy - what one would write without Onward.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import cast

import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.nn.parallel import DistributedDataParallel

from onward.trainer.config.sections.model import GraphConfig, ModelConfig
from onward.trainer.config.sections.ranks import ParallelConfig
from onward.trainer.config.sections.training import OptimizerConfig
from onward.trainer.data.batches.batches import Batch
from onward.trainer.distributed.mesh import ParallelDims, make_mesh
from onward.trainer.distributed.processes import MPIContext
from onward.trainer.distributed.weights import Placement, Weight
from onward.trainer.model.compile import accelerate
from onward.trainer.model.losses.loss import Losses
from onward.trainer.onnx_graph.reference_models import build_squeezenet
from onward.trainer.onnx_graph.torchvision_import import import_torchvision
from onward.trainer.onnx_import.driver import to_module
from onward.trainer.onnx_import.imported_graph import named_weights
from onward.trainer.optim.optimizers import build_optimizer, clip_factor
from onward.trainer.parallel.pipeline.engine import Pipeline
from onward.trainer.parallel.pipeline.split import split
from onward.trainer.parallel.pipeline.stage import build_stages
from onward.trainer.parallel.replicas.reducer import Reducer
from tests.bench.handwritten import gpt2_from, gpt2_model
from tests.support.losses import loss_of
from tests.support.ranks import run_ranks

UPDATES = 5
GPT2_SIZES = {"vocabulary": 256, "length": 256, "layers": 4, "heads": 4, "width": 128}


def squeezenet(batch_size: int) -> tuple[nn.Module, nn.Module, Batch]:
    """(imported, hand-written in channels-last format, as PyTorch's guide for CPUs advises, batch)."""
    import_torchvision()
    from torchvision.models import squeezenet1_1

    imported = to_module(build_squeezenet(num_classes=10, image_size=32))
    batch = Batch(
        (torch.randn(batch_size, 3, 32, 32),), (torch.randint(0, 10, (batch_size,)),), batch_size, (batch_size,)
    )
    return imported, squeezenet1_1(num_classes=10).to(memory_format=torch.channels_last), batch


def gpt2(batch_size: int) -> tuple[nn.Module, nn.Module, Batch]:
    """(imported, hand-written, batch)."""
    model = gpt2_model(GPT2_SIZES)
    shape = (batch_size, GPT2_SIZES["length"])
    batch = Batch((torch.randint(0, 256, shape),), (torch.randint(0, 256, shape),), batch_size, (math.prod(shape),))
    return to_module(model), gpt2_from(model, GPT2_SIZES), batch


MODELS = {"squeezenet": (squeezenet, 32), "gpt2": (gpt2, 8)}


def onward_update(module: nn.Module, batch: Batch, mpi: MPIContext) -> Callable[[], float]:
    """One update with the nouns of the loop, of a graph as a run computes it by default."""
    accelerate(cast("fx.GraphModule", module), GraphConfig(), mpi.device, rows=batch.size)
    mesh = make_mesh(mpi, ParallelDims(data=mpi.world_size), timeout_s=60)
    (stage,) = build_stages(module, [split(module, ())], {})  # the graph as one unit
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
        squares, loss, _ = reducer.sum(reducer.reduce(), part, False)
        reducer.multiply(clip_factor(math.sqrt(squares), 1.0))
        optimizer.step()
        return loss

    return update


def handwritten_update(module: nn.Module, batch: Batch, mpi: MPIContext) -> Callable[[], float]:
    """One update as one writes it; DDP when there are several ranks."""
    module.train()
    model = DistributedDataParallel(module) if mpi.world_size > 1 else module
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


def compare(mpi: MPIContext, name: str, rounds: int) -> dict[str, float]:
    """Medians in ms of both sides, and the median of the rounds' ratios. Collective: every rank."""
    torch.manual_seed(mpi.rank)
    build, batch_size = MODELS[name]
    imported, handwritten, batch = build(batch_size)
    sides = {
        "onward": onward_update(imported, batch, mpi),
        "handwritten": handwritten_update(handwritten, batch, mpi),
    }
    times: dict[str, list[float]] = {side: [] for side in sides}
    for turn in range(rounds + 1):
        for side, update in sides.items():
            started_at = time.perf_counter()
            for _ in range(UPDATES):
                update()
            if turn:  # the first turn warms up
                times[side].append((time.perf_counter() - started_at) / UPDATES)
    ratios = [ours / theirs for ours, theirs in zip(times["onward"], times["handwritten"], strict=True)]
    medians = {f"{side}_ms": 1e3 * statistics.median(values) for side, values in times.items()}
    return medians | {"ratio": statistics.median(ratios), "ratio_min": min(ratios), "ratio_max": max(ratios)}


def main() -> None:
    """Run every comparison and print a table (or JSON)."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    results = {
        f"{name}, {ranks} rank{'s' * (ranks > 1)}": run_ranks(
            ranks, "tests.bench.update_time:compare", name, arguments.rounds, timeout_s=600
        )[0]
        for name in MODELS
        for ranks in (1, 2)
    }
    if arguments.json:
        print(json.dumps(results, indent=2))
        return
    print(f"{'':24}{'Onward':>12}{'by hand':>12}{'ratio':>8}   (least .. greatest round)")
    for label, row in results.items():
        print(
            f"{label:24}{row['onward_ms']:>9.1f} ms{row['handwritten_ms']:>9.1f} ms{row['ratio']:>8.2f}   "
            f"({row['ratio_min']:.2f} .. {row['ratio_max']:.2f})"
        )


if __name__ == "__main__":
    main()
