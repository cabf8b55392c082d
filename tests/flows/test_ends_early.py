"""A whole run that stops at its time limit exports the file, says how to go on, and goes on with that command."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from onward.trainer.run.directory import RunDir
from tests.support.workshop import Workshop

pytestmark = [pytest.mark.usefixtures("only_servers"), pytest.mark.mpi, pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workshop]:
    workshop = Workshop.made(tmp_path_factory.mktemp("workshop"))
    yield workshop
    workshop.close()


def test_out_of_time_a_run_is_exported_and_the_command_that_it_prints_continues_it(workshop: Workshop) -> None:
    first = workshop.onward("run", str(workshop.root / "config.toml"), "train.num_steps=60", "stop.max_hours=2e-6")
    run = RunDir(Path(first["directory"]))
    assert (first["state"], first["step"], first["attempts"]) == ("exported", 1, 1)
    assert first["ended_early"].startswith("stop.max_hours = 2e-06: ")
    assert Path(first["model"]).is_file()
    assert "the run ends early: stop.max_hours" in (run.root / "flow.log").read_text()
    (mlflow_run,) = workshop.mlflow_runs(run)
    assert mlflow_run.info.status == "FINISHED"
    assert mlflow_run.data.tags["onward.ended_early"] == first["ended_early"]

    refused = workshop.start("resume", run.root.name, "train.num_steps=90")
    _, error = refused.communicate()
    assert refused.returncode == 2
    assert "train.num_steps: a run keeps the configuration that it began with, but for [stop]" in error

    command, verb, name, limit = first["to_go_on"].split()
    assert (command, verb, name) == ("onward", "resume", run.root.name)
    key, _, hours = limit.partition("=")
    assert float(hours) > 2e-6
    on = workshop.onward("resume", name, f"{key}={float(hours) + 1}")
    assert (on["state"], on["step"], on["attempts"], on["ended_early"]) == ("exported", 60, 2, "")
    assert on["sha256"] != first["sha256"]
    (mlflow_run,) = workshop.mlflow_runs(run)
    assert mlflow_run.data.tags["onward.ended_early"] == ""
