"""A table with names, gaps and categories trains alike on one rank, on two, and after a kill, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest

from onward.trainer.data.storage.shards import open_shards
from onward.trainer.run.directory import RunDir
from tests.support.runs import assert_close, assert_equal_bits, final_tensors, make_run, train_run, train_until

pytestmark = pytest.mark.mpi

MODEL = """
<ir_version: 10, opset_import: ["" : 20]>
churn (float[batch, 3] numbers, int64[batch] city) => (float[batch, 3] logits)
<float[4, 2] cities = {0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8}, float[5, 3] weight = {WEIGHT}>
{
    place = Gather (cities, city)
    all = Concat <axis = 1> (numbers, place)
    logits = MatMul (all, weight)
}
"""


def configured(folder: Path, *, replicas: int = 1) -> RunDir:
    folder.mkdir(parents=True)
    random = np.random.default_rng(0)
    lines = ["income;age;label;city"]
    for _ in range(120):
        age = "" if random.random() < 0.2 else random.integers(18, 90)
        label, city = random.choice(["dog", "cat", "cow"]), random.choice(["oslo", "rome", "bonn"])
        lines.append(f"{random.lognormal(10, 1):.2f};{age};{label};{city}".replace(".", ","))
    (folder / "table.csv").write_text("\n".join(lines))
    weights = ", ".join(f"{value:.3f}" for value in random.normal(0, 0.5, 15))
    table = {
        "decimal": ",",
        "standardise": "standard",
        "missing": {"age": "mean"},
        "indicators": ["age"],
        "log1p": ["income"],
        "categories": ["city"],
    }
    inputs = {"numbers": ["income", "age", "age_missing"]}
    sections: dict[str, Any] = {
        "data": {"source": str(folder / "table.csv"), "inputs": inputs, "table": table},
        "train": {"global_batch_size": 12, "num_steps": 14, "gradient_accumulation_steps": 2 // replicas},
        "optimizer": {"learning_rate": 0.05},
        "parallel": {"data": replicas},
        "checkpoint": {"period": 3},
    }
    return make_run(folder, onnx.parser.parse_model(MODEL.replace("WEIGHT", weights)), {}, **sections)


def test_one_rank_two_ranks_and_a_killed_run_end_with_the_same_weights(tmp_path: Path) -> None:
    alone, both, killed = (configured(tmp_path / str(place), replicas=place or 2) for place in (1, 2, 0))
    manifests = {run.shards.resolve().name for run in (alone, both, killed)}
    assert len(manifests) == 1
    assert open_shards(alone.shards, "train").fitted["label"].classes == ("cat", "cow", "dog")
    for run in (alone, both):
        train_run(run)
    train_until(killed, lambda event: event.step >= 7 and event.kind == "scalars")
    train_run(killed)
    first, second, third = (final_tensors(run) for run in (alone, both, killed))
    assert_equal_bits(third, second)
    assert_close(first, second, 1e-5)
