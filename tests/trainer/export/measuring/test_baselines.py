"""What needs no model is measured by the same metrics on the same rows, and never ends an export."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from onward.trainer.data.storage.opened_shards import open_shards
from onward.trainer.export.export_commands import evaluation_data
from onward.trainer.export.measuring.baselines import Baselines
from onward.trainer.export.measuring.onnx_runner import OnnxRunner
from onward.trainer.export.model_file import ModelFile
from onward.trainer.run.directory import RunDir, read_config
from tests.support.graphs import tiny_conv_net, tiny_loss_model, tiny_mlp, tiny_transformer, tiny_two_outputs
from tests.support.runs import Array, make_run, tiny_images, tiny_text

ONE_STEP = {"num_steps": 1, "global_batch_size": 8}


def measured(run: RunDir) -> dict[str, dict[str, float]]:
    """The baselines of a run, as its export measures them."""
    data, config = evaluation_data(run), read_config(run)
    runner = OnnxRunner(ModelFile.read(config.model.path), data)
    baselines = Baselines(config.data, data, runner.outputs)
    runner.evaluate(baselines.count)
    runner.evaluate(baselines.measure)
    return baselines.compute()


def held_out(run: RunDir, column: str = "label") -> Array:
    rows = open_shards(run.shards, "evaluation")
    return np.asarray(rows.read(np.arange(rows.num_rows))[column])


def test_of_classes_it_is_the_most_frequent_one(tmp_path: Path) -> None:
    images = tiny_images(200)
    images["label"] = np.where(np.arange(200) % 3, 2, images["label"])
    run = make_run(tmp_path, tiny_conv_net(), images, train=ONE_STEP)
    ((name, found),) = measured(run).items()
    assert name == "the most frequent class"
    shares = np.bincount(held_out(run)) / len(held_out(run))
    assert found["evaluation/accuracy"] == pytest.approx(shares.max())
    shares = shares[shares > 0]
    assert found["evaluation/loss"] == pytest.approx(-(shares * np.log(shares)).sum(), rel=1e-5)


def test_of_tokens_it_is_the_most_frequent_one(tmp_path: Path) -> None:
    run = make_run(tmp_path, tiny_transformer(), tiny_text(40), train=ONE_STEP)
    shares = np.bincount(held_out(run).ravel()) / held_out(run).size
    assert measured(run)["the most frequent class"]["evaluation/accuracy"] == pytest.approx(shares.max(), abs=1e-6)


def test_of_numbers_it_is_the_mean_of_each_element(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    columns = {
        "features": random.normal(size=(100, 4)).astype(np.float32),
        "label": (random.normal(size=(100, 3)) * [1, 10, 100] + [0, 50, 5000]).astype(np.float32),
    }
    run = make_run(tmp_path, tiny_mlp(outputs=3), columns, model={"loss": "mse"}, train=ONE_STEP)
    ((name, found),) = measured(run).items()
    assert name == "the mean of the labels"
    assert found["evaluation/mse"] == pytest.approx(held_out(run).var(axis=0).mean(), rel=1e-4)


def test_of_a_series_it_is_its_last_value_too_in_the_units_of_the_source(tmp_path: Path) -> None:
    walk = 1000 + np.cumsum(np.random.default_rng(0).normal(size=400))
    pd.DataFrame({"price": walk}).to_csv(tmp_path / "walk.csv", index=False)
    run = make_run(
        tmp_path / "run",
        tiny_mlp(outputs=2),
        {},
        model={"loss": "mse"},
        data={
            "source": str(tmp_path / "walk.csv"),
            "inputs": {"features": "price"},
            "label": "price_ahead",
            "table": {"standardise": "standard", "window": {"length": 4, "horizon": 2}},
        },
        train=ONE_STEP,
    )
    found = measured(run)
    assert list(found) == ["the mean of the labels", "the last known value"]
    ahead = held_out(run, "price_ahead")
    places = [int(np.argmin(np.abs(walk - first))) for first in ahead[:, 0]]
    errors = ahead - walk[np.array(places) - 1][:, None]
    assert found["the last known value"]["evaluation/mse"] == pytest.approx((errors**2).mean(), rel=1e-3)
    assert found["the last known value"]["evaluation/mse"] < found["the mean of the labels"]["evaluation/mse"] / 2


def test_several_losses_have_one_together_and_a_graph_with_its_own_loss_has_none(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    labels: dict[str, Any] = {}
    proto = tiny_two_outputs()
    names = [value.name for value in proto.graph.input]
    shapes = {v.name: [d.dim_value for d in v.type.tensor_type.shape.dim] for v in proto.graph.input}
    columns = {name: random.normal(size=(80, *shapes[name][1:])).astype(np.float32) for name in names}
    outputs = [value.name for value in proto.graph.output]
    losses = [
        {"name": "cross_entropy", "output": outputs[0], "label": "label"},
        {"name": "mse", "output": outputs[1], "label": "number"},
    ]
    widths = [v.type.tensor_type.shape.dim[-1].dim_value for v in proto.graph.output]
    labels["label"] = random.integers(0, widths[0], 80)
    labels["number"] = random.normal(size=(80, widths[1])).astype(np.float32)
    run = make_run(tmp_path / "two", proto, columns | labels, loss=losses, train=ONE_STEP)
    assert list(measured(run)) == ["the most frequent class and the mean of the labels"]

    columns = {"features": random.normal(size=(80, 4)).astype(np.float32), "label": random.integers(0, 3, 80)}
    proto = tiny_loss_model()
    own = {v.name for v in proto.graph.input}
    given = {("labels" if name == "label" and "labels" in own else name): value for name, value in columns.items()}
    assert measured(make_run(tmp_path / "own", proto, given, model={"loss": "output"}, train=ONE_STEP)) == {}


def test_an_error_leaves_the_baseline_out_and_the_evaluation_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path, tiny_conv_net(), tiny_images(40), train=ONE_STEP)

    def fails(*_: object) -> torch.Tensor:
        raise RuntimeError("no such class")

    monkeypatch.setattr(Baselines, "_constant_of", fails)
    assert measured(run) == {}
