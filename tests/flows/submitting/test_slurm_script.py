"""The script of a run, which sbatch gets; what Slurm does with it is proven in tests/flows/test_slurm.py."""

from __future__ import annotations

import datetime
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from onward.flows.run_state.slurm_submission import forget_stopped, is_stopped, note_stopped
from onward.flows.running import stop
from onward.flows.submitting.slurm_script import requeued, script_of
from onward.infra.job import slurm_jobs
from onward.trainer.config.loading import build_config
from onward.trainer.config.run_config import RunConfig
from onward.trainer.config.sections.ranks import LaunchConfig, ParallelConfig
from onward.trainer.errors import ConfigError, RuntimeUnavailable
from onward.trainer.run.directory import RunDir
from onward.trainer.run.records import write_record


def sections(**launch: object) -> tuple[LaunchConfig, ParallelConfig]:
    found = config(**launch)
    return found.launch, found.parallel


def config(**launch: object) -> RunConfig:
    sections = {"model": {"path": "/m.onnx"}, "data": {"source": "digits"}, "train": {"num_steps": 4}}
    return build_config({**sections, "parallel": {"data": 2}, "launch": launch, "name": "digits"})


def test_the_script_begins_or_continues_one_run_and_each_task_of_an_array_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ONWARD_HOME", str(tmp_path / "a home"))
    script = script_of(
        "d1", *sections(), ["my config.toml", "train.seed=3"], nodes=2, options=["time=2:00:00", "--mem=0"]
    )
    head = script.split("\nexport")[0].splitlines()
    assert head[0] == "#!/bin/bash"
    for option in ("job-name=d1", "nodes=2", "ntasks=2", "signal=B:TERM@120", "requeue", "time=2:00:00", "mem=0"):
        assert f"#SBATCH --{option}" in head
    # what bash makes of it, with a program that prints its words in place of `onward run`
    command = script.splitlines()[-1]
    assert command.startswith("exec ")
    printed = script.replace(command, command.replace("exec ", 'printf "%s\\n" "$ONWARD_HOME" '))
    for environment, name in (({}, "d1"), ({"SLURM_ARRAY_TASK_ID": "4"}, "d1-4")):
        said = subprocess.run(["bash"], input=printed, env=environment, capture_output=True, text=True, check=True)
        home, *words = said.stdout.splitlines()
        assert home == str(tmp_path / "a home")
        assert words[-6:] == ["run", "my config.toml", "train.seed=3", "--name", name, "--continue"]


def test_the_page_shows_the_script_as_it_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONWARD_HOME", "/shared/onward")
    page = (Path(__file__).parents[3] / "docs/how-to/gpus-and-clusters.md").read_text(encoding="utf-8")
    shown = page.partition("#!/bin/bash")[2].partition("```")[0]
    launch, parallel = sections()
    parallel = parallel.model_copy(update={"data": 16})
    options = ["time=8:00:00", "gpus-per-node=8"]
    script = script_of("d1", launch, parallel, ["CONFIG", "parallel.data=16"], nodes=2, options=options)
    assert script == f"#!/bin/bash{shown}".replace("exec onward", f"exec {sys.executable} -m onward.flows.cli")


@pytest.mark.parametrize(
    ("name", "changes", "launch", "said"),
    [
        ("../x", {}, {}, "a name has up to 100 letters"),
        ("d1", {"nodes": 3}, {}, "--nodes 3: the run has 2 ranks"),
        ("d1", {"options": ["time=1\n#SBATCH --uid=0"]}, {}, "is no option of sbatch"),
        ("d1", {"options": ["--"]}, {}, "is no option of sbatch"),
        ("d1", {}, {"hostfile": "/hosts"}, "launch.hostfile names hosts"),
    ],
)
def test_what_makes_no_job_is_refused(name: str, changes: dict, launch: dict, said: str) -> None:  # type: ignore[type-arg]
    with pytest.raises(ConfigError, match=shlex.quote(said).strip("'").replace(".", r"\.")):
        script_of(name, *sections(**launch), ["c.toml"], **changes)


def test_what_squeue_says_is_read_and_after_it_what_the_accounting_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, does in (
        ("squeue", 'case "$*" in *--jobs=1*) echo "RUNNING|None|n[1-3]|2026-11-29T08:32:34";; *) exit 1;; esac'),
        ("sacct", 'case "$*" in *--jobs=2*) echo "CANCELLED by 0|None|n1|2026-11-29T08:00:00"; esac'),
    ):
        (tmp_path / name).write_text(f"#!/bin/sh\n{does}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    running = slurm_jobs.find("1")
    assert str(running) == "job 1 of Slurm is RUNNING on n[1-3] and ends at 2026-11-29T08:32:34 at the latest"
    cancelled = slurm_jobs.find("2")
    assert cancelled is not None
    assert cancelled.has_ended
    assert slurm_jobs.find("3") is None
    assert slurm_jobs.ends_at({}) == float("inf")
    assert slurm_jobs.ends_at({"SLURM_JOB_ID": "3", "SLURM_JOB_END_TIME": "99"}) == 99.0
    assert slurm_jobs.ends_at({"SLURM_JOB_ID": "3"}) == float("inf"), "Slurm before 22.05 sets no such variable"


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Makes this process the script of job 7 of Slurm, which is in `state`; returns the file of what Slurm is asked."""

    def made(*, state: str = "RUNNING", ends_in_s: int = 9000, is_batch: bool = True) -> Path:
        ends = datetime.datetime.now().astimezone() + datetime.timedelta(seconds=ends_in_s)
        for name, does in (
            ("squeue", f'echo "{state}|None|n1|{ends:%Y-%m-%dT%H:%M:%S}"'),
            ("scontrol", f'echo "$@" >> {tmp_path}/asked'),
            ("scancel", f'echo cancel "$@" >> {tmp_path}/asked'),
        ):
            (tmp_path / name).write_text(f"#!/bin/sh\n{does}\n")
            (tmp_path / name).chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path))
        monkeypatch.setenv("ONWARD_HOME", str(tmp_path / "home"))
        monkeypatch.setenv("SLURM_JOB_ID", "7")
        monkeypatch.setenv("ENVIRONMENT", "BATCH")
        monkeypatch.setattr(slurm_jobs, "_is_script", lambda: is_batch)
        (tmp_path / "asked").touch()
        return tmp_path / "asked"

    return made


@pytest.mark.parametrize(
    ("state", "status", "is_batch", "ends_in_s", "requeues"),
    [
        ("RUNNING", 143, True, 9000, True),
        ("RUNNING", 143, True, 60, False),  # nothing was trained in the time of the job
        ("COMPLETING", 143, True, 9000, False),  # it was cancelled
        ("RUNNING", 75, True, 9000, False),
        ("RUNNING", 143, False, 9000, False),  # a session of salloc
    ],
)
def test_a_job_that_a_signal_of_slurm_has_ended_is_requeued(
    asked: Callable[..., Path], state: str, status: int, is_batch: bool, ends_in_s: int, requeues: bool
) -> None:
    said = asked(state=state, ends_in_s=ends_in_s, is_batch=is_batch)
    with pytest.raises(SystemExit), requeued("d1"):
        raise SystemExit(status)
    assert said.read_text() == ("requeue 7\n" if requeues else "")


@pytest.mark.parametrize(("saved", "requeues"), [(0, False), (3, True)])
def test_a_job_whose_ranks_get_long_to_save_is_not_requeued_for_ever(
    asked: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, saved: int, requeues: bool
) -> None:
    # such ranks are asked to save 630 s before the end of the job
    said = asked(ends_in_s=620)
    run = RunDir(tmp_path / "home" / "runs" / "abc")
    run.root.mkdir(parents=True)
    write_record(run.config, config(stop_grace_s=600.0))
    steps = iter((0, saved))
    monkeypatch.setattr("onward.flows.submitting.slurm_script.owner_of", lambda name: "abc")
    monkeypatch.setattr("onward.flows.submitting.slurm_script.newest_checkpoint", lambda run: next(steps))
    with pytest.raises(SystemExit), requeued("d1"):
        raise SystemExit(143)
    assert said.read_text() == ("requeue 7\n" if requeues else "")


def test_a_job_that_somebody_has_stopped_is_cancelled_in_place_of_requeued_and_not_gone_on_with(
    asked: Callable[..., Path],
) -> None:
    said = asked()

    def stopped() -> None:
        stop._end_job("7")
        raise SystemExit(143)

    with pytest.raises(SystemExit), requeued("d1"):
        stopped()
    assert said.read_text() == "cancel --batch --signal=TERM 7\ncancel 7\n"
    # Slurm has started it again, because a host was lost meanwhile
    refused = "has ended d1 in job 7 of Slurm; another job, by `onward submit`"
    with pytest.raises(RuntimeUnavailable, match=refused), requeued("d1"):
        pytest.fail("it goes on")
    # another job of the run goes on
    forget_stopped("7")
    note_stopped("6")
    with requeued("d1"):
        pass


def test_a_job_that_cannot_be_asked_to_stop_stays_one_that_is_requeued(
    asked: Callable[..., Path], tmp_path: Path
) -> None:
    asked()
    (tmp_path / "scancel").write_text("#!/bin/sh\necho not yours >&2\nexit 1\n")
    with pytest.raises(slurm_jobs.SlurmError, match="scancel: not yours"):
        stop._end_job("7")
    assert not is_stopped("7")
