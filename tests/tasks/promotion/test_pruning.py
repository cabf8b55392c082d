"""The median rule: which trials of a sweep end early, and what a trial's event log says of it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import pytest

from onward.tasks.promotion.pruning import MedianRule, history, reason_to_prune
from onward.trainer.events import Evaluated, Event, EventWriter, Started
from onward.trainer.run.directory import RunDir
from onward.trainer.run.history import RunHistory
from onward.trainer.run.recorded.sweep_records import Membership, Pruned, Sweep, SweepDir, Trial
from onward.trainer.run.records import read_record, write_record

OTHERS = [{100: 0.90, 200: 0.60, 300: 0.40}, {100: 0.80, 200: 0.50, 300: 0.30}, {100: 0.95, 200: 0.90, 300: 0.70}]


def reason(values: Mapping[int, float], others: list[dict[int, float]] = OTHERS, *, greatest: bool = False) -> str:
    return reason_to_prune(values, others, metric="evaluation/loss", greatest=greatest)


def test_a_trial_whose_best_value_is_worse_than_the_median_at_its_step_is_pruned() -> None:
    assert reason({}) == ""
    assert reason({100: 0.85}) == ""
    assert reason({100: 0.85, 200: 0.80}) == (
        "pruned at step 200: the best evaluation/loss so far is 0.8, and the median of the 3 complete trials at this "
        "step is 0.6"
    )
    assert reason({100: 0.55, 200: 0.80}) == "", "its best value counts, not its last"
    assert reason({150: 9.0}) == "", "no other trial was evaluated at this step"
    assert reason({100: math.nan, 200: math.nan}) == "pruned at step 200: evaluation/loss was never a number"
    assert reason({100: 0.55, 200: math.nan}) == ""
    assert reason({100: 9.0}, OTHERS[:2]) == "", "fewer than three trials are complete"


def test_of_a_metric_that_is_best_when_greatest_the_smaller_value_is_pruned() -> None:
    assert reason({100: 0.85}, greatest=True).startswith("pruned at step 100: ")
    assert reason({100: 0.91}, greatest=True) == ""


@pytest.fixture
def trial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    monkeypatch.setenv("ONWARD_HOME", str(tmp_path))
    folder = SweepDir.of("s")
    (folder.root / "trials").mkdir(parents=True)
    facts = {"created_at": "2026", "settings": {}, "choices": {"a.b": (1, 2)}, "ranges": {}, "num_trials": 4, "seed": 0}
    where = {"metric": "evaluation/loss", "greatest": False, "experiment": "e", "tracking_uri": "u"}
    write_record(folder.sweep, Sweep.model_validate({"sweep_id": "s", "name": "n", "prune": True, **facts, **where}))
    for number, values in enumerate(OTHERS, 1):
        before = Trial(number=number, run_id=f"r{number}", settings={}, status="complete", value=values[300])
        write_record(folder.trial(number), before)
        events = EventWriter(before.run.events, attempt=1, rank=0)
        for step, value in {0: 2.3, **values}.items():
            events.emit(Evaluated(step=step, values={"evaluation/loss": value, "evaluation/accuracy": 0.5}))
        events.close()
        assert history(before, "evaluation/loss") == values, "the evaluation before the first step is the same for all"
    run = Trial(number=4, run_id="r4", settings={}).run
    write_record(run.trial, Membership(sweep_id="s", number=4, mlflow_run_id=""))
    return run


def evaluation(step: int, value: float) -> Event:
    return Evaluated(attempt=1, step=step, values={"evaluation/loss": value})


def read_by_rule(run: RunDir, *events: Event) -> MedianRule:
    """A rule that has read the start of a run of 300 steps, and these events."""
    history = RunHistory(run.events)
    rule = MedianRule(run, history)
    for event in (Started(attempt=1, step=0, num_steps=300), *events):
        history.add(event)
        rule.add(event)
    return rule


def test_the_reason_is_on_disk_before_the_job_is_stopped_and_is_not_changed(trial: RunDir) -> None:
    rule = read_by_rule(trial, evaluation(0, 2.3), evaluation(100, 0.85))
    assert not trial.pruned.exists()
    rule = read_by_rule(trial, evaluation(0, 2.3), evaluation(100, 0.85), evaluation(200, 0.80), evaluation(250, 0.79))
    assert read_record(trial.pruned, Pruned).step == 200
    rule.poll()  # no job is running


def test_a_trial_at_its_last_step_and_a_run_that_is_no_trial_are_not_pruned(trial: RunDir, tmp_path: Path) -> None:
    read_by_rule(trial, evaluation(300, 9.0))
    assert not trial.pruned.exists()
    other = RunDir(tmp_path / "runs" / "other")
    other.root.mkdir(parents=True)
    read_by_rule(other, evaluation(100, 9.0))
    assert not other.pruned.exists()
