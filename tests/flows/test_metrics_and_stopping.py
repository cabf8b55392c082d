"""Whole runs: configured metrics are in every record; one that stops at its time limit says how to go on, and does."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch

from onward.flows.shown.terminal_tables import outcome
from onward.infra.mlflow.tracking import Tracker
from onward.trainer.data.storage.opened_shards import open_shards
from onward.trainer.model.metrics.library_measure import import_torchmetrics
from onward.trainer.run.directory import RunDir
from onward.trainer.run.records import ExportedModel, RunIdentity, read_record
from tests.support.runs import events
from tests.support.workshop import Workshop

pytestmark = [pytest.mark.usefixtures("only_servers"), pytest.mark.mpi, pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workshop]:
    workshop = Workshop.made(tmp_path_factory.mktemp("workshop"))
    yield workshop
    workshop.close()


def by_torchmetrics(model: Path, rows: Mapping[str, Any], split: str) -> dict[str, float]:
    """Compute the metrics of a file of 4 classes by onnxruntime and torchmetrics alone."""
    session = onnxruntime.InferenceSession(str(model), providers=["CPUExecutionProvider"])
    images, labels = (np.asarray(rows[name]) for name in ("image", "label"))
    logits = torch.from_numpy(session.run(None, {"image": images.astype(np.float32)})[0])
    targets, classification = torch.from_numpy(labels), import_torchmetrics().functional.classification
    found = {
        "loss": torch.nn.functional.cross_entropy(logits, targets),
        "accuracy": classification.multiclass_accuracy(logits, targets, num_classes=4, average="micro"),
        "f1_macro": classification.multiclass_f1_score(logits, targets, num_classes=4, average="macro"),
        "auroc": classification.multiclass_auroc(logits.softmax(1), targets, num_classes=4, average="macro"),
    }
    return {f"{split}/{name}": float(value) for name, value in found.items()}


def test_the_metrics_of_checkpoint_exported_file_and_variant_have_the_same_names_and_values(workshop: Workshop) -> None:
    random, labels = np.random.default_rng(7), np.arange(90) % 4
    images = random.normal(size=(90, 3, 8, 8)) * 2 + labels[:, None, None, None]  # as the others, with more noise
    test = {"image": images.astype(np.float32), "label": labels}
    np.savez(workshop.root / "test.npz", **test)
    settings = ['metrics=["accuracy", "f1_macro", "auroc"]', "checkpoint.best_metric=evaluation/f1_macro"]
    settings += [f"data.test_source={workshop.root / 'test.npz'}"]
    settings += [
        "train.num_steps=90",
        "train.evaluation_period=30",
        "checkpoint.period=30",
        'export.variants=["int8_static"]',
    ]
    facts = workshop.onward("run", str(workshop.root / "config.toml"), *settings)
    run = RunDir(Path(facts["directory"]))
    names = {f"evaluation/{name}" for name in ("loss", "accuracy", "f1_macro", "auroc")}
    exported = read_record(run.exported, ExportedModel)
    evaluated = {event.step: event.values for event in events(run, "evaluation")}
    best = max((step for step in evaluated if step), key=lambda step: (evaluated[step]["evaluation/f1_macro"], -step))
    assert exported.step == best, "the best checkpoint follows F1, of which a greater one is better"
    assert set(exported.before) == set(exported.after) == names
    assert exported.before == pytest.approx(evaluated[0], abs=1e-4)
    assert exported.after == pytest.approx(evaluated[best], abs=1e-4)
    for variant in exported.variants:
        assert not variant.refused
        assert set(variant.metrics) == names
        for name in ("evaluation/loss", "evaluation/accuracy"):  # one prediction in 20 changes F1 by more
            assert variant.metrics[name] == pytest.approx(exported.after[name], abs=0.1)
    held_out = open_shards(run.shards, "evaluation")
    rows = held_out.read(np.arange(held_out.num_rows))
    assert exported.after == pytest.approx(by_torchmetrics(exported.path, rows, "evaluation"), rel=1e-4)
    tested = by_torchmetrics(exported.path, test, "test")
    assert exported.test == facts["test"] == pytest.approx(tested, rel=1e-4)
    for variant in exported.variants:
        assert variant.path
        assert variant.metrics == pytest.approx(by_torchmetrics(variant.path, rows, "evaluation"), rel=1e-4)
    (mlflow_run,) = workshop.mlflow_runs(run)
    assert names <= mlflow_run.data.metrics.keys()
    client = Tracker(read_record(run.identity, RunIdentity).tracking_uri)._client
    version = client.get_model_version(exported.registered_as, exported.version)
    logged = client.search_logged_models([mlflow_run.info.experiment_id], f"tags.sha256 = '{exported.sha256}'")
    (model,) = (each for each in logged if each.artifact_location == version.source)
    registered = {metric.key: metric.value for metric in model.metrics}
    for name, value in tested.items():
        assert mlflow_run.data.metrics[name] == registered[name] == pytest.approx(value)
    assert names <= registered.keys()
    once = client.get_metric_history(mlflow_run.info.run_id, "evaluation/loss")
    assert [point.step for point in once].count(best) == 1, "the run, the checkpoint and the file share one point"
    assert json.loads((run.classes / "classes.json").read_text())["step"] == 90
    confusion = (run.classes / "confusion.csv").read_text().splitlines()
    assert confusion[0] == "target \\ predicted,0,1,2,3"
    refused = workshop.start("run", str(workshop.root / "config.toml"), 'metrics=["f1_makro", "rmse"]')
    _, error = refused.communicate()
    assert refused.returncode == 2
    assert "there is no metric 'f1_makro'; did you mean f1_macro" in error
    refused = workshop.start("run", str(workshop.root / "config.toml"), 'metrics=["top_5"]')
    _, error = refused.communicate()
    assert refused.returncode == 2
    assert "metrics: top_5 needs 5 classes or more, but the output has 4" in error, "the rehearsal tries the metrics"


def test_out_of_time_a_run_is_exported_and_the_command_that_it_prints_continues_it(workshop: Workshop) -> None:
    first = workshop.onward("run", str(workshop.root / "config.toml"), "train.num_steps=60", "stop.max_hours=2e-6")
    run = RunDir(Path(first["directory"]))
    assert (first["state"], first["step"], first["attempts"]) == ("exported", 1, 1)
    assert first["ended_early"].startswith("stop.max_hours = 2e-06: ")
    assert Path(first["model"]).is_file()
    assert "the run ends early: stop.max_hours" in (run.root / "flow.log").read_text()
    (mlflow_run,) = workshop.mlflow_runs(run)
    assert mlflow_run.info.status == "FINISHED"
    assert mlflow_run.data.tags["onward.ended_early"] == first["ended_early"]

    refused = workshop.start("resume", run.root.name, "train.num_steps=90")
    _, error = refused.communicate()
    assert refused.returncode == 2
    assert "train.num_steps: a run keeps the configuration that it began with, but for [stop]" in error

    command, verb, name, limit = first["to_go_on"].split()
    assert (command, verb, name) == ("onward", "resume", read_record(run.identity, RunIdentity).name)
    closing = dict(outcome(first))
    assert (closing["ended early"], closing["to go on"]) == (first["ended_early"], first["to_go_on"]), "in the terminal"
    key, _, hours = limit.partition("=")
    assert float(hours) > 2e-6
    on = workshop.onward("resume", name, f"{key}={float(hours) + 1}")
    assert (on["state"], on["step"], on["attempts"], on["ended_early"]) == ("exported", 60, 2, "")
    assert on["sha256"] != first["sha256"]
    (mlflow_run,) = workshop.mlflow_runs(run)
    assert mlflow_run.data.tags["onward.ended_early"] == ""
