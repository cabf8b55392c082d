"""Each command has a recorded session, which is what it prints now."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.sessions import page
from tests.sessions.recording import Terminal
from tests.sessions.script import SESSIONS, commands


def all_commands() -> set[str]:
    """Every command of the command line, those of groups with their group."""
    from typer.main import get_command

    from onward.flows.cli import app

    found = set()
    root: Any = get_command(app)
    for name, command in root.commands.items():
        found |= {f"{name} {each}" for each in command.commands} if hasattr(command, "commands") else {name}
    return found


def test_every_command_has_a_session_and_every_session_is_on_the_page() -> None:
    assert all_commands() - set(commands()) == set(), "add it to SESSIONS in tests/sessions/script.py"
    shown = page.shown(page.PAGE.read_text(encoding="utf-8"))
    assert list(shown) == [each.command for each in SESSIONS], "run `python -m tests.sessions`"
    for session in SESSIONS:
        assert len(shown[session.command]) == 1 + session.shows_view
        assert shown[session.command][-1].startswith(f"$ {session.command}\n")


def test_what_varies_has_placeholders_and_what_a_reader_sees_has_not() -> None:
    text = "table-1  exported  rmse 0.61  3 min ago  2 s  9f6ca8c8fc7d  22a31ade  http://127.0.0.1:36695/v2/runs"
    other = "table-1  exported  rmse 1.25  just now  1 min 05 s  00c8c8fc7d11  22031400  http://127.0.0.1:4200/v2/runs"
    other += "\n  next run  2026-11-25T02:00:00+00:00"
    assert page.without_what_varies(text) == page.without_what_varies(other)
    assert "exported rmse" in page.without_what_varies(text)
    assert page.without_what_varies(text) != page.without_what_varies(text.replace("exported", "failed"))


@pytest.mark.slow
@pytest.mark.mpi
@pytest.mark.usefixtures("only_servers")
@pytest.mark.timeout(3600)
def test_every_command_prints_what_its_session_shows(tmp_path: Path) -> None:
    blocks = page.shown(page.PAGE.read_text(encoding="utf-8"))
    terminal, differences = Terminal(tmp_path), []
    try:
        for session in SESSIONS:
            differences.append(page.difference(session, blocks[session.command], terminal.record(session)))
    finally:
        terminal.close()
    found = [each for each in differences if each]
    assert not found, "run `python -m tests.sessions`, if that is wanted:\n" + "\n".join(found)
