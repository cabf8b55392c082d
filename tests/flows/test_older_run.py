"""A run directory of a version with other settings: everything reads it, and it goes on where it can be computed."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from onward.trainer.checkpoint.retention import list_checkpoints
from onward.trainer.run.directory import RunDir
from tests.support.workshop import Workshop, reached, until

WORDS = ("config.toml", "parallel.data=1", "train.num_steps=200", "average.kind=ema_warmup")


@pytest.fixture
def workshop(tmp_path: Path) -> Iterator[Workshop]:
    with Workshop.entered(tmp_path) as made, made.server():
        yield made


def make_older(run: RunDir, **stop: Any) -> None:
    """Give both records of the settings the form that they had."""
    settings = json.loads(run.config.read_text())
    settings["average"] |= {"kind": "ema", "warmup": True}
    settings["launch"] |= {"collective_timeout_s": 90.0, "storage_wait_s": 5.0}
    settings["stop"] |= stop
    run.config.write_text(json.dumps(settings))
    kept = json.loads(run.accepted.read_text())
    run.accepted.write_text(json.dumps(kept | {"settings": settings}))


@pytest.mark.slow
@pytest.mark.mpi
@pytest.mark.timeout(900)
def test_a_run_of_an_earlier_version_is_shown_and_exported_and_goes_on_if_it_can(workshop: Workshop) -> None:
    process = workshop.start("run", *WORDS, stderr=subprocess.DEVNULL)
    run = workshop.new_run()
    until(lambda: reached(run, 60) and list_checkpoints(run), limit_s=300)
    workshop.kill(process)

    # 1. what only its version computes: everything but going on
    make_older(run, metric="evaluation/accuracy")
    name = workshop.onward("status", str(run.root))["name"]
    assert [each["name"] for each in workshop.onward("runs")["runs"]] == [name]
    workshop.onward("report", name)
    assert run.report.is_file()
    workshop.onward("export", name, "--output", "older.onnx")
    assert Path("older.onnx").is_file()
    workshop.onward("gc")
    for words in (("resume",), ("resume", "--accept-config"), ("verify", "--replay", "--from", "0")):
        error = workshop.refusal(words[0], name, *words[1:])
        assert "stop.metric was 'evaluation/accuracy' in this run of an earlier version" in error
        assert "go on with that version, or start a new run" in error
    assert run.current_attempt == 1, "nothing was started"

    # 2. what the settings of now say
    make_older(run, metric="")
    resumed = workshop.onward("resume", name)
    assert (resumed["state"], resumed["step"], resumed["attempts"]) == ("exported", 200, 2)
    assert workshop.onward("verify", name, "--replay")["problems"] == []
