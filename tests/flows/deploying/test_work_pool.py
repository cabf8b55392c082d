"""The work pool of deployed runs on a real server: what somebody who may start runs can change of their processes."""

from __future__ import annotations

import sqlite3
import urllib.error
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from onward.flows.deploying.work_pool import closed_template, variables_of
from tests.support.workshop import Workshop, api, signed_in, until

pytestmark = [
    pytest.mark.usefixtures("only_servers"),
    pytest.mark.timeout(2400),
]

DEFAULT = {
    "job_configuration": {"command": "{{ command }}", "env": "{{ env }}", "stream_output": "{{ stream_output }}"},
    "variables": {
        "type": "object",
        "properties": {
            "command": {"type": "string"},
            "env": {"type": "object"},
            "stream_output": {"type": "boolean", "default": True},
        },
    },
}
"""What Prefect's worker gives a pool, as far as it matters here."""
CHOSEN = {
    "job_configuration": {"command": "{{ command }}"},
    "variables": {"type": "object", "properties": {"command": {"type": "string", "default": "nice python"}}},
}


@pytest.mark.parametrize(
    ("template", "variables"),
    [
        (closed_template(), []),
        (closed_template("python -m x"), []),
        ({}, ["everything"]),
        (DEFAULT, ["command", "env", "stream_output"]),
        ({"job_configuration": {"command": "nice {{ command }}"}, "variables": {}}, ["command"]),
        ({"job_configuration": {"a": [{"b": "{{image}}"}]}, "variables": {}}, ["image"]),
        ({"job_configuration": {"env": {"A": "1"}}, "variables": {}}, ["env"]),
        ({"job_configuration": {"name": "{{ ctx.flow.name }} {{ prefect.variables.x }} {{ $HOME }}"}}, []),
    ],
)
def test_the_variables_of_a_template_are_found(template: dict[str, Any], variables: list[str]) -> None:
    assert variables_of(template) == variables


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workshop]:
    workshop = Workshop.made(tmp_path_factory.mktemp("workshop"))
    yield workshop
    try:
        workshop.onward("down")
        until(lambda: not workshop.processes(), limit_s=30)
    finally:
        workshop.close()


def answered(server: str, path: str, body: Any, method: str = "") -> int:
    """The status with which a request is answered."""
    try:
        api(server, path, body, method=method)
    except urllib.error.HTTPError as error:
        return error.code
    return 200


def with_traps(root: Path) -> tuple[Path, dict[str, dict[str, Any]]]:
    """A directory in which each of these job variables would leave a file, and the variables."""
    marks, code = root / "marks", root / "code"
    marks.mkdir()
    code.mkdir()
    (code / "sitecustomize.py").write_text(f"open({str(marks / 'code')!r}, 'w').close()\n")
    return marks, {
        "command": {"command": f'/bin/sh -c "id > {marks}/command"'},
        "environment": {"env": {"PYTHONPATH": str(code)}},
        "one variable": {"env.PYTHONPATH": str(code)},
        "directory": {"working_dir": str(code)},
    }


@pytest.mark.slow
@pytest.mark.mpi
def test_job_variables_run_nothing(workshop: Workshop) -> None:
    server = signed_in(workshop.onward("up")["prefect"], workshop.home)
    marks, traps = with_traps(workshop.root)
    made = workshop.onward("deploy", str(workshop.root / "config.toml"), "train.num_steps=5", "--name", "limited")
    deployment = f"/deployments/{made['deployment_id']}"
    later = {"state": {"type": "SCHEDULED", "state_details": {"scheduled_time": "2099-01-01T00:00:00Z"}}}
    scheduled = api(server, f"{deployment}/create_flow_run", later)["id"]
    trigger = {"type": "event", "expect": ["a.b"], "posture": "Reactive", "threshold": 1, "within": 0}
    for name, variables in traps.items():
        chosen = {"job_variables": variables}
        assert answered(server, f"{deployment}/create_flow_run", {**chosen, "state": {"type": "SCHEDULED"}}) == 422, (
            name
        )
        assert answered(server, f"/flow_runs/{scheduled}", chosen, "PATCH") == 422, name
        run = {"type": "run-deployment", "source": "selected", "deployment_id": made["deployment_id"], **chosen}
        assert answered(server, "/automations/", {"name": name, "trigger": trigger, "actions": [run]}) == 422, name

    # those of the deployment, which a starter cannot change, and what a database would have that was made before
    everything = {key: value for variables in traps.values() for key, value in variables.items()}
    api(server, f"/flow_runs/{scheduled}", method="DELETE")
    begun = api(server, f"{deployment}/create_flow_run", later)["id"]
    assert answered(server, deployment, {"job_variables": everything}, "PATCH") == 200
    chosen = {"job_variables": everything, "work_pool_name": "onward", "state": {"type": "SCHEDULED"}}
    flow = api(server, deployment)["flow_id"]
    assert answered(server, "/flow_runs/", {"flow_id": flow, "name": "without a deployment", **chosen}) == 200
    now = {"state": {"type": "SCHEDULED", "name": "Scheduled"}, "force": True}
    assert api(server, f"/flow_runs/{begun}/set_state", now)["status"] == "ACCEPT"
    final = ("COMPLETED", "FAILED", "CRASHED", "CANCELLED")
    until(lambda: api(server, f"/flow_runs/{begun}")["state"]["type"] in final, limit_s=900)
    assert api(server, f"/flow_runs/{begun}")["state"]["type"] == "COMPLETED"
    assert list(marks.iterdir()) == []


@pytest.mark.slow
def test_a_pool_of_an_earlier_version_is_closed_and_one_that_somebody_has_opened_is_refused(workshop: Workshop) -> None:
    server = signed_in(workshop.onward("up")["prefect"], workshop.home)
    config = str(workshop.root / "config.toml")
    earlier = workshop.onward("deploy", config, "--name", "earlier")["deployment_id"]
    assert answered(server, "/work_pools/onward", {"base_job_template": DEFAULT}, "PATCH") == 200
    assert answered(server, f"/deployments/{earlier}", {"job_variables": {"env": {"A": "1"}}}, "PATCH") == 200
    refusal = workshop.onward("deploy", config, "--name", "new", status=3)["problems"]
    assert "who may start a run can run any program" in refusal[0]
    assert "close it with `prefect work-pool update onward --base-job-template" in refusal[0]
    found = workshop.onward("doctor", status=3)["findings"]
    assert [each["level"] for each in found if each["check"] == "work pool"] == ["problem"]

    workshop.onward("down")
    server = signed_in(workshop.onward("up")["prefect"], workshop.home)
    assert variables_of(api(server, "/work_pools/onward")["base_job_template"]) == []
    assert api(server, f"/deployments/{earlier}")["job_variables"] == {}
    workshop.onward("deploy", config, "--name", "new")

    assert answered(server, "/work_pools/onward", {"base_job_template": CHOSEN}, "PATCH") == 200
    workshop.onward("down")
    (problem,) = workshop.onward("up", status=3)["problems"]
    assert "who may start a run can run any program: the work pool 'onward'" in problem
    with closing(sqlite3.connect(workshop.home / "prefect" / "prefect.db")) as database:
        kept = database.execute("select base_job_template from work_pool where name = 'onward'").fetchone()[0]
    assert "nice python" in kept, "what somebody has chosen is not replaced"
