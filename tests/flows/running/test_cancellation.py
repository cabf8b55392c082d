"""The thread that sees a Cancel in Prefect, without a server; with one it is in test_cancelled_in_prefect.py."""

from __future__ import annotations

import datetime
import signal
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from prefect import State
from prefect._flow_run_suspension import FlowRunSuspensionRequest
from prefect.exceptions import Pause
from prefect.states import Cancelled, Cancelling, Paused, Running, Suspended

from onward.flows.running import cancellation
from onward.flows.running.cancellation import StopRequest, stopped_from_prefect
from onward.trainer.errors import Stopped
from onward.trainer.run.directory import RunDir
from tests.flows.test_cli import make_run

Show = Callable[[State[object]], None]


class FakeServer:
    """A Prefect server whose flow runs are all in one state."""

    def __init__(self, state: State[object]) -> None:
        self.state = state

    def __enter__(self) -> FakeServer:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def read_flow_run(self, _: object) -> FakeServer:
        return self

    def set_flow_run_state(self, _: object, state: State[object], *, force: bool) -> None:
        assert force, "Prefect refuses a state of a suspended run that cannot be scheduled"
        self.state = state


@pytest.fixture
def show(monkeypatch: pytest.MonkeyPatch) -> Iterator[Show]:
    """Let the server show a state; SIGTERM is what it is in a command."""

    def show(state: State[object]) -> None:
        server = FakeServer(state)
        monkeypatch.setattr(cancellation, "prefect_client", lambda: server)

    monkeypatch.setattr(cancellation, "prefect_answers", lambda: True)
    monkeypatch.setattr(cancellation, "PERIOD_S", 0.05)
    monkeypatch.setattr("prefect.runtime.flow_run.get_id", lambda: str(uuid.uuid4()))
    monkeypatch.delenv("PREFECT__FLOW_RUN_ID", raising=False)
    before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    yield show
    signal.signal(signal.SIGTERM, before)


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return make_run(tmp_path, "aaaa-1", "digits")


@pytest.mark.parametrize("state", [Cancelling(), Cancelled()])
def test_outside_of_the_training_the_flow_is_interrupted(state: State[object], run: RunDir, show: Show) -> None:
    show(state)
    began = time.monotonic()
    with pytest.raises(Stopped, match="cancelled in Prefect; no checkpoint is saved"), stopped_from_prefect(run):
        time.sleep(10)
    assert time.monotonic() - began < 5


def train(request: StopRequest, failed: bool) -> None:
    time.sleep(0.3)
    if failed:
        raise ValueError("of something else")
    request.check()
    pytest.fail("something further is begun")


@pytest.mark.parametrize("failed", [False, True])
def test_while_ranks_train_they_save_and_then_nothing_further_is_begun(
    failed: bool, run: RunDir, show: Show, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped: list[Path] = []
    monkeypatch.setattr("onward.infra.job.job.stop_running", lambda root: not stopped.append(root))
    show(Cancelling())
    said = "meanwhile: ValueError: of something else" if failed else "cancelled in Prefect"
    with pytest.raises(Stopped, match=said), stopped_from_prefect(run) as request:
        train(request, failed)
    assert stopped == [run.root], "it is asked once"


def deployed(request: StopRequest) -> FlowRunSuspensionRequest:
    """Make the run of a request, which has not begun to look, one of a deployment; return what Prefect's observer has
    seen."""
    observed = FlowRunSuspensionRequest()
    request._deployment, request._observed = uuid.uuid4(), observed
    return observed


@pytest.mark.parametrize("seen_by", ["the run", "Prefect's observer"])
@pytest.mark.parametrize("doing", ["training", "exporting", "failing"])
def test_a_suspended_run_of_a_deployment_stops_whatever_it_does_and_stays_suspended(
    doing: str, seen_by: str, run: RunDir, show: Show, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = threading.Event()
    monkeypatch.setattr("onward.infra.job.job.stop_running", lambda root: doing != "exporting" and not ranks.set())
    monkeypatch.setattr(cancellation, "waits_for_all", lambda _: True)
    show(Suspended() if seen_by == "the run" else Running())
    start = StopRequest.start

    def started(request: StopRequest) -> None:
        observed = deployed(request)
        if seen_by == "Prefect's observer":  # also of a run that was resumed at once
            observed.mark_requested(Suspended())
        start(request)

    monkeypatch.setattr(StopRequest, "start", started)

    def work() -> None:
        if doing == "exporting":
            time.sleep(10)
        assert ranks.wait(timeout=10)
        if doing == "failing":
            raise ValueError("of something else")

    with pytest.raises(Pause, match=r"suspended in Prefect: Resume .*onward"), stopped_from_prefect(run):
        work()


def test_a_run_without_a_deployment_that_is_suspended_is_cancelled_and_says_why(
    run: RunDir, show: Show, caplog: pytest.LogCaptureFixture
) -> None:
    show(Suspended())
    with pytest.raises(Stopped, match="cancelled in Prefect"), stopped_from_prefect(run):
        time.sleep(10)
    assert "a run without a deployment is cancelled and not suspended" in caplog.text


def test_a_paused_run_ends_while_it_trains_and_may_wait_for_an_answer(
    run: RunDir, show: Show, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Path] = []
    show(Paused())
    with stopped_from_prefect(run):
        time.sleep(0.3)
    monkeypatch.setattr("onward.infra.job.job.stop_running", lambda root: not asked.append(root))
    with stopped_from_prefect(run):
        time.sleep(0.3)
    assert asked == [run.root]


def test_the_worker_of_a_run_may_stop_it_first(run: RunDir, show: Show, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREFECT__FLOW_RUN_ID", "of the worker")
    state = Cancelling()
    show(state)
    with stopped_from_prefect(run):
        time.sleep(0.3)
    state.timestamp = datetime.datetime.now(datetime.UTC) - datetime.timedelta(seconds=cancellation.WORKER_S)
    with pytest.raises(Stopped), stopped_from_prefect(run):
        time.sleep(10)


def test_what_ends_a_run_that_nobody_has_cancelled_is_passed_on(run: RunDir, show: Show) -> None:
    show(Running())
    for error in (ValueError("wrong"), SystemExit(143), KeyboardInterrupt()):
        with pytest.raises(type(error)), stopped_from_prefect(run):
            raise error
