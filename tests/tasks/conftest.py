"""The folder and the MLflow store of runs that a test of one task configures."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.stores import new_store


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> str:
    """One MLflow store for all tests here."""
    return new_store(tmp_path_factory.mktemp("store"))


@pytest.fixture
def home(tmp_path: Path, store: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the runs of the test lie; not created yet."""
    monkeypatch.setenv("ONWARD_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", store)
    return tmp_path / "home"
