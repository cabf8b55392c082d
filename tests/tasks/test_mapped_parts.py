"""The same shards from real clusters of Dask and of Ray, also when a worker is killed while it writes a part."""

from __future__ import annotations

import importlib.util
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import psutil
import pytest

from onward.tasks import mapped_parts
from onward.tasks.checks.machine_check import engine_problems
from onward.tasks.shard_data import shard_data
from onward.trainer.config.loading import build_config
from onward.trainer.config.sections.data import DataConfig
from onward.trainer.data.storage import written_parts
from onward.trainer.run.directory import RunDir
from onward.trainer.run.records import RunIdentity, write_record
from tests.support import graphs

ENGINES = ("dask", "ray")
COLUMNS = 12


def installed(engine: str) -> Any:
    missing = importlib.util.find_spec(f"prefect_{engine}") is None
    return pytest.param(engine, marks=pytest.mark.skipif(missing, reason=f"prefect-{engine} is not installed"))


@pytest.fixture(scope="module")
def prefect_server(only_servers: None) -> Iterator[None]:
    from prefect.testing.utilities import prefect_test_harness

    with prefect_test_harness(server_startup_timeout=120):
        yield


def configured(folder: Path, shard_on: str, bad_rows: str = "fail") -> RunDir:
    run = RunDir(folder / (shard_on or "alone"))
    config = build_config(
        {
            "model": {"path": folder / "model.onnx"},
            "data": {
                "source": str(folder / "*.csv"),
                "inputs": {"features": [f"f{number}" for number in range(COLUMNS)]},
                "label": "kind",
                "table": {"standardise": "standard"},
                "bad_rows": bad_rows,
                "shard_on": shard_on,
            },
            "train": {"num_steps": 1},
        }
    )
    write_record(run.config, config)
    write_record(run.identity, RunIdentity(run_id=shard_on, name="t", created_at="2026-01-01", model_sha256=""))
    return run


def write_data(folder: Path, num_rows: int) -> None:
    random = np.random.default_rng(0)
    onnx.save(graphs.tiny_mlp(inputs=COLUMNS, outputs=3), folder / "model.onnx")
    for name in "ab":
        with (folder / f"{name}.csv").open("w") as file:
            file.write(",".join([*(f"f{number}" for number in range(COLUMNS)), "kind"]) + "\n")
            for values in random.normal(size=(num_rows, COLUMNS)).round(5).tolist():
                file.write(",".join(map(str, values)) + f",{['red', 'green', 'blue'][int(values[0] * 10) % 3]}\n")


def sharded(run: RunDir, home: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, bytes]:
    """Write the shards in a flow, and return the content of their directory."""
    from prefect import flow

    monkeypatch.setenv("ONWARD_HOME", str(home))

    @flow(name="shards")
    def shards() -> None:
        shard_data(run)

    shards()
    return {path.name: path.read_bytes() for path in sorted(run.shards.resolve().iterdir())}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("engine", [*map(installed, ENGINES)])
@pytest.mark.usefixtures("prefect_server")
def test_a_cluster_writes_the_same_shards_also_when_a_worker_is_killed(
    tmp_path: Path, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_data(tmp_path, 150_000)
    expected = sharded(configured(tmp_path, ""), tmp_path / "home-1", monkeypatch)
    monkeypatch.setattr(written_parts, "LEAST_BYTES", 1)
    monkeypatch.setattr(written_parts, "PART_BYTES", 4 << 20)
    monkeypatch.setattr(mapped_parts, "usable_cores", lambda: 2)
    killed: list[int] = []
    ended = threading.Event()

    def kill_a_worker() -> None:
        while not (killed or ended.is_set()):
            time.sleep(0.05)
            for folder in (tmp_path / "home-2").glob("shards/.*.partial/parts/.*.partial"):
                writers = [each for each in workers(engine) if holds(each, folder)]
                if writers:
                    killed.append(writers[0].pid)
                    os.kill(writers[0].pid, signal.SIGKILL)
                    return

    killer = threading.Thread(target=kill_a_worker)
    killer.start()
    try:
        found = sharded(configured(tmp_path, engine), tmp_path / "home-2", monkeypatch)
    finally:
        ended.set()
        killer.join()
    assert killed
    assert found.keys() == expected.keys()
    assert [name for name in found if found[name] != expected[name]] == []


def workers(engine: str) -> list[psutil.Process]:
    """The processes that make parts, of a cluster on this machine."""
    found = []
    for process in psutil.process_iter(["cmdline", "name"]):
        text = " ".join(process.info["cmdline"] or [])
        is_worker = "spawn_main" in text if engine == "dask" else text.startswith("ray::")
        found += [process] * is_worker
    return found


def holds(process: psutil.Process, folder: Path) -> bool:
    """Return whether a process has a file in a folder open."""
    try:
        return any(str(folder) in each.path for each in process.open_files())
    except psutil.Error:
        return False


@pytest.mark.parametrize("given", ["spark", "dask://host", "tcp:/host", "ray://", "http://host:1"])
def test_another_engine_is_refused(given: str) -> None:
    with pytest.raises(ValueError, match="shard_on"):
        DataConfig(source="digits", shard_on=given)


@pytest.mark.parametrize(("shard_on", "package"), [("dask", "dask"), ("tcp://h:8786", "dask"), ("ray://h:1", "ray")])
def test_a_missing_package_is_named_before_anything_is_started(
    shard_on: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    (problem,) = engine_problems(shard_on)
    assert f"data.shard_on is '{shard_on}', which needs prefect-{package}: pip install" in problem
    monkeypatch.undo()
    assert [*engine_problems("")] == []
