"""What a run directory says after somebody was at it: an edited config.json, a damaged log, a missing identity.json."""

from __future__ import annotations

import json
import re
import signal
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from onward.infra.mlflow.tracking import Tracker
from onward.trainer.checkpoint.retention import list_checkpoints
from onward.trainer.run.directory import RunDir
from onward.trainer.run.records import RunIdentity, read_record
from tests.support.stores import points_of
from tests.support.workshop import Workshop, reached, until

WORDS = ("config.toml", "parallel.data=1", "monitor.report=true", "train.num_steps=200")


@pytest.fixture
def workshop(tmp_path: Path) -> Iterator[Workshop]:
    with Workshop.entered(tmp_path) as made, made.server():
        yield made


@pytest.mark.slow
@pytest.mark.mpi
@pytest.mark.timeout(900)
def test_a_run_whose_records_were_edited_says_what_was_changed_and_goes_on(workshop: Workshop) -> None:
    process = workshop.start("run", *WORDS, stderr=subprocess.DEVNULL)
    run = workshop.new_run()
    until(lambda: reached(run, 60) and list_checkpoints(run), limit_s=300)
    workshop.kill(process)
    identity = read_record(run.identity, RunIdentity)

    # 1. a setting
    settings = json.loads(run.config.read_text())
    settings["optimizer"]["learning_rate"] = 2e-3
    run.config.write_text(json.dumps(settings))
    shown = workshop.refusal("resume", identity.name)
    assert "optimizer.learning_rate was 0.001, and is 0.002" in shown
    assert f"`onward resume {identity.name} --accept-config`" in shown
    assert run.current_attempt == 1, "nothing was started"

    # 2. the event log
    lines = run.events.read_bytes().splitlines(keepends=True)
    number = next(place for place, line in enumerate(lines) if b'"step":20,"kind":"scalars"' in line)
    run.events.write_bytes(b"".join([*lines[:number], b"\0" * 40 + b"\n", *lines[number + 1 :]]))

    # 3. the identity
    run.identity.unlink()
    for text in (str(run.root), identity.name):
        status = workshop.onward("status", text)
        assert (status["name"], status["kind"]) == (identity.name, "killed")
        assert f"onward resume {identity.name}" in status["to_do"]
    assert any("has 1 damaged line, the first is" in each for each in status["remarks"])
    assert [each["name"] for each in workshop.onward("runs")["runs"]] == [identity.name]

    process = workshop.start("resume", str(run.root), "--accept-config")
    out, error = process.communicate(timeout=600)
    assert process.returncode == 0, error
    assert re.search(r"config.json was edited, and accepted at step \d+ \(20\S+\): optimizer.learning_rate was", error)
    assert "lacks the metrics of 1 step (20)" in error
    result = json.loads(out)
    assert (result["name"], result["step"], result["mlflow_run_id"]) == (identity.name, 200, identity.mlflow_run_id)
    remarks = workshop.onward("status", identity.name)["remarks"]
    assert [each.partition(" ")[0] for each in remarks] == ["config.json", "events.jsonl"]
    page = run.report.read_text()
    assert "accepted at step" in page
    assert "damaged line" in page
    found = Counter(points_of(Tracker(identity.tracking_uri, identity.mlflow_run_id)))
    assert set(found.values()) == {1}, "no point twice"
    assert workshop.onward("verify", identity.name)["problems"] == []


@pytest.mark.slow
@pytest.mark.mpi
@pytest.mark.timeout(600)
def test_a_run_that_was_killed_when_its_name_was_printed_is_known_by_name_and_directory(workshop: Workshop) -> None:
    process = workshop.start("run", *WORDS)
    assert process.stderr
    printed = next(found for line in process.stderr if (found := re.match(r"onward: run (\S+) in (\S+)", line)))
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=60)
    name, run = printed[1], RunDir(Path(printed[2]))
    until(lambda: not workshop.processes(), limit_s=60)
    assert not run.config.exists(), "killed before it had settings"
    for text in (name, str(run.root), run.root.name):
        status = workshop.onward("status", text)
        assert (status["name"], status["state"], status["kind"]) == (name, "interrupted", "killed")
        assert "nothing is trained yet: start it again" in status["to_do"]
        shown = workshop.refusal("resume", text)
        assert f"{name} cannot be resumed: it ended before its settings were saved" in shown
    assert workshop.onward("runs") == {"runs": [], "total": 0}


@pytest.mark.slow
@pytest.mark.mpi
@pytest.mark.timeout(600)
def test_a_refusal_says_whether_a_run_has_begun(workshop: Workshop) -> None:
    before = workshop.refusal("run", *WORDS, "data.label=prize")
    assert before.splitlines()[-1] == "To do: correct each thing that is listed; no run has begun"
    assert not list(workshop.home.glob("runs/*"))
    images = np.load("data.npz")["image"]  # a loss of them is not finite, as the rehearsal finds inside the run
    np.savez("data.npz", image=np.full_like(images, 1e38), label=np.arange(200) % 4)
    inside = workshop.refusal("run", *WORDS)
    (run,) = workshop.home.glob("runs/*")
    last = inside.splitlines()[-1]
    assert (
        last
        == f"To do: correct each thing that is listed; config-1 has begun, and stays in {run} and in Prefect as failed"
    )
    assert list(workshop.prefect_states().values()) == ["FAILED"]
    assert "written" not in workshop.refusal("status", "no-such-run")
