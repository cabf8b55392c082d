"""Bring models that a configuration names by `models:/` and `runs:/` from MLflow to this machine.

The name stays in the configuration, and remote.json says which version it was when the run began: a run that is resumed
goes on with that one, also after the alias has moved.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from onward.infra.mlflow.mlflow_store import TrackingError, TrackingUnavailable, local_store
from onward.infra.mlflow.registry import RegisteredVersion, Registry
from onward.infra.servers.databases import without_password
from onward.trainer.config.run_config import RunConfig
from onward.trainer.config.sections.results import MonitorConfig
from onward.trainer.config.urls import is_registered, url_of
from onward.trainer.data.reading import fetching
from onward.trainer.data.schema.signature import model_digest
from onward.trainer.errors import ConfigError, RuntimeUnavailable
from onward.trainer.run.home import download_cache, onward_home
from onward.trainer.run.remote.local_copies import LocalCopies, LocalCopy, urls_in


def store_of(monitor: MonitorConfig) -> str:
    """Return the tracking URI without a password; a relative SQLite path is made absolute, for `onward resume` in
    another directory."""
    # the setting wins over the environment, and Onward's own store stands behind both
    named = monitor.tracking_uri or without_password(os.environ.get("MLFLOW_TRACKING_URI", ""))
    chosen = named or local_store(onward_home())
    # MLflow resolves a relative database against the working directory, which may differ at the next resume.
    database = chosen.removeprefix("sqlite:///")
    return chosen if database == chosen else f"sqlite:///{Path(database).absolute()}"


def with_registered(sections: RunConfig | Mapping[str, Any], known: LocalCopies | None = None) -> LocalCopies | None:
    """Return `known`, the copies that a run began with, and with it those of registered models that it lacks.

    Raises ConfigError for what MLflow does not have, RuntimeUnavailable when it cannot be reached.
    """
    models = [(setting, url) for setting, url in urls_in(sections) if setting in fetching.MODELS]
    named = [(setting, url) for setting, url in models if is_registered(url)]
    if not named:
        return known
    monitor = dict(sections).get("monitor")
    registry = Registry(store_of(monitor if isinstance(monitor, MonitorConfig) else MonitorConfig()))
    before = {copy.url: copy for copy in (known.copies if known else ())}
    for setting, url in named:
        # a copy that a run began with is used again, also if the alias names another version now
        if url not in before or not before[url].path.exists():
            before[url] = _fetched(url, registry, before.get(url), setting=setting)
    return LocalCopies(copies=tuple(before.values()))


def local_model(location: Path) -> Path:
    """Return a model's path, or that of a local copy of what a URL names. Raises as `with_registered`."""
    url = url_of(location)
    if not is_registered(url):
        return fetching.local_model(location)
    return _fetched(url, Registry(store_of(MonitorConfig())), None).path


def _fetched(url: str, registry: Registry, pinned: LocalCopy | None, *, setting: str = "model.path") -> LocalCopy:
    """Download what a URL names now, or the version that a run began with."""
    try:
        if pinned and not url.startswith("runs:/"):
            name, _, rest = pinned.key.rpartition("/")
            # the key is NAME/VERSION DIGEST
            number, _, _ = rest.partition(" ")
            version: RegisteredVersion | None = registry.version(name, number)
        else:
            version = registry.resolve(url)
        cache = download_cache() / "registered"
        # the digest is the name in the cache, so equal files of several versions are kept once
        if version and version.sha256 and (there := sorted((cache / version.sha256).glob("*.onnx"))):
            file = there[0]
        else:
            arrived = registry.download(version or url, cache / uuid.uuid4().hex)
            sha256 = model_digest(arrived)
            if version and version.sha256 not in ("", sha256):
                raise ConfigError(
                    f"{url}: the files of version {version.version} have SHA-256 {sha256[:12]}, and it was registered "
                    f"with {version.sha256[:12]}: they were changed or damaged"
                )
            # the model may lie deeper in its directory, which is moved as a whole
            root = next(parent for parent in arrived.parents if parent.parent == cache)
            place = cache / sha256
            if not place.exists():
                root.rename(place)
            file = place / arrived.relative_to(root)
    except TrackingUnavailable as error:
        raise RuntimeUnavailable(f"{setting}: {error}") from error
    except TrackingError as error:
        raise ConfigError(f"{setting}: {error}") from error
    key = f"{version.name}/{version.version} " if version else ""
    copy = LocalCopy(url=url, path=file, key=key + model_digest(file), bytes=file.stat().st_size)
    if pinned and pinned.key != copy.key:
        raise ConfigError(f"{url} is {copy.key} now, but the run began with {pinned.key}; start a new run")
    return copy
