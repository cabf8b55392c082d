"""Connect to an MLflow store, and translate the errors of its calls.

A URI may hold a password. It is read from the environment alone, and no record, log or message has it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import wraps
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Concatenate, ParamSpec, TypeVar
from urllib.parse import unquote, urlsplit

from onward.infra.servers.databases import is_database_server, without_password
from onward.infra.servers.login import keep_from_others, named_home
from onward.infra.servers.service_state import lock_database

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import LoggedModel

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


class Store:
    """An MLflow store, connected to when it is first called."""

    def __init__(self, tracking_uri: str) -> None:
        self.tracking_uri = tracking_uri
        """As it is recorded: without a password."""
        self._connected: MlflowClient | None = None
        self._file = ""
        self._expected = False
        """Whether a database that does not exist was removed, and is not made."""

    @property
    def _client(self) -> MlflowClient:
        # SQLite would go on writing to a file that was removed or replaced, and nobody would ever read that
        file = file_of(self.tracking_uri)
        database = database_of(self.tracking_uri)
        # before the first connection an absent file is a new store, unless the caller expects an old one
        had_file = self._connected or self._expected
        if database and not file and had_file:
            raise TrackingUnavailable(
                f"the MLflow database {database} was removed: put it back; `onward resume` of a run sends its metrics "
                "to a new one"
            )
        # another file at the same path: the open connections would still write to the removed one
        if self._connected and self._file != file:
            # MLflow shares them between all clients of the same URI
            registry = self._connected._get_registry_client()  # type: ignore[no-untyped-call]
            for each in (self._connected._tracking_client.store, registry.store):
                if engine := getattr(each, "engine", None):
                    engine.dispose()
            self._connected = None
        if self._connected is None:
            self._connected = connect(self.tracking_uri)
            self._file = file_of(self.tracking_uri)
        return self._connected

    def _logged_models(self, experiments: list[str], condition: str = "") -> Iterator[LoggedModel]:
        """Yield the LoggedModels of experiments that meet a condition."""
        token: str | None = None
        # MLflow searches experiments that are named, and returns 100 models at a time
        while experiments:
            page = self._client.search_logged_models(experiments, condition or None, page_token=token)
            yield from page
            token = page.token
            if not token:
                return


def translate_errors(
    method: Callable[Concatenate[T, P], R],
) -> Callable[Concatenate[T, P], R]:
    """Make a method raise TrackingUnavailable for an outage of any kind and TrackingError for a refusal."""

    @wraps(method)
    def call(store: T, /, *args: P.args, **kwargs: P.kwargs) -> R:
        from mlflow.exceptions import MlflowException
        from sqlalchemy.exc import DatabaseError

        # MLflow's messages may hold the whole URI
        whole = with_password(store.tracking_uri)
        shown = store.tracking_uri
        try:
            return method(store, *args, **kwargs)
        except FileNotFoundError:
            raise  # of a file that the caller named, not of MLflow's
        except (MlflowException, OSError, DatabaseError) as error:  # every error of the HTTP client is an OSError
            text = _sentence(error).replace(whole, shown)
            if any(words in text for words in _DAMAGE):
                raise TrackingUnavailable(
                    f"the MLflow database {database_of(shown) or shown} is damaged ({text}): put a copy of it back, or "
                    "move it away, and a new one is made; `onward resume` of a run sends its metrics again"
                ) from error
            if not isinstance(error, MlflowException):
                raise TrackingUnavailable(f"MLflow at {shown} cannot be reached: {text}") from error
            status = error.get_http_status_code()  # type: ignore[no-untyped-call]
            # 429: too many requests, which is over after a while
            if status >= 500 or status == 429:
                raise TrackingUnavailable(f"MLflow at {shown} reports a temporary error: {text}") from error
            raise TrackingError(f"MLflow at {shown} refused: {text}") from error

    return call


@translate_errors
def last_steps(store: Store, run_id: str) -> dict[str, int]:
    """Return the greatest step that is stored of each metric of a run."""
    return {metric.key: metric.step for metric in store._client.get_run(run_id).data.to_proto().metrics}


_DAMAGE = ("file is not a database", "database disk image is malformed", "no such table")
"""What SQLite says of a file that is no database, or of another program, or that was made again without tables."""


def _sentence(error: Exception) -> str:
    """Return the line of an error that says what is wrong; others hold the SQL statement and advice to programmers."""
    lines = str(error).splitlines() or [type(error).__name__]
    # SQLAlchemy begins the line with the error in brackets
    return next((line for line in lines if "Error) " in line), lines[0])


def connect(tracking_uri: str) -> MlflowClient:
    """Return MLflow's client of a store, given by its URI as it is recorded: without a password."""
    tracking_uri = with_password(tracking_uri)
    keep_from_others(tracking_uri, _credentials(tracking_uri))
    for name, value in SETTINGS.items():
        # MLflow reads them when it is imported, so this comes first
        os.environ.setdefault(name, value)
    from mlflow import MlflowClient

    # it prints 50 lines for each call that fails, which is raised as well
    logging.getLogger("mlflow.store.db.utils").setLevel(logging.CRITICAL)
    # two processes must not make the tables of one database at the same time
    with lock_database(database_of(tracking_uri)):
        client = MlflowClient(tracking_uri, tracking_uri)
        if database_of(tracking_uri):
            client.search_experiments(max_results=1)  # creates the tables of a new database that has none yet
    return client


@contextlib.contextmanager
def made_ahead(tracking_uri: str) -> Iterator[Future[None]]:
    """Import MLflow, and make a database that does not exist yet, in a thread; wait for it before any other import.

    What is wrong with the database is for the first call to say.
    """

    def make() -> None:
        with contextlib.suppress(Exception):
            if database_of(tracking_uri):
                connect(tracking_uri)
            import mlflow  # noqa: F401

    with ThreadPoolExecutor(1, "make the MLflow database") as thread:
        yield thread.submit(make)


def import_for_models() -> None:
    """Import what registering a model needs, so that its first call takes no seconds."""
    with warnings.catch_warnings(), contextlib.suppress(Exception):
        warnings.simplefilter("ignore")  # deprecations inside MLflow
        import mlflow.models
        import mlflow.onnx
        import mlflow.types  # noqa: F401


@contextlib.contextmanager
def registering_prepared(tracking_uri: str) -> Iterator[None]:
    """Do in a thread beside the block what the first registration of a process waits for: about a second.

    That are imports, the check of the registry's tables, and MLflow's list of the modules of all installed packages.
    What is wrong is for the registration to say.
    """

    def prepare() -> None:
        import_for_models()
        with contextlib.suppress(Exception):
            from mlflow.utils.requirements_utils import warn_dependency_requirement_mismatches

            # the call fills the cache of MLflow's list of packages; its result is not used
            warn_dependency_requirement_mismatches([f"onnx=={metadata.version('onnx')}"])
            if file_of(tracking_uri):  # a database that was removed is not made again
                connect(tracking_uri).search_registered_models(max_results=1)

    with ThreadPoolExecutor(1, "prepare the registration") as thread:
        thread.submit(prepare)
        yield


def with_password(tracking_uri: str) -> str:
    """Return MLFLOW_TRACKING_URI if it is the URI of this store with a password, else the URI itself."""
    # the password is looked up at each connection, and never kept
    own = os.environ.get("MLFLOW_TRACKING_URI", "")
    return own if own and without_password(own) == tracking_uri else tracking_uri


def _credentials(tracking_uri: str) -> str:
    """Return the `user:password` that MLflow's client sends to a server, from the URI or the environment."""
    named, at, _ = urlsplit(tracking_uri).netloc.rpartition("@")
    variables = ("MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD")
    # a part of a URI is percent-encoded, a variable is not
    return unquote(named) if at else ":".join(os.environ.get(name, "") for name in variables)


def local_store(home: Path) -> str:
    """Return the tracking URI of Onward's own store: SQLite under its home, the artifacts beside it."""
    return f"sqlite:///{home.absolute() / 'mlflow' / 'mlflow.db'}"


def artifacts_of(tracking_uri: str) -> str:
    """Return where the artifacts of a database are, for which MLflow would take the working directory; "" of a server.

    Those of a SQLite file lie beside it, those of a database server in Onward's home.
    """
    if is_database_server(tracking_uri):
        return (named_home().absolute() / "mlflow" / "artifacts").as_uri()
    database = database_of(tracking_uri)
    return (database.parent / "artifacts").as_uri() if database else ""


def database_of(tracking_uri: str) -> Path | None:
    """Return the SQLite file of a store; None for a server."""
    path = tracking_uri.removeprefix("sqlite:///")
    return Path(path).absolute() if path != tracking_uri else None


def file_of(tracking_uri: str) -> str:
    """Return which file on which disk a SQLite store is; "" for a server, and without a file."""
    database = database_of(tracking_uri)
    if database is None or not database.exists():
        return ""
    facts = database.stat()
    return f"{facts.st_dev}:{facts.st_ino}"
