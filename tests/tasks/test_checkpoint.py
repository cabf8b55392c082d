"""The checkpoint task on real directories and real MLflow stores, with checkpoints written by the test."""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from onward.infra.mlflow.tracking import Tracker
from onward.tasks.checkpoint import checkpoint, mark_best
from onward.trainer.checkpoint.retention import announced
from onward.trainer.checkpoint.save import save
from onward.trainer.checkpoint.train_state import TrainState
from onward.trainer.checkpoint.verification import VerifiedCheckpoint, verify
from onward.trainer.config.run_config import RunConfig
from onward.trainer.config.sections.data import DataConfig
from onward.trainer.config.sections.model import ModelConfig
from onward.trainer.config.sections.results import CheckpointConfig
from onward.trainer.config.sections.training import TrainConfig
from onward.trainer.distributed.processes import MPIContext
from onward.trainer.distributed.weights import Placement
from onward.trainer.run.directory import RunDir
from onward.trainer.run.durable_files import sha256
from onward.trainer.run.machine.priority import NICENESS
from onward.trainer.run.records import CheckpointInfo, RunIdentity, write_record
from tests.support.stores import Server, client, free_port, new_run, points

ALONE = MPIContext(0, 1, 0, 1, "here", torch.device("cpu"))


def make_run(root: Path, tracker: Tracker, **checkpoints: Any) -> RunDir:
    """A run directory as configure leaves it, of a first attempt."""
    run = RunDir(root)
    model, data = ModelConfig(path=root / "m.onnx"), DataConfig(source="digits")
    keep = CheckpointConfig(**{"keep_newest": 2, **checkpoints})
    write_record(run.config, RunConfig(model=model, data=data, train=TrainConfig(num_steps=10), checkpoint=keep))
    where = {"mlflow_run_id": tracker.run_id, "tracking_uri": tracker.tracking_uri}
    write_record(run.identity, RunIdentity(run_id="r", name="r", created_at="", model_sha256="", **where))
    run.begin_attempt()
    return run


def save_steps(run: RunDir, losses: dict[int, float | None]) -> None:
    """Save steps as the loop does; one with a loss was evaluated, the others carry the evaluation before."""
    state = TrainState(step=0, samples_seen=0, scaler={}, metrics={})
    for step, loss in losses.items():
        state = state.model_copy(update={"step": step})
        state = state if loss is None else state.evaluated({"evaluation/loss": loss}, CheckpointConfig())
        parts = {"model/w": (torch.full((100,), float(step)), Placement.full((100,)))}
        save(run, attempt=run.current_attempt, state=state, parts=parts, mpi=ALONE)


def steps(run: RunDir) -> list[str]:
    return sorted(path.name for path in run.checkpoints.glob("step-*"))


def wait_until(true: Callable[[], bool]) -> None:
    give_up_at = time.monotonic() + 30
    while not true():
        assert time.monotonic() < give_up_at, "it never became true"
        time.sleep(0.02)


def recorded(tracker: Tracker) -> dict[str, dict[str, str]]:
    """Return name -> tags of each checkpoint that is recorded in MLflow."""
    experiment = client(tracker).get_run(tracker.run_id).info.experiment_id
    found = client(tracker).search_logged_models([experiment], f"source_run_id = '{tracker.run_id}'")
    return {model.name: {**model.tags} for model in found}


def test_during_training_it_announces_and_records_checkpoints_and_keeps_the_newest_and_the_best(tmp_path: Path) -> None:
    tracker = new_run()
    run = make_run(tmp_path, tracker)
    results: list[CheckpointInfo | None] = []
    watcher = threading.Thread(target=lambda: results.append(checkpoint.fn(run, tick_s=0.01)), daemon=True)
    watcher.start()
    for step, loss in {1: 0.5, 2: 0.1, 3: 0.4, 4: 0.3}.items():
        save_steps(run, {step: loss})
        wait_until(lambda step=step: step in [info.step for info in announced(run)])
    save_steps(run, {5: 0.2})
    run.close_log()  # what was saved before this is seen, however late
    watcher.join(60)
    assert steps(run) == ["step-000000002", "step-000000004", "step-000000005"]
    infos = announced(run)
    assert [(info.step, info.best, info.metrics) for info in infos] == [
        (2, True, {"evaluation/loss": 0.1}),
        (4, False, {"evaluation/loss": 0.3}),
        (5, False, {"evaluation/loss": 0.2}),
    ]
    assert results == [infos[0]]
    known = recorded(tracker)
    assert [known[info.path.name]["best"] for info in infos] == ["true", "false", "false"]
    assert known["step-000000002"]["path"] == str(run.checkpoint(2))
    assert known["step-000000002"]["sha256"] == sha256(run.checkpoint(2) / "manifest.json")
    assert (2, 0.1) in points(tracker, "evaluation/loss")
    marked = {name: tags.get("deleted") == "true" for name, tags in known.items()}
    assert marked == {name: not (run.checkpoints / name).exists() for name in known}


def test_it_verifies_in_a_thread_that_gives_way_to_the_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(tmp_path, new_run())
    save_steps(run, {1: 0.5})
    run.close_log()
    before, seen = os.getpriority(os.PRIO_PROCESS, 0), list[int]()

    def noticed(path: Path) -> VerifiedCheckpoint:
        seen.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
        return verify(path)

    monkeypatch.setattr("onward.tasks.checkpoint.verify", noticed)
    assert checkpoint.fn(run)
    assert seen == [min(19, before + NICENESS)]
    assert os.getpriority(os.PRIO_PROCESS, 0) == before


def test_a_damaged_checkpoint_is_renamed_and_never_announced(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = make_run(tmp_path, new_run())
    save_steps(run, {1: 0.5, 2: 0.1})
    file = run.checkpoint(2) / "rank-00000.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\xff")
    run.close_log()
    result = checkpoint.fn(run)
    assert result is not None
    assert result.step == 1
    assert steps(run) == ["step-000000001", "step-000000002.damaged"]
    assert f"SHA-256 {sha256(tmp_path / 'checkpoints/step-000000002.damaged' / file.name)}, not" in caplog.text


def test_a_list_of_checkpoints_that_was_moved_or_forged_names_directories_of_this_run_only(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", new_run())
    save_steps(run, {1: 0.5, 2: 0.1})
    run.close_log()
    checkpoint.fn(run)
    listed = run.announced.read_text()
    run.announced.write_text(listed.replace(str(run.checkpoints), "/elsewhere"))
    assert [info.path for info in announced(run)] == [run.checkpoint(1), run.checkpoint(2)]


def test_a_restarted_task_continues_with_the_checkpoints_on_disk(tmp_path: Path) -> None:
    run = make_run(tmp_path, new_run())
    save_steps(run, {1: 0.5, 2: 0.4, 3: 0.3})
    run.close_log()
    checkpoint.fn(run)
    shutil.rmtree(run.checkpoint(2))
    (run.checkpoint(3) / "manifest.json").unlink()  # damaged since it was announced
    save_steps(run, {4: 0.6})
    result = checkpoint.fn(run)
    assert [(info.step, info.best) for info in announced(run)] == [(4, True)]
    run.announced.write_text("{ not readable")
    assert checkpoint.fn(run) == result == announced(run)[0]


def test_without_a_checkpoint_it_returns_none(tmp_path: Path) -> None:
    run = make_run(tmp_path, new_run())
    run.close_log()
    assert checkpoint.fn(run) is None


def test_without_the_metric_the_newest_counts_as_the_best_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = make_run(tmp_path, new_run(), best_metric="evaluation/accuracy")
    save_steps(run, {1: 0.5, 2: 0.4})
    run.close_log()
    result = checkpoint.fn(run)
    assert result is not None
    assert (result.step, result.best) == (2, False)
    assert "no checkpoint has the metric evaluation/accuracy" in caplog.text


@pytest.mark.parametrize(
    ("values", "metric", "expected"),
    [
        ([], "loss", None),
        ([None, None], "loss", None),
        ([0.5, 0.1, 0.4], "loss", 1),
        ([0.5, 0.1, 0.4], "accuracy", 0),
        ([0.2, 0.1, 0.1], "loss", 1),
        ([0.9, None, 0.9], "accuracy", 0),
        ([float("nan"), 0.7], "loss", 1),
        ([float("inf"), None], "loss", 0),
    ],
)
def test_the_best_is_the_first_of_the_best_values(
    values: list[float | None], metric: str, expected: int | None
) -> None:
    found: list[dict[str, float]] = [{} if value is None else {f"evaluation/{metric}": value} for value in values]
    infos = [
        CheckpointInfo(step=step, path=Path(str(step)), bytes=1, digest="", metrics=metrics, best=True)
        for step, metrics in enumerate(found)
    ]
    flags = [info.best for info in mark_best(infos, CheckpointConfig(best_metric=f"evaluation/{metric}"))]
    assert flags == [place == expected for place in range(len(values))]


def test_a_checkpoint_with_the_evaluation_of_an_earlier_step_is_not_the_best(tmp_path: Path) -> None:
    run = make_run(tmp_path, new_run())
    save_steps(run, {1: 0.1, 2: None, 3: 0.3})
    run.close_log()
    checkpoint.fn(run)
    assert [(info.step, info.metrics) for info in announced(run)][1:] == [(2, {}), (3, {"evaluation/loss": 0.3})]


@pytest.mark.slow
def test_an_outage_of_mlflow_only_delays_the_records(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("onward.tasks.shown.mlflow_outages.PERIOD_S", 0.2)
    server = Server(tmp_path / "mlflow")
    server.start()
    try:
        tracker = new_run(server.uri)
        run = make_run(tmp_path / "run", tracker)
        server.kill()
        watcher = threading.Thread(target=lambda: checkpoint.fn(run, tick_s=0.01), daemon=True)
        watcher.start()
        save_steps(run, {1: 0.5, 2: 0.4, 3: 0.3})
        wait_until(lambda: "checkpoints are recorded when it is back" in caplog.text)
        wait_until(lambda: [info.step for info in announced(run)] == [2, 3])
        server.start()
        run.close_log()
        watcher.join(60)
        assert not watcher.is_alive()
        assert recorded(tracker)["step-000000003"]["best"] == "true"
    finally:
        server.kill()


def test_a_lasting_outage_of_mlflow_is_logged_and_does_not_fail_the_task(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tracker = Tracker(f"http://127.0.0.1:{free_port()}", "no-such-run")
    run = make_run(tmp_path, tracker)
    save_steps(run, {1: 0.5})
    run.close_log()
    result = checkpoint.fn(run, patience_s=0.0)
    assert result is not None
    assert result.step == 1
    assert "could not be reached for 0 s" in caplog.text


def test_a_run_that_mlflow_refuses_loses_only_its_records(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = make_run(tmp_path, Tracker(new_run().tracking_uri, "no-such-run"))
    save_steps(run, {1: 0.5})
    run.close_log()
    assert checkpoint.fn(run) is not None
    assert "MLflow refused the record of" in caplog.text
