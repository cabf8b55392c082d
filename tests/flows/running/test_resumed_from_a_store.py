"""`onward run` with `checkpoint.store` on a real S3 server: a lost machine, a network that is away, other data."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from onward.trainer.run.directory import RunDir
from onward.trainer.run.records import read_record, record_if_written
from onward.trainer.run.remote.stored_run import Sending, StoredRun, record_in
from tests.support.s3_server import S3Server, s3_server
from tests.support.workshop import Workshop, until

pytestmark = [pytest.mark.slow, pytest.mark.mpi, pytest.mark.usefixtures("only_servers"), pytest.mark.timeout(3600)]

STORE = "checkpoint.store='s3://bucket/runs'"


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    with s3_server(tmp_path / "s3", monkeypatch) as server:
        yield server


@pytest.fixture
def workshop(tmp_path: Path, server: S3Server) -> Iterator[Workshop]:
    (tmp_path / "shop").mkdir()
    workshop = Workshop.made(tmp_path / "shop")
    yield workshop
    workshop.close()


def onward(workshop: Workshop, home: str, *words: str) -> tuple[int, dict[str, Any], str]:
    """Return (exit status, the JSON object on stdout, stderr) of a command in another home."""
    environment = {**workshop.environment, "ONWARD_HOME": str(workshop.root / home)}
    ended = subprocess.run(
        [sys.executable, "-m", "onward.flows.cli", *words, "--json"], env=environment, capture_output=True, text=True
    )
    return ended.returncode, json.loads(ended.stdout), ended.stderr


def kill_all_of(workshop: Workshop, first: int) -> None:
    """End a process with all that it has started and all that runs for the home, as a power failure does."""
    with contextlib.suppress(psutil.NoSuchProcess):
        for process in [psutil.Process(first), *psutil.Process(first).children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
    workshop.close()


def test_a_run_whose_machine_is_lost_goes_on_elsewhere_with_the_same_bits(workshop: Workshop) -> None:
    config = str(workshop.root / "config.toml")
    plain = workshop.onward("run", config)["sha256"]

    words = ("run", config, STORE, "--name", "nightly", "--continue")
    first = workshop.start(*words)
    run = workshop.new_run(limit_s=600)

    def is_stored() -> bool:
        sending = record_if_written(record_in(run), Sending)
        return bool(sending and sending.stored)

    until(is_stored, limit_s=900)
    kill_all_of(workshop, first.pid)
    first.communicate()
    promised = max(read_record(record_in(run), Sending).stored)
    (workshop.root / "home").rename(workshop.root / "lost")
    (workshop.root / "model.onnx").rename(workshop.root / "lost-model.onnx")

    # other data does not go on
    data = dict(np.load(workshop.root / "data.npz"))
    (workshop.root / "data.npz").rename(workshop.root / "kept.npz")
    np.savez(workshop.root / "data.npz", **{**data, "image": data["image"] + 1})
    status, refused, _ = onward(workshop, "second", "resume", "s3://bucket/runs/nightly")
    assert status == 2
    assert "the data changed since the run began" in json.dumps(refused)
    (workshop.root / "kept.npz").rename(workshop.root / "data.npz")

    status, ended, said = onward(workshop, "third", "resume", "s3://bucket/runs/nightly")
    assert status == 0, said
    assert ended["sha256"] == plain
    assert ended["name"] == "nightly"
    attempts = Path(ended["directory"], "attempts")
    [begun] = [
        line for line in (attempts / "002" / "train.log").read_text().splitlines() if "goes on from step" in line
    ]
    assert int(begun.split("goes on from step ")[1].split()[0]) >= promised
    # the command of a scheduler, on a machine that has nothing
    status, again, said = onward(workshop, "fourth", *words)
    assert (status, again.get("sha256")) == (0, plain), said


def test_a_run_trains_on_without_its_store_and_sends_later(workshop: Workshop, server: S3Server) -> None:
    first = workshop.start("run", str(workshop.root / "config.toml"), STORE, "train.num_steps=300")
    run = workshop.new_run(limit_s=600)
    begun = StoredRun(f"s3://bucket/runs/{run.root.name}")
    until(begun.newest_sender, limit_s=900)
    server.kill()
    output, said = first.communicate(timeout=1800)
    assert first.returncode == 0, said
    outcome = json.loads(output)
    log = (Path(outcome["directory"]) / "flow.log").read_text()
    assert log.count("training goes on, and what is to be stored is sent later") >= 1
    assert "not everything is in the store" in log
    assert not read_record(record_in(RunDir(Path(outcome["directory"]))), Sending).ended
    server.start()
    workshop.onward("resume", outcome["run_id"])
    stored = StoredRun(f"s3://bucket/runs/{outcome['run_id']}")
    state = stored.state(stored.newest_sender())
    assert state is not None
    assert state.ended
    assert state.checkpoints[-1].step == 300
    assert "export/model.json" in state.files
