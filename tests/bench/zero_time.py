"""One weight update with ZeRO 0 to 3 beside DistributedDataParallel: a GPT-2 of 27 million parameters on two ranks.

    python -m tests.bench.zero_time [--rounds 15] [--tokens 256] [--json]            about 4 minutes on 2 cores

All sides live in one job of 2 ranks and take turns, so that whatever else the machine does hits all of them. A round is
one update of each side; the figure is the median over the rounds of the ratio of its time to that of DDP in the same
round, with the quartiles. Processor time is that of all threads of both ranks, gloo's included: on a machine whose
cores all compute, it is what a message costs that no rank waits for. "waiting" is ZeRO with FSDP2's own collectives,
for which a rank on a CPU waits.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import onnx
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

from onward.trainer.config.loading import build_config
from onward.trainer.config.run_config import RunConfig
from onward.trainer.data.batches.batches import Batch
from onward.trainer.distributed.mesh import ParallelDims, make_mesh
from onward.trainer.distributed.processes import MPIContext
from onward.trainer.model.precision import autocast
from onward.trainer.model.trainable import open_trainable
from onward.trainer.optim.optimizers import build_optimizer, clip_factor
from onward.trainer.parallel.pipeline.engine import Pipeline
from onward.trainer.parallel.rank_model import build_rank_model
from onward.trainer.parallel.replicas import zero
from onward.trainer.parallel.replicas.norms import sum_over_world
from tests.bench.handwritten import gpt2_from, gpt2_model
from tests.support.ranks import run_ranks

ROUNDS, TOKENS, LENGTH = 15, 256, 128
SIZES = {"vocabulary": 4096, "length": LENGTH, "layers": 8, "heads": 8, "width": 512}
SIDES: dict[str, dict[str, Any]] = {
    "ZeRO 0": {},
    "ZeRO 1": {"zero": 1},
    "ZeRO 2": {"zero": 2},
    "ZeRO 3": {"zero": 3},
    "ZeRO 1, waiting": {"zero": 1},
    "ZeRO 2, waiting": {"zero": 2},
    "ZeRO 3, waiting": {"zero": 3},
}
BY_HAND = "DDP"


@contextmanager
def collectives_of(name: str) -> Iterator[None]:
    """Make a side with FSDP2's own collectives, if its name says so."""
    if "waiting" not in name:
        yield
        return
    with patch.object(zero, "gather_in_background"), patch.object(zero, "scatter_with"):
        yield


def onward_update(config: RunConfig, mpi: MPIContext, batch: Batch) -> Callable[[], float]:
    """One update as the loop does it. Collective: every rank."""
    mesh = make_mesh(mpi, ParallelDims.of(config.parallel), timeout_s=60)
    model = build_rank_model(open_trainable(config), config, mesh, mpi, example=batch.inputs)
    pipeline = Pipeline(
        model.stages,
        model.losses,
        schedule="1f1b",
        stages_for=model.shapes_of,
        autocast=lambda: autocast(config.precision, mpi.device),
        device=mpi.device,
        group_pipeline=mesh.get_group("pipeline"),
        group_data=mesh.get_group("data"),
    )
    reducer = model.reducer
    optimizer = build_optimizer(config.optimizer, model.trained, parts=model.part_sums)

    def update() -> float:
        part = pipeline.run([batch], reducer, scale=1.0)
        squares, loss = sum_over_world([reducer.reduce(), part], part.device)
        reducer.multiply(clip_factor(math.sqrt(squares), 1.0))
        optimizer.step()
        return loss

    return update


def ddp_update(path: str, batch: Batch) -> Callable[[], float]:
    """One update as one writes it by hand. Collective: every rank."""
    model = gpt2_from(onnx.load(path), SIZES).train()
    replicated = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.0, fused=True)

    def update() -> float:
        optimizer.zero_grad(set_to_none=True)
        loss = F.cross_entropy(replicated(*batch.inputs).flatten(0, -2), batch.labels[0].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return float(loss)

    return update


def compare(
    mpi: MPIContext, path: str, tokens: int, rounds: int, names: list[str]
) -> dict[str, dict[str, list[float]]]:
    """Return, for each side, wall and processor seconds of each round. Collective: every rank."""
    torch.manual_seed(mpi.rank)
    shape = (tokens // LENGTH, LENGTH)
    batch = Batch(
        (torch.randint(0, SIZES["vocabulary"], shape),),
        (torch.randint(0, SIZES["vocabulary"], shape),),
        shape[0],
        (math.prod(shape),),
    )
    updates = {BY_HAND: ddp_update(path, batch)}
    for name in names:
        config = build_config(
            {
                "name": "bench",
                "model": {"path": path},
                "data": {"source": "digits"},  # never read
                "train": {"global_batch_size": shape[0] * mpi.world_size, "num_steps": 1},
                "parallel": {"data": mpi.world_size, **SIDES[name]},
                "launch": {"device": "cpu"},
            }
        )
        with collectives_of(name):
            updates[name] = onward_update(config, mpi, batch)
    found: dict[str, dict[str, list[float]]] = {name: {"wall": [], "cpu": []} for name in updates}
    for turn in range(rounds + 1):
        for name, update in updates.items():
            dist.barrier()
            wall, cpu = time.perf_counter(), time.process_time()
            update()
            if turn:  # the first round makes buffers
                found[name]["wall"].append(time.perf_counter() - wall)
                found[name]["cpu"].append(time.process_time() - cpu)
    return found


def main() -> None:
    """Run the comparison and print a table (or JSON)."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--tokens", type=int, default=TOKENS, help=f"of a rank in an update, a multiple of {LENGTH}")
    parser.add_argument("--sides", nargs="+", default=list(SIDES), choices=list(SIDES), metavar="SIDE")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="zero-") as folder:
        path = Path(folder) / "gpt2.onnx"
        onnx.save(gpt2_model(SIZES), path)
        arguments = (str(path), options.tokens, options.rounds, options.sides)
        ranks = run_ranks(2, "tests.bench.zero_time:compare", *arguments, timeout_s=1200)
    if options.json:
        print(json.dumps(ranks))
        return
    print(f"{'':16}{'wall':>12}{'of DDP':>9}{'quartiles':>16}{'CPU, 2 ranks':>16}{'of DDP':>9}")
    wall = {name: rows["wall"] for name, rows in ranks[0].items()}
    cpu = {name: [sum(pair) for pair in zip(*(rank[name]["cpu"] for rank in ranks), strict=True)] for name in wall}
    for name in wall:
        of_wall, of_cpu = (
            sorted(own / base for own, base in zip(times[name], times[BY_HAND], strict=True)) for times in (wall, cpu)
        )
        low, high = of_wall[len(of_wall) // 4], of_wall[(3 * len(of_wall)) // 4]
        print(
            f"{name:16}{statistics.median(wall[name]) * 1e3:>9.0f} ms{statistics.median(of_wall):>9.2f}"
            f"{low:>9.2f} .. {high:.2f}{statistics.median(cpu[name]) * 1e3:>13.0f} ms{statistics.median(of_cpu):>9.2f}"
        )


if __name__ == "__main__":
    main()
