"""`onward plan`: what a whole run takes, where each number is from, and what is only guessed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from onward.flows import api, cli
from onward.flows.planning import step_measurement
from onward.flows.planning import time_needed as time_needed_module
from onward.flows.planning.shown import show_run_plan
from onward.flows.planning.time_needed import (
    known_pace,
    number_of_checkpoints,
    number_of_evaluations,
    number_of_steps,
    time_needed,
)
from onward.flows.planning.whole_run import RunPlan
from onward.trainer.config.loading import build_config
from onward.trainer.config.run_config import RunConfig
from onward.trainer.data.schema.signature import model_digest
from onward.trainer.data.storage.row_counts import RowCount
from onward.trainer.errors import Diverged
from onward.trainer.events import EventWriter, Started
from onward.trainer.parallel.planning.plan_record import Plan
from onward.trainer.run.directory import RunDir
from onward.trainer.run.records import RankReport, RunIdentity, RuntimeReport, TrainResult, write_record
from onward.trainer.run.timing.step_timing import Pace, calibration_file
from tests.support.graphs import tiny_mlp

ROWS = RowCount(train=100, evaluation=10, source="counted")
UNKNOWN = RowCount(source="not known: large")


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ONWARD_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:1/api")  # neither is asked
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:2")
    return tmp_path / "home"


@pytest.fixture
def settings(tmp_path: Path) -> dict[str, dict[str, Any]]:
    onnx.save(tiny_mlp(), tmp_path / "m.onnx")
    rng = np.random.default_rng(0)
    np.savez(tmp_path / "d.npz", features=rng.random((50, 4), np.float32), label=rng.random(50, np.float32))
    return {
        "model": {"path": tmp_path / "m.onnx", "loss": "mse"},
        "data": {"source": str(tmp_path / "d.npz"), "evaluation_fraction": 0.2},
        "train": {"num_epochs": 3, "global_batch_size": 8},
        "parallel": {"data": 2},
        "launch": {"device": "cpu", "threads_per_rank": 1},
    }


def configured(settings: dict[str, dict[str, Any]], **sections: dict[str, Any]) -> RunConfig:
    given = {name: settings.get(name, {}) | sections.get(name, {}) for name in settings.keys() | sections.keys()}
    return build_config(given)


# -- measured on real ranks, for one and the same run


@pytest.mark.mpi
@pytest.mark.usefixtures("forked")
def test_a_plan_says_where_the_time_of_a_step_is_from(
    settings: dict[str, dict[str, Any]], home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # steps to profile, which the measurement does not have
    config = configured(settings, monitor={"profile_steps": [14, 15]})
    before = api.plan(config)
    assert before.time.source == "estimate"
    assert before.time.said.startswith("not measured: estimated from counted FLOPs for CPU")
    assert any("`onward plan --measure` measures it" in text for text in before.time.guessed)
    assert not home.exists(), "a plan writes nothing"

    assert (before.rows.train, before.rows.evaluation) == (40, 10)
    assert (before.num_steps, before.num_samples, before.epochs) == (15, 120, 3.0)
    assert before.disk.model_bytes == (home.parent / "m.onnx").stat().st_size
    assert before.disk.checkpoints == 5
    assert before.disk.shares[0].bytes == 5 * before.disk.checkpoint_bytes
    assert before.changed["parallel.data"] == 2

    measured = api.plan(config, measure=3)
    assert (measured.time.source, ": 3 steps" in measured.time.said) == ("measured", True)
    assert measured.time.said.startswith("measured at 20")
    assert [path.name for path in home.iterdir()] == ["calibrations"], "nothing but the calibration is kept"
    assert measured.time.steps_s == pytest.approx(15 * measured.time.step_s)
    assert measured.time.samples_per_s == pytest.approx(8 / measured.time.step_s)
    assert measured.time.evaluations == 4
    assert measured.time.evaluation_s
    assert measured.time.total_s
    assert measured.time.total_s > measured.time.steps_s

    again = api.plan(config, {"optimizer.learning_rate": 0.5})
    assert again.time == measured.time
    other = api.plan(config, {"train.global_batch_size": 16})
    assert other.time.source == "estimate", "the pace of another batch size says nothing"

    moved = home.parent / "moved.npz"
    moved.write_bytes(Path(config.data.source).read_bytes())
    elsewhere = api.plan(config, {"data.source": str(moved)})
    assert elsewhere.time.step_s == measured.time.step_s
    assert any(f"that of other data, {config.data.source}" in text for text in elsewhere.time.guessed)

    with pytest.raises(SystemExit) as end:
        cli.app(["plan", str(write_toml(home.parent, config)), "--json"])
    assert not end.value.code
    printed = json.loads(capsys.readouterr().out)
    assert printed.pop("num_ranks") == 2
    assert RunPlan.model_validate(printed).time == measured.time


def write_toml(folder: Path, config: RunConfig) -> Path:
    from onward.flows.shown.terminal_tables import config_lines

    path = folder / "run.toml"
    path.write_text("\n".join(config_lines(config)))
    return path


@pytest.mark.mpi
@pytest.mark.usefixtures("forked")
def test_a_measurement_ends_in_time_and_removes_what_a_killed_one_has_left(
    settings: dict[str, dict[str, Any]], home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # the run directory of a measurement that was killed is removed by the next one
    left = home / f".measure-{step_measurement.socket.gethostname()}-999999999-x"
    left.mkdir(parents=True)
    monkeypatch.setattr(step_measurement, "LONGEST_H", 1e-9)  # after one step, which is a first one
    found = api.plan(configured(settings), measure=3)
    assert found.time.said.endswith(": 1 step"), "with one step that one counts"
    assert [path.name for path in home.iterdir()] == ["calibrations"]


@pytest.mark.slow
@pytest.mark.mpi
@pytest.mark.usefixtures("forked")
def test_a_measurement_that_fails_raises_the_error_of_its_rank_and_leaves_nothing(
    settings: dict[str, dict[str, Any]], home: Path
) -> None:
    with pytest.raises(Diverged, match="lower the learning rate"):
        api.plan(configured(settings, optimizer={"learning_rate": 1e30}), measure=9)
    assert list(home.iterdir()) == []


# -- finished runs


def finished_run(
    home: Path, config: RunConfig, *, step_s: float, host: str = "", torch: str = "", name: str = "mlp-1"
) -> RunDir:
    """A run directory as a finished run leaves it."""
    run = RunDir(home / "runs" / name)
    write_record(run.config, config)
    digest = model_digest(config.model.path)
    identity = RunIdentity(run_id=name, name=name, created_at="2026-01-01T00:00:00+00:00", model_sha256=digest)
    write_record(run.identity, identity)
    rank = RankReport(
        rank=0,
        world_size=1,
        expected_world_size=1,
        host=host or time_needed_module.socket.gethostname(),
        pid=1,
        device="cpu",
        versions={"torch": torch or time_needed_module.metadata.version("torch")},
        memory_bytes=1,
        all_reduce=1.0,
        all_reduce_expected=1.0,
    )
    write_record(run.runtime, RuntimeReport(ranks=(rank,), launch_s=1.0, disk_free_bytes=1))
    write_record(run.train, TrainResult(status="done", attempts=1, step=2, samples_seen=2, metrics={}, elapsed_s=1.0))
    events = EventWriter(run.events, attempt=1, rank=0)
    events.emit(Started(step=0, num_steps=2))
    for step in (1, 2):
        events.scalars(step, step_s=step_s * (3 - step))
    events.close()
    return run


def test_the_pace_of_a_finished_run_is_used_and_named(settings: dict[str, dict[str, Any]], home: Path) -> None:
    config = configured(settings)
    assert known_pace(config) is None
    finished_run(home, configured(settings, train={"global_batch_size": 16}), step_s=1.0, name="other-1")
    finished_run(home, config, step_s=1.0, host="elsewhere", name="elsewhere-1")
    finished_run(home, config, step_s=1.0, torch="2.0.0", name="old-1")
    assert known_pace(config) is None, "another batch size, another machine, another torch"
    run = finished_run(home, config, step_s=0.25)
    found = known_pace(configured(settings, train={"num_epochs": 9}))
    assert found is not None
    assert (found.run, found.step_s, found.steps) == ("mlp-1", 0.25, 1)
    said = time_needed(config, plan_of(), ROWS, found).said
    assert said.startswith("that of run mlp-1 on ")
    assert ", which ended at 20" in said
    run.train.unlink()
    assert known_pace(config) is None, "it has not finished"
    run.config.write_text("damaged")
    assert known_pace(config) is None


def test_a_calibration_comes_before_a_run_and_a_damaged_one_is_removed(
    settings: dict[str, dict[str, Any]], home: Path
) -> None:
    config = configured(settings)
    finished_run(home, config, step_s=0.25)
    path = calibration_file(time_needed_module.key_of_run(config))
    write_record(path, Pace(step_s=0.5, steps=3, samples_per_s=16.0, measured_at="2026-01-01", host="h"))
    found = known_pace(config)
    assert found is not None
    assert found.step_s == 0.5
    path.write_text("{}")
    found = known_pace(config)
    assert found is not None
    assert found.step_s == 0.25
    assert not path.exists()


# -- the sums


def plan_of(step_s: float = 0.0) -> Plan:
    return Plan.model_construct(step_s=step_s, device="CPU")


def test_the_total_adds_steps_evaluations_checkpoints_and_loading(settings: dict[str, dict[str, Any]]) -> None:
    config = configured(settings, train={"num_epochs": 2}, checkpoint={"period": 10, "minutes": 0})
    pace = Pace(
        step_s=2.0,
        steps=9,
        samples_per_s=4.0,
        setup_s=3.0,
        compile_s=4.0,
        evaluation_s=5.0,
        evaluation_rows=5,
        checkpoint_s=0.5,
    )
    found = time_needed(config, plan_of(), ROWS, pace)
    # 200 samples in 25 steps; evaluations of 10 rows take 10 s: before, and after each of two epochs
    assert (found.steps_s, found.evaluations, found.evaluation_s, found.checkpoints) == (50.0, 3, 10.0, 3)
    assert found.total_s == 7.0 + 50.0 + 3 * 10.0 + 3 * 0.5
    assert (found.samples_per_s, found.per_1000_samples_s) == (4.0, 250.0)


@pytest.mark.slow
def test_the_copy_of_a_checkpoint_in_memory_is_said(
    settings: dict[str, dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    found = api.plan(configured(settings))
    assert found.copy_bytes == found.disk.checkpoint_bytes > 0
    show_run_plan(found)
    assert "written beside the training, from a copy of" in capsys.readouterr().out
    for section in ({"checkpoint": {"background": False}}, {"parallel": {"data": 2, "memory_gib": 1.0}}):
        waits = api.plan(configured(settings, **section))
        assert waits.copy_bytes == 0, section
    show_run_plan(waits)
    assert "written while the training waits" in capsys.readouterr().out


def test_an_unknown_number_of_rows_gives_the_time_of_1000_samples(settings: dict[str, dict[str, Any]]) -> None:
    found = time_needed(configured(settings), plan_of(step_s=0.5), UNKNOWN, None)
    assert (found.total_s, found.steps_s, found.per_1000_samples_s) == (None, None, 62.5)
    assert found.guessed[0] == "the number of rows is not known: large; so is the number of steps"
    measured = Pace(step_s=2.0, steps=9, samples_per_s=4.0, evaluation_s=1.0, evaluation_rows=5)
    steps_given = configured(settings, train={"num_epochs": 0, "num_steps": 7})
    found = time_needed(steps_given, plan_of(), UNKNOWN, measured)
    assert (found.steps_s, found.evaluations, found.evaluation_s) == (14.0, None, None)
    assert "evaluations are not in the total" in found.guessed


def test_a_measurement_on_a_busy_machine_says_so(settings: dict[str, dict[str, Any]]) -> None:
    pace = Pace(step_s=2.0, steps=9, samples_per_s=4.0, load=0.2)
    assert "other programs" not in " ".join(time_needed(configured(settings), plan_of(), ROWS, pace).guessed)
    busy = pace.model_copy(update={"load": 3.25})
    said = time_needed(configured(settings), plan_of(), ROWS, busy).guessed
    assert any("other programs were computing when it was measured (load average 3.2)" in each for each in said)


def test_limits_of_stop_are_named(settings: dict[str, dict[str, Any]]) -> None:
    config = configured(settings, stop={"max_hours": 2.0, "patience": 3})
    said = time_needed(config, plan_of(), ROWS, None).guessed
    assert said[:2] == (
        "stop.max_hours ends the training after 2 h at the latest",
        "[stop] may end the training earlier",
    )


@pytest.mark.parametrize(
    ("train", "rows", "evaluations"),
    [
        ({"num_steps": 10, "num_epochs": 0, "evaluation_period": 5}, UNKNOWN, 3),
        ({"num_steps": 10, "num_epochs": 0, "evaluation_period": 4}, UNKNOWN, 4),
        ({"num_steps": 10, "num_epochs": 0, "evaluation_period": 0}, UNKNOWN, 2),
        ({"num_steps": 10, "num_epochs": 0}, UNKNOWN, None),
        ({"num_epochs": 3}, ROWS, 4),
        ({"num_epochs": 2.5}, ROWS, 4),
        ({"num_epochs": 3}, UNKNOWN, None),
    ],
    ids=str,
)
def test_evaluations_are_counted_as_the_loop_makes_them(
    settings: dict[str, dict[str, Any]], train: dict[str, Any], rows: RowCount, evaluations: int | None
) -> None:
    assert number_of_evaluations(configured(settings, train=train).train, rows) == evaluations


def test_steps_and_checkpoints_are_counted_as_the_loop_makes_them(settings: dict[str, dict[str, Any]]) -> None:
    assert number_of_steps(configured(settings).train, ROWS) == 38  # 300 samples, 8 a step, the last one smaller
    assert number_of_steps(configured(settings).train, UNKNOWN) is None

    def checkpoints(period: int, minutes: float, steps: int, trained_s: float = 0.0) -> int:
        saving = {"period": period, "minutes": minutes}
        return number_of_checkpoints(configured(settings, checkpoint=saving).checkpoint, steps, trained_s)

    assert checkpoints(10, 0, 30) == 3
    assert checkpoints(10, 0, 31) == 4
    assert checkpoints(0, 0, 31) == 1
    assert checkpoints(0, 10, 31, trained_s=3700.0) == 7
