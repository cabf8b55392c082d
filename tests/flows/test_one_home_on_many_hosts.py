"""Three hosts with one home on a shared file system, each with a run of its own, all at the same time."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from onward.trainer.run.records import RunIdentity, read_record
from tests.support.machines import machines, missing
from tests.support.workshop import Workshop, until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.mpi,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(bool(missing()), reason=missing()),
]
RUN = (sys.executable, "-m", "onward.flows.cli", "run")


@pytest.fixture
def workshop(tmp_path: Path) -> Iterator[Workshop]:
    with contextlib.closing(Workshop.made(tmp_path)) as made:
        yield made


def test_three_jobs_at_once_on_three_hosts_with_one_home_all_end_with_a_file(workshop: Workshop) -> None:
    words = [*RUN, str(workshop.root / "config.toml"), "parallel.data=1", "train.num_steps=40", "monitor.report=false"]
    logs = {f"h{number}": workshop.root / f"h{number}.log" for number in range(3)}
    with machines(workshop.root / "machines", 3) as cluster:
        jobs = [
            cluster.start([*words, "--name", f"of-{host}"], workshop.environment, log, host=host)
            for host, log in logs.items()
        ]
        # a second start of a name is refused while the run goes on, on whichever host
        until(lambda: list((workshop.home / "runs").glob("*/identity.json")), limit_s=600)
        twice = subprocess.run(
            [*cluster.on("h1"), *words, "--name", "of-h0", "--continue"],
            env=workshop.environment,
            capture_output=True,
            text=True,
        )
        statuses = [job.wait(1200) for job in jobs]
        said = {host: log.read_text() for host, log in logs.items()}
        assert statuses == [0, 0, 0], said
        assert twice.returncode == 2, twice.stderr
        assert "the run of-h0 is running already" in twice.stderr
        # one of the three had the home's Prefect server, and the others said which
        alone = [host for host, text in said.items() if "the Prefect server of this home is on " not in text]
        assert len(alone) == 1, said
        others = [text for host, text in said.items() if host not in alone]
        assert all(f"the Prefect server of this home is on {alone[0]}, and" in text for text in others)
    runs = [read_record(path, RunIdentity).name for path in (workshop.home / "runs").glob("*/identity.json")]
    assert sorted(runs) == ["of-h0", "of-h1", "of-h2"]
    assert sorted(run["name"] for run in workshop.onward("runs")["runs"]) == sorted(runs)
