"""Where Onward's home may be."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize("command", [("runs",), ("run", "config.toml"), ("up",), ("gc",)])
def test_a_home_at_an_address_is_refused_and_no_folder_of_that_name_is_made(
    command: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.toml").write_text("")
    monkeypatch.setenv("ONWARD_HOME", "s3://bucket/home")
    words = [sys.executable, "-m", "onward.flows.cli", *command]
    ended = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True)
    assert ended.returncode == 2, ended.stderr
    assert "ONWARD_HOME=s3://bucket/home: the home must be a directory" in ended.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["config.toml"]
