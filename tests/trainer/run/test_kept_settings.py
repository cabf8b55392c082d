"""A config.json that somebody has edited is refused with what was changed, until it is accepted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onward.flows.run_state.run_status import remarks_of
from onward.trainer.config.run_config import RunConfig
from onward.trainer.config.sections.data import DataConfig
from onward.trainer.config.sections.model import ModelConfig
from onward.trainer.config.sections.training import TrainConfig
from onward.trainer.errors import ConfigError
from onward.trainer.run.directory import RunDir, read_config
from onward.trainer.run.kept_settings import (
    accept_edited,
    accepted_changes,
    edited_settings,
    refuse_edited,
    write_settings,
)
from onward.trainer.run.recorded.sweep_records import Membership
from onward.trainer.run.records import write_record
from tests.support.graphs import tiny_mlp
from tests.support.runs import make_run, start_attempt


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    found = RunDir(tmp_path / "aaaa-1")
    model, data = ModelConfig(path=tmp_path / "m.onnx"), DataConfig(source="digits")
    write_settings(found, RunConfig(model=model, data=data, train=TrainConfig(num_steps=10)))
    return found


def edit(run: RunDir, section: str, key: str, value: Any) -> None:
    settings = json.loads(run.config.read_text())
    settings[section][key] = value
    run.config.write_text(json.dumps(settings))  # in other white space, which is no change


def test_an_edited_setting_is_refused_with_both_values_and_the_way_on(run: RunDir) -> None:
    refuse_edited(run)
    before = read_config(run, "given").optimizer.learning_rate
    edit(run, "optimizer", "learning_rate", 0.5)
    edit(run, "train", "num_steps", 20)
    with pytest.raises(ConfigError) as refused:
        refuse_edited(run, "onward resume mlp-3")
    assert refused.value.problems == (
        f"in {run.config}, train.num_steps was 10, and is 20",
        f"in {run.config}, optimizer.learning_rate was {before}, and is 0.5",
        "a run keeps the settings that it began with: put them back, start a new run, or accept it with "
        "`onward resume mlp-3 --accept-config`, which the report will say",
    )
    assert "is refused until it is accepted: train.num_steps was 10" in remarks_of(run)[0]


@pytest.mark.mpi
def test_a_rank_refuses_an_edited_setting(tmp_path: Path) -> None:
    columns = {"features": np.zeros((40, 4), np.float32), "label": np.zeros((40, 1), np.float32)}
    made = make_run(tmp_path, tiny_mlp(), columns, train={"num_steps": 4})
    write_settings(made, read_config(made, "given"))
    edit(made, "optimizer", "learning_rate", 0.5)
    assert start_attempt(made).wait(120) != 0
    error = made.first_error(1)
    assert error
    assert "optimizer.learning_rate was 0.001, and is 0.5" in error.cause
    assert not made.events.exists()


def test_a_trial_of_a_sweep_has_no_other_settings(run: RunDir) -> None:
    write_record(run.trial, Membership(sweep_id="s", number=1, mlflow_run_id=""))
    edit(run, "train", "num_steps", 20)
    with pytest.raises(ConfigError, match="put them back, or start a new sweep"):
        refuse_edited(run)


def test_accepted_settings_are_kept_with_the_time_and_the_step(run: RunDir) -> None:
    assert accept_edited(run, 5) is None, "nothing was edited"
    edit(run, "train", "num_steps", 20)
    change = accept_edited(run, 5)
    assert change
    assert change.changes == ("train.num_steps was 10, and is 20",)
    refuse_edited(run)
    edit(run, "train", "num_steps", 30)
    assert edited_settings(run) == ["train.num_steps was 20, and is 30"]
    accept_edited(run, 12)
    assert [each.step for each in accepted_changes(run)] == [5, 12]
    write_settings(run, read_config(run, "given"))  # as a resume does that raises [stop]
    assert len(accepted_changes(run)) == 2
    assert remarks_of(run)[0].startswith("config.json was edited, and accepted at step 5 (20")


def test_limits_that_a_resume_may_change_are_no_edits_and_older_runs_keep_no_settings(run: RunDir) -> None:
    edit(run, "stop", "max_hours", 3.0)
    assert edited_settings(run) == []
    run.accepted.unlink()
    edit(run, "train", "num_steps", 20)
    refuse_edited(run)
    assert edited_settings(run) == []


def test_with_a_damaged_record_nothing_goes_on_before_somebody_has_looked(run: RunDir) -> None:
    run.accepted.write_bytes(b"\0" * 50)
    with pytest.raises(ConfigError, match=r"accepted\.json .*not known whether .* was edited: look at it, then"):
        refuse_edited(run)
    change = accept_edited(run, 0)
    assert change
    assert "not known, because their record was damaged" in str(change)
    refuse_edited(run)
