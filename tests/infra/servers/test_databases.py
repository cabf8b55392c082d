"""Which databases the servers use, and what is said of one that cannot be used; a real one is in test_postgres.py."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from onward.infra.servers import service_state, services
from onward.infra.servers.databases import mlflow_problem, named_database, prefect_problem, without_password

NOWHERE = "u:se%2Fcret@127.0.0.1:1/d"


@pytest.mark.parametrize(
    ("service", "variables", "named"),
    [
        ("prefect", {}, ""),
        ("prefect", {"PREFECT_API_DATABASE_CONNECTION_URL": "sqlite+aiosqlite:////x.db"}, ""),
        ("prefect", {"PREFECT_API_DATABASE_CONNECTION_URL": "postgresql+asyncpg://h/d"}, "postgresql+asyncpg://h/d"),
        ("prefect", {"PREFECT_SERVER_DATABASE_CONNECTION_URL": "a://", "PREFECT_API_DATABASE_CONNECTION_URL": "b://"}, "a://"),
        ("prefect", {"MLFLOW_TRACKING_URI": "postgresql://h/d"}, ""),
        ("mlflow", {"MLFLOW_TRACKING_URI": "postgresql://h/d"}, "postgresql://h/d"),
        ("mlflow", {"MLFLOW_TRACKING_URI": "http://h"}, ""),
        ("mlflow", {"MLFLOW_TRACKING_URI": "sqlite:////x.db"}, ""),
        ("worker", {"MLFLOW_TRACKING_URI": "postgresql://h/d"}, ""),
    ],
)  # fmt: skip
def test_a_variable_of_prefect_or_mlflow_names_a_database_server(
    service: str, variables: dict[str, str], named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (*variables, "PREFECT_API_DATABASE_CONNECTION_URL", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert named_database(service) == named


def test_a_database_that_cannot_be_used_is_named_without_its_password(monkeypatch: pytest.MonkeyPatch) -> None:
    said = [
        prefect_problem(f"postgresql+asyncpg://{NOWHERE}"),
        mlflow_problem(f"postgresql://{NOWHERE}"),
        prefect_problem(f"postgresql://{NOWHERE}"),
        mlflow_problem(f"postgresql+none://{NOWHERE}"),
    ]
    assert "of Prefect cannot be used ([Errno 111]" in said[0]
    assert "the database postgresql://u@127.0.0.1:1/d of MLflow cannot be used" in said[1]
    assert "begins with 'postgresql'; Prefect needs postgresql+asyncpg://USER:PASSWORD@HOST/DATABASE" in said[2]
    monkeypatch.setitem(sys.modules, "psycopg2", None)
    said.append(mlflow_problem(f"postgresql://{NOWHERE}"))
    assert "needs the package psycopg2, which is not installed here" in said[4]
    assert all("cret" not in each for each in said), said


@pytest.mark.parametrize(
    ("uri", "shown"),
    [
        ("postgresql://u:a@h/d?ssl=require", "postgresql://u@h/d?ssl=require"),
        ("postgresql://u:cr/et@h:5/d", "postgresql://u@h:5/d"),
        ("postgresql://u:cr#et?@h/d", "postgresql://u@h/d"),
        ("postgresql://u:cr@et@h/d", "postgresql://u@h/d"),
        ("postgresql://h/d?user=u&password=cret&x=1", "postgresql://h/d?user=u&password=...&x=1"),
        ("postgresql+asyncpg://h:5/d", "postgresql+asyncpg://h:5/d"),
        ("http://u:a@h:5/x", "http://u@h:5/x"),
        ("sqlite:////home/x.db", "sqlite:////home/x.db"),
    ],
)
def test_a_password_is_removed_wherever_a_database_takes_one(uri: str, shown: str) -> None:
    assert without_password(uri) == shown
    assert without_password(shown) == shown


def test_a_server_that_runs_with_another_database_is_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"postgresql://{NOWHERE}")
    monkeypatch.setattr(services, "healthy_url", lambda home, name: "http://127.0.0.1:5")
    with pytest.raises(services.ServiceError, match="mlflow server that runs here uses a file of Onward's home: stop"):
        services._start_if_needed(tmp_path, "mlflow")
    with service_state.open_lock_file(tmp_path, "mlflow.supervisor") as file:
        assert service_state.try_lock(file)
        service_state.write_state(file, {"database": "postgresql://u@127.0.0.1:1/d"})
        assert services._start_if_needed(tmp_path, "mlflow") == "http://127.0.0.1:5"
