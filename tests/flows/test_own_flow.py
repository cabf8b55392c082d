"""The flow of a run inside a Prefect flow of one's own, as docs/how-to/use-from-python.md shows it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest

from onward.infra.servers.login import login
from tests.support.graphs import tiny_mlp
from tests.support.workshop import Workshop, api, signed_in
from tests.test_docs import blocks

pytestmark = [pytest.mark.usefixtures("only_servers"), pytest.mark.mpi, pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture
def workshop(tmp_path: Path) -> Iterator[Workshop]:
    workshop = Workshop(tmp_path)
    yield workshop
    workshop.onward("down")
    workshop.close()


def test_a_run_is_a_subflow_of_a_flow_of_ones_own_and_returns_the_file(workshop: Workshop) -> None:
    (program,) = (block.text for block in blocks("docs/how-to/use-from-python.md") if block.title == "nightly.py")
    (workshop.root / "nightly.py").write_text(program)
    onnx.save(tiny_mlp(), workshop.root / "tiny.onnx")
    features = np.random.default_rng(0).normal(size=(400, 4)).astype(np.float32)
    np.savez(workshop.root / "data.npz", features=features, label=features.sum(1, keepdims=True))
    page = workshop.onward("up")["prefect"]
    environment = {
        **workshop.environment,
        "PREFECT_API_URL": page.removesuffix("/v2/runs") + "/api",
        "PREFECT_API_AUTH_STRING": login(workshop.home),
    }
    done = subprocess.run(
        [sys.executable, "nightly.py"], cwd=workshop.root, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    exported = Path(done.stdout.splitlines()[-1])
    assert exported.is_relative_to(workshop.home)
    onnx.checker.check_model(onnx.load(exported))
    runs = api(signed_in(page, workshop.home), "/flow_runs/filter", {})
    assert {run["state"]["type"] for run in runs} == {"COMPLETED"}
    (outer,) = (run for run in runs if run["parent_task_run_id"] is None)
    (inner,) = (run for run in runs if run["parent_task_run_id"] is not None)
    assert (outer["parameters"], inner["name"]) == ({}, "nightly-1")
