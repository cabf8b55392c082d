"""Metrics of real runs do not depend on the layout: replicas with unequal shares, tensor parallelism, a pipeline."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from torch import Tensor

from onward.trainer.checkpoint.load import load
from onward.trainer.checkpoint.verification import verify
from onward.trainer.config.metric_names import METRICS as KNOWN
from onward.trainer.distributed.weights import weights_in
from onward.trainer.export import exported_model as export
from onward.trainer.export.export_commands import evaluation_data
from onward.trainer.onnx_graph.node_builder import GraphWriter
from onward.trainer.run.directory import RunDir, read_config
from tests.equivalence.layouts import Case, trained
from tests.support.ranks import run_ranks
from tests.support.runs import Array, events, make_run

pytestmark = pytest.mark.mpi
METRICS = ["accuracy", "top_3", "f1_macro", "mean_iou", "auroc", "cohen_kappa", "perplexity"]
COUNTED = {f"evaluation/{name}" for name in ("accuracy", "top_3", "f1_macro", "mean_iou", "cohen_kappa")}
"""Metrics that rounding changes only where it changes a prediction."""


@pytest.mark.slow
def test_every_layout_has_the_metrics_of_one_rank_and_so_has_the_exported_file(tmp_path: Path) -> None:
    """The evaluation split has 12 rows in batches of 5: with two replicas shares of two batches and of one."""
    sections = {"metrics": METRICS, "train": {"num_steps": 1, "evaluation_batch_size": 5}}
    cases = [Case("GPT-2: fused QKV, tied", layout, sections=sections) for layout in ("1x1x1", "dp2", "tp2", "pp2")]
    runs = dict(zip(("alone", "dp2", "tp2", "pp2"), trained(cases, tmp_path).values(), strict=True))
    expected = evaluations(runs["alone"])
    assert set(expected[0]) == {"evaluation/loss", *(f"evaluation/{name}" for name in METRICS)}
    for name, run in runs.items():
        for mine, theirs in zip(evaluations(run), expected, strict=True):
            assert mine == pytest.approx(theirs, rel=1e-5), name
            assert {key: mine[key] for key in COUNTED} == {key: theirs[key] for key in COUNTED}, name
    run = runs["dp2"]
    weights = weights_in(load(verify(run.checkpoint(1)))[1])
    made = export.export(run, export.Checkpoint(step=1, weights=weights), data=evaluation_data(run), folder=tmp_path)
    assert made.before == pytest.approx(expected[0], rel=1e-5)
    assert made.after == pytest.approx(evaluations(run)[-1], rel=1e-5)


def evaluations(run: RunDir) -> list[dict[str, float]]:
    return [event.values for event in events(run, "evaluation")]


# -- every metric of every loss: one graph with an output for each


def every_output() -> onnx.ModelProto:
    """`features` [batch, 6] -> an output for each loss."""
    g = GraphWriter("every_output", seed=0)
    x = g.input("features", ("batch", 6))
    for name, size in (("fc1", 6), ("fc2", 16)):
        weight = g.weight(f"{name}.weight", g.normal(0.5, 16, size))
        x = g.op("Tanh", g.op("Gemm", x, weight, g.weight(f"{name}.bias", g.normal(0.1, 16)), transB=1))

    def head(name: str, size: int) -> str:
        weight = g.weight(f"{name}.weight", g.normal(0.5, size, 16))
        return g.op("Gemm", x, weight, g.weight(f"{name}.bias", g.normal(0.1, size)), transB=1)

    def output(name: str, value: str, *shape: int) -> None:
        g.op("Reshape", value, g.weight(f"{name}.shape", [-1, *shape]), outputs=name)
        g.output(name, ("batch", *shape))

    sizes = {"kinds": (5,), "tags": (3,), "level": (2,), "picture": (1, 12, 12), "range": (3,), "steps": (8, 6)}
    for name, shape in (sizes | {"a": (4,), "b": (4,), "c": (4,)}).items():
        output(name, head(name, math.prod(shape)), *shape)
    middle, half = head("middle", 2), g.op("Exp", head("half", 2))
    output("box", g.op("Concat", g.op("Sub", middle, half), g.op("Add", middle, half), axis=1), 4)
    return g.model()


def every_label(rows: int, seed: int) -> dict[str, Array]:
    random = np.random.default_rng(seed)
    words = random.integers(1, 6, (rows, 3))
    words[np.arange(3) >= random.integers(1, 4, (rows, 1))] = -100  # words of 1 to 3 symbols
    middle, half = random.normal(size=(rows, 2)), random.random((rows, 2)) + 0.5
    numbers = {
        "features": random.normal(size=(rows, 6)),
        "tag": random.integers(0, 2, (rows, 3)),
        "number": random.normal(size=(rows, 2)),
        "picture": random.random((rows, 1, 12, 12)),
        "amount": random.normal(size=rows),
        "corners": np.concatenate([middle - half, middle + half], 1),
        "alike": random.integers(0, 2, rows) * 2 - 1,
    }
    classes = {"kind": random.integers(0, 5, rows), "word": words}
    return {name: values.astype(np.float32) for name, values in numbers.items()} | classes


def own(output: Tensor, labels: Tensor) -> Tensor:
    return output.square().sum() + 0 * labels.sum()


FILE = f"{Path(__file__).resolve()}:own"
LOSSES: list[dict[str, Any]] = [
    {"name": "cross_entropy", "output": "kinds", "label": "kind"},
    {"name": "bce_with_logits", "output": "tags", "label": "tag"},
    {"name": "mse", "output": "level", "label": "number"},
    {"name": "l1", "output": "picture", "label": "picture"},
    {"name": "quantile", "output": "range", "label": "amount", "quantiles": [0.1, 0.5, 0.9]},
    {"name": "giou", "output": "box", "label": "corners"},
    {"name": "ctc", "output": "steps", "label": "word"},
    {"name": "cosine", "output": ["a", "b"], "label": "alike"},
    {"name": "triplet", "output": ["a", "b", "c"]},
    {"name": "file", "file": FILE, "output": "kinds", "label": "kind", "label_type": "int64"},
    {"name": "file", "file": FILE, "output": "tags", "label": "tag"},
]
# which needs the rows of all stages at once
MATCHES: list[dict[str, Any]] = [{"name": "info_nce", "output": ["b", "c"]}]
PARAMETERS: dict[str, dict[str, Any]] = {
    "top_k": {"k": 2},
    "f_beta": {"beta": 2.0},
    "psnr": {"data_range": 1.0, "output": "picture"},
    "ssim": {"data_range": 1.0, "output": "picture"},
    "mape": {"output": "level"},
}
ENTRIES = [{"name": name} | PARAMETERS.get(name, {}) for name in KNOWN]


def evaluated_on(rows: int, layout: Mapping[str, int], folder: Path, *, can_match: bool) -> RunDir:
    """A run whose evaluation data has so many rows, in batches of 5 on each replica."""
    folder.mkdir()
    np.savez(folder / "held-out.npz", **every_label(rows, 1))
    return make_run(
        folder,
        every_output(),
        every_label(24, 0),
        data={"evaluation_source": str(folder / "held-out.npz")},
        loss=[*LOSSES, *(MATCHES if can_match else [])],
        metrics=[each for each in ENTRIES if can_match or each["name"] != "retrieval_accuracy"],
        train={
            "global_batch_size": 12,
            "gradient_accumulation_steps": layout.get("pipeline", 1),
            "num_steps": 1,
            "evaluation_batch_size": 5,
        },
        checkpoint={"best_metric": "evaluation/level/mse"},
        parallel=layout,
    )


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_metric_of_every_loss_is_the_same_on_any_layout_with_ragged_and_with_empty_shares(tmp_path: Path) -> None:
    """13 rows: two replicas have 7 and 6 in batches of 5. 2 rows: the third of three replicas has none."""
    layouts: list[dict[str, int]] = [{}, {"data": 2}, {"tensor": 2}, {"data": 3}]
    cases = [(rows, layout, True) for rows, layout in itertools.product((13, 2), layouts)]
    cases += [(rows, layout, False) for rows, layout in itertools.product((13, 2), ({}, {"pipeline": 2}))]
    runs = [evaluated_on(*case[:2], tmp_path / str(place), can_match=case[2]) for place, case in enumerate(cases)]
    for size in (1, 2, 3):
        roots = [str(run.root) for run in runs if read_config(run).world_size == size]
        run_ranks(size, "tests.equivalence.layouts:train_all", roots, timeout_s=900)
    for (rows, layout, can_match), run in zip(cases, runs, strict=True):
        alone = runs[cases.index((rows, {}, can_match))]
        for mine, expected in zip(evaluations(run), evaluations(alone), strict=True):
            # the loss info_nce, and so the sum of all losses, depends on the rows that an evaluation batch has
            for name in ("evaluation/loss", "evaluation/b+c/loss") if can_match else ():
                del mine[name], expected[name]
            assert mine == pytest.approx(expected, rel=2e-5, abs=1e-7, nan_ok=True), (rows, layout)
    measured = evaluations(runs[0])[0]
    assert not [name for name, value in measured.items() if math.isnan(value)]
    keys = {name.rpartition("/")[2] for name in measured}
    wanted = {f"{name}_2" if name == "f_beta" else "top_2" if name == "top_k" else name for name in KNOWN}
    assert keys == {*wanted, "loss"}
