"""Whole runs: configured metrics are in every record; one that stops at its time limit says how to go on, and does."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from onward.trainer.run.directory import RunDir
from onward.trainer.run.records import ExportedModel, read_record
from tests.support.runs import events
from tests.support.workshop import Workshop

pytestmark = [pytest.mark.usefixtures("only_servers"), pytest.mark.mpi, pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workshop]:
    workshop = Workshop.made(tmp_path_factory.mktemp("workshop"))
    yield workshop
    workshop.close()


def test_the_metrics_of_checkpoint_exported_file_and_variant_have_the_same_names_and_values(workshop: Workshop) -> None:
    settings = ['metrics=["accuracy", "f1_macro", "auroc"]', "checkpoint.best_metric=evaluation/f1_macro"]
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
    evaluated = {event.step: event.fields["values"] for event in events(run, "evaluation")}
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
    (mlflow_run,) = workshop.mlflow_runs(run)
    assert names <= mlflow_run.data.metrics.keys()
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
    assert (command, verb, name) == ("onward", "resume", run.root.name)
    key, _, hours = limit.partition("=")
    assert float(hours) > 2e-6
    on = workshop.onward("resume", name, f"{key}={float(hours) + 1}")
    assert (on["state"], on["step"], on["attempts"], on["ended_early"]) == ("exported", 60, 2, "")
    assert on["sha256"] != first["sha256"]
    (mlflow_run,) = workshop.mlflow_runs(run)
    assert mlflow_run.data.tags["onward.ended_early"] == ""
