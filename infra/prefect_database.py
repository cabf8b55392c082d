"""Remove old flow runs and events from the database of Onward's own Prefect server, which must not run meanwhile.

Prefect deletes events after 7 days, if its server happens to run then, and flow runs never: 230 KB for each run.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import sqlite3
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onward.infra.service_state import is_supervised, open_lock_file, try_lock

FLOWS = ("train-onnx", "sweep-onnx")
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "CRASHED")
KNOWN = {
    "flow": {"id", "name"},
    "deployment": {"name", "parameters"},
    "flow_run": {"id", "flow_id", "state_type", "updated", "parameters"},
    "log": {"flow_run_id"},
    "artifact": {"flow_run_id"},
    "task_run": {"flow_run_id"},
    "events": {"id", "occurred"},
    "event_resources": {"event_id", "resource_id"},
}
"""Tables and columns that are read or changed here."""


class DatabaseRefused(Exception):
    """The database is in use, or is not of the form that is known here."""


@dataclass(frozen=True)
class OldRecords:
    """What can be removed from the database."""

    flow_runs: tuple[str, ...]
    """Their ids."""
    events: int
    bytes: int
    """About the space of them on the disk."""


def path_of(home: Path) -> Path:
    """Return the database of Onward's own Prefect server."""
    return home / "prefect" / "prefect.db"


def find_old(home: Path, before: datetime.datetime, *, is_kept: Callable[[str], bool]) -> OldRecords:
    """Return the flow runs of Onward that have ended before a time, and the events before it, and of those runs.

    is_kept: whether the run or sweep with this id stays. Raises DatabaseRefused.
    """
    with _opened(home, "ro") as database:
        return _old(database, before, is_kept)


def remove_old(home: Path, before: datetime.datetime, *, is_kept: Callable[[str], bool]) -> tuple[OldRecords, int]:
    """Remove what `find_old` returns; return it and the bytes by which the file has become smaller."""
    with open_lock_file(home, "lease") as lease:
        # a run that begins meanwhile waits for this lock before it starts a server
        if is_supervised(home, "prefect") or not try_lock(lease):
            raise DatabaseRefused("the Prefect server is running; repeat it when no run uses it, after `onward down`")
        size = path_of(home).stat().st_size
        with _opened(home, "rw") as database:
            found = _old(database, before, is_kept)
            database.execute("pragma foreign_keys = on")
            with database:
                _mark(database, before, found.flow_runs)
                database.execute("delete from events where id in (select id from old_events)")
                database.execute("delete from event_resources where event_id not in (select id from events)")
                for table in ("log", "artifact", "task_run"):
                    database.execute(f"delete from {table} where flow_run_id in (select id from old_runs)")
                database.execute("delete from flow_run where id in (select id from old_runs)")
            database.execute("vacuum")
            database.execute("pragma wal_checkpoint(truncate)")
        return found, max(0, size - path_of(home).stat().st_size)


def deployments(home: Path) -> dict[str, str]:
    """Return name -> parameters of the deployments; a database that cannot be read has none that could be run."""
    if not path_of(home).exists():
        return {}
    with contextlib.suppress(DatabaseRefused), _opened(home, "ro") as database:
        return {
            f"deployment {name}": text for name, text in database.execute("select name, parameters from deployment")
        }
    return {}


@contextlib.contextmanager
def _opened(home: Path, mode: str) -> Iterator[sqlite3.Connection]:
    """Open the database and check its form; an error of SQLite is a DatabaseRefused."""
    path = path_of(home)
    try:
        with contextlib.closing(sqlite3.connect(f"file:{path}?mode={mode}", uri=True, timeout=10)) as database:
            for table, columns in KNOWN.items():
                found = {row[1] for row in database.execute(f"pragma table_info({table})")}
                if missing := columns - found:
                    raise DatabaseRefused(f"{path} has another form than Prefect 3.8: {table} lacks {sorted(missing)}")
            yield database
    except sqlite3.Error as error:
        raise DatabaseRefused(f"{path} cannot be read: {error}") from error


def _old(database: sqlite3.Connection, before: datetime.datetime, is_kept: Callable[[str], bool]) -> OldRecords:
    marks = ", ".join("?" * len(ENDED)), ", ".join("?" * len(FLOWS))
    ended = database.execute(
        "select flow_run.id, flow_run.parameters from flow_run join flow on flow.id = flow_run.flow_id "
        f"where state_type in ({marks[0]}) and flow.name in ({marks[1]}) and flow_run.updated < ?",
        [*ENDED, *FLOWS, _text(before)],
    ).fetchall()
    flow_runs = tuple(run_id for run_id, parameters in ended if not is_kept(_run_of(run_id, parameters)))
    _mark(database, before, flow_runs)
    (events,) = database.execute("select count(*) from old_events").fetchone()
    shares = {"events": (events, "events"), "event_resources": (events, "events"), "log": (len(flow_runs), "flow_run")}
    size = sum(_size(database, table) * number / max(1, _count(database, of)) for table, (number, of) in shares.items())
    return OldRecords(flow_runs, events, int(size))


def _run_of(flow_run_id: str, parameters: str) -> str:
    """Return the name of the directory of a flow run: that of the run that it resumed, of its sweep, or its own id."""
    try:
        given: dict[str, Any] = json.loads(parameters)
        return str(given.get("sweep") or given.get("resume") or flow_run_id)
    except (ValueError, AttributeError):
        return flow_run_id


def _mark(database: sqlite3.Connection, before: datetime.datetime, flow_runs: tuple[str, ...]) -> None:
    """Write the ids into temporary tables, which a database that is opened for reading has, too."""
    database.execute("create temporary table if not exists old_runs (id text primary key)")
    database.execute("create temporary table if not exists old_events (id text primary key)")
    database.execute("delete from old_runs")
    database.execute("delete from old_events")
    database.executemany("insert into old_runs values (?)", [(each,) for each in flow_runs])
    database.execute(
        "insert or ignore into old_events select id from events where occurred < ? union "
        "select event_id from event_resources where resource_id in (select 'prefect.flow-run.' || id from old_runs)",
        [_text(before)],
    )


def _text(time: datetime.datetime) -> str:
    return time.astimezone(datetime.UTC).strftime("%Y-%m-%d %H:%M:%S.%f")


def _count(database: sqlite3.Connection, table: str) -> int:
    return int(database.execute(f"select count(*) from {table}").fetchone()[0])


def _size(database: sqlite3.Connection, table: str) -> int:
    """Return the bytes of a table; 0 where this SQLite cannot tell."""
    with contextlib.suppress(sqlite3.OperationalError):
        return int(database.execute("select sum(pgsize) from dbstat where name = ?", [table]).fetchone()[0] or 0)
    return 0
