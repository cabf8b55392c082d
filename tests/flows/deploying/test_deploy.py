"""Deployments on real servers: schedules create runs that complete, and failed runs are retried."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from onward.flows.run_state.runs import is_running
from onward.trainer.run.directory import RunDir
from onward.trainer.run.outcomes.run_ending import ending_of
from onward.trainer.run.records import RunIdentity, read_record
from tests.support.workshop import Workshop, api, ranks_of, reached, signed_in, until

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(900), pytest.mark.usefixtures("only_servers")]


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workshop]:
    """A workshop whose servers run; afterwards `onward down` leaves no process."""
    workshop = Workshop.made(tmp_path_factory.mktemp("workshop"))
    workshop.onward("up")
    yield workshop
    try:
        assert workshop.onward("down")["left"] == []
        until(lambda: not workshop.processes(), limit_s=15)
    finally:
        workshop.close()


@pytest.fixture(scope="module")
def server(workshop: Workshop) -> str:
    """The Prefect server's address."""
    return signed_in(workshop.onward("up")["prefect"], workshop.home)


def flow_runs(server: str, deployment: str, *states: str) -> list[dict[str, Any]]:
    """The deployment's runs in one of the states, the earliest first."""
    asked = {
        "deployments": {"id": {"any_": [deployment]}},
        "flow_runs": {"state": {"type": {"any_": list(states)}}},
        "sort": "START_TIME_ASC",
    }
    found: list[dict[str, Any]] = api(server, "/flow_runs/filter", asked)
    return found


def state_of(server: str, flow_run: str) -> str:
    return str(api(server, f"/flow_runs/{flow_run}")["state"]["type"])


@pytest.mark.slow
def test_a_schedule_creates_runs_and_they_complete(workshop: Workshop, server: str) -> None:
    made = workshop.onward(
        "deploy", str(workshop.root / "config.toml"), "train.num_steps=20", "--name", "often", "--interval", "20"
    )
    deployment = made["deployment_id"]
    try:
        until(lambda: flow_runs(server, deployment, "SCHEDULED"), limit_s=30)
        (ran, *_) = until(lambda: flow_runs(server, deployment, "COMPLETED", "FAILED", "CRASHED"), limit_s=240)
    finally:
        api(server, f"/deployments/{deployment}", method="DELETE")
    assert ran["state"]["type"] == "COMPLETED", ran["state"]
    assert "auto-scheduled" in ran["tags"]
    run = RunDir(workshop.home / "runs" / ran["id"])
    assert run.exported.exists()


@pytest.mark.slow
def test_a_cron_expression_schedules_runs_in_its_time_zone(workshop: Workshop, server: str) -> None:
    config = str(workshop.root / "config.toml")
    made = workshop.onward("deploy", config, "--name", "yearly", "--cron", "0 2 1 1 *", "--timezone", "Europe/Berlin")
    deployment = made["deployment_id"]
    try:
        (first, *_) = until(lambda: flow_runs(server, deployment, "SCHEDULED"), limit_s=30)
    finally:
        api(server, f"/deployments/{deployment}", method="DELETE")
    assert first["expected_start_time"][4:16] == "-01-01T01:00"  # UTC


@pytest.mark.slow
def test_a_retried_run_continues_in_its_directory_and_its_mlflow_run(workshop: Workshop, server: str) -> None:
    made = workshop.onward(
        "deploy", str(workshop.root / "config.toml"), "launch.retries=0", "--name", "fragile", "--cron", "0 2 1 1 *"
    )
    begun = api(server, f"/deployments/{made['deployment_id']}/create_flow_run", {"state": {"type": "SCHEDULED"}})["id"]
    run = RunDir(workshop.home / "runs" / begun)
    until(lambda: reached(run, 100), limit_s=300)
    before = read_record(run.identity, RunIdentity)
    ranks_of(run)[1].kill()
    until(lambda: state_of(server, begun) == "FAILED", limit_s=120)
    assert [found.info.status for found in workshop.mlflow_runs(run)] == ["FAILED"]

    retry = {"state": {"type": "SCHEDULED", "name": "AwaitingRetry"}}  # what the UI's Retry button sends
    assert api(server, f"/flow_runs/{begun}/set_state", retry)["status"] == "ACCEPT"
    until(lambda: state_of(server, begun) in ("COMPLETED", "FAILED", "CRASHED"), limit_s=240)
    assert state_of(server, begun) == "COMPLETED"
    assert run.current_attempt == 2
    assert read_record(run.identity, RunIdentity).created_at == before.created_at
    (mlflow_run,) = workshop.mlflow_runs(run)
    assert (mlflow_run.info.run_id, mlflow_run.info.status) == (before.mlflow_run_id, "FINISHED")


@pytest.mark.slow
def test_parameters_that_name_other_files_are_refused_before_anything_is_read(workshop: Workshop, server: str) -> None:
    made = workshop.onward("deploy", str(workshop.root / "config.toml"), "--name", "limited")
    assert made["may_use"] == [str(workshop.root)]
    create = f"/deployments/{made['deployment_id']}/create_flow_run"
    elsewhere = {"data": {"source": "/etc/passwd"}, "export": {"path": "/tmp/over.onnx"}}
    evil, mark = workshop.root / "evil.py", workshop.root / "executed"
    evil.write_text(f"open({str(mark)!r}, 'w')\n")
    loss = {"loss": [{"name": "file", "file": f"{evil}:f.onnx"}]}
    for parameters, reason in (
        (loss, f"loss.file {evil} executes Python that the deployment's author has not named; named are: none"),
        (elsewhere, f"data.source /etc/passwd is not below a directory that this deployment may use: {workshop.root}"),
        ({"resume": "/tmp"}, "resume '/tmp' is not the id of a run"),
    ):
        begun = api(server, create, {"state": {"type": "SCHEDULED"}, "parameters": parameters})["id"]
        until(lambda begun=begun: state_of(server, begun) in ("COMPLETED", "FAILED", "CRASHED"), limit_s=240)
        state = api(server, f"/flow_runs/{begun}")["state"]
        assert (state["type"], reason in state["message"]) == ("FAILED", True), state
        assert not (workshop.home / "runs" / begun).exists()
    assert not mark.exists(), "a parameter's file was executed"


@pytest.mark.slow
def test_a_deployed_run_that_is_cancelled_saves_ends_as_cancelled_and_can_be_resumed(
    workshop: Workshop, server: str
) -> None:
    made = workshop.onward("deploy", str(workshop.root / "config.toml"), "train.num_steps=3000", "--name", "cancelled")
    begun = api(server, f"/deployments/{made['deployment_id']}/create_flow_run", {"state": {"type": "SCHEDULED"}})["id"]
    run = RunDir(workshop.home / "runs" / begun)
    until(lambda: reached(run, 60), limit_s=240)
    cancel = {"state": {"type": "CANCELLING", "name": "Cancelling"}}  # what the UI's Cancel button sends
    assert api(server, f"/flow_runs/{begun}/set_state", cancel)["status"] == "ACCEPT"
    until(lambda: not is_running(run), limit_s=60)
    until(lambda: state_of(server, begun) not in ("RUNNING", "CANCELLING"), limit_s=30)
    assert state_of(server, begun) == "CANCELLED"
    assert [found.info.status for found in workshop.mlflow_runs(run)] == ["KILLED"]
    assert not ranks_of(run)
    described = workshop.onward("status", begun)
    assert described["state"] == "stopped"
    assert described["step"] >= 60
    assert run.checkpoint(described["step"]).is_dir(), "the ranks have saved where they stopped"
    ending = ending_of(run)
    assert ending is not None
    assert ending.status == "cancelled"
    asked = {"flow_runs": {"id": {"any_": [begun]}}}
    states = {each["name"]: each["state"]["type"] for each in api(server, "/task_runs/filter", asked)}
    assert states["train"] == "CANCELLED", states
    said = [each["message"] for each in api(server, "/logs/filter", {"logs": {"flow_run_id": {"any_": [begun]}}})]
    assert not [line for line in said if "Crash" in line or "Traceback" in line]
    assert "Crash" not in (run.root / "flow.log").read_text()
    assert workshop.onward("resume", begun)["step"] == 3000
    assert [found.info.status for found in workshop.mlflow_runs(run)] == ["FINISHED"]


@pytest.mark.slow
def test_down_lets_a_deployed_run_save_and_resume_continues_it(workshop: Workshop, server: str) -> None:
    # the last test here: the others need the servers
    made = workshop.onward("deploy", str(workshop.root / "config.toml"), "train.num_steps=3000", "--name", "saved")
    begun = api(server, f"/deployments/{made['deployment_id']}/create_flow_run", {"state": {"type": "SCHEDULED"}})["id"]
    run = RunDir(workshop.home / "runs" / begun)
    until(lambda: reached(run, 60), limit_s=150)
    assert workshop.onward("down")["left"] == []
    until(lambda: not workshop.processes(), limit_s=15)
    described = workshop.onward("status", begun)
    assert described["state"] == "stopped"
    assert run.checkpoint(described["step"]).is_dir()
    assert workshop.onward("resume", begun)["step"] == 3000
