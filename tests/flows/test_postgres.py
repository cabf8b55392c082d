"""Runs, a registered model and a promotion with Prefect and MLflow on a real PostgreSQL, which is away for a while."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from onward.trainer.events import read_events
from onward.trainer.run.directory import RunDir
from onward.trainer.run.records import RunIdentity, read_record
from tests.support.postgres import PASSWORD, QUOTED, USER, Postgres, missing, postgres
from tests.support.ranks import ROOT
from tests.support.workshop import Team, finished, reached, until

pytestmark = [
    pytest.mark.usefixtures("only_servers"),
    pytest.mark.slow,
    pytest.mark.mpi,
    pytest.mark.timeout(2400),
    pytest.mark.skipif(bool(missing()), reason=missing()),
]
PREFECT = "PREFECT_API_DATABASE_CONNECTION_URL"
MLFLOW = "MLFLOW_TRACKING_URI"
AWAY_S = 15.0


@pytest.fixture(scope="module")
def database() -> Iterator[Postgres]:
    with postgres() as found:
        yield found


@pytest.fixture
def team(tmp_path: Path, database: Postgres) -> Iterator[Team]:
    """Prefect and MLflow on PostgreSQL, by the variables on the page."""
    shown = re.findall(r"^export (\w+)=(\S+)$", (ROOT / "docs/how-to/databases.md").read_text("utf-8"), re.M)
    where = f"{USER}:{QUOTED}@127.0.0.1:{database.port}"
    variables = {name: url.replace("USER:PASSWORD@HOST", where) for name, url in shown}
    assert variables.keys() == {PREFECT, MLFLOW}
    team = replace(Team.made(tmp_path), variables=variables)
    yield team
    team.close()


def test_two_runs_at_once_outlive_an_outage_of_the_database_and_their_models_are_registered_and_promoted(
    team: Team, database: Postgres
) -> None:
    team.onward("up")
    words = (
        "run",
        str(team.root / "config.toml"),
        "train.num_steps=3000",
        "checkpoint.period=1000",
        "export.register_as='shapes'",
    )
    started = [team.start(*words, f"train.seed={seed}") for seed in (1, 2)]
    until(lambda: len(team._runs()) == 2, limit_s=600)
    runs = [RunDir(path) for path in team._runs()]
    until(lambda: all(reached(run, 100) for run in runs), limit_s=600)
    database.stop()
    time.sleep(AWAY_S)
    assert not any(run.train.exists() for run in runs), "the outage was to be in the middle of the training"
    database.start()
    for process in started:
        finished(process, limit_s=900)
    assert database.rows("mlflow", "select name, version from model_versions order by 2") == [
        ["shapes", "1"],
        ["shapes", "2"],
    ]
    for run in runs:
        identity = read_record(run.identity, RunIdentity)
        assert identity.tracking_uri == database.url("mlflow").replace(f":{QUOTED}@", "@")
        steps = {event.step for event, _ in read_events(run.events) if "train/loss" in getattr(event, "values", {})}
        query = f"select step from metrics where key = 'train/loss' and run_uuid = '{identity.mlflow_run_id}'"
        assert sorted(int(step) for (step,) in database.rows("mlflow", query)) == sorted(steps)
    assert database.rows("mlflow", "select status, count(*) from runs group by status") == [["FINISHED", "2"]]
    states = "select state_type from flow_run where flow_id in (select id from flow where name = 'train-onnx')"
    assert database.rows("prefect", states) == [["COMPLETED"]] * 2
    assert {path.name for path in team.home.rglob("*.db")} == {"names.db"}, "no SQLite of Prefect or MLflow beside it"
    assert not (Path.cwd() / "mlruns").exists()

    team.onward("promote", "shapes", "2", "--alias", "served")
    aliases = "select alias, version from registered_model_aliases where alias = 'served'"
    assert database.rows("mlflow", aliases) == [["served", "2"]]
    again = team.onward("run", *words[1:2], "model.path='models:/shapes@served'", "train.num_steps=2")
    assert again["step"] == 2
    links = team.onward("ui")
    assert read_record(runs[0].identity, RunIdentity).mlflow_url == ""
    assert links["last run in mlflow"].startswith(links["mlflow"].partition("/#")[0])
    # the environment now names another database than the servers use
    other = replace(team, variables={**team.variables, PREFECT: database.url("mlflow", driver="postgresql+asyncpg")})
    (problem,) = other.onward("run", *words[1:2], status=3)["problems"]
    assert "the prefect server that runs here uses postgresql+asyncpg://onward@127.0.0.1" in problem
    team.onward("down")
    secrets = (PASSWORD.encode(), QUOTED.encode())
    files = [path for path in team.home.rglob("*") if path.is_file()]
    assert not [path for path in files if any(secret in path.read_bytes() for secret in secrets)]


@pytest.mark.parametrize(
    ("variable", "wrong", "said"),
    [
        (MLFLOW, {"password": "a-wrong-one"}, "password authentication failed"),
        (MLFLOW, {"database": "none"}, 'database "none" does not exist'),
        (MLFLOW, {"driver": "postgresql+psycopg"}, "needs the package psycopg, which is not installed here: pip inst"),
        (PREFECT, {"password": "a-wrong-one"}, "password authentication failed"),
        (PREFECT, {"database": "none"}, 'database "none" does not exist'),
        (PREFECT, {"driver": "postgresql"}, "Prefect needs postgresql+asyncpg://"),
    ],
)
def test_a_database_that_cannot_be_used_is_refused_before_anything_is_launched(
    team: Team, database: Postgres, variable: str, wrong: dict[str, str], said: str
) -> None:
    of = {MLFLOW: {"database": "mlflow"}, PREFECT: {"database": "prefect", "driver": "postgresql+asyncpg"}}[variable]
    wrong_one = replace(team, variables={**team.variables, variable: database.url(**{**of, **wrong})})
    words = [sys.executable, "-m", "onward.flows.cli", "run", str(team.root / "config.toml")]
    ended = subprocess.run(words, env=wrong_one.environment, capture_output=True, text=True, timeout=600)
    assert ended.returncode == 3, ended.stderr
    assert said in ended.stderr
    assert not any(secret in ended.stderr + ended.stdout for secret in (PASSWORD, QUOTED, "a-wrong-one"))
    assert not (team.home / "runs").exists()
