"""One run, one name: a command that a scheduler starts again and again begins a run, goes on with it, finds it done."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from onward.trainer.checkpoint.retention import list_checkpoints
from onward.trainer.run.directory import RunDir
from onward.trainer.run.names import take_name
from onward.trainer.run.records import RunIdentity, read_record
from tests.support.workshop import Workshop, reached, until

WORDS = (
    *("config.toml", "parallel.data=1", "train.num_steps=300", "train.evaluation_period=100"),
    "precision.compute=auto",  # which the run replaces by what it chooses
)
NIGHTLY = ("--name", "nightly", "--continue")


@pytest.fixture
def workshop(tmp_path: Path) -> Iterator[Workshop]:
    with Workshop.entered(tmp_path) as made:
        yield made


@pytest.mark.mpi
@pytest.mark.timeout(900)
@pytest.mark.slow
def test_the_same_command_begins_a_run_goes_on_with_it_and_finds_it_done(
    workshop: Workshop, only_servers: None
) -> None:
    with workshop.server():
        # 1. it begins; the scheduler kills the job, with all of its processes
        process = workshop.start("run", *WORDS, *NIGHTLY, stderr=subprocess.DEVNULL)
        run = workshop.new_run()
        until(lambda: reached(run, 120) and list_checkpoints(run), limit_s=300)
        running = workshop.refusal("run", *WORDS, *NIGHTLY)
        assert "the run nightly is running already, or just begins" in running
        workshop.kill(process)
        assert read_record(run.identity, RunIdentity).name == "nightly"

        # 2. what would make another run of it is refused, with every difference
        assert "there is a run nightly already; go on with it by --continue" in workshop.refusal(
            "run", *WORDS, "--name", "nightly"
        )
        changed = workshop.refusal(
            "run", *WORDS, "optimizer.learning_rate=2e-3", "train.seed=7", "stop.max_hours=2", *NIGHTLY
        )
        assert "nightly began with optimizer.learning_rate = 0.001, and now it is 0.002" in changed
        assert "nightly began with train.seed = 0, and now it is 7" in changed
        assert "stop.max_hours" not in changed, "a limit may change"

        # 3. the same command goes on, in the same directory, behind its newest checkpoint
        resumed = workshop.onward("run", *WORDS, "stop.max_hours=2", *NIGHTLY)
        assert (resumed["name"], resumed["state"], resumed["step"]) == ("nightly", "exported", 300)
        assert [path.name for path in (workshop.home / "runs").iterdir()] == [run.root.name]

        # 4. and then it is done: status 0, and nothing is started
        done = workshop.onward("run", *WORDS, "stop.max_hours=2", *NIGHTLY)
        same = ("run_id", "state", "step", "sha256", "attempts")
        assert [done[key] for key in same] == [resumed[key] for key in same]

        # 5. a name means one run for ever
        shutil.rmtree(run.root)
        assert "the run nightly was deleted, and a name means one run for ever" in workshop.refusal(
            "run", *WORDS, *NIGHTLY
        )


@pytest.mark.slow
@pytest.mark.mpi
@pytest.mark.timeout(600)
def test_a_run_that_ended_before_it_had_settings_gives_up_its_name(
    workshop: Workshop, only_servers: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ONWARD_HOME", str(workshop.home))
    dead = RunDir(workshop.home / "runs" / "0f0f0f0f-dead")
    dead.root.mkdir(parents=True)
    (dead.root / "phases.jsonl").touch()
    assert take_name("config", dead.root.name, wanted="nightly") == "nightly"
    with workshop.server():
        # the second command of the two that begin at once is refused, or finds the first one's run
        both = [workshop.start("run", *WORDS, "train.num_steps=20", *NIGHTLY) for _ in range(2)]
        ended = [process.communicate(timeout=400) for process in both]
    statuses = sorted(process.returncode for process in both)
    assert statuses == [0, 2], ended
    assert any("the run nightly is running already, or just begins" in error for _, error in ended)
    names = [read_record(path, RunIdentity).name for path in (workshop.home / "runs").glob("*/identity.json")]
    assert names == ["nightly"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--continue",), "--continue needs the run that it means: --name NAME"),
        (("--name", "a/b"), "--name 'a/b': a name has up to 100 letters"),
        (("--name", "last"), "and is not 'last'"),
        (("--name", "config"), "--name config is also the configuration's"),
    ],
)
def test_a_wrong_name_is_refused(workshop: Workshop, words: tuple[str, ...], message: str) -> None:
    assert message in workshop.refusal("run", "config.toml", *words)
    assert not (workshop.home / "runs").exists()
