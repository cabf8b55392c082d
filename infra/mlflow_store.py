"""Connect to an MLflow store, and translate the errors of its calls."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Callable, Iterator
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Concatenate, ParamSpec, Protocol, TypeVar

if TYPE_CHECKING:
    from mlflow import MlflowClient

SETTINGS = {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",  # the default blocks a call for minutes; the callers here retry themselves
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "DO_NOT_TRACK": "true",
    "MLFLOW_LOGGING_LEVEL": "WARNING",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
}
"""Environment that MLflow reads when it is imported. Variables that the user has set are kept."""

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T", bound="Store")


class TrackingError(Exception):
    """MLflow refused a call; repeating it would fail again."""


class TrackingUnavailable(TrackingError):
    """MLflow cannot be reached or has an internal error; the same call may be repeated later."""


class Store(Protocol):
    """Something that calls MLflow."""

    @property
    def tracking_uri(self) -> str: ...


def translate_errors(
    method: Callable[Concatenate[T, P], R],
) -> Callable[Concatenate[T, P], R]:
    """Make a method raise TrackingUnavailable for an outage of any kind and TrackingError for a refusal."""

    @wraps(method)
    def call(store: T, /, *args: P.args, **kwargs: P.kwargs) -> R:
        from mlflow.exceptions import MlflowException
        from sqlalchemy.exc import OperationalError

        try:
            return method(store, *args, **kwargs)
        except MlflowException as error:
            status = error.get_http_status_code()  # type: ignore[no-untyped-call]
            if status >= 500 or status == 429:
                raise TrackingUnavailable(
                    f"MLflow at {store.tracking_uri} reports a temporary error: {error}"
                ) from error
            raise TrackingError(f"MLflow at {store.tracking_uri} refused: {error}") from error
        except FileNotFoundError:
            raise  # of a file that the caller named, not of MLflow's
        except (OSError, OperationalError) as error:  # every error of the HTTP client is an OSError
            raise TrackingUnavailable(f"MLflow at {store.tracking_uri} cannot be reached: {error}") from error

    return call


def connect(tracking_uri: str) -> MlflowClient:
    """Return MLflow's client of a store."""
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    from mlflow import MlflowClient

    with _lock_database(database_of(tracking_uri)):
        client = MlflowClient(tracking_uri, tracking_uri)
        if database_of(tracking_uri):
            client.search_experiments(max_results=1)  # creates the tables of a new database
    return client


def database_of(tracking_uri: str) -> Path | None:
    """Return the SQLite file of a store; None for a server."""
    path = tracking_uri.removeprefix("sqlite:///")
    return Path(path).absolute() if path != tracking_uri else None


@contextlib.contextmanager
def _lock_database(database: Path | None) -> Iterator[None]:
    """Hold a lock while a new database gets its tables: when two processes create them at once, both fail."""
    if database is None:
        yield
        return
    database.parent.mkdir(parents=True, exist_ok=True)
    with database.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
