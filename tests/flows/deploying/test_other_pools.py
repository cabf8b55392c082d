"""Deployments in a pool of somebody's own: refusals, queues, and signed limits, which an empty home can verify."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import VariableUpdate, WorkPoolCreate
from prefect.exceptions import ObjectNotFound
from prefect.testing.utilities import prefect_test_harness

from onward.flows.deploying import signed_limits
from onward.flows.deploying.deploy import Place, _job_variables, deploy
from onward.flows.deploying.deployment_limits import check_limits, forget, waits_for_all
from onward.flows.deploying.deployments import delete
from onward.flows.deploying.signed_limits import KEY
from onward.flows.deploying.work_pool import closed_template
from onward.trainer.config.loading import build_config
from onward.trainer.config.run_config import RunConfig
from onward.trainer.errors import ConfigError, RuntimeUnavailable

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("only_servers"), pytest.mark.timeout(2400)]

SECRET = "0123456789abcdef-of-the-team"


@pytest.fixture(scope="module")
def prefect() -> Iterator[None]:
    """A Prefect server with the closed pool `gpus`, an open pool, and one of containers."""
    with prefect_test_harness(server_startup_timeout=300), get_client(sync_client=True) as client:
        client.create_work_pool(WorkPoolCreate(name="gpus", type="process", base_job_template=closed_template()))
        client.create_work_pool(WorkPoolCreate(name="open", type="process"))
        docker = {
            "job_configuration": {"image": "{{ image }}", "env": "{{ env }}"},
            "variables": {"type": "object", "properties": {"image": {"type": "string"}, "env": {"type": "object"}}},
        }
        client.create_work_pool(WorkPoolCreate(name="boxes", type="docker", base_job_template=docker))
        yield


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, prefect: None) -> RunConfig:
    monkeypatch.setenv("ONWARD_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    (tmp_path / "home").mkdir(mode=0o700)
    for name in ("model.onnx", "rows.npz"):
        (tmp_path / name).touch()
    sections = {"path": tmp_path / "model.onnx"}
    return build_config({"model": sections, "data": {"source": str(tmp_path / "rows.npz")}, "train": {"num_steps": 1}})


def read(deployment_id: str) -> Any:
    with get_client(sync_client=True) as client:
        return client.read_deployment(deployment_id)


def test_a_deployment_names_its_pool_its_queue_and_its_image(config: RunConfig) -> None:
    made = read(deploy(config, "a", place=Place(pool="gpus", queue="h100"))[0])
    assert (made.work_pool_name, made.work_queue_name, made.job_variables) == ("gpus", "h100", {})
    boxed = read(deploy(config, "b", place=Place(pool="boxes", image="onward:1"))[0])
    assert boxed.job_variables["image"] == "onward:1"
    assert boxed.job_variables["env"]["ONWARD_HOME"] == os.environ["ONWARD_HOME"]


def test_a_pool_that_is_absent_or_open_is_refused_with_the_command_that_makes_a_closed_one(config: RunConfig) -> None:
    with pytest.raises(RuntimeUnavailable, match=r"no work pool 'none'.*`prefect work-pool create none --type process"):
        deploy(config, "a", place=Place(pool="none"))
    with pytest.raises(RuntimeUnavailable, match="who may start a run can run any program: the work pool 'open'"):
        deploy(config, "a", place=Place(pool="open"))
    template = Path(os.environ["ONWARD_HOME"], "work-pool.json")
    assert json.loads(template.read_text()) == closed_template()
    with pytest.raises(ConfigError, match="--image x: runs of the work pool 'gpus' are processes"):
        deploy(config, "a", place=Place(pool="gpus", image="x"))


def test_signed_limits_are_those_of_an_empty_home_and_nobody_without_the_key_changes_them(
    config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(KEY, SECRET)
    first, _ = deploy(config, "first", place=Place(pool="gpus"), all_waiting=True)
    second, _ = deploy(config, "second", place=Place(pool="gpus"), allowed=["/"])
    monkeypatch.setenv("ONWARD_HOME", str(tmp_path / "empty"))
    assert check_limits(first, dict(config)) == {}
    assert waits_for_all(first)
    elsewhere = config.model_copy(update={"data": config.data.model_copy(update={"source": "/etc/passwd"})})
    with pytest.raises(ConfigError, match=r"/etc/passwd is not below"):
        check_limits(first, dict(elsewhere))
    check_limits(second, dict(elsewhere))

    def put(deployment: str, value: Any) -> None:
        with get_client(sync_client=True) as client:
            name = f"onward_limits_{deployment.replace('-', '_')}"
            client.update_variable(VariableUpdate(name=name, value=value))

    with get_client(sync_client=True) as client:
        known = {
            each: client.read_variable_by_name(f"onward_limits_{each.replace('-', '_')}").value
            for each in (first, second)
        }
    # those of another deployment, changed ones, and rubbish
    wider = {**known[first], "limits": known[first]["limits"].replace(str(tmp_path), "/")}
    for value in (known[second], wider, {}, "rubbish", {"limits": 1, "signature": None}):
        put(first, value)
        with pytest.raises(ConfigError, match=f"were not signed with the {KEY} of this worker"):
            check_limits(first, dict(config))
    put(first, known[first])
    monkeypatch.setenv(KEY, SECRET + "!")
    with pytest.raises(ConfigError, match="were not signed"):
        check_limits(first, dict(config))
    monkeypatch.setenv(KEY, "short")
    with pytest.raises(ConfigError, match="has 5 letters, and needs 16"):
        check_limits(first, dict(config))
    monkeypatch.delenv(KEY)
    with pytest.raises(ConfigError, match=f"A worker without that home needs the same {KEY}"):
        check_limits(first, dict(config))
    monkeypatch.setenv(KEY, SECRET)
    forget(first)
    with pytest.raises(ConfigError, match="does not exist"):
        check_limits(first, dict(config))


def test_signed_limits_are_not_left_behind_by_who_deploys_again_or_deletes_without_the_key(
    config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(KEY, SECRET)
    signed, _ = deploy(config, "signed", place=Place(pool="gpus"), allowed=["/"])
    monkeypatch.delenv(KEY)
    narrower = config.model_copy(update={"train": config.train.model_copy(update={"num_steps": 7})})
    with pytest.raises(ConfigError, match=f"signed limits of this deployment, which would stay .*: set {KEY}, or"):
        deploy(narrower, "signed", place=Place(pool="gpus"))
    assert read(signed).parameters["train"] == {"num_steps": 1}
    monkeypatch.setenv(KEY, SECRET + "!")
    assert deploy(narrower, "signed", place=Place(pool="gpus"))[0] == signed
    monkeypatch.setenv("ONWARD_HOME", str(tmp_path / "empty"))
    elsewhere = config.model_copy(update={"data": config.data.model_copy(update={"source": "/etc/passwd"})})
    with pytest.raises(ConfigError, match=r"/etc/passwd is not below"):
        check_limits(signed, dict(elsewhere))
    monkeypatch.delenv(KEY)
    delete("signed")
    assert deploy(narrower, "signed", place=Place(pool="gpus"))[0] != signed
    with get_client(sync_client=True) as client:
        assert client.read_variable_by_name(f"onward_limits_{signed.replace('-', '_')}") is None


@pytest.mark.parametrize(("key", "why"), [(SECRET, "letters, and Prefect takes 10"), ("short", "has 5 letters")])
def test_limits_that_cannot_be_signed_are_refused_before_anything_is_deployed(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch, key: str, why: str
) -> None:
    monkeypatch.setattr(signed_limits, "MOST_LETTERS", 10)
    monkeypatch.setenv(KEY, key)
    with pytest.raises(ConfigError, match=why):
        deploy(config, "refused", place=Place(pool="gpus"))
    with get_client(sync_client=True) as client, pytest.raises(ObjectNotFound):
        client.read_deployment_by_name("train-onnx/refused")


@pytest.mark.parametrize(("key", "has_home"), [("", True), (SECRET, False)])
def test_containers_use_this_home_without_a_key_and_an_empty_one_is_none(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch, key: str, has_home: bool
) -> None:
    monkeypatch.setenv(KEY, key)
    assert ("ONWARD_HOME" in _job_variables(Place(pool="boxes"))["env"]) == has_home
