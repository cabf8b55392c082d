"""The names of runs, such as `mlp-14`: the name of the configuration and a number, each given once in Onward's home.

    HOME/names.db     one row for each name: the run that has it, the configuration's name, the number

A name means one run for ever, also after its directory was deleted. A row is removed only if its run was ended before
it had settings, and another one begins under the name that was asked for (`onward run --name`). The database gives
two runs that begin at the same time different numbers, and has each name on the disk before a run uses it.
"""

from __future__ import annotations

import contextlib
import re
import sqlite3
from collections.abc import Iterator
from pathlib import Path

from onward.trainer.errors import OnwardError, RuntimeUnavailable
from onward.trainer.run.directory import RunDir, onward_home
from onward.trainer.run.records import RunIdentity, read_record

WAIT_S = 30.0
"""Longest time that a run waits for others which take a name at the same time."""
SHORT = 8
"""Characters of a short id."""


def short_id(run_id: str) -> str:
    """Return the end of an id, by which commands show and find a run.

    Not its beginning: Prefect's scheduled runs have ids that begin with their time, and share about 17 characters. And
    not the shortest part that is unambiguous: another run may make it ambiguous after somebody has noted it.
    """
    return run_id[-SHORT:]


def take_name(config_name: str, run_id: str, *, wanted: str = "", instead_of: str = "") -> str:
    """Return the name of a run; a run without one takes the next number of its configuration's name.

    wanted: the name to take if no other run has it, in place of a number. instead_of: the run that gives up that name.
    Raises RuntimeUnavailable when the database cannot be read or written.
    """
    path = onward_home() / "names.db"
    try:
        with _transaction(path) as database:
            # a resumed or retried run asks again, and keeps its name
            known = database.execute("select name from names where run_id = ?", (run_id,)).fetchone()
            if known:
                return str(known[0])
            if instead_of:
                database.execute("delete from names where name = ? and run_id = ?", (wanted, instead_of))
            if wanted and _insert(database, wanted, run_id, config_name, 0):
                return wanted
            # numbers only grow, so that the name of a deleted run is not given to another one
            (highest,) = database.execute("select max(number) from names where config = ?", (config_name,)).fetchone()
            number = (highest or _highest_number(config_name)) + 1
            # the name may be taken: a sweep wants names such as `mlp-15-2`, which a configuration may have, too
            while not _insert(database, name := f"{config_name}-{number}", run_id, config_name, number):
                number += 1
            return name
    except sqlite3.Error as error:
        raise RuntimeUnavailable(
            f"{path}, which has the names of all runs, cannot be used: {error}. If it is damaged, delete it: it is "
            "made again from the runs"
        ) from error


def name_of(run: RunDir, config_name: str, *, wanted: str = "", instead_of: str = "") -> str:
    """Return the name of a run, which it keeps in every resume and retry; a new one takes it. Raises as `take_name`."""
    with contextlib.suppress(OnwardError, OSError):
        return read_record(run.identity, RunIdentity).name
    return take_name(config_name, run.root.name, wanted=wanted, instead_of=instead_of)


def name_given_to(run_id: str) -> tuple[str, str] | None:
    """Return the name of a run and that of its configuration; None if it has none, or if the database is damaged."""
    return _looked_up("select name, config from names where run_id = ?", run_id)


def owner_of(name: str) -> str | None:
    """Return the id of the run or the trial that has a name; None if none has, or if the database is damaged."""
    found = _looked_up("select run_id, '' from names where name = ?", name)
    return found[0] if found else None


def _looked_up(query: str, value: str) -> tuple[str, str] | None:
    path = onward_home() / "names.db"
    if path.is_file():
        with (
            contextlib.suppress(sqlite3.Error),
            # read-only: looking up must not create an empty database
            contextlib.closing(sqlite3.connect(f"{path.as_uri()}?mode=ro", timeout=WAIT_S, uri=True)) as database,
        ):
            found = database.execute(query, (value,)).fetchone()
            return (str(found[0]), str(found[1])) if found else None
    return None


@contextlib.contextmanager
def _transaction(path: Path) -> Iterator[sqlite3.Connection]:
    path.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.closing(sqlite3.connect(path, timeout=WAIT_S, isolation_level=None)) as database:
        database.execute("begin immediate")  # nobody else takes a name until the end of the block
        database.execute(
            "create table if not exists names (name text primary key, run_id text unique, config text, number integer)"
        )
        yield database
        database.execute("commit")


def _insert(database: sqlite3.Connection, name: str, run_id: str, config_name: str, number: int) -> bool:
    """Give a run a name; return False if another run has it."""
    row = (name, run_id, config_name, number)
    return database.execute("insert or ignore into names values (?, ?, ?, ?)", row).rowcount == 1


def _highest_number(config_name: str) -> int:
    """Return the highest number among the runs that are not in the database: they are of an earlier version of Onward,
    in which all runs of a configuration had its name, or the database was deleted."""
    plain = 0
    highest = 0
    for path in (onward_home() / "runs").glob("*/identity.json"):
        with contextlib.suppress(OnwardError, OSError):
            name = read_record(path, RunIdentity).name
            plain += name == config_name
            if numbered := re.fullmatch(re.escape(config_name) + r"-(\d{1,9})", name):
                highest = max(highest, int(numbered[1]))
    return max(plain, highest)
