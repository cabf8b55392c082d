"""What commands print for people: no Python brackets, no lost words, a word before they are silent."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from typer.core import TyperGroup as Group
from typer.main import get_command

from onward.flows import cli
from onward.flows.commands import servers
from onward.flows.commands.common import print_facts
from onward.infra import services
from onward.trainer.errors import RuntimeUnavailable
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
