"""How a flow ends: its record, the state in Prefect, what the next command says; and its log on a full disk."""

from __future__ import annotations

import io
import logging
import signal
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
from prefect.exceptions import TerminationSignal
from prefect.settings import get_current_settings

from onward.flows.run_state.flow_log import flow_log
from onward.flows.run_state.run_status import describe
from onward.flows.run_state.runs import how_to_continue
from onward.flows.running.flow_guard import Ending, own_error, raise_stop, recorded
from onward.flows.running.local_run import CREATOR, mark_orphaned_runs_crashed
from onward.infra.job.process_identity import boot_id, is_gone, this_process
from onward.trainer.errors import (
    CheckpointError,
    ConfigError,
    DeviceAssertion,
    Diverged,
    ExportRefused,
    Fenced,
    OnwardError,
    OutOfMemory,
    RuntimeUnavailable,
    Stopped,
    StorageUnavailable,
    TrainingFailed,
)
from onward.trainer.run.directory import RunDir
from onward.trainer.run.outcomes.ending_kinds import would_end_again
from onward.trainer.run.outcomes.run_ending import ending_of
from onward.trainer.run.recorded.sweep_records import Membership, SweepDir
from onward.trainer.run.records import write_record
from tests.flows.test_cli import make_run


@pytest.fixture(autouse=True)
def client(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The settings of Prefect's client, which an ending changes."""
    found = get_current_settings().client
    monkeypatch.setattr(found, "max_retries", 5)
    monkeypatch.setattr(logging, "raiseExceptions", True)
    return found


def ended(run: RunDir, error: BaseException | None) -> Any:
    """The state that a flow returns which this error has ended."""
    with Ending(run) as ending:
        if error is not None:
            raise error
        return "the result"
    return ending.cancelled


@pytest.mark.parametrize(
    ("error", "status", "said", "raised"),
    [
        (
            KeyboardInterrupt(),
            130,
            "stopped by SIGINT; no checkpoint is saved, so that it begins again",
            KeyboardInterrupt,
        ),
        (TerminationSignal(signal.SIGTERM), 143, "stopped by SIGTERM; no checkpoint is saved", SystemExit),
        (Stopped("stopped; to continue from step 5: onward resume r"), 75, "to continue from step 5", Stopped),
    ],
)
def test_what_was_asked_to_stop_is_cancelled_and_ends_with_its_own_exit_status(
    error: BaseException, status: int, said: str, raised: type[BaseException], tmp_path: Path
) -> None:
    run = make_run(tmp_path, "aaaa-1", "digits")
    state = ended(run, error)
    assert state.is_cancelled()
    assert said in state.message
    record = ending_of(run)
    assert record is not None
    assert (record.status, record.exit_status) == ("cancelled", status)
    assert describe(run).state == "stopped"
    with pytest.raises(raised) as stopped:
        raise_stop(run, state.message)
    assert getattr(stopped.value, "code", status) == status


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (ConfigError(["this", "that"]), 2, "this; that"),
        (OSError(28, "No space left on device", "/dev/full"), 3, "No space left on device: the disk of /dev/full has "),
        (PermissionError(13, "Permission denied", "/etc/shadow"), 3, "cannot use /etc/shadow: Permission denied"),
        (ZeroDivisionError("of nothing"), 1, "unexpected ZeroDivisionError: of nothing; the traceback is in "),
    ],
)
def test_a_failed_flow_records_its_cause_and_exit_status_and_the_status_command_shows_it(
    error: Exception, status: int, said: str, tmp_path: Path, client: Any
) -> None:
    run = make_run(tmp_path, "aaaa-1", "digits")
    with pytest.raises(OnwardError) as raised:
        ended(run, error)
    assert raised.value.exit_code == status
    on_disk = isinstance(raised.value, StorageUnavailable)
    assert (client.max_retries, logging.raiseExceptions) == ((1, False) if on_disk else (5, True))
    record = ending_of(run)
    assert record is not None
    assert (record.status, record.exit_status, record.error) == ("failed", status, type(raised.value).__name__)
    described = describe(run)
    assert described.state == "failed"
    assert said in described.error
    assert isinstance(recorded(RuntimeError("Prefect: 500"), run), type(raised.value)), "the flow's own error counts"
    assert ended(run, None) == "the result"
    assert describe(run).error == "", "a flow that went on after it"


def test_an_error_on_a_full_disk_names_the_disk_because_it_follows_from_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # a disk without room at all is in tests/trainer/run/outcomes/test_storage.py
    monkeypatch.setattr("onward.trainer.run.outcomes.storage.FULL_BYTES", 1 << 80)
    failed = own_error(TrainingFailed("attempt 1: mpirun ended with status 70"), RunDir(tmp_path))
    assert isinstance(failed, StorageUnavailable)
    assert str(failed).startswith(f"No space left on device: the disk of {tmp_path} has ")
    assert str(failed).endswith("(it follows: TrainingFailed: attempt 1: mpirun ended with status 70)")
    monkeypatch.undo()
    after_retries = own_error(
        TrainingFailed("attempt 3: OSError: [Errno 28] No space left on device"), RunDir(tmp_path)
    )
    assert isinstance(after_retries, StorageUnavailable)
    in_mlflow = RuntimeUnavailable(
        "MLflow at x reports a temporary error: (sqlite3.OperationalError) database or disk is full; tried 4 times"
    )
    assert isinstance(own_error(in_mlflow, RunDir(tmp_path)), StorageUnavailable)
    refused = ConfigError("no such key")
    assert own_error(refused, RunDir(tmp_path)) is refused


def test_a_run_is_told_to_go_on_at_the_step_of_its_checkpoint_and_only_if_it_can(tmp_path: Path) -> None:
    assert how_to_continue(RunDir(tmp_path / "new")) == "nothing is trained yet: start it again"
    run = make_run(tmp_path, "aaaa-1", "digits")
    assert how_to_continue(run) == "no checkpoint is saved, so that it begins again at step 0: onward resume aaaa-1"
    run.checkpoint(7).mkdir(parents=True)
    assert how_to_continue(run) == "to continue from step 7: onward resume aaaa-1"
    for goes_on in (TrainingFailed, RuntimeUnavailable, CheckpointError, KeyboardInterrupt):
        assert not would_end_again(goes_on.__name__)
    for ends_again in (ConfigError, ExportRefused, Diverged, OutOfMemory, DeviceAssertion, Fenced, Stopped):
        assert would_end_again(ends_again.__name__)


def test_only_a_process_of_this_machine_that_has_ended_is_gone() -> None:
    me = this_process()
    assert me["boot"] == boot_id()
    assert not is_gone(me)
    assert is_gone(me | {"started": me["started"] - 1.0}), "another process with the same number"
    assert is_gone(me | {"boot": "an earlier one"})
    assert is_gone(me | {"pid": max(psutil.pids()) + 10_000})
    assert not is_gone(me | {"host": "another"})
    assert not is_gone(None)


@pytest.mark.slow  # a Prefect server is started
def test_a_sweep_and_its_trial_that_were_killed_while_pending_are_closed_and_a_workers_run_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from prefect import task
    from prefect.client.orchestration import get_client
    from prefect.states import Pending
    from prefect.testing.utilities import prefect_test_harness

    from onward.flows.sweep import locked, sweep_onnx
    from onward.flows.train_onnx import train_onnx

    monkeypatch.setenv("ONWARD_HOME", str(tmp_path))
    folder = SweepDir.of("abc")
    folder.root.mkdir(parents=True)
    write_record(RunDir(tmp_path / "runs" / "first").trial, Membership(sweep_id="abc", number=1, mlflow_run_id=""))
    killed = {CREATOR: this_process() | {"pid": max(psutil.pids()) + 10_000}}
    with prefect_test_harness(server_startup_timeout=120), get_client(sync_client=True) as client:
        sweep = client.create_flow_run(sweep_onnx, parameters={"sweep": "abc"}, context=killed, state=Pending())
        above = client.create_task_run(task(lambda: None, name="trial"), sweep.id, dynamic_key="1")
        trial = client.create_flow_run(
            train_onnx, parameters={"resume": "first"}, parent_task_run_id=above.id, state=Pending()
        )
        workers = client.create_flow_run(train_onnx, parameters={}, state=Pending())

        def states() -> list[str]:
            found = (client.read_flow_run(each.id).state for each in (sweep, trial, workers))
            return [state.type.value for state in found if state]

        with locked(folder):  # by a process that resumes it
            mark_orphaned_runs_crashed()
        assert states() == ["PENDING"] * 3
        mark_orphaned_runs_crashed()
        assert states() == ["CRASHED", "CRASHED", "PENDING"]


def test_what_libraries_print_goes_into_the_log_and_a_full_disk_is_one_line_on_the_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = io.StringIO()
    monkeypatch.setattr(sys, "stderr", terminal)
    run = RunDir(tmp_path)
    with flow_log(run) as shown:
        assert shown is terminal
        print("of a library", file=sys.stderr)
        logging.getLogger("onward.tasks.train").info("of a task")
        logging.getLogger("mlflow.store").error("with a traceback", exc_info=ValueError("x"))
        with flow_log(RunDir(tmp_path / "trial")) as inner:
            assert inner is terminal
    assert terminal.getvalue() == "of a task\n"
    log = (tmp_path / "flow.log").read_text()
    assert all(text in log for text in ("of a library", "of a task", "ValueError: x"))

    (tmp_path / "flow.log").unlink()
    (tmp_path / "flow.log").symlink_to("/dev/full")
    with flow_log(run):
        for number in range(3):
            logging.getLogger("onward.tasks.train").info("line %d", number)
            logging.getLogger("prefect").error("hidden", exc_info=ValueError("x"))
            print("of a library", file=sys.stderr)
    gap = f"{tmp_path}/flow.log has a gap from here on: No space left on device"
    assert sorted(terminal.getvalue().splitlines()) == sorted([gap, "line 0", "line 1", "line 2", "of a task"])
