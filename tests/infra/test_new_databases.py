"""Databases that are made from SQL: the same as by the packages' own migrations, complete or not there, or not made."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from onward.infra import mlflow_store, new_databases
from onward.infra.new_databases import SCHEMAS, heading, make_database, migrated
from onward.infra.service_definitions import environment

PACKAGES = ("prefect", "mlflow")


def content(path: Path) -> list[str]:
    """What a database consists of: settings, tables, columns in their order, constraints, indexes, triggers, and rows.

    The order of the constraints of a table, and of the values of an IN, is that of a set in SQLAlchemy, and has no
    meaning.
    """
    with contextlib.closing(sqlite3.connect(path)) as database:
        assert database.execute("pragma integrity_check").fetchall() == [("ok",)]
        settings = ("user_version", "application_id", "page_size", "auto_vacuum", "encoding")
        facts = [repr((name, database.execute(f"pragma {name}").fetchone())) for name in settings]
        for kind, name, table, sql in database.execute(
            "select type, name, tbl_name, sql from sqlite_master order by 1, 2"
        ):
            facts.append(repr((kind, name, table, parts(sql) if kind == "table" else sql)))
            if kind == "table":
                facts.append(repr(database.execute(f'pragma table_xinfo("{name}")').fetchall()))
        return [*facts, *(line for line in database.iterdump() if line.startswith("INSERT"))]


def parts(sql: str) -> list[str]:
    """Return the head of a CREATE TABLE and what it defines, sorted, with one space between words."""
    sql = re.sub(r"IN \(([^()]*)\)", lambda found: f"IN ({sorted(found[1].split(', '))})", " ".join(sql.split()))
    head, _, body = sql.partition("(")
    defined, depth = [""], 0
    for character in body:
        depth += {"(": 1, ")": -1}.get(character, 0)
        if character == "," and depth == 0:
            defined.append("")
        else:
            defined[-1] += character
    # the last one ends with the parenthesis that encloses them all
    return [head.strip(), *sorted(each.strip() for each in [*defined[:-1], defined[-1].rstrip().removesuffix(")")])]


def test_another_column_or_constraint_is_another_table() -> None:
    table = "CREATE TABLE a (b INT CHECK (b IN ('x', 'y')), c INT, CONSTRAINT d UNIQUE (b, c))"
    same = "CREATE TABLE a (\n\tb INT CHECK (b IN ('y', 'x')), \n\tCONSTRAINT d UNIQUE (b, c), c INT\n)"
    assert parts(table) == parts(same)
    for before, after in (("(b, c)", "(c, b)"), ("c INT", "c TEXT"), ("'y'", "'z'"), (", c INT", ""), ("d U", "e U")):
        assert parts(table) != parts(table.replace(before, after)), before


@pytest.mark.slow  # another version makes its tables itself
@pytest.mark.parametrize("package", PACKAGES)
def test_a_new_database_is_the_one_that_the_migrations_of_the_package_make(package: str, tmp_path: Path) -> None:
    (tmp_path / "by-itself").mkdir()
    by_itself, made = tmp_path / "by-itself" / "a.db", tmp_path / "home" / "a.db"
    migrated(by_itself, package)
    assert make_database(made, package), (
        f"{package} was upgraded: `python -m onward.infra.new_databases` writes its tables anew"
    )
    assert content(made) == content(by_itself)
    assert [path.name for path in made.parent.iterdir()] == ["a.db"]


@pytest.mark.parametrize("package", PACKAGES)
def test_another_version_makes_its_tables_itself(package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(new_databases.metadata, "version", lambda name: "99.0")
    assert not make_database(tmp_path / "a.db", package)
    assert not list(tmp_path.iterdir())


def test_a_database_that_exists_stays_as_it_is(tmp_path: Path) -> None:
    database = tmp_path / "a.db"
    for bytes_before in (b"", b"not a database"):
        database.write_bytes(bytes_before)
        assert not make_database(database, "mlflow")
        assert database.read_bytes() == bytes_before


def test_one_that_another_program_makes_meanwhile_is_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    database, sync = tmp_path / "a.db", new_databases._sync

    def sync_late(path: Path) -> None:
        sync(path)
        database.write_bytes(b"of another program")

    monkeypatch.setattr(new_databases, "_sync", sync_late)
    assert not make_database(database, "mlflow")
    assert database.read_bytes() == b"of another program"
    assert [path.name for path in tmp_path.iterdir()] == ["a.db"]


@pytest.mark.parametrize("at", ["_sync", "os.link", "partial.unlink"])
def test_of_a_killed_process_a_database_is_complete_or_not_there(at: str, tmp_path: Path) -> None:
    database = tmp_path / "a.db"
    program = f"""
import os, signal, sys
from pathlib import Path
from onward.infra import new_databases
def die(*args, **keywords): os.kill(os.getpid(), signal.SIGKILL)
if {at!r} == "_sync": new_databases._sync = die
elif {at!r} == "os.link": os.link = die
else:
    link = os.link
    os.link = lambda *args: (link(*args), die())
new_databases.make_database(Path(sys.argv[1]), "mlflow")
"""
    ended = subprocess.run([sys.executable, "-c", program, str(database)])
    assert ended.returncode == -signal.SIGKILL
    assert database.exists() == (at == "partial.unlink")
    assert (tmp_path / ".a.db.partial").exists()
    assert make_database(database, "mlflow") == (at != "partial.unlink")
    assert "CREATE TABLE experiments" in "\n".join(content(database)).replace('"', "")
    assert [path.name for path in tmp_path.iterdir()] == ["a.db"]  # nothing of the killed process is left


def test_a_half_written_file_of_a_killed_process_is_written_anew(tmp_path: Path) -> None:
    (tmp_path / ".a.db.partial").write_bytes((SCHEMAS / "mlflow.sql").read_bytes()[:5000])
    assert make_database(tmp_path / "a.db", "mlflow")
    assert content(tmp_path / "a.db")


@pytest.mark.parametrize(
    "problem", ["no room", "no links", "read-only", "wrong SQL", "a file in place of the directory"]
)
def test_where_it_cannot_be_made_nothing_is_left_and_no_error_raised(
    problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object) -> None:
        raise OSError(28, "No space left on device")

    folder = tmp_path / "home"
    if problem == "no room":
        monkeypatch.setattr(new_databases, "_sync", refuse)
    elif problem == "no links":
        monkeypatch.setattr(os, "link", refuse)
    elif problem == "read-only":

        def open_nothing(*args: object, **keywords: object) -> None:
            raise sqlite3.OperationalError("unable to open database file")

        monkeypatch.setattr(sqlite3, "connect", open_nothing)
    elif problem == "wrong SQL":
        (tmp_path / "mlflow.sql").write_text(f"{heading('mlflow')}\nCREATE TABLE a (b); CREATE TABLE a (b);")
        monkeypatch.setattr(new_databases, "SCHEMAS", tmp_path)
    else:
        folder.write_text("")
    assert not make_database(folder / "a.db", "mlflow")
    assert not folder.is_dir() or not list(folder.iterdir())


def test_without_the_sql_mlflow_makes_the_same_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, own = tmp_path / "ours" / "mlflow.db", tmp_path / "own" / "mlflow.db"
    mlflow_store.connect(f"sqlite:///{ours}")
    monkeypatch.setattr(new_databases, "SCHEMAS", tmp_path / "missing")
    mlflow_store.connect(f"sqlite:///{own}")
    tables = [[row for row in content(each) if 'INSERT INTO "experiments"' not in row] for each in (ours, own)]
    assert tables[0] == tables[1]  # the rows of experiments have the time and the place


def test_a_uri_with_options_is_left_to_mlflow(tmp_path: Path) -> None:
    mlflow_store.make_if_missing(f"sqlite:///{tmp_path}/a.db?timeout=10")
    mlflow_store.make_if_missing("http://127.0.0.1:5000")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("own", [True, False])
def test_prefects_file_is_made_only_if_its_server_uses_it(own: bool, tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from onward.infra import web_server as w; w._prefect(Path(sys.argv[1]))"
    )
    other = {} if own else {"PREFECT_API_DATABASE_CONNECTION_URL": f"sqlite+aiosqlite:///{tmp_path}/other.db"}
    home = tmp_path / "home"
    subprocess.run(
        [sys.executable, "-c", program, str(home)], env={**os.environ, **environment(home), **other}, check=True
    )
    assert (home / "prefect" / "prefect.db").exists() == own


def test_mlflows_server_makes_the_database_of_a_new_home(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from onward.infra import web_server as w; w._mlflow(Path(sys.argv[1]))"
    )
    subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], env={**os.environ, **environment(tmp_path)}, check=True
    )
    assert content(tmp_path / "mlflow" / "mlflow.db")
    assert not list((tmp_path / "mlflow").glob(".*"))
