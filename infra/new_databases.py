"""Make the SQLite databases of Prefect and MLflow at once, with the tables that their own migrations would make.

A new database goes through more than a hundred migrations, which take each package some seconds of the first run. Their
result depends on the version of the package alone. It is kept here as SQL, for the version that Onward is tested with:

    schemas/prefect.sql, mlflow.sql --> .NAME.partial, synced --> link as NAME, unless NAME exists

With any other version, or where this is not possible, no file is made, and the package migrates an empty database as
ever. `python -m onward.infra.new_databases` writes the files anew after a change of the versions; a test compares them
with what the migrations make.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path

SCHEMAS = Path(__file__).parent / "schemas"
MLFLOW_MIGRATIONS = """
import sys, sqlalchemy
from mlflow.store.db.utils import _initialize_tables
_initialize_tables(sqlalchemy.create_engine(f"sqlite:///{sys.argv[1]}"))
"""
"""What MLflow does with an empty database when its store is opened."""


def make_database(path: Path, package: str) -> bool:
    """Make a database that does not exist, for `prefect` or `mlflow`; return whether it was made.

    One process at a time may call this for a path. A database is complete or does not exist, also after `kill -9`.
    """
    partial = path.with_name(f".{path.name}.partial")
    try:
        partial.unlink(missing_ok=True)  # of a process that was killed
        script = (SCHEMAS / f"{package}.sql").read_text()
        if path.exists() or script.partition("\n")[0] != heading(package):
            return False
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with contextlib.closing(sqlite3.connect(partial, isolation_level=None)) as database:
                # nobody knows the file yet: it is synced once, at the end
                database.execute("pragma synchronous = off")
                database.execute("pragma journal_mode = off")
                database.executescript(script)
            _sync(partial)
            os.link(partial, path)  # a rename would replace a database that another program has made meanwhile
        finally:
            partial.unlink(missing_ok=True)
        _sync(path.parent)
    except (OSError, sqlite3.Error, metadata.PackageNotFoundError):
        return False  # a full disk, a directory that cannot be written: the package says what is wrong
    return True


def heading(package: str) -> str:
    """Return the first line of the SQL for the installed version of a package."""
    return f"-- {package} {metadata.version(package)}"


def migrated(path: Path, package: str) -> str:
    """Let a package make an empty database by its own migrations; return it as SQL, with the heading.

    The constraints of a table that a migration rewrites come in any order, because SQLAlchemy has them in sets.
    """
    settings = {
        "PREFECT_API_DATABASE_CONNECTION_URL": f"sqlite+aiosqlite:///{path}",
        "PREFECT_HOME": str(path.parent),
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "DO_NOT_TRACK": "true",
        "MLFLOW_DISABLE_TELEMETRY": "true",
    }
    arguments = {
        "prefect": ["-m", "prefect", "server", "database", "upgrade", "-y"],
        "mlflow": ["-c", MLFLOW_MIGRATIONS, str(path)],
    }[package]
    subprocess.run(
        [sys.executable, *arguments], env={**os.environ, **settings}, cwd=path.parent, check=True, capture_output=True
    )
    with contextlib.closing(sqlite3.connect(path)) as database:
        return "\n".join([heading(package), *database.iterdump(), ""])


def _sync(path: Path) -> None:
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


if __name__ == "__main__":
    for each in ("prefect", "mlflow"):
        with tempfile.TemporaryDirectory() as folder:
            (SCHEMAS / f"{each}.sql").write_text(migrated(Path(folder) / f"{each}.db", each))
