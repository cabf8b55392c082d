"""The parity matrix: the same training in every layout, on real ranks, by the loop itself.

Each case is a run directory. `trained(cases)` starts one mpirun for each world size and lets its ranks train one run
after the other; what is compared lies on the disk afterwards: the event log and the checkpoints. Adam's first moment
after the first step is the gradient, but for a factor; so a checkpoint of that step says every gradient.

    python -m tests.equivalence.layouts      makes the whole matrix and its table in docs/reference/measurements.md
"""

from __future__ import annotations

import dataclasses
import itertools
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from torch._subclasses.fake_tensor import is_fake

from onward.trainer.checkpoint.load import load
from onward.trainer.checkpoint.verification import verify
from onward.trainer.distributed import collectives
from onward.trainer.distributed.processes import MPIContext
from onward.trainer.export import exported_model as export
from onward.trainer.export.export_commands import evaluation_data
from onward.trainer.model.losses import vocabulary_loss
from onward.trainer.parallel.planning.planner import plan
from onward.trainer.run.directory import RunDir, read_config
from tests.support import graphs
from tests.support.ranks import run_ranks
from tests.support.runs import Array, events, losses, make_run, tiny_images, tiny_text

NUM_STEPS = 3
TOLERANCE = 2e-5
"""Of losses, and of gradients and parameters relative to the largest value of their tensor."""


def _masked_text(rows: int) -> dict[str, Array]:
    text = tiny_text(rows)["input_ids"]
    return {"input_ids": text, "attention_mask": np.ones_like(text), "label": text[:, 0] % 3}


MODELS: dict[str, tuple[Callable[[], onnx.ModelProto], Callable[[int], dict[str, Array]]]] = {
    "GPT-2: fused QKV, tied": (graphs.tiny_transformer, tiny_text),
    "BERT: separate QKV": (graphs.tiny_bert, _masked_text),
    "llama: GQA, gated MLP": (graphs.tiny_llama, tiny_text),
    "conv net: skips, BatchNorm": (graphs.tiny_resnet, tiny_images),
}
"""Name -> the graph, and data of so many rows."""

ALONE = "1x1x1"
LAYOUTS: dict[str, dict[str, Any]] = {
    ALONE: {},
    "dp2": {"data": 2},
    "dp3": {"data": 3},
    "tp2": {"tensor": 2},
    "tp3": {"tensor": 3},
    "pp2": {"pipeline": 2},
    "pp3": {"pipeline": 3},
    "pp2 interleaved": {"pipeline": 2, "stages_per_rank": 2, "schedule": "interleaved"},
    "pp2 gpipe": {"pipeline": 2, "schedule": "gpipe"},
    "dp2 x tp2": {"data": 2, "tensor": 2},
    "dp2 x pp2": {"data": 2, "pipeline": 2},
    "tp2 x pp2": {"tensor": 2, "pipeline": 2},
    "2x2x2": {"data": 2, "tensor": 2, "pipeline": 2},
    "dp4 hybrid": {"data": 4, "shard": 2},
}
"""Name -> [parallel]. Of three ranks or stages nothing is a multiple: 2 layers, 2 heads, 32 tokens."""
MICRO_BATCHES = 12
"""In a step, over all replicas: the same ones in every layout, so that BatchNormalization sees the same samples."""


@dataclasses.dataclass(frozen=True)
class Case:
    """One training."""

    model: str
    layout: str
    zero: int = 0
    sections: Mapping[str, Any] = dataclasses.field(default_factory=dict, hash=False)

    @property
    def name(self) -> str:
        return f"{self.model} {self.layout} ZeRO {self.zero}"

    @property
    def world_size(self) -> int:
        sizes = LAYOUTS[self.layout]
        return int(np.prod([sizes.get(axis, 1) for axis in ("data", "tensor", "pipeline")]))


def matrix() -> list[Case]:
    """Every layout x every ZeRO that has something to divide x every model."""
    cases = []
    for model, layout in itertools.product(MODELS, LAYOUTS):
        replicas = LAYOUTS[layout].get("data", 1)
        stages = (1, 2, 3) if "shard" in LAYOUTS[layout] else (0, 1, 2, 3) if replicas > 1 else (0,)
        cases += [Case(model, layout, zero) for zero in stages]
    return cases


def make_case(case: Case, folder: Path) -> RunDir:
    """Its run directory, ready to train."""
    build, columns = MODELS[case.model]
    parallel = {"convolutions": "always", **LAYOUTS[case.layout], "zero": case.zero, "units": 2 if case.zero else 0}
    sections: dict[str, Any] = {
        "train": {
            "global_batch_size": 2 * MICRO_BATCHES,
            "gradient_accumulation_steps": MICRO_BATCHES // LAYOUTS[case.layout].get("data", 1),
            "num_steps": NUM_STEPS,
            "seed": 3,
            "clip_norm": 0.5,
        },
        "optimizer": {"name": "adamw", "learning_rate": 1e-3, "epsilon": 1e-3, "weight_decay": 0.01},
        "parallel": parallel,
        "checkpoint": {"period": 1, "keep_newest": 9},
        "monitor": {"norms": ["*"]},
    }
    for name, values in case.sections.items():
        sections[name] = {**sections.get(name, {}), **values} if isinstance(values, Mapping) else values
    return make_run(folder, build(), columns(60), **sections)


def trained(cases: Iterable[Case], folder: Path, *, timeout_s: float = 900) -> dict[Case, RunDir]:
    """Train them all; raises AssertionError with the traceback of the rank that failed first."""
    runs = {case: make_case(case, folder / str(number)) for number, case in enumerate(cases)}
    for size in sorted({case.world_size for case in runs}):
        roots = [str(run.root) for case, run in runs.items() if case.world_size == size]
        run_ranks(size, "tests.equivalence.layouts:train_all", roots, timeout_s=timeout_s)
    return runs


def train_all(mpi: MPIContext, roots: list[str]) -> None:
    """On a rank: one training after the other."""
    from onward.trainer.events import Heartbeat
    from onward.trainer.loop import train

    class Counting(Heartbeat):
        """Notes how many collectives were made by the beginning of each step."""

        def beat(self, step: int | None = None, *, longest_step_s: float = 0.0) -> None:
            if step is not None:
                made[step] = len(calls)
            super().beat(step, longest_step_s=longest_step_s)

    def counted_all_reduce(x: torch.Tensor, group: str, how: Any) -> torch.Tensor:
        if not is_fake(x):  # the dry run and the cost estimate use fake tensors
            calls.append(how)
        return collective(x, group, how)

    def counted(move_rows: Callable[..., torch.Tensor], x: torch.Tensor, part: Any) -> torch.Tensor:
        if not is_fake(x):
            calls.append("rows")
        return move_rows(x, part)

    collective, calls = collectives.all_reduce, list[str]()
    collectives.all_reduce = vocabulary_loss.all_reduce = counted_all_reduce
    gather, scatter = collectives.all_gather_rows, collectives.reduce_scatter_rows  # of sequence parallelism
    collectives.all_gather_rows, collectives.reduce_scatter_rows = partial(counted, gather), partial(counted, scatter)
    for root in roots:
        run, made = RunDir(Path(root)), dict[int, int]()
        if mpi.rank == 0:
            run.begin_attempt()
        torch.distributed.barrier()
        heartbeat = Counting(run.heartbeat)
        train(run, mpi, attempt=1, heartbeat=heartbeat, stop_requested=lambda: False)
        if {1, 2} <= made.keys():  # not where it began with a checkpoint of the first step
            (run.root / f"collectives-{mpi.rank}").write_text(str(made[2] - made[1]))
    collectives.all_reduce = vocabulary_loss.all_reduce = collective
    collectives.all_gather_rows, collectives.reduce_scatter_rows = gather, scatter


def num_collectives(run: RunDir) -> list[int]:
    """Of the tensor axis in the first step, of each rank."""
    return [int(path.read_text()) for path in run.root.glob("collectives-*")]


def num_planned(run: RunDir) -> int:
    """What the plan says of the rank that sends most."""
    found = plan(read_config(run)).traffic
    return sum(each.count for each in found if each.axis == "tensor" and each.what.endswith(" of activations"))


def evaluated(run: RunDir) -> float:
    """The evaluation loss before the first step."""
    first = next(event for event in events(run, "evaluation") if event.step == 0)
    return float(first.values["evaluation/loss"])


def norms(run: RunDir) -> dict[str, float]:
    """What the event log says of every trained weight and its gradient, whole, in the last step."""
    values = [event.values for event in events(run, "scalars") if event.step == NUM_STEPS]
    return {name: value for each in values for name, value in each.items() if "_norm/" in name}


def counted_flops(run: RunDir) -> float:
    """What a step costs by the count on the graph."""
    (start,) = events(run, "start")
    return float(start.flops_per_sample) * read_config(run).train.global_batch_size


def flops_of_steps(run: RunDir) -> list[float]:
    """What the event log says that each step has cost."""
    values = [event.values for event in events(run, "scalars")]
    return [each["train/tflops"] * each["train/step_s"] * 1e12 for each in values if "train/tflops" in each]


def exported(run: RunDir) -> dict[str, Array]:
    """The weights of the file that comes out, proven under onnxruntime, by name."""
    loaded = tensors(run, NUM_STEPS, "model/")
    trained = export.Checkpoint(step=NUM_STEPS, weights=loaded)
    made = export.export(run, trained, data=evaluation_data(run), folder=run.root / "export")
    model = onnx.load(made.path)
    return {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in model.graph.initializer}


def tensors(run: RunDir, step: int, prefix: str) -> dict[str, torch.Tensor]:
    """What a checkpoint holds under a prefix, whole."""
    return {
        name.removeprefix(prefix): tensor
        for name, tensor in load(verify(run.checkpoint(step)))[1].items()
        if name.startswith(prefix)
    }


def gradients(run: RunDir) -> dict[str, torch.Tensor]:
    """Every gradient of the first step, clipped: 10 times Adam's first moment after it."""
    moments = tensors(run, 1, "optimizer/")
    return {name: 10 * tensor for name, tensor in moments.items() if name.endswith("/moment_1")}


def differences(found: RunDir, wanted: RunDir) -> dict[str, float]:
    """`loss`, `evaluation`, `gradients`, `parameters`: the greatest difference, relative as TOLERANCE says;
    `collectives`: how many more or fewer it made in a step than its plan says. Running statistics are parameters here.
    """
    a, b = losses(found), losses(wanted)
    assert a.keys() == b.keys() == set(range(1, NUM_STEPS + 1))
    pairs = {
        "gradients": (gradients(found), gradients(wanted)),
        "parameters": (tensors(found, NUM_STEPS, "model/"), tensors(wanted, NUM_STEPS, "model/")),
    }
    largest = max(float(tensor.abs().max()) for tensor in pairs["gradients"][1].values())
    worst = {"loss": max(abs(a[step] / b[step] - 1) for step in a)}
    worst["evaluation"] = abs(evaluated(found) / evaluated(wanted) - 1)
    if read_config(found).parallel.tensor > 1:
        worst["collectives"] = min(abs(number - num_planned(found)) for number in num_collectives(found))
    for kind, (mine, theirs) in pairs.items():
        assert mine.keys() == theirs.keys()
        floor = 1e-3 * largest if kind == "gradients" else 1e-6
        worst[kind] = max(_difference(mine[name], theirs[name], floor) for name in theirs)
    return worst


def _difference(a: torch.Tensor, b: torch.Tensor, floor: float) -> float:
    """Relative to the tensor's largest value; to `floor` if that is smaller, such as the gradients of key biases."""
    assert a.shape == b.shape
    return float((a - b).abs().max() / max(float(b.abs().max()), floor))


# -- the table in docs/reference/measurements.md

BEGIN, END = "<!-- parity: begin -->", "<!-- parity: end -->"


def table(found: Mapping[Case, Mapping[str, float]], made: Mapping[Case, int]) -> str:
    """One row for each layout and ZeRO, one column for each model: the greatest of its differences, and the number of
    tensor-parallel collectives of a micro-batch."""
    rows = [f"| layout | {' | '.join(MODELS)} |", "|---|" + "---|" * len(MODELS)]
    for layout in LAYOUTS:
        for zero in sorted({case.zero for case in found if case.layout == layout}):
            cells = [
                f"{max(differences.values()):.0e}" + (f" · {made[case]}" if case in made else "")
                for model in MODELS
                for case, differences in found.items()
                if (case.model, case.layout, case.zero) == (model, layout, zero)
            ]
            name = f"{layout}, ZeRO {zero}" if zero else layout
            rows.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(rows)


def main() -> None:
    """Train the whole matrix and write its table into docs/reference/measurements.md."""
    from tests.support.ranks import ROOT

    with tempfile.TemporaryDirectory(prefix="layouts-") as folder:
        runs = trained(matrix(), Path(folder), timeout_s=3600)
        found = {
            case: differences(run, runs[Case(case.model, ALONE)]) for case, run in runs.items() if case.layout != ALONE
        }
        made = {
            case: max(num_collectives(run)) // read_config(run).train.gradient_accumulation_steps
            for case, run in runs.items()
            if read_config(run).parallel.tensor > 1
        }
    page = ROOT / "docs" / "reference" / "measurements.md"
    before, _, rest = page.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    page.write_text(f"{before}{BEGIN}\n{table(found, made)}\n{END}{after}")
    print(table(found, made))
    worst = max(max(each.values()) for each in found.values())
    sys.exit(f"{worst:.1e} is above {TOLERANCE:.0e}" if worst > TOLERANCE else 0)


if __name__ == "__main__":
    main()
