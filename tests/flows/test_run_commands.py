"""The commands for runs that exist: stop, logs, runs, the completion of names; and what Ctrl-C says."""

from __future__ import annotations

import datetime
import json
import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from onward.flows.commands.common import names_of_runs
from onward.flows.commands.training_commands import runs
from onward.flows.run_state.flow_log import flow_log, own_log
from onward.flows.run_state.run_index import listed_runs
from onward.flows.run_state.run_logs import show_logs
from onward.flows.run_state.run_table import ago, rows_of
from onward.flows.run_state.runs import holder_of, is_running
from onward.flows.running.stop import stop
from onward.flows.running.stop_signals import acknowledged_interrupt
from onward.infra.job.job import Job
from onward.infra.job.launcher import Ranks
from onward.infra.job.mpirun import Mpirun
from onward.trainer.config.sections.ranks import ParallelConfig
from onward.trainer.errors import ConfigError, RuntimeUnavailable
from onward.trainer.events import Evaluated, EventWriter, Heartbeat, Started, last_beat
from onward.trainer.parallel.observing.step_clock import StepClock
from onward.trainer.run.directory import RunDir, read_config
from onward.trainer.run.records import write_record
from tests.flows.test_cli import make_run, onward
from tests.support.workshop import until

HOLDS = """
import sys, time
from pathlib import Path
from onward.flows.run_state.runs import locked
from onward.flows.running.flow_guard import Ending
from onward.flows.running.stop_signals import exit_on_sigterm
from onward.trainer.config.sections.ranks import ParallelConfig
from onward.trainer.run.directory import RunDir, read_config
from onward.trainer.run.records import write_record
run = RunDir(Path(sys.argv[1]))
with exit_on_sigterm(), locked(run), Ending(run):
    time.sleep(60)
"""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ONWARD_HOME", str(tmp_path))
    return tmp_path


@pytest.fixture
def run(home: Path) -> RunDir:
    return make_run(home, "aaaa-1", "mlp-1", config_name="mlp")


def test_stop_asks_the_process_that_runs_a_run_and_says_how_it_ended(run: RunDir) -> None:
    process = subprocess.Popen([sys.executable, "-c", HOLDS, str(run.root)])
    until(lambda: is_running(run) and holder_of(run), limit_s=60)
    ended = stop("mlp-1")
    assert (ended.state, ended.kind) == ("stopped", "stopped")
    assert "stopped by SIGTERM" in json.loads(run.flow_ending.read_text())["problems"][0]
    assert process.wait(10) == 0
    with pytest.raises(ConfigError, match=r"mlp-1 does not run: it is stopped; `onward status mlp-1` shows how"):
        stop("mlp-1")


def test_stop_refuses_a_run_of_another_machine(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = {"host": "h9", "boot": "b", "pid": 7, "started": 0.0, "slurm_job": ""}
    monkeypatch.setattr("onward.flows.running.stop.holder_of", lambda run: elsewhere)
    monkeypatch.setattr("onward.flows.running.stop.is_running", lambda run: True)
    with pytest.raises(RuntimeUnavailable, match="mlp-1 is run by process 7 on h9: stop it there, or with Cancel"):
        stop("mlp-1")


def test_logs_are_those_of_the_flow_and_the_newest_attempt_or_of_one_rank(
    run: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    show_logs("mlp-1")
    assert "mlp-1 has no log yet" in capsys.readouterr().err
    two = read_config(run).model_copy(update={"parallel": ParallelConfig(data=2)})
    write_record(run.config, two)
    run.begin_attempt()
    (run.root / "flow.log").write_text("of the flow\n")
    run.log(1).write_text("mpirun\nrank 0: a\nrank 1: b\nbelow b\nrank 0: c\n[rank1]: d\nhalf a line")
    run.traceback(1, 1).write_text("where it was\n")
    show_logs("mlp-1")
    shown = capsys.readouterr().out
    assert shown.index("of the flow") < shown.index("rank 0: a") < shown.index("[rank1]: d")
    assert "half" not in shown
    show_logs("mlp-1", rank=1)
    lines = [line for line in capsys.readouterr().out.splitlines() if line and not line.startswith("==>")]
    assert lines == ["rank 1: b", "below b", "[rank1]: d", "where it was"]
    with pytest.raises(ConfigError, match="mlp-1 has the ranks 0 to 1, and no rank 2"):
        show_logs("mlp-1", rank=2)


def test_a_flow_that_no_command_logs_writes_its_own_log_with_the_traceback(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    logging.getLogger("onward").setLevel(logging.INFO)

    def flow() -> None:
        logging.getLogger("onward.tasks.train").info("of a task")
        raise ZeroDivisionError("of nothing")

    with pytest.raises(ZeroDivisionError), own_log(run):
        flow()
    log = (tmp_path / "flow.log").read_text()
    assert all(text in log for text in ("of a task", "the run failed", "Traceback", "ZeroDivisionError: of nothing"))
    with flow_log(run), own_log(run):
        logging.getLogger("onward.tasks.train").info("once")
    assert (tmp_path / "flow.log").read_text().count("once") == 1


def test_the_table_of_runs_fits_into_60_80_and_120_columns_and_drops_the_least_important(home: Path) -> None:
    for number, name in enumerate(("digits", "a-long-name-of-a-configuration"), 1):
        run = make_run(home, f"{number}aaaaaaa-1111-7000-8000-00000000face", f"{name}-{number}", config_name=name)
        events = EventWriter(run.events, attempt=run.begin_attempt(), rank=0)
        events.emit(Started(step=0, num_steps=9))
        events.emit(Evaluated(step=3, values={"evaluation/loss": 0.25}))
        events.close()
    found = [status for _, status in listed_runs()]
    for width in (60, 80, 120):
        heads, rows = rows_of(found, width)
        widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
        assert sum(widths) + 2 * (len(heads) - 1) <= width
        assert heads[:3] == ("name", "state", "metric")
    assert heads == ("name", "state", "metric", "when", "duration", "step", "layout", "id")
    assert {row[2] for row in rows} == {"loss 0.25"}
    assert rows_of(found, 10)[0] == ("name", "state")


def test_runs_are_filtered_and_the_json_has_everything(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number, name in enumerate(("mlp", "cnn", "mlp"), 1):
        made = make_run(home, f"aaaa-{number}", f"{name}-{number}", f"2026-01-0{number}", config_name=name)
    (made.attempts / "001").mkdir(parents=True)

    def names(*words: str) -> list[str]:
        return [each["name"] for each in json.loads(onward(capsys, "runs", "--json", *words))["runs"]]

    assert names() == ["mlp-3", "cnn-2", "mlp-1"]
    assert names("--name", "mlp") == ["mlp-3", "mlp-1"]
    assert names("--last", "1") == ["mlp-3"]
    assert names("--state", "exported") == []
    assert names("--state", "exported,interrupted", "--name", "cnn-2") == ["cnn-2"]
    with pytest.raises(ConfigError, match="there is no state done; choose from running, exported"):
        runs(state="done")


def test_times_have_units_that_fit() -> None:
    now = datetime.datetime(2026, 1, 2, 12, tzinfo=datetime.UTC)
    times = ("2026-01-02T11:59:30+00:00", "2026-01-02T11:30:00", "2026-01-02T02:00:00+00:00", "2025-12-30", "x")
    assert [ago(each, now) for each in times] == ["just now", "30 min ago", "10 h ago", "3 d ago", ""]


def test_a_shell_completes_the_names_of_runs(run: RunDir, home: Path) -> None:
    make_run(home, "aaaa-2", "cnn-1", config_name="cnn")
    assert names_of_runs("m") == ["mlp-1"]
    assert set(names_of_runs("")) == {"mlp-1", "cnn-1", "last"}
    words = {"COMP_WORDS": "onward status m", "COMP_CWORD": "2", "_ONWARD_COMPLETE": "complete_bash"}
    shown = subprocess.run(
        [
            sys.executable,
            "-c",
            "from onward.flows.cli import app; app(prog_name='onward')",
        ],
        env=os.environ | words,
        capture_output=True,
        text=True,
        check=False,
    )
    assert shown.stdout.split() == ["mlp-1"], shown.stderr


def test_the_first_ctrl_c_says_what_follows_and_the_second_that_it_stops_at_once(
    capfd: pytest.CaptureFixture[str],
) -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with acknowledged_interrupt(20.0, say=lambda text: print(text, file=sys.stderr)):
            for said in ("save a checkpoint, for which they have 20 s and two steps; Ctrl-C again", "at once, without"):
                with pytest.raises(KeyboardInterrupt):
                    signal.raise_signal(signal.SIGINT)
                assert said in capfd.readouterr().err
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


def test_ranks_get_two_of_their_own_steps_beside_the_configured_grace_to_save(tmp_path: Path) -> None:
    heartbeat = Heartbeat(tmp_path / "heartbeat")
    job = Job(
        ranks=Ranks(module=("m",), num_ranks=1),
        launcher=Mpirun(),
        run_dir=tmp_path,
        log=tmp_path / "log",
        heartbeat=tmp_path / "heartbeat",
        grace_s=5.0,
    )
    assert job.stop_limit_s() == 5.0
    heartbeat.start(rank=0, timeout_s=60.0)
    clock = StepClock(began_at=time.monotonic(), compiled_s=lambda: 0.0)
    for step in (1, 2, 3):
        heartbeat.beat(step, longest_step_s=clock.begin_step())
        time.sleep(0.3)
    heartbeat.stop()
    step_s = last_beat(tmp_path / "heartbeat").step_s
    assert 0.3 <= step_s < 5.0
    assert job.stop_limit_s() == 5.0 + 2.0 * step_s
