"""Which version is served after whole runs: through the command line, a real Prefect server and a real MLflow store."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from onward.infra.mlflow.mlflow_store import local_store
from onward.infra.mlflow.registry import Registry
from onward.trainer.run.directory import RunDir
from onward.trainer.run.records import ExportedModel, Promotion, read_record
from onward.trainer.run.remote.local_copies import LocalCopies
from tests.support.graphs import tiny_conv_net
from tests.support.workshop import Workshop, api, finished, signed_in, until

pytestmark = [
    pytest.mark.usefixtures("only_servers"),
    pytest.mark.mpi,
    pytest.mark.slow,
    pytest.mark.timeout(900),
]

CONFIG = """
name = "shapes"
[model]
path = "{model}"
[data]
source = "{data}"
evaluation_source = "evaluation.npz"
[train]
global_batch_size = 8
num_steps = {steps}
[optimizer]
learning_rate = 3e-3
[checkpoint]
best_metric = "evaluation/accuracy"
[launch]
device = "cpu"
threads_per_rank = 1
rehearsal = "off"
"""


@pytest.fixture
def workshop(tmp_path: Path) -> Iterator[Workshop]:
    onnx.save_model(tiny_conv_net(num_classes=4), tmp_path / "model.onnx")
    random = np.random.default_rng(0)

    def write(name: str, count: int, wrong: float) -> None:
        labels = np.arange(count) % 4
        images = random.normal(size=(count, 3, 8, 8)) + 0.7 * labels[:, None, None, None]
        given = np.where(random.random(count) < wrong, random.integers(0, 4, count), labels)
        np.savez(tmp_path / name, image=images.astype(np.float32), label=given)

    write("data.npz", 400, wrong=0.0)
    write("bad.npz", 400, wrong=1.0)
    write("evaluation.npz", 200, wrong=0.0)
    workshop = Workshop(tmp_path)
    yield workshop
    workshop.close()


def write_config(workshop: Workshop, name: str, more: str = "", /, *, model: str, data: str, steps: int) -> str:
    path = workshop.root / f"{name}.toml"
    path.write_text(CONFIG.format(model=model, data=data, steps=steps) + more)
    return str(path)


def champion(workshop: Workshop) -> str:
    served = Registry(local_store(workshop.home)).served("shapes", "champion")
    return served.version if served else ""


def test_a_nightly_run_on_worse_data_does_not_replace_the_served_model_and_a_better_one_does(
    workshop: Workshop,
) -> None:
    first = workshop.onward("run", write_config(workshop, "first", model="model.onnx", data="data.npz", steps=20))
    assert first["promotion"].startswith("served: it is the first champion of its name: evaluation/accuracy ")
    assert first["promotion"].endswith(" of the most frequent class")
    nightly = {"model": "models:/shapes@champion"}
    bad = workshop.onward(
        "run", write_config(workshop, "bad", **nightly, data="bad.npz", steps=100), "export.checkpoint=last"
    )
    assert bad["promotion"].startswith("candidate: evaluation/accuracy"), bad["promotion"]
    assert "not better" in bad["promotion"]
    assert champion(workshop) == "1"
    copy = read_record(RunDir(Path(bad["directory"])).remote, LocalCopies).copies[0]
    assert (copy.url, copy.key) == ("models:/shapes@champion", f"shapes/1 {first['sha256']}")
    good = workshop.onward("run", write_config(workshop, "good", **nightly, data="data.npz", steps=300))
    assert good["promotion"].startswith("served: evaluation/accuracy"), good["promotion"]
    assert champion(workshop) == "3"
    # the run that began with version 1 goes on with it, though the alias has moved
    resumed = workshop.onward("resume", Path(bad["directory"]).name)
    assert resumed["sha256"] == bad["sha256"]
    refused = workshop.onward(
        "run", write_config(workshop, "none", model="models:/shapes@best", data="data.npz", steps=1), status=2
    )
    assert "no alias 'best'; its aliases are candidate (version 2), champion (version 3)" in refused["problems"][0]
    back = workshop.onward("promote", "shapes", "1")
    assert (back["before"], champion(workshop)) == ("3", "1")


def test_a_schedule_serves_what_it_trained_on_good_data_and_not_what_it_trained_on_worse_data(
    workshop: Workshop,
) -> None:
    server = signed_in(workshop.onward("up")["prefect"], workshop.home)
    workshop.onward("run", write_config(workshop, "first", model="model.onnx", data="data.npz", steps=2))
    nightly = write_config(workshop, "nightly", model="models:/shapes@champion", data="data.npz", steps=150)
    last = ("export.checkpoint=last", "checkpoint.period=50")
    deployment = workshop.onward("deploy", nightly, *last, "--name", "nightly", "--interval", "20")["deployment_id"]

    def runs() -> list[RunDir]:
        asked = {"deployments": {"id": {"any_": [deployment]}}, "sort": "START_TIME_ASC"}
        found = [RunDir(workshop.home / "runs" / each["id"]) for each in api(server, "/flow_runs/filter", asked)]
        return [run for run in found if run.identity.exists()]

    def decision(number: int) -> Promotion | None:
        begun = runs()
        if len(begun) <= number or not begun[number].exported.exists():
            return None
        return read_record(begun[number].exported, ExportedModel).promotion

    try:
        # the rows of the first run are in its shards by then
        until(lambda: runs() and any(runs()[0].checkpoints.glob("step-*")), limit_s=300)
        (workshop.root / "bad.npz").replace(workshop.root / "data.npz")
        first = until(lambda: decision(0), limit_s=300)
        second = until(lambda: decision(1), limit_s=300)
    finally:
        api(server, f"/deployments/{deployment}", method="DELETE")
    assert first.status == "served", first
    assert first.reason.startswith("evaluation/accuracy"), first
    assert second.status == "candidate", second
    assert second.comparison is not None
    assert second.comparison.version == "2", "it is compared with what the schedule's first run has promoted"
    assert champion(workshop) == "2"
    workshop.onward("down")


def test_of_two_runs_at_the_same_time_one_is_promoted_and_it_is_the_better_one(workshop: Workshop) -> None:
    workshop.onward("run", write_config(workshop, "first", model="model.onnx", data="data.npz", steps=2))
    short = write_config(workshop, "short", model="model.onnx", data="data.npz", steps=60)
    long = write_config(workshop, "long", model="model.onnx", data="data.npz", steps=400)
    both = [workshop.start("run", config) for config in (short, long)]
    found = [finished(process, limit_s=600) for process in both]
    accuracies = {each["registered"]: each["after"]["evaluation/accuracy"] for each in found}
    served = f"shapes version {champion(workshop)}"
    assert accuracies[served] == max(accuracies.values())


def test_a_run_that_asks_waits_in_prefect_and_the_answer_decides(workshop: Workshop) -> None:
    url = signed_in(workshop.onward("up")["prefect"], workshop.home)
    workshop.onward("run", write_config(workshop, "first", model="model.onnx", data="data.npz", steps=2))
    asking = write_config(
        *(workshop, "asking", "[export.promote_if]\napproval_hours = 1\n"),
        model="model.onnx",
        data="data.npz",
        steps=300,
    )
    process = workshop.start("run", asking)
    run = workshop.new_run()

    def paused() -> bool:
        state: dict[str, Any] = api(url, f"/flow_runs/{run.root.name}")["state"]
        return bool(state["type"] == "PAUSED")

    until(paused, limit_s=300)
    assert champion(workshop) == "1"
    answered = api(url, f"/flow_runs/{run.root.name}/resume", {"run_input": {"promote": True}})
    assert answered["status"] == "ACCEPT"
    assert finished(process)["promotion"].startswith("served: evaluation/accuracy")
    assert champion(workshop) == "2"
    shown = api(url, "/artifacts/filter", {"artifacts": {"key": {"any_": ["promotion"]}}})
    assert any("| **evaluation/accuracy** |" in artifact["data"] for artifact in shown)
    workshop.onward("down")
