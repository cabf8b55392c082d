"""The buttons of a deployed run's page in Prefect: Suspend and Resume, Cancel and Retry, and `onward stop`.

Each ends in the weights of a run that nobody has touched. What the buttons send was read in the pages of Prefect 3.8.
"""

from __future__ import annotations

import datetime
import urllib.error
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest

from onward.flows.run_state.runs import holder_of, is_running
from onward.infra.servers.service_state import directory
from onward.trainer.run.directory import RunDir
from onward.trainer.run.outcomes.run_ending import ending_of
from onward.trainer.run.records import ExportedModel, RunIdentity, read_record
from tests.support.workshop import Workshop, api, ranks_of, reached, signed_in, until

pytestmark = [pytest.mark.mpi, pytest.mark.slow, pytest.mark.timeout(3600), pytest.mark.usefixtures("only_servers")]

STEPS = (
    *("train.num_steps=3000", "train.evaluation_period=1000", "checkpoint.period=400"),
    *("launch.retries=0", "launch.rehearsal='off'"),
)
RETRY = {"state": {"type": "SCHEDULED", "name": "AwaitingRetry", "message": "Retry from the UI"}, "force": True}
CANCEL = {"state": {"type": "CANCELLING", "name": "Cancelling"}}


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workshop]:
    workshop = Workshop.made(tmp_path_factory.mktemp("suspended"))
    workshop.onward("up")
    yield workshop
    try:
        assert workshop.onward("down")["left"] == []
        until(lambda: not workshop.processes(), limit_s=15)
    finally:
        workshop.close()


@pytest.fixture(scope="module")
def server(workshop: Workshop) -> str:
    return signed_in(workshop.onward("up")["prefect"], workshop.home)


@pytest.fixture(scope="module")
def undisturbed(workshop: Workshop) -> str:
    """The digest of the file that a run exports which nobody has touched."""
    return str(workshop.onward("run", str(workshop.root / "config.toml"), *STEPS)["sha256"])


@pytest.fixture(scope="module")
def deployment(workshop: Workshop, server: str) -> str:
    return str(
        workshop.onward("deploy", str(workshop.root / "config.toml"), *STEPS, "--name", "buttons")["deployment_id"]
    )


def suspend(*, force: bool, limit_s: float = 300.0) -> dict[str, Any]:
    """What Suspend sends (Pause in Prefect's newer pages, with `force`)."""
    until = datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=limit_s)
    details = {"pause_timeout": until.isoformat(), "pause_reschedule": True}
    return {"state": {"type": "PAUSED", "name": "Suspended", "state_details": details}, "force": force}


def training(workshop: Workshop, server: str, deployment: str) -> tuple[str, RunDir]:
    """A run of the deployment whose ranks train, and that has saved a checkpoint of its own accord."""
    create = f"/deployments/{deployment}/create_flow_run"
    begun = api(server, create, {"state": {"type": "SCHEDULED"}})["id"]
    run = RunDir(workshop.home / "runs" / begun)
    until(lambda: reached(run, 500), limit_s=600)
    return begun, run


def name_of_state(server: str, flow_run: str) -> str:
    return str(api(server, f"/flow_runs/{flow_run}")["state"]["name"])


def with_suspend(workshop: Workshop, server: str, begun: str) -> str:
    answer = api(server, f"/flow_runs/{begun}/set_state", suspend(force=False))
    assert answer["status"] == "ACCEPT", answer
    return "Suspended"


def with_pause(workshop: Workshop, server: str, begun: str) -> str:
    answer = api(server, f"/flow_runs/{begun}/set_state", suspend(force=True))
    assert answer["status"] == "ACCEPT", answer
    return "Suspended"


def with_cancel(workshop: Workshop, server: str, begun: str) -> str:
    assert api(server, f"/flow_runs/{begun}/set_state", CANCEL)["status"] == "ACCEPT"
    return "Cancelled"


def with_onward_stop(workshop: Workshop, server: str, begun: str) -> str:
    assert workshop.onward("stop", begun)["state"] == "stopped"
    return "Cancelled"


def with_a_lost_rank(workshop: Workshop, server: str, begun: str) -> str:
    ranks_of(RunDir(workshop.home / "runs" / begun))[1].kill()
    return "Failed"


@pytest.mark.parametrize("how", [with_suspend, with_pause, with_cancel, with_onward_stop, with_a_lost_rank])
def test_a_deployed_run_that_is_interrupted_frees_its_ranks_says_so_and_goes_on_to_the_same_weights(
    how: Callable[[Workshop, str, str], str], workshop: Workshop, server: str, deployment: str, undisturbed: str
) -> None:
    begun, run = training(workshop, server, deployment)
    before = read_record(run.identity, RunIdentity)
    holder = holder_of(run)
    assert holder is not None
    state = how(workshop, server, begun)
    until(lambda: not ranks_of(run), limit_s=120)
    until(lambda: not is_running(run), limit_s=120)
    until(lambda: not psutil.pid_exists(holder["pid"]), limit_s=120)
    until(lambda: name_of_state(server, begun) == state, limit_s=120)
    tasks = api(server, "/task_runs/filter", {"flow_runs": {"id": {"any_": [begun]}}})
    assert not {task["state_type"] for task in tasks} & {"RUNNING", "PENDING"}, "no task is shown as running"
    shown = {"Failed": "FAILED"}.get(state, "KILLED")
    assert [each.info.status for each in workshop.mlflow_runs(run)] == [shown]
    ending, described = ending_of(run), workshop.onward("status", begun)
    assert ending is not None
    assert ending.status == state.lower()
    if state != "Failed":
        assert described["state"] == "stopped"
        assert described["step"] >= 500
        assert run.checkpoint(described["step"]).is_dir(), "the ranks have saved where they stopped"
        assert f"onward resume {described['name']}" in described["to_do"]

    if how is with_cancel:  # until then Prefect's worker would cancel the retried run, too
        said = f"Cancelled flow run '{before.name}'"
        until(lambda: said in (directory(workshop.home) / "worker.log").read_text(), limit_s=300)
    if state == "Suspended":
        assert "Resume there continues it" in ending.problems[0]
        assert api(server, f"/flow_runs/{begun}/resume", {})["status"] == "ACCEPT"
    else:
        assert api(server, f"/flow_runs/{begun}/set_state", RETRY)["status"] == "ACCEPT"
    until(lambda: name_of_state(server, begun) in ("Completed", "Crashed", "Cancelled", "Failed"), limit_s=600)
    assert name_of_state(server, begun) == "Completed"
    assert run.current_attempt == 2
    after = read_record(run.identity, RunIdentity)
    assert (after.mlflow_run_id, after.name, after.created_at) == (before.mlflow_run_id, before.name, before.created_at)
    assert [each.info.status for each in workshop.mlflow_runs(run)] == ["FINISHED"]
    assert read_record(run.exported, ExportedModel).sha256 == undisturbed


def test_prefect_refuses_to_suspend_a_run_without_a_deployment_and_a_forced_one_is_cancelled_and_says_why(
    workshop: Workshop, server: str, undisturbed: str
) -> None:
    process = workshop.start("run", str(workshop.root / "config.toml"), *STEPS)
    run = workshop.new_run()
    until(lambda: reached(run, 500), limit_s=600)
    answer = api(server, f"/flow_runs/{run.root.name}/set_state", suspend(force=False))
    assert answer["status"] == "ABORT"
    assert answer["details"]["reason"] == "Cannot suspend flows without a deployment."
    assert api(server, f"/flow_runs/{run.root.name}/set_state", suspend(force=True))["status"] == "ACCEPT"
    _, said = process.communicate(timeout=120)
    assert process.returncode == 75, said
    assert "a run without a deployment is cancelled and not suspended" in said
    assert name_of_state(server, run.root.name) == "Cancelled"
    assert [each.info.status for each in workshop.mlflow_runs(run)] == ["KILLED"]
    try:
        answer = api(server, f"/flow_runs/{run.root.name}/set_state", {**RETRY, "force": False})
        assert answer["status"] == "ABORT"
        assert answer["details"]["reason"] == "Cannot reschedule a run without an associated deployment."
    except urllib.error.HTTPError as error:
        pytest.fail(f"{error}")
    assert workshop.onward("resume", run.root.name)["sha256"] == undisturbed
