"""The layout that `parallel = "auto"` chooses beside all that it could have chosen: measured times of a step.

    python -m tests.bench.auto_choice [--turns 2] [--cases "SqueezeNet" ...]     about 8 minutes on 2 cores

Each case is a model and a batch on two ranks of one thread. Every division of the ranks is trained as `auto` would have
it (micro-batches, ZeRO, recomputation), turn and turn about in one job. A choice is right if no other layout is quicker
by more than WITHIN, which two measurements of one layout may differ by.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import torch
import torch.distributed as dist

from onward.trainer.config.run_config import RunConfig
from onward.trainer.distributed.arithmetic import resolve_precision
from onward.trainer.distributed.processes import MPIContext
from onward.trainer.errors import ConfigError
from onward.trainer.onnx_graph.examples.reference_models import build_squeezenet
from onward.trainer.onnx_graph.examples.small_models import build_resnet18
from onward.trainer.parallel.planning import planner
from onward.trainer.parallel.planning.estimate_layouts import Estimator
from onward.trainer.run.directory import RunDir, read_config
from tests.bench.memory_prediction import gpt2, images, text
from tests.support import graphs
from tests.support.ranks import run_ranks
from tests.support.runs import Array, events, make_run

RANKS, NUM_STEPS, FIRST_STEPS, WITHIN = 2, 7, 2, 1.05
Case = tuple[Callable[[], onnx.ModelProto], Callable[[int], dict[str, Array]], int]
CASES: dict[str, Case] = {
    "GPT-2 8 x 256, batch 16": (gpt2(256, 8, 512, 128), lambda rows: text(rows, 128, 512), 16),
    "GPT-2 8 x 256, batch 4": (gpt2(256, 8, 512, 128), lambda rows: text(rows, 128, 512), 4),
    "GPT-2 4 x 512, 4096 words, batch 16": (gpt2(512, 4, 4096, 64), lambda rows: text(rows, 64, 4096), 16),
    "GPT-2 4 x 512, 4096 words, batch 4": (gpt2(512, 4, 4096, 64), lambda rows: text(rows, 64, 4096), 4),
    "GPT-2 2 x 768, batch 2": (gpt2(768, 2, 256, 32), lambda rows: text(rows, 32, 256), 2),
    "llama 8 x 32, batch 16": (
        lambda: graphs.tiny_llama(vocab_size=1024, num_layers=8),
        lambda rows: text(rows, 256, 1024),
        16,
    ),
    "SqueezeNet 96, batch 16": (
        lambda: build_squeezenet(num_classes=10, image_size=96),
        lambda rows: images(rows, 96),
        16,
    ),
    "SqueezeNet 32, batch 64": (
        lambda: build_squeezenet(num_classes=10, image_size=32),
        lambda rows: images(rows, 32),
        64,
    ),
    "ResNet-18 32, batch 32": (
        lambda: build_resnet18(num_classes=10, image_size=32),
        lambda rows: images(rows, 32),
        32,
    ),
    "ResNet-18 64, batch 8": (
        lambda: build_resnet18(num_classes=10, image_size=64),
        lambda rows: images(rows, 64),
        8,
    ),
}
"""Model, its data, and the samples of a step."""


def possible(config: RunConfig) -> dict[str, dict[str, Any]]:
    """The sections of each layout that `auto` compares, the one that it chooses first; by name."""
    config = config.model_copy(update={"precision": resolve_precision(config.precision, None)})
    estimator = Estimator(planner.open_with_teacher(config, by_parts=True).module, torch.device("cpu"))
    found = []
    for sizes in planner.divisions(RANKS):
        try:
            estimate = planner._first_that_fits(
                estimator, planner._with(config, parallel=sizes), torch.device("cpu"), 2**40
            )
        except ConfigError:
            continue  # nothing of the graph can be divided so
        used = estimate.config
        sections = {
            "parallel": {**sizes, "zero": used.parallel.zero},
            "train": {"gradient_accumulation_steps": used.train.gradient_accumulation_steps},
        }
        found.append((estimate.step_s(), estimate.name, sections))
    return {name: sections for _, name, sections in sorted(found, key=lambda each: each[0])}


def train_all(mpi: MPIContext, roots: list[str]) -> None:
    """On a rank: train one run after the other."""
    from onward.trainer.events import Heartbeat
    from onward.trainer.loop import train

    for root in roots:
        run = RunDir(Path(root))
        if mpi.rank == 0:
            run.begin_attempt()
        dist.barrier()
        train(run, mpi, attempt=1, heartbeat=Heartbeat(run.heartbeat), stop_requested=lambda: False)


def step_s(run: RunDir) -> float:
    """The median of a run's steps but the first ones."""
    times = [float(event.values["train/step_s"]) for event in events(run, "scalars")]
    return statistics.median(times[FIRST_STEPS:])


def compare(folder: Path, case: Case, turns: int) -> dict[str, float]:
    """Layout -> seconds of a step, the least of the turns' medians; the layout that `auto` chooses comes first."""
    build, columns, batch = case
    model, data = build(), columns(2 * batch)
    train = {"global_batch_size": batch, "num_steps": NUM_STEPS, "log_period": 1}
    layouts = possible(read_config(make_run(folder / "plan", model, data, train=train)))
    runs = {
        (turn, name): make_run(
            folder / f"{turn}-{number}",
            model,
            data,
            train=train | sections["train"],
            parallel=sections["parallel"],
            checkpoint={"period": 0},
        )
        for turn in range(turns)
        for number, (name, sections) in enumerate(layouts.items())
    }
    run_ranks(RANKS, "tests.bench.auto_choice:train_all", [str(run.root) for run in runs.values()], timeout_s=500)
    return {name: min(step_s(runs[turn, name]) for turn in range(turns)) for name in layouts}


def main() -> None:
    """Run every case; print the layouts with their times, and how many choices were right."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--cases", nargs="*", default=[""])
    arguments = parser.parse_args()
    right = total = 0
    for title, case in CASES.items():
        if not any(word in title for word in arguments.cases):
            continue
        with tempfile.TemporaryDirectory(prefix="auto-") as folder:
            found = compare(Path(folder), case, arguments.turns)
        chosen, quickest = next(iter(found)), min(found, key=lambda name: found[name])
        total += 1
        right += found[chosen] <= WITHIN * found[quickest]
        print(f"{title}: chosen {chosen}, {found[chosen] / found[quickest]:.2f} of the quickest", flush=True)
        for name, seconds in found.items():
            print(f"    {1e3 * seconds:8.1f} ms   {name}", flush=True)
    print(f"{right} of {total} choices are within {WITHIN:g} of the quickest layout")


if __name__ == "__main__":
    main()
