"""A table with names, gaps and categories trains alike on one rank, on two, and after a kill, bit for bit."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest

from onward.trainer.data.storage.opened_shards import open_shards
from onward.trainer.events import read_events
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


WORDS = """
<ir_version: 10, opset_import: ["" : 20]>
words (int64[batch, length] ids) => (float[batch, 3] logits)
<float[20, 3] table = {TABLE}, int64 padding = {0}, int64[1] last = {-1}, int64[1] middle = {1}>
{
    is_padding = Equal (ids, padding)
    is_word = Not (is_padding)
    mask = Cast <to = 1> (is_word)
    column = Unsqueeze (mask, last)
    rows = Gather (table, ids)
    kept = Mul (rows, column)
    total = ReduceSum <keepdims = 0> (kept, middle)
    count = ReduceSum (mask, middle)
    logits = Div (total, count)
}
"""

SERIES = """
<ir_version: 10, opset_import: ["" : 20]>
series (float[batch, 6] load) => (float[batch, 2] ahead)
<float[6, 2] weight = {WEIGHT}>
{
    ahead = MatMul (load, weight)
}
"""


def numbers(count: int) -> str:
    return ", ".join(f"{value:.3f}" for value in np.random.default_rng(1).normal(0, 0.5, count))


def ragged_rows(folder: Path, *, replicas: int) -> RunDir:
    """Rows of 2 to 40 ids, ordered by length within a shuffle."""
    folder.mkdir(parents=True)
    random = np.random.default_rng(2)
    rows = [
        {"ids": random.integers(1, 20, random.integers(2, 41)).tolist(), "label": place % 3} for place in range(150)
    ]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    sections: dict[str, Any] = {
        "data": {"source": str(folder / "rows.jsonl")},
        "train": {
            "global_batch_size": 12,
            "num_epochs": 2,
            "gradient_accumulation_steps": 4 // replicas,
            "shuffle": "length",
        },
    }
    return made(folder, WORDS.replace("TABLE", numbers(60)), sections, replicas)


def time_series(folder: Path, *, replicas: int) -> RunDir:
    """Windows of 6 hours and the 2 that follow, of 4 series."""
    folder.mkdir(parents=True)
    random = np.random.default_rng(3)
    lines = ["meter,load"]
    lines += [
        f"{meter},{np.sin(hour / 3) * meter + random.normal(0, 0.1):.4f}"
        for meter in (1, 2, 3, 4)
        for hour in range(60)
    ]
    (folder / "hours.csv").write_text("\n".join(lines))
    table = {"window": {"length": 6, "horizon": 2, "by": "meter"}, "standardise": {"load": "standard"}}
    sections: dict[str, Any] = {
        "model": {"loss": "mse"},
        "data": {"source": str(folder / "hours.csv"), "label": "load_ahead", "table": table},
        "train": {"global_batch_size": 12, "num_epochs": 1, "gradient_accumulation_steps": 2 // replicas},
    }
    return made(folder, SERIES.replace("WEIGHT", numbers(12)), sections, replicas)


def made(folder: Path, model: str, sections: dict[str, Any], replicas: int) -> RunDir:
    more = {"optimizer": {"learning_rate": 0.05}, "parallel": {"data": replicas}, "checkpoint": {"period": 3}}
    return make_run(folder, onnx.parser.parse_model(model), {}, **sections, **more)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [ragged_rows, time_series])
def test_balanced_lengths_and_windows_train_alike_on_two_ranks_and_after_kills(
    kind: Callable[..., RunDir], tmp_path: Path
) -> None:
    alone, both, killed = (kind(tmp_path / str(place), replicas=place or 2) for place in (1, 2, 0))
    for run in (alone, both):
        train_run(run)
    for step in (4, 9):
        train_until(killed, lambda event, step=step: event.step >= step and event.kind == "scalars")
    train_run(killed)
    first, second, third = (final_tensors(run) for run in (alone, both, killed))
    assert_equal_bits(third, second)
    assert_close(first, second, 1e-5)
    steps = {event.step for event, _ in read_events(alone.events) if event.kind == "scalars"}
    assert max(steps) > 9
