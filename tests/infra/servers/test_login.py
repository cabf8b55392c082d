"""The login of the servers: who can read it, and that there is one however many processes ask at once."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from onward.infra.servers.login import login
from onward.trainer.run.machine.private_home import make_private


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o7777


def test_the_login_is_generated_once_and_its_owner_alone_can_read_it(tmp_path: Path) -> None:
    first = login(tmp_path)
    assert login(tmp_path) == first
    assert len(first.removeprefix("onward:")) >= 32
    assert mode(tmp_path / "login") == 0o600
    assert [path.name for path in tmp_path.iterdir()] == ["login"]
    assert login(tmp_path / "other") != first


def test_processes_that_generate_the_login_at_once_get_the_same(tmp_path: Path) -> None:
    program = (
        "import sys, pathlib; from onward.infra.servers.login import login; print(login(pathlib.Path(sys.argv[1])))"
    )
    started = [
        subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE) for _ in range(4)
    ]
    assert len({process.communicate()[0] for process in started}) == 1
    assert mode(tmp_path / "login") == 0o600


def test_a_login_that_others_could_read_is_closed_and_a_damaged_one_is_refused(tmp_path: Path) -> None:
    (tmp_path / "login").write_text("onward:known\n")
    (tmp_path / "login").chmod(0o644)
    assert login(tmp_path) == "onward:known"
    assert mode(tmp_path / "login") == 0o600
    (tmp_path / "login").write_text("")
    with pytest.raises(PermissionError, match="not one line `onward:PASSWORD`; delete it"):
        login(tmp_path)


def test_a_new_home_is_private_and_an_existing_one_becomes_so_with_a_note(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    home = tmp_path / "home"
    make_private(home)
    assert mode(home) == 0o700
    home.chmod(0o755)
    (home / "runs").mkdir()
    assert capsys.readouterr().err == ""
    make_private(home)
    assert mode(home) == 0o700
    assert f"the mode of {home} was 0755 and is now 0700" in capsys.readouterr().err
    make_private(home)
    assert capsys.readouterr().err == ""


def test_a_directory_with_other_uses_is_not_closed_to_others_but_warned_about(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    (shared / "letters").touch()
    shared.chmod(0o755)
    make_private(shared)
    assert mode(shared) == 0o755
    assert "other users can enter" in capsys.readouterr().err
    (shared / "runs").mkdir()
    shared.chmod(0o1777)  # as /tmp
    make_private(shared)
    assert mode(shared) == 0o1777
