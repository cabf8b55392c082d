"""The cause of a run's end, its class and what to do, for each way in which a run ends without a result."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from onward.flows.run_state.run_status import describe
from onward.flows.run_state.runs import locked
from onward.flows.run_state.why_run_ended import cause_of
from onward.flows.running.flow_guard import Ending
from onward.flows.running.resuming import checked_run, outcome_if_finished
from onward.infra.job.process_identity import this_process
from onward.trainer.errors import ConfigError, OnwardError, RuntimeUnavailable, TrainingFailed
from onward.trainer.run.directory import RunDir
from onward.trainer.run.outcomes.attempt_endings import AttemptEnding
from onward.trainer.run.records import write_record
from tests.flows.test_cli import make_run

LATER_MS = 4_000_000_000_000


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    monkeypatch.setattr(
        "onward.flows.running.flow_guard._expect_no_answer", lambda: None
    )  # it is for the rest of the process
    monkeypatch.setenv("ONWARD_HOME", str(tmp_path))
    return make_run(tmp_path, "aaaa-1", "mlp-3", config_name="mlp")


def test_a_run_without_a_record_of_its_end_on_a_disk_that_takes_none_is_not_called_killed(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert cause_of(run).kind == "killed"
    monkeypatch.setattr("onward.trainer.run.outcomes.storage.FULL_BYTES", 1 << 80)
    found = cause_of(run)
    assert found.kind == "storage"
    assert f"none can be written now: No space left on device: the disk of {run.root} has " in found.sentence


def failed(run: RunDir, error: Exception) -> None:
    with pytest.raises(OnwardError), locked(run), Ending(run):
        raise error


def test_a_failure_of_a_rank_has_the_class_of_its_attempt_and_goes_on_from_the_checkpoint(run: RunDir) -> None:
    run.begin_attempt()
    run.checkpoint(120).mkdir(parents=True)
    ending = AttemptEnding(
        attempt=1, kind="hang", sentence="rank 1 hung", action="", began_ms=1, detected_ms=2, ended_ms=LATER_MS
    )
    write_record(run.ending(1), ending)
    failed(run, TrainingFailed("attempt 1: Hang"))
    status = describe(run)
    assert (status.kind, status.error) == ("hang", "rank 1 hung")
    assert status.to_do.endswith("to continue from step 120: onward resume mlp-3")
    write_record(run.ending(1), ending.model_copy(update={"ended_ms": 3}))  # before the newest flow began
    failed(run, RuntimeUnavailable("no MPI: there is no mpirun"))
    assert describe(run).kind == "machine"


def test_a_killed_flow_and_a_power_loss_are_told_apart_by_the_process_that_held_the_lock(run: RunDir) -> None:
    assert describe(run).kind == "killed"
    assert describe(run).error.endswith("it was killed, or the machine lost power")
    me = this_process()
    with locked(run):
        assert json.loads(run.lock.read_text()) == me | {"slurm_job": "", "renewed_s": 10.0}
        assert (describe(run).state, describe(run).kind) == ("running", "")
    status = describe(run)
    assert (status.state, status.kind) == ("interrupted", "killed")
    assert status.error.startswith(f"process {me['pid']} on {me['host']} was killed from outside")
    assert status.to_do == "no checkpoint is saved, so that it begins again at step 0: onward resume mlp-3"
    run.lock.write_text(json.dumps(me | {"boot": "an earlier one"}))
    status = describe(run)
    assert (status.kind, status.state) == ("power_loss", "interrupted")
    assert "the machine was started again (" in status.error


def test_a_lock_that_is_held_keeps_the_name_of_its_process_while_another_one_waits(run: RunDir) -> None:
    with locked(run):
        with pytest.raises(ConfigError, match=r"`onward status mlp-3` shows its step"), locked(run, timeout_s=0.0):
            pass
        assert json.loads(run.lock.read_text()) == this_process() | {"slurm_job": "", "renewed_s": 10.0}


def test_a_resume_names_the_way_to_change_a_setting(run: RunDir) -> None:
    with pytest.raises(ConfigError, match=r"only|but for \[stop\]\. To change it, start a new run: `onward run CONFIG"):
        checked_run("mlp-3", ["optimizer.learning_rate=1"], from_start=False)
    run.checkpoint(120).mkdir(parents=True)
    with pytest.raises(ConfigError, match=rf"`onward run CONFIG checkpoint\.load={run.checkpoint(120)} SECTION"):
        checked_run("mlp-3", ["optimizer.learning_rate=1"], from_start=False)


def test_a_run_with_steps_left_is_not_finished(run: RunDir) -> None:
    assert outcome_if_finished(run, []) is None
