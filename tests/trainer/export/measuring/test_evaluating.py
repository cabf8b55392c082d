"""Labelled rows are measured as the evaluations of training measure them, by a file alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onward.trainer.config.losses import LossConfig
from onward.trainer.config.sections.metrics import MetricConfig
from onward.trainer.errors import ConfigError, DataError
from onward.trainer.export.export_commands import evaluation_data
from onward.trainer.export.measuring import evaluating
from onward.trainer.export.measuring.onnx_runner import OnnxRunner
from onward.trainer.export.measuring.predictions import Predictions, recipe_of
from onward.trainer.export.measuring.raw_batches import read_raw_batches
from onward.trainer.export.model_file import ModelFile
from onward.trainer.export.served.predictor import Predictor
from onward.trainer.run.directory import RunDir
from tests.support import graphs
from tests.support.exported_runs import exported_run, finished_run, two_tables


@dataclass
class Measuring:
    """An exported file that is measured on tables."""

    predictor: Predictor
    losses: Sequence[LossConfig]
    skips: bool = False
    bad: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, run: RunDir, **how: Any) -> Measuring:
        path = run.export / "model.onnx"
        recipe, folder = recipe_of(path)
        predictor = Predictor(path, recipe, folder)
        return cls(predictor, evaluating.losses_of(predictor.meanings), **how)

    def metrics(self, source: Path) -> dict[str, float]:
        meanings = self.predictor.meanings
        labels = evaluating.label_kinds(self.losses, meanings)
        batches = read_raw_batches(str(source), self.predictor.columns, 7, labels=labels)
        found = Predictions(self.predictor, batches, skips=self.skips, bad=self.bad)
        chosen = evaluating.metrics_that_fit(self.losses, ())
        return evaluating.evaluate(found, self.losses, meanings, chosen)


def trained(run: RunDir) -> dict[str, float]:
    """The evaluation of the same file by training, without the names of splits."""
    values = OnnxRunner(ModelFile.read(run.export / "model.onnx"), evaluation_data(run)).evaluate()
    return {name.removeprefix("evaluation/"): value for name, value in values.items()}


def classifier(folder: Path, labels: Sequence[Any]) -> RunDir:
    random = np.random.default_rng(0)
    columns = {name: random.normal(size=len(labels)) for name in "abcd"}
    data = two_tables(folder, **columns, label=labels) | {"inputs": {"features": list("abcd")}}
    data["table"] = {"standardise": "standard"}
    run = exported_run(folder, graphs.tiny_mlp(outputs=3), data=data)
    return finished_run(run, folder / "model.onnx")


@pytest.mark.parametrize("labels", [["no", "yes", "maybe"] * 10, [0, 1, 2] * 10], ids=["names", "numbers"])
def test_classes_are_measured_as_in_training_and_by_more_metrics(tmp_path: Path, labels: list[Any]) -> None:
    run = classifier(tmp_path, labels)
    found, wanted = Measuring.of(run).metrics(tmp_path / "b.parquet"), trained(run)
    assert wanted.keys() == {"loss", "accuracy"}
    assert {name: found[name] for name in wanted} == pytest.approx(wanted, rel=1e-6)
    assert {"f1", "auroc", "matthews", "recall", "perplexity"} <= found.keys()


def test_numbers_are_measured_as_in_training(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    columns = {name: random.normal(size=30) for name in ("a", "b", "c", "d", "price")}
    data = two_tables(tmp_path, **columns) | {"inputs": {"features": list("abcd")}, "label": "price"}
    model = {"path": tmp_path / "model.onnx", "loss": "mse"}
    run = finished_run(exported_run(tmp_path, graphs.tiny_mlp(), model=model, data=data), tmp_path / "model.onnx")
    found, wanted = Measuring.of(run).metrics(tmp_path / "b.parquet"), trained(run)
    assert {name: found[name] for name in wanted} == pytest.approx(wanted, rel=1e-6)
    assert {"r2", "rmse", "mae"} <= found.keys()


def test_labels_that_are_no_class_are_named_by_row(tmp_path: Path) -> None:
    measuring = Measuring.of(classifier(tmp_path, ["no", "yes", "maybe"] * 10))
    (tmp_path / "t.csv").write_text("a,b,c,d,label\n1,2,3,4,yes\n1,2,3,4,never\n1,2,3,4,\n1,2,3,4,no\n")
    with pytest.raises(DataError) as caught:
        measuring.metrics(tmp_path / "t.csv")
    first, second = caught.value.problems
    assert "t.csv, line 3: label is 'never', which is no class of the model; it has maybe, no, yes" in first
    assert "t.csv, line 4" in second
    skipping = Measuring(measuring.predictor, measuring.losses, skips=True)
    assert skipping.metrics(tmp_path / "t.csv")["loss"] > 0
    assert len(skipping.bad) == 2


def test_a_label_beyond_the_classes_of_the_model_and_a_label_that_is_missing(tmp_path: Path) -> None:
    measuring = Measuring.of(classifier(tmp_path, [0, 1, 2] * 10))
    (tmp_path / "t.csv").write_text("a,b,c,d,label\n1,2,3,4,3\n")
    with pytest.raises(DataError, match="the labels go up to class 3, but the model has 3"):
        measuring.metrics(tmp_path / "t.csv")
    (tmp_path / "u.csv").write_text("a,b,c,d\n1,2,3,4\n")
    with pytest.raises(DataError, match=r"u\.csv has no column label; it has a, b, c, d"):
        measuring.metrics(tmp_path / "u.csv")


@pytest.mark.parametrize("loss", ["output", "triplet", "ctc", "file"])
def test_losses_that_labelled_rows_do_not_give_are_refused(loss: str) -> None:
    with pytest.raises(ConfigError, match="`onward status` has what the run measured"):
        evaluating.losses_of([{"name": "y", "loss": loss, "label": ("label",), "classes": ()}])


def test_curves_that_keep_all_scores_are_left_out_where_there_are_many_classes_unless_they_are_configured() -> None:
    losses = evaluating.losses_of([{"name": "y", "loss": "cross_entropy", "label": ("label",), "classes": ()}])
    few = {metric.name for metric in evaluating.metrics_that_fit(losses, (), num_classes=100)}
    many = {metric.name for metric in evaluating.metrics_that_fit(losses, (), num_classes=101)}
    assert few - many == {"auroc", "average_precision"}
    asked = [MetricConfig(name="auroc", thresholds=100), MetricConfig(name="top_k", k=5)]
    chosen = {metric.key for metric in evaluating.metrics_that_fit(losses, asked, num_classes=1000)}
    assert {"auroc", "top_5", "accuracy"} <= chosen
