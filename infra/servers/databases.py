"""The databases of Prefect and MLflow: SQLite files of Onward's home, or the server that a variable of theirs names.

    PREFECT_API_DATABASE_CONNECTION_URL=postgresql+asyncpg://USER:PASSWORD@HOST/prefect
    MLFLOW_TRACKING_URI=postgresql://USER:PASSWORD@HOST/mlflow

The URL with its password stays in the environment: no record, log or message has it.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Callable
from urllib.parse import unquote, urlsplit

KINDS = ("postgresql", "mysql", "mssql")
"""Database servers, as URLs of SQLAlchemy name them. Prefect takes the first alone."""
PREFECT = ("PREFECT_SERVER_DATABASE_CONNECTION_URL", "PREFECT_API_DATABASE_CONNECTION_URL")
"""Of both the first counts, as for Prefect."""
_IN_AUTHORITY = re.compile(r"^([^:/]+://[^:/@]*):([^@]*(?:@[^/?#]*)?)@")
_IN_QUERY = re.compile(r"([?&](?:password|passwd|pwd|sslpassword)=)([^&#]*)", re.IGNORECASE)
LIMIT_S = 10
"""Longest time until a database has answered."""


def is_database_server(uri: str) -> bool:
    """Return whether a URI names a database server: no SQLite file, and no server of MLflow."""
    return urlsplit(uri).scheme.partition("+")[0] in KINDS


def named_database(service: str) -> str:
    """Return the URL of the database server that the environment names for a service; "" = a file in Onward's home."""
    names = PREFECT if service == "prefect" else ("MLFLOW_TRACKING_URI",) if service == "mlflow" else ()
    url = next(filter(None, (os.environ.get(name) for name in names)), "")
    # MLflow's variable may name a server of MLflow as well; a database of Prefect that is no file has to be PostgreSQL
    is_server = is_database_server(url) if service == "mlflow" else not url.startswith("sqlite")
    return url if is_server else ""


def without_password(uri: str) -> str:
    """Return the URI of a store as it is recorded and shown."""
    uri = _IN_QUERY.sub(r"\1...", uri)
    # SQLAlchemy takes letters in a password, such as a slash, that end the host for urlsplit
    if is_database_server(uri):
        return _IN_AUTHORITY.sub(r"\1@", uri)
    parts = urlsplit(uri)
    if parts.password is None:
        return uri
    return parts._replace(netloc=f"{parts.username}@{parts.netloc.rpartition('@')[2]}").geturl()


def prefect_problem(url: str) -> str:
    """Return why Prefect's server cannot use a database, and what to do; "" if it can."""
    if urlsplit(url).scheme != "postgresql+asyncpg":
        scheme = urlsplit(url).scheme
        return f"{PREFECT[1]} begins with {scheme!r}; Prefect needs postgresql+asyncpg://USER:PASSWORD@HOST/DATABASE"
    return _problem(url, lambda: asyncio.run(asyncio.wait_for(_connect_async(url), LIMIT_S)), of="Prefect")


def mlflow_problem(url: str) -> str:
    """Return why MLflow cannot use a database server, and what to do; "" if it can."""

    def connect() -> None:
        from sqlalchemy import create_engine
        from sqlalchemy.pool import NullPool

        limit = {"connect_timeout": LIMIT_S} if url.startswith("postgresql") else {}
        create_engine(url, poolclass=NullPool, connect_args=limit).connect().close()

    return _problem(url, connect, of="MLflow")


def _problem(url: str, connect: Callable[[], None], *, of: str) -> str:
    shown = f"the database {without_password(url)} of {of}"
    try:
        connect()
    except ModuleNotFoundError as error:
        return f"{shown} needs the package {error.name}, which is not installed here"
    except Exception as error:  # each driver has errors of its own
        lines = str(error).splitlines() or [type(error).__name__]
        # a driver may repeat what it was given
        passwords = [match[2] for match in _IN_QUERY.finditer(url)]
        if is_database_server(url) and (match := _IN_AUTHORITY.match(url)):
            passwords.append(match[2])
        said = lines[0]
        # as they stand in the URL, and as they are
        for secret in filter(None, (*passwords, *map(unquote, passwords))):
            said = said.replace(secret, "...")
        return f"{shown} cannot be used ({said}); start or make it, or correct its address, user or password"
    return ""


async def _connect_async(url: str) -> None:
    from sqlalchemy.ext.asyncio import create_async_engine

    engine = create_async_engine(url)
    try:
        async with engine.connect():
            pass
    finally:
        await engine.dispose()
