"""Whole sweeps: the comparison, its best model, and what is left of a sweep that was killed, stopped or cancelled."""

from __future__ import annotations

import json
import shutil
import signal
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from onward.infra.mlflow.registry import Registry
from onward.infra.mlflow.tracking import Tracker
from onward.trainer.run.directory import RunDir
from onward.trainer.run.recorded.sweep_records import SweepDir, Trial
from onward.trainer.run.records import ExportedModel, RunIdentity, read_record
from tests.support.runs import events
from tests.support.workshop import Workshop, api, finished, reached, signed_in, until

pytestmark = [pytest.mark.usefixtures("only_servers"), pytest.mark.mpi, pytest.mark.slow, pytest.mark.timeout(1800)]

SHORT = ("parallel.data=1", "train.num_steps=300", "checkpoint.period=25")


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workshop]:
    workshop = Workshop.made(tmp_path_factory.mktemp("workshop"))
    yield workshop
    workshop.close()


def started(workshop: Workshop, *words: str) -> tuple[Any, SweepDir]:
    """Start a sweep; return its process and its directory."""
    sweeps = workshop.home / "sweeps"
    before = set(sweeps.glob("*/sweep.json"))
    process = workshop.start("sweep", str(workshop.root / "config.toml"), *words)
    new = until(lambda: process.poll() or next(iter(set(sweeps.glob("*/sweep.json")) - before), None), limit_s=120)
    assert not isinstance(new, int), process.communicate()[1]
    return process, SweepDir(new.parent)


def run_of(workshop: Workshop, folder: SweepDir, number: int) -> RunDir:
    """The run directory of a trial, as soon as the trial has begun."""
    path = folder.trial(number)
    return RunDir(
        workshop.home / "runs" / until(lambda: path.exists() and read_record(path, Trial), limit_s=300).run_id
    )


def status_of(folder: SweepDir, number: int) -> str:
    path = folder.trial(number)
    return read_record(path, Trial).status if path.exists() else ""


def killed(workshop: Workshop, process: Any) -> None:
    process.kill()
    process.communicate()
    until(lambda: not workshop.processes(), limit_s=30)


def test_six_learning_rates_killed_twice_and_resumed_lose_no_trial_repeat_none_and_register_the_best(
    workshop: Workshop,
) -> None:
    rates = "optimizer.learning_rate=1e-4,3e-4,1e-3,3e-3,1e-2,1e30"
    process, folder = started(workshop, rates, *SHORT)
    second = run_of(workshop, folder, 2)
    until(lambda: reached(second, 100), limit_s=300)
    killed(workshop, process)  # in the middle of trial 2
    assert [status_of(folder, number) for number in (1, 2, 3)] == ["complete", "running", ""]
    first = folder.trial(1).read_bytes()

    process = workshop.start("sweep", "--resume", "last")
    until(lambda: reached(second, 200, attempt=2), limit_s=300)
    refused = workshop.start("sweep", "--resume", folder.root.name[:8])
    _, error = refused.communicate(timeout=120)
    assert refused.returncode == 2
    assert "is running already" in error
    until(lambda: status_of(folder, 3) == "complete", limit_s=300)
    killed(workshop, process)  # between trials 3 and 4
    before = [folder.trial(number).read_bytes() for number in (1, 2, 3)]
    assert before[0] == first

    facts = workshop.onward("sweep", "--resume", "last", limit_s=1200)
    assert [folder.trial(number).read_bytes() for number in (1, 2, 3)] == before
    trials = facts["trials"]
    print(json.dumps(trials, indent=1))
    assert [each["settings"]["optimizer.learning_rate"] for each in trials] == [1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 1e30]
    assert [each["status"] for each in trials] == ["complete"] * 5 + ["failed"]
    assert "step " in trials[5]["reason"]
    assert "lower the learning rate" in trials[5]["reason"]
    runs = [RunDir(workshop.home / "runs" / each["run_id"]) for each in trials]
    assert {path.parent.name for path in (workshop.home / "runs").glob("*/identity.json")} == {
        run.root.name for run in runs
    }, "no trial has a second run"
    assert [run.current_attempt for run in runs] == [1, 2, 1, 1, 1, 1]
    assert [event.step for event in events(runs[1], "start")][1] >= 100, "the killed trial goes on from its checkpoint"
    assert len({run.shards.readlink() for run in runs}) == 1, "the data is sharded once"
    assert "written" in (runs[0].root / "flow.log").read_text()

    best = min(trials[:5], key=lambda each: each["value"])
    assert facts["best"] == best["number"]
    assert (facts["state"], facts["registered"]) == ("exported", f"{workshop.root.name} version 1")
    assert [run.exported.exists() for run in runs] == [each["number"] == best["number"] for each in trials]
    exported = read_record(runs[best["number"] - 1].exported, ExportedModel)
    assert exported.after["evaluation/loss"] == pytest.approx(best["value"], rel=1e-4)
    rate = best["settings"]["optimizer.learning_rate"]
    alone = workshop.onward("run", str(workshop.root / "config.toml"), f"optimizer.learning_rate={rate}", *SHORT)
    assert alone["sha256"] == facts["sha256"], "a trial trains what a run with its settings trains"

    process = workshop.start("sweep", "--resume", "last")
    assert finished(process) == facts, "a sweep that has ended is shown, not repeated"
    shown(workshop, folder, facts, runs)


def shown(workshop: Workshop, folder: SweepDir, facts: dict[str, Any], runs: list[RunDir]) -> None:
    """Check what MLflow and Prefect show of the sweep."""
    identity = read_record(folder.identity, RunIdentity)
    client = Tracker(identity.tracking_uri)._client
    parent = client.get_run(identity.mlflow_run_id)
    assert parent.info.status == "FINISHED"
    assert parent.data.tags["onward.best_trial"] == str(facts["best"])
    by_trial = client.get_metric_history(parent.info.run_id, "trial/evaluation/loss")
    assert {point.step: point.value for point in by_trial} == {
        each["number"]: each["value"] for each in facts["trials"] if each["status"] == "complete"
    }
    assert len(by_trial) == 5, "a value is recorded once, however often the sweep was resumed"
    below = f"tags.`mlflow.parentRunId` = '{parent.info.run_id}'"
    children = {run.data.tags["onward.run_id"]: run for run in client.search_runs([parent.info.experiment_id], below)}
    assert set(children) == {run.root.name for run in runs}
    for trial in facts["trials"]:
        child = children[trial["run_id"]]
        assert float(child.data.params["optimizer.learning_rate"]) == trial["settings"]["optimizer.learning_rate"]
        assert child.data.metrics.get("trial/evaluation/loss") == trial["value"]
        assert child.info.status == ("FINISHED" if trial["status"] == "complete" else "FAILED")
    with sqlite3.connect(workshop.home / "prefect" / "prefect.db") as shown:
        above = shown.execute(
            "select count(*) from flow_run below join task_run on below.parent_task_run_id = task_run.id "
            "join flow_run above on task_run.flow_run_id = above.id join flow on above.flow_id = flow.id "
            "where flow.name = 'sweep-onnx'"
        ).fetchone()
        states = shown.execute(
            "select state_type, context from flow_run join flow on flow_run.flow_id = flow.id "
            "where flow.name = 'sweep-onnx'"
        ).fetchall()
        (table,) = shown.execute("select data from artifact where key = 'sweep'").fetchone()
    shown.close()
    assert above in [(8,), (9,)], "6 trials, one or two of them in two flow runs, and the export of the best one"
    assert sorted(state for state, _ in states) == ["COMPLETED", "CRASHED", "CRASHED"]
    assert all(json.loads(context)["onward.process"]["pid"] for _, context in states), (
        "one killed while pending is closed"
    )
    rows = json.loads(json.loads(table)) if isinstance(json.loads(table), str) else json.loads(table)
    assert [row["status"] for row in rows].count("complete, the best") == 1
    listed = finished(workshop.start("sweep", "--list"))["sweeps"]
    assert [each["sweep_id"] for each in listed] == [folder.root.name]


def test_a_sweep_that_is_interrupted_and_cancelled_goes_on_and_prunes_what_is_worse_than_the_median(
    workshop: Workshop,
) -> None:
    rates = "optimizer.learning_rate=1e-2,3e-3,1e-3,1e-6"
    # long enough that the last trial does not end before it is stopped
    words = ("parallel.data=1", "train.num_steps=6000", "checkpoint.period=25", "train.evaluation_period=50")
    process, folder = started(workshop, rates, *words, "--prune", "export.alias=")
    second = run_of(workshop, folder, 2)
    until(lambda: reached(second, 30), limit_s=300)
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=120)
    assert process.returncode == 130, error[-3000:]
    assert f"to continue the sweep: onward sweep --resume {folder.root.name}" in error
    assert status_of(folder, 2) == "running"
    saved = list(second.checkpoints.glob("step-*"))
    assert saved, "the running trial has saved a checkpoint"

    for path in saved:
        (path / "manifest.json").unlink()
    process = workshop.start("sweep", "--resume", folder.root.name)
    _, error = process.communicate(timeout=300)
    assert process.returncode == 4, error[-3000:]
    command = f"onward sweep --resume {folder.root.name} --from-start"
    assert f"begin trial 2 of its sweep again at step 0 with `{command}`" in error
    process = workshop.start(*command.split()[1:])
    third = run_of(workshop, folder, 3)
    until(lambda: reached(third, 30), limit_s=300)
    url, _, flow_run_id = read_record(folder.identity, RunIdentity).prefect_url.partition("/v2/runs/flow-run/")
    state = {"state": {"type": "CANCELLING", "name": "Cancelling"}, "force": True}
    url = signed_in(url, workshop.home)
    api(url, f"/flow_runs/{flow_run_id}/set_state", state)
    _, error = process.communicate(timeout=120)
    assert process.returncode == 75, error[-3000:]
    assert f"stopped; to continue: onward sweep --resume {folder.root.name}" in error
    shown = api(url, f"/flow_runs/{flow_run_id}") if workshop.processes() else {"state_type": "CANCELLED"}
    assert shown["state_type"] == "CANCELLED"

    number = next(number for number in (3, 4) if status_of(folder, number) == "running")  # 3, unless it was quick
    stopped = run_of(workshop, folder, number)
    attempt = stopped.current_attempt
    process = workshop.start("sweep", "--resume", folder.root.name)
    until(lambda: stopped.current_attempt > attempt, limit_s=300)
    process.send_signal(signal.SIGTERM)
    _, error = process.communicate(timeout=120)
    assert process.returncode == 143, error[-3000:]

    facts = workshop.onward("sweep", "--resume", folder.root.name, limit_s=900)
    trials = facts["trials"]
    assert [each["status"] for each in trials] == ["complete", "complete", "complete", "pruned"]
    assert trials[3]["step"] < 6000
    assert trials[3]["reason"].startswith("pruned at step 50: the best evaluation/loss so far is ")
    pruned = RunDir(workshop.home / "runs" / trials[3]["run_id"])
    (mlflow_run,) = workshop.mlflow_runs(pruned)
    assert mlflow_run.info.status == "KILLED"
    assert mlflow_run.data.tags["onward.trial.reason"] == trials[3]["reason"]
    assert facts["best"] in (1, 2, 3)
    assert facts["promotion"] == ""


def test_trials_that_all_fail_fail_the_sweep_with_the_first_reason(workshop: Workshop) -> None:
    process, folder = started(workshop, "optimizer.learning_rate=1e30,2e30", *SHORT, "launch.rehearsal=off")
    _, error = process.communicate(timeout=600)
    assert process.returncode == 70, error[-3000:]
    assert "none of the 2 trials is complete; trial 1 (optimizer.learning_rate=1e+30) failed: rank 0" in error
    assert [status_of(folder, number) for number in (1, 2)] == ["failed", "failed"]
    again = workshop.start("sweep", "--resume", "last")
    _, error = again.communicate(timeout=120)
    assert again.returncode == 70
    assert "trial 3" not in error


def test_a_model_file_that_changes_while_the_sweep_runs_makes_the_later_trial_a_failed_one(workshop: Workshop) -> None:
    shutil.copy(workshop.root / "model.onnx", workshop.root / "changing.onnx")
    words = (f"model.path={workshop.root / 'changing.onnx'}", "train.num_steps=60", "parallel.data=1", "name=changing")
    process, folder = started(workshop, "optimizer.learning_rate=1e-2,1e-3", *words)
    until(lambda: status_of(folder, 1) == "complete", limit_s=300)
    model = Path(workshop.root / "changing.onnx")
    content = model.read_bytes()
    partial = model.with_suffix(".partial")
    partial.write_bytes(content + b"\x32\x04note")  # the field doc_string of a ModelProto
    partial.replace(model)
    _, error = process.communicate(timeout=600)
    assert "the model file changed while the sweep ran: SHA-256" in error
    assert status_of(folder, 2) == "failed"
    version = Registry(read_record(folder.identity, RunIdentity).tracking_uri)
    assert version is not None
