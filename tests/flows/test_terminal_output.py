"""What commands print for people: no Python brackets, no lost words, a word before they are silent."""

from __future__ import annotations

import contextlib
import io
import logging
import re
import tomllib
from pathlib import Path
from typing import Any, get_args

import pytest
from typer.core import TyperGroup as Group
from typer.main import get_command

from onward.flows import cli
from onward.flows.commands import servers
from onward.flows.commands.common import print_facts
from onward.flows.run_state.flow_log import flow_log
from onward.flows.shown.terminal_tables import changed_lines
from onward.infra.servers import services
from onward.tasks.shown.task_logger import IN_RESULT, IN_TRAIN_LOG
from onward.trainer.config.flat_settings import changed_settings
from onward.trainer.config.loading import build_config
from onward.trainer.errors import RuntimeUnavailable
from onward.trainer.run.directory import RunDir
from onward.trainer.run.timing.phases import Phase, enter_phase, phases
from tests.flows.test_cli import walk


def test_facts_are_printed_without_the_brackets_of_python(capsys: pytest.CaptureFixture[str]) -> None:
    facts = {"before": {"loss": 0.5, "accuracy": 1}, "inputs": ["image", "mask"], "training": [], "path": Path("/a b")}
    print_facts(facts, as_json=False)
    assert capsys.readouterr().out.splitlines() == [
        "before    loss 0.5, accuracy 1",
        "inputs    image, mask",
        "training",
        "path      /a b",
    ]


def test_changed_settings_are_toml_without_what_is_not_set() -> None:
    metrics = [{"name": "f1"}, {"name": "f_beta", "beta": 2.0}]
    sections = {"model": {"path": "/m.onnx"}, "data": {"source": "digits"}, "train": {"num_steps": 20}}
    config = build_config({"name": "a", "metrics": metrics, **sections})
    (line,) = (line for line in changed_lines(changed_settings(config), {}) if line.startswith("metrics"))
    assert "null" not in line
    assert build_config({**sections, **tomllib.loads(line)}).metrics == config.metrics


def test_no_help_text_has_words_in_brackets_which_the_help_would_leave_out() -> None:
    root: Any = get_command(cli.app)
    assert isinstance(root, Group)
    for name, command in walk(root):
        for text in (command.help, *(getattr(each, "help", "") for each in command.params)):
            assert not re.search(r"\[[a-z][^\]]*\]", text or ""), f"{name}: {text}"


def test_a_command_that_starts_servers_says_so_before_it_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ONWARD_HOME", str(tmp_path / "home"))

    def up(home: Path, names: tuple[str, ...]) -> dict[str, str]:
        said = capsys.readouterr().err
        assert said == "onward: starting prefect, mlflow, worker, which may take a minute\n"
        raise services.ServiceError("no port is free")

    monkeypatch.setattr(services, "up", up)
    with pytest.raises(RuntimeUnavailable, match="no port is free"):
        servers.up()


def test_the_terminal_has_onwards_lines_and_warnings_and_flow_log_what_train_log_has_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_module, of_task = logging.getLogger("onward.tasks.export"), logging.getLogger("prefect.task_runs")
    shown = io.StringIO()
    with contextlib.redirect_stderr(shown), flow_log(RunDir(tmp_path)):
        monkeypatch.setattr(of_task, "handlers", [])  # which sends to a server
        of_module.info("both")
        of_module.info("in the table of the result", extra=IN_RESULT)
        of_task.setLevel(logging.INFO)
        of_task.info("of a task", extra={"of_onward": "onward.tasks.monitor"})
        of_task.info("of a rank", extra={"of_onward": "onward.tasks.monitor", **IN_TRAIN_LOG})
        of_task.warning("a warning", extra={"of_onward": "onward.tasks.checkpoint"})
        for name in ("configure", "export"):
            of_task.info("Finished", extra={"task_run_name": name})
    assert shown.getvalue().splitlines() == ["both", "a warning"]
    lines = [line.partition(" INFO ")[2] for line in (tmp_path / "flow.log").read_text().splitlines()]
    assert [line for line in lines if line] == [
        "onward.tasks.export: both",
        "onward.tasks.export: in the table of the result",
        "onward.tasks.monitor: of a task",
        "prefect.task_runs configure: Finished",
        "prefect.task_runs export: Finished",
    ]


def test_what_each_trial_of_a_sweep_finds_alike_is_on_the_terminal_once(tmp_path: Path) -> None:
    log, shown = logging.getLogger("onward.tasks.shard_data"), io.StringIO()
    with contextlib.redirect_stderr(shown), flow_log(RunDir(tmp_path / "sweep")):
        for trial in ("1", "2"):
            log.info("trial %s of 2", trial)
            with flow_log(RunDir(tmp_path / trial)):
                log.info("90 rows, written in %.1f s", float(trial))
            assert "90 rows" in (tmp_path / trial / "flow.log").read_text()
    assert shown.getvalue().splitlines() == ["trial 1 of 2", "90 rows, written in 1.0 s", "trial 2 of 2"]


def test_the_beginning_of_a_phase_is_no_line_of_a_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="onward"):
        for phase in get_args(Phase):
            enter_phase(RunDir(tmp_path), phase)
    assert caplog.messages == []
    assert [each.kind for each in phases(RunDir(tmp_path))] == list(get_args(Phase))
