"""A real PostgreSQL on 127.0.0.1, with the databases `prefect` and `mlflow`, which can be stopped and started again.

Its programs refuse to run as root, so they run as the first ordinary account then.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.support.stores import free_port

PASSWORD = "pass+word/7@of:the team"
"""With letters that are written otherwise in a URL."""
QUOTED = "pass%2Bword%2F7%40of%3Athe%20team"
USER = "onward"
DATABASES = ("prefect", "mlflow")


def _programs() -> Path | None:
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin"))
    return found[-1] if found else None


def missing() -> str:
    """Why there can be no PostgreSQL here; "" if there can."""
    if _programs() is None:
        return "needs PostgreSQL: apt-get install postgresql"
    return "" if os.geteuid() or _account() else "needs an account that is not root"


def _account() -> pwd.struct_passwd | None:
    return next((each for each in pwd.getpwall() if each.pw_name in ("postgres", "nobody")), None)


@dataclass(frozen=True)
class Postgres:
    """A cluster of databases, and where it listens."""

    folder: Path
    port: int

    def url(self, database: str, *, driver: str = "postgresql", password: str = QUOTED) -> str:
        return f"{driver}://{USER}:{password}@127.0.0.1:{self.port}/{database}"

    def start(self) -> None:
        options = f"-p {self.port} -k {self.folder} -c listen_addresses=127.0.0.1 -c fsync=off"
        self.call("pg_ctl", "-D", "data", "-o", options, "-l", "log", "-w", "start")

    def stop(self) -> None:
        """End it at once, with the connections that it has."""
        self.call("pg_ctl", "-D", "data", "-m", "immediate", "-w", "stop")

    def rows(self, database: str, query: str) -> list[list[str]]:
        """What a query finds."""
        words = ["psql", "-h", "127.0.0.1", "-p", str(self.port), "-U", USER, "-AtF", "|", "-c", query, database]
        return [line.split("|") for line in self.call(*words).splitlines()]

    def call(self, program: str, *words: str) -> str:
        programs = _programs()
        account = None if os.geteuid() else _account()
        assert programs
        done = subprocess.run(
            [str(programs / program), *words],
            cwd=self.folder,
            env={"PATH": os.environ["PATH"], "PGPASSWORD": PASSWORD, "LC_ALL": "C"},
            user=account and account.pw_uid,
            group=account and account.pw_gid,
            # its server would keep a pipe open
            stdout=subprocess.PIPE if program != "pg_ctl" else subprocess.DEVNULL,
            check=True,
            text=True,
        )
        return done.stdout or ""


@contextlib.contextmanager
def postgres() -> Iterator[Postgres]:
    """A cluster that is deleted at the end."""
    found = Postgres(Path(tempfile.mkdtemp(prefix="postgres-")), free_port())
    (found.folder / "password").write_text(PASSWORD)
    if not os.geteuid() and (account := _account()):
        for path in (found.folder, found.folder / "password"):
            os.chown(path, account.pw_uid, account.pw_gid)
    try:
        words = ("-D", "data", "-U", USER, "-A", "scram-sha-256", "--pwfile=password", "--no-sync", "-E", "UTF8")
        found.call("initdb", *words)
        found.start()
        for name in DATABASES:
            found.call("createdb", "-h", "127.0.0.1", "-p", str(found.port), "-U", USER, name)
        yield found
    finally:
        with contextlib.suppress(subprocess.CalledProcessError):
            found.stop()
        shutil.rmtree(found.folder, ignore_errors=True)
