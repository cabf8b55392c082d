"""A run from the command line that is cancelled in Prefect, as by the button of its page, whatever it is just doing.

Runs of a deployment are in test_deploy.py, sweeps in test_sweeps.py.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from onward.flows.running.cancellation import PERIOD_S
from onward.trainer.run.directory import RunDir
from onward.trainer.run.names import name_of
from onward.trainer.run.outcomes.run_ending import ending_of
from onward.trainer.run.records import RunIdentity, read_record
from tests.flows.test_every_phase import SHORT, begun, go_on, runs_of, start_until
from tests.support.workshop import Workshop, api, ranks_of, signed_in, until

pytestmark = [pytest.mark.mpi, pytest.mark.slow, pytest.mark.timeout(600), pytest.mark.usefixtures("only_servers")]


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workshop]:
    workshop = Workshop.made(tmp_path_factory.mktemp("cancelled"))
    with workshop.server():
        yield workshop
    workshop.close()


@pytest.fixture(scope="module")
def undisturbed(workshop: Workshop) -> str:
    """The digest of the file that a run exports which is not disturbed."""
    return str(workshop.onward("run", str(workshop.root / "config.toml"), *SHORT)["sha256"])


def cancel(workshop: Workshop, run: RunDir) -> None:
    """What the button Cancel sends."""
    url, _, flow_run = read_record(run.identity, RunIdentity).prefect_url.partition("/v2/runs/flow-run/")
    body = {"state": {"type": "CANCELLING", "name": "Cancelling"}}
    answer = api(signed_in(url, workshop.home), f"/flow_runs/{flow_run}/set_state", body)
    assert answer["status"] == "ACCEPT", answer


@pytest.mark.parametrize("phase", ["sharding", "step", "a retry's pause", "save", "evaluation", "export"])
def test_a_run_that_is_cancelled_in_prefect_ends_as_cancelled_and_goes_on_to_the_same_file(
    phase: str, workshop: Workshop, undisturbed: str, tmp_path: Path
) -> None:
    before, reached = runs_of(workshop), tmp_path / "reached"
    paused = phase == "a retry's pause"
    process = start_until(workshop, "step" if paused else phase, "wait", reached, retry_delay_s=100.0 * paused)
    until(reached.exists, limit_s=300)
    name, run = begun(workshop, before)
    assert run is not None
    if paused:
        ranks_of(run)[0].kill()
        until(lambda: run.ending(1).exists(), limit_s=60)
    cancel(workshop, run)
    time.sleep(PERIOD_S + 2.0)
    reached.with_name("reached.go").touch()
    _, said = process.communicate(timeout=60)
    assert process.returncode == 75, said
    assert "Traceback" not in said
    assert len(said.splitlines()) < 25, said
    assert f"onward resume {name_of(run, 'config')}" in said
    until(lambda: not workshop.processes(), limit_s=60)
    assert workshop.prefect_states()[name] == "CANCELLED"
    assert [each.info.status for each in workshop.mlflow_runs(run)] == ["KILLED"]
    ending = ending_of(run)
    assert ending is not None
    assert (ending.status, ending.exit_status) == ("cancelled", 75)
    assert workshop.onward("status", name)["state"] == ("trained" if phase == "export" else "stopped")
    if phase in ("step", "save", "evaluation"):
        assert list(run.checkpoints.glob("step-*")), "the ranks have saved a checkpoint"
    assert go_on(workshop, run)["sha256"] == undisturbed
    assert [each.info.status for each in workshop.mlflow_runs(run)] == ["FINISHED"]
