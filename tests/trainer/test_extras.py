"""Messages name the command that installs a missing library from the source that Onward was installed from."""

from __future__ import annotations

import json
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest

from onward.trainer import extras
from onward.trainer.extras import how_to_install
from tests.support.ranks import ROOT


def test_an_editable_installation_is_extended_from_its_source() -> None:
    assert how_to_install("mpi") == f"pip install -e '{ROOT}[mpi]'"


def test_a_copy_is_extended_from_the_directory_that_pip_has_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "its source"
    (source / "trainer").mkdir(parents=True)
    (source / "pyproject.toml").touch()
    monkeypatch.setattr(extras, "__file__", str(tmp_path / "site-packages" / "onward" / "trainer" / "extras.py"))
    record = json.dumps({"url": source.as_uri(), "dir_info": {}})
    found = SimpleNamespace(read_text=lambda name: record)
    monkeypatch.setattr(metadata, "distribution", lambda name: found)
    assert how_to_install("flow") == f"pip install '{source}[flow]'"
    (source / "pyproject.toml").unlink()
    assert how_to_install("flow") == (
        "pip install '.[flow]' in the directory of Onward's source, which has its pyproject.toml"
    )


def test_no_message_installs_onward_from_an_index() -> None:
    files = [file for part in ("flows", "tasks", "trainer", "infra", "docs") for file in (ROOT / part).rglob("*.*")]
    texts = {file: file.read_text(errors="replace") for file in files if file.suffix in (".py", ".md", ".toml")}
    wrong = ("pip install onward", "pip install 'onward", 'pip install "onward')
    assert [str(file) for file, text in texts.items() if any(each in text for each in wrong)] == [
        str(ROOT / "trainer" / "extras.py")
    ], "the docstring that says why"
