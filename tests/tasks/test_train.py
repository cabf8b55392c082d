"""train: what counts as success, what is retried, what is raised. Real mpirun, ranks without a model."""

from __future__ import annotations

import re
import shutil
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
from prefect import State
from prefect.states import Failed

from onward.infra.job import job
from onward.tasks.train import train, worth_retrying
from onward.trainer.config.loading import build_config
from onward.trainer.errors import (
    ConfigError,
    DataError,
    DeviceAssertion,
    Diverged,
    OnwardError,
    OutOfMemory,
    RuntimeUnavailable,
    TrainingFailed,
)
from onward.trainer.events import last_beat
from onward.trainer.run.directory import RunDir
from onward.trainer.run.outcomes.attempt_endings import AttemptEnding, endings
from onward.trainer.run.records import TrainResult, read_record, write_record
from tests.support.graphs import tiny_conv_net
from tests.support.runs import events, make_run, tiny_images

pytestmark = pytest.mark.mpi


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """A configured run of two ranks, with short time limits."""
    run = RunDir(tmp_path)
    config = build_config(
        {
            "model": {"path": str(tmp_path / "model.onnx")},
            "data": {"source": "digits"},
            "train": {"num_steps": 8, "global_batch_size": 4},
            "parallel": {"data": 2},
            "launch": {"start_timeout_s": 20, "stop_grace_s": 2},
        }
    )
    write_record(run.config, config)
    return run


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Selects what the ranks do: a program of tests/support/attempts.py."""
    return lambda habit: monkeypatch.setattr("onward.tasks.train.RANK", ("tests.support.attempts", habit))


def test_a_result_file_of_this_attempt_is_success(run: RunDir, ranks: Any) -> None:
    ranks("finishes")
    result = train.fn(run)
    assert isinstance(result, TrainResult)
    assert (result.status, result.attempts, result.step, result.samples_seen) == ("done", 1, 8, 32)
    assert read_record(run.train, TrainResult) == result


def test_exit_status_0_without_a_result_is_a_failure(run: RunDir, ranks: Any) -> None:
    ranks("lies")
    with pytest.raises(TrainingFailed) as failed:
        train.fn(run)
    assert "attempt 1: mpirun ended with status 0 without a result" in str(failed.value)
    assert "all is well" in str(failed.value)  # the end of the log
    assert not run.train.exists()


def test_the_result_file_of_an_earlier_attempt_is_not_success(run: RunDir, ranks: Any) -> None:
    ranks("waits")
    _stop_when_moving(run)
    ranks("lies")
    with pytest.raises(TrainingFailed, match="attempt 2: mpirun ended with status 0"):
        train.fn(run)


def test_the_error_of_the_rank_that_failed_first_is_raised(run: RunDir, ranks: Any) -> None:
    ranks("fails")
    with pytest.raises(TrainingFailed, match="attempt 1: rank 1 on here, step 3: ValueError: a NaN in row 17"):
        train.fn(run)


@pytest.mark.parametrize(
    ("habit", "kind", "sentence"),
    [
        ("is_refused", ConfigError, "no weight matches 'conv*'\nno column 'pixels'"),
        ("diverges", Diverged, "rank 0 on here, step 3: step 3: loss nan"),
    ],
)
def test_an_error_that_a_retry_would_repeat_is_raised_as_the_rank_raised_it(
    run: RunDir, ranks: Any, habit: str, kind: type[OnwardError], sentence: str
) -> None:
    ranks(habit)
    with pytest.raises(kind) as refused:
        train.fn(run)
    assert str(refused.value) == sentence


def test_every_attempt_leaves_a_record_of_its_ending_and_one_line_on_the_terminal(
    run: RunDir, ranks: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    ranks("waits")
    assert _stop_when_moving(run).is_cancelled()
    ranks("is_killed")
    with pytest.raises(TrainingFailed):
        train.fn(run)
    ranks("is_refused")
    with pytest.raises(ConfigError):
        train.fn(run)
    ranks("finishes")
    train.fn(run)
    host = socket.gethostname()
    expected = [
        "attempt 1 ended at step 5: it was stopped as asked; `onward resume` continues it",
        f"attempt 2 ended at step 0: rank 1 on {host} was ended by SIGKILL: killed from outside: by a person, a job "
        "scheduler, or the out-of-memory killer of another host or container; it starts again from the beginning in "
        "0.5 s, retry 1 of 2",
        "attempt 3 ended at step 3: rank 0 on here failed: ConfigError: no weight matches 'conv*' no column 'pixels'; "
        "a retry would be refused again",
        "attempt 4 ended at step 8: the run is done; its last checkpoint is saved",
    ]
    assert [str(ending) for ending in endings(run)] == expected
    assert [line for line in caplog.messages if " ended at step " in line] == expected
    assert [ending.kind for ending in endings(run)] == ["stopped", "rank_lost", "user_error", "done"]


def test_a_flow_that_was_killed_has_its_attempt_recorded_by_the_next_one(run: RunDir, ranks: Any) -> None:
    run.begin_attempt()  # and nothing more
    ranks("finishes")
    train.fn(run)
    lost, done = endings(run)
    assert (lost.kind, lost.retry) == ("rank_lost", 0)
    assert lost.sentence == "the flow's process was killed, and the ranks did not save"
    assert done.kind == "done"


def test_a_killed_job_continues_in_the_next_attempt(run: RunDir, ranks: Any) -> None:
    ranks("dies_once")
    with pytest.raises(TrainingFailed, match=r"status 137"):
        train.fn(run)
    result = train.fn(run)
    assert isinstance(result, TrainResult)
    assert (result.status, result.attempts) == ("done", 2)


DATA_LOSS = r"index out of range.*Loss\.cu:245: nll_loss.* Assertion `t >= 0 && t < n_classes` failed"


@pytest.mark.parametrize(
    ("habit", "kind", "expected", "cause"),
    [
        ("aborts", TrainingFailed, "rank_lost", r"^SIGABRT: native code aborted, in _dies \(.*attempts\.py:\d+\)$"),
        ("crashes", TrainingFailed, "rank_lost", r"^SIGSEGV: a crash in native code, in <lambda> "),
        ("is_killed", TrainingFailed, "rank_lost", r"^SIGKILL: killed from outside: by a person, a job scheduler"),
        (
            "times_out",
            TrainingFailed,
            "hang",
            r"^SIGABRT: a collective timed out: ALLREDUCE number 78 waited 100\.009 s",
        ),
        (
            "stands_still",
            TrainingFailed,
            "hang",
            r"^Hang: the job made no progress for 0:00:00\.50*: it is in stand_still \(",
        ),
        (
            "asserts",
            DeviceAssertion,
            "data_error",
            rf"^DeviceAssertion: SIGABRT: a GPU kernel was given an {DATA_LOSS}",
        ),
    ],
)
def test_a_rank_that_a_signal_ended_has_a_record_with_the_cause(
    run: RunDir, ranks: Any, habit: str, kind: type[OnwardError], expected: str, cause: str
) -> None:
    ranks(habit)
    with pytest.raises(kind) as failed:
        train.fn(run)
    error = run.first_error(1)
    assert error is not None
    assert (error.rank, error.secondary) == (1, False)
    assert re.search(cause, error.cause), error.cause
    assert cause_in_message(error.cause) in str(failed.value)
    assert error.step == (0 if habit == "is_killed" else 4)
    again = kind is TrainingFailed
    assert worth_retrying(train, None, Failed(data=failed.value)) == again  # type: ignore[arg-type]
    ending = read_record(run.ending(1), AttemptEnding)
    assert (ending.kind, ending.rank, ending.retry) == (expected, 1, int(again))
    assert ending.began_ms < ending.detected_ms <= ending.ended_ms
    if habit != "is_killed":
        assert "attempts.py" in error.traceback


def cause_in_message(cause: str) -> str:
    """Of an error that is raised as its own class, the message is in the cause after the class's name."""
    return cause.removeprefix("DeviceAssertion: ").removeprefix("Hang: ")


@pytest.mark.slow
def test_a_rank_that_aborts_in_the_middle_of_training_leaves_its_step_and_traceback(tmp_path: Path) -> None:
    """The whole trainer; SIGABRT is what NCCL's watchdog ends a rank with."""
    sections: dict[str, Any] = {"parallel": {"data": 2}, "checkpoint": {"period": 5}}
    step = {"global_batch_size": 8, "num_steps": 600, "evaluation_period": 0}
    trained = make_run(tmp_path, tiny_conv_net(), tiny_images(80), train=step, **sections)

    def abort_rank_one() -> None:
        while last_beat(trained.heartbeat).step < 10 or not events(trained, "checkpoint"):
            time.sleep(0.005)
        for process in psutil.process_iter(["cmdline", "environ"]):
            environment = process.info["environ"] or {}
            if str(trained.root) in (process.info["cmdline"] or ()) and environment.get("PMIX_RANK") == "1":
                process.send_signal(signal.SIGABRT)

    aborting = threading.Thread(target=abort_rank_one, daemon=True)
    aborting.start()
    with pytest.raises(TrainingFailed, match=r"rank 1 on \S+, step \d+: SIGABRT: native code aborted, in "):
        train.fn(trained)
    aborting.join()
    error = trained.first_error(1)
    assert error is not None
    assert error.step >= 10
    assert "trainer/loop.py" in error.traceback
    result = train.fn(trained)
    assert isinstance(result, TrainResult)
    assert (result.status, result.attempts, result.step) == ("done", 2, 600)


def test_the_out_of_memory_killer_is_named_if_it_ended_a_process_meanwhile(
    run: RunDir, ranks: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = iter((3, 4))
    monkeypatch.setattr("onward.tasks.attempts.attempt.num_oom_kills", lambda: next(counts))
    ranks("is_killed")
    with pytest.raises(TrainingFailed, match="SIGKILL: the kernel's out-of-memory killer ended 1 process on this host"):
        train.fn(run)


def test_out_of_memory_is_not_retried_in_the_first_steps_and_once_in_later_ones(run: RunDir, ranks: Any) -> None:
    message = r"rank 1 on here, step \d: .*CUDA out of memory. Tried to allocate 2.00 GiB"
    ranks("runs_out_of_memory_at_once")
    with pytest.raises(OutOfMemory, match=message):
        train.fn(run)
    shutil.rmtree(run.errors)
    ranks("runs_out_of_memory")
    with pytest.raises(TrainingFailed, match=message):
        train.fn(run)
    with pytest.raises(OutOfMemory, match=message) as failed:
        train.fn(run)
    assert not worth_retrying(train, None, Failed(data=failed.value))  # type: ignore[arg-type]


def test_a_run_that_is_done_is_not_trained_again(run: RunDir, ranks: Any) -> None:
    ranks("finishes")
    first = train.fn(run)
    ranks("fails")
    assert train.fn(run) == first


def test_a_stopped_job_is_cancelled_and_can_continue(run: RunDir, ranks: Any) -> None:
    ranks("waits")
    state = _stop_when_moving(run)
    assert state.is_cancelled()
    assert state.message == "stopped; the checkpoint of step 5 is saved"
    assert read_record(run.train, TrainResult).status == "stopped"
    ranks("finishes")
    result = train.fn(run)
    assert isinstance(result, TrainResult)
    assert (result.status, result.attempts, result.elapsed_s) == ("done", 2, 4.0)


def test_a_job_that_was_stopped_without_saving_is_cancelled(run: RunDir, ranks: Any) -> None:
    ranks("does_not_save")
    state = _stop_when_moving(run)
    assert state.is_cancelled()
    limit = "2 s (launch.stop_grace_s)"
    assert state.message == f"stopped, but it did not save within {limit}; earlier checkpoints are kept"


def test_without_mpirun_it_raises_runtime_unavailable(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("sys.prefix", str(tmp_path))
    monkeypatch.setenv("PATH", "")
    with pytest.raises(RuntimeUnavailable, match="there is no mpirun"):
        train.fn(run)


def test_a_second_job_in_the_same_run_is_refused(run: RunDir, ranks: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks("waits")
    monkeypatch.setattr(job, "FREE_S", 0.2)
    with ThreadPoolExecutor() as threads:
        first = threads.submit(train.fn, run)
        _until_moving(run)
        try:
            with pytest.raises(RuntimeUnavailable, match="is still running, started at"):
                train.fn(run)
            assert run.current_attempt == 1  # the first one still owns the directory
        finally:
            job.stop_running(run.root)
        assert first.result(15).is_cancelled()


@pytest.mark.parametrize(
    ("error", "again"),
    [(TrainingFailed("died"), True), (ConfigError("x"), False), (DataError("x"), False), (KeyError("bug"), False)],
)
def test_only_training_failed_is_retried(error: Exception, again: bool) -> None:
    assert worth_retrying(train, None, Failed(data=error)) == again  # type: ignore[arg-type]


def _until_moving(run: RunDir) -> None:
    deadline = time.monotonic() + 15
    while not run.heartbeat.exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def _stop_when_moving(run: RunDir) -> State[Any]:
    with ThreadPoolExecutor() as threads:
        running = threads.submit(train.fn, run)
        _until_moving(run)
        assert job.stop_running(run.root)
        state = running.result(15)
    assert isinstance(state, State)
    return state
