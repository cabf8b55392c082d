"""A real `onward run` that the rehearsal refuses: the reasons on the terminal and in Prefect, and nothing launched."""

from __future__ import annotations

import contextlib
import json
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest

from onward.trainer.onnx_graph.node_builder import GraphWriter
from tests.support.workshop import CONFIG, Workshop

pytestmark = [pytest.mark.usefixtures("only_servers"), pytest.mark.mpi, pytest.mark.timeout(900)]


@pytest.fixture
def workshop(tmp_path: Path) -> Iterator[Workshop]:
    """A model whose layers share one bias, and whose scores are rounded."""
    workshop = Workshop(tmp_path)
    g = GraphWriter("merged")
    x, bias = g.input("x", ("batch", 4)), g.weight("bias", np.zeros(4, np.float32))
    for layer in "abc":
        x = g.op("Relu", g.op("Add", g.op("MatMul", x, g.weight(f"{layer}.w", g.normal(0.5, 4, 4))), bias))
    g.output(g.op("Round", x), ("batch", 4))
    onnx.save_model(g.model(), tmp_path / "model.onnx")
    random = np.random.default_rng(0)
    np.savez(tmp_path / "data.npz", x=random.normal(size=(40, 4)).astype(np.float32), label=np.arange(40) % 4)
    (tmp_path / "config.toml").write_text(CONFIG)
    yield workshop
    workshop.close()


@pytest.mark.slow
def test_a_run_that_cannot_work_is_refused_with_every_reason_before_anything_is_sharded_or_launched(
    workshop: Workshop,
) -> None:
    process = workshop.start("run", str(workshop.root / "config.toml"))
    out, error = process.communicate(timeout=300)

    assert process.returncode == 2, error[-3000:]
    problems = json.loads(out)["problems"]
    assert len(problems) == 2
    assert 'set model.accept = ["merged"]' in problems[0]
    assert "nothing would be learnt: the loss of the first 4 rows is" in problems[1]
    assert all(f"  - {problem}" in error for problem in problems)
    # only small records of the flow are in the run directory, and no shards are in the cache
    (run,) = (workshop.home / "runs").iterdir()
    left = sorted(path.name for path in run.iterdir() if path.is_file() and path.stat().st_size)
    assert left == ["ending.json", "flow.log", "lock", "origins.json", "phases.jsonl"]
    assert not (workshop.home / "shards").exists()
    with contextlib.closing(sqlite3.connect(workshop.home / "prefect" / "prefect.db")) as shown:
        tasks = shown.execute("select name, state_type from task_run").fetchall()
        (message,) = shown.execute("select message from task_run_state where type = 'FAILED'").fetchone()
    assert tasks == [("configure", "FAILED")]
    assert "nothing would be learnt" in message
