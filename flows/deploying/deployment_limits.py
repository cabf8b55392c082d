"""What a run of a deployment may use: the files under some directories, and code that the deployment's author named.

    onward deploy --> HOME/deployments/ID.json: directories, Python files with their digests, MLflow's address
                                                      |
    run of the deployment, its parameters from Prefect --> compared, before anything is read --> refused, or runs

Parameters can be changed by everyone who may start a run in Prefect. The record lies beside the runs, so that no
parameter changes it; or in Prefect, signed (signed_limits.py). `onward run` on a terminal has no limits: its user has
the rights anyway.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from onward.flows.deploying.signed_limits import KEY, publish_limits, published_limits, withdraw_limits
from onward.infra.servers.databases import without_password
from onward.trainer.config.named_files import named_files
from onward.trainer.config.rules import Sections
from onward.trainer.config.section import Section
from onward.trainer.config.sections.data import DataConfig
from onward.trainer.config.setting_paths import BUNDLED_SOURCES
from onward.trainer.config.urls import is_registered, redacted, url_of
from onward.trainer.data.schema.allowed_files import folder_of
from onward.trainer.errors import ConfigError, OnwardError
from onward.trainer.run.allowed_code import code_digests
from onward.trainer.run.directory import onward_home
from onward.trainer.run.durable_files import sha256
from onward.trainer.run.records import read_record, write_record

AGAIN = "`onward deploy` on the machine of the worker writes it"
OF_HOME = ("runs", "models", "downloads")
"""What a run may use of Onward's home; not the login, and not the records of limits."""


class Limits(Section):
    """What runs of one deployment may use."""

    deployment: str
    roots: tuple[str, ...]
    """Directories, absolute and without links; of URLs everything up to the last `/`."""
    code: Mapping[str, str]
    """Path -> SHA-256 of the Python files that may be executed: `model.converters` and `loss.file`."""
    tracking_uri: str
    """`monitor.tracking_uri`: a database at any path would be created."""
    all_waiting: bool = False
    """Whether every scheduled run that waits for a running one starts after it (cancellation.py)."""


def limits_of(name: str, settings: Sections, allowed: Iterable[str] = (), *, all_waiting: bool = False) -> Limits:
    """Return the limits of a deployment: the directories that its configuration names, and those `allowed` besides.

    Raises ConfigError for an allowed directory that does not exist and for code at a URL, whose content may change.
    """
    # without links, because what a run names is compared without links, too
    given = [os.path.realpath(Path(each).expanduser()) for each in allowed]
    problems = [f"--allow {each}: there is no such directory" for each in given if not Path(each).is_dir()]
    # code is not covered by directories: whoever may write there could have it executed
    files = [(key, file.location) for key, file in named_files(settings) if file.is_code]
    problems += [
        f"{key}: a deployment executes code from local files only, not {redacted(url)}; download it"
        for key, path in files
        if (url := url_of(path))
    ]
    if problems:
        raise ConfigError(problems)
    named = [value for _, value in _places(settings) if not is_registered(url_of(value))]
    roots = sorted({*given, *(root for value in named for root in _roots(value))})
    uri = without_password(settings["monitor"].tracking_uri)
    # the content now: a file that changes later is not the one that was deployed
    code = {os.path.realpath(path): sha256(Path(path)) for _, path in files}
    return Limits(deployment=name, roots=tuple(roots), code=code, tracking_uri=uri, all_waiting=all_waiting)


def record(deployment_id: str, limits: Limits) -> None:
    """Write the limits of a deployment where its runs find them: in this home, and with a key in Prefect as well."""
    publish_limits(deployment_id, limits.model_dump_json())
    write_record(_record(deployment_id), limits)


def forget(deployment_id: str) -> None:
    """Delete the record of a deployment that is deleted."""
    _record(deployment_id).unlink(missing_ok=True)
    withdraw_limits(deployment_id)


def waits_for_all(deployment_id: str) -> bool:
    """Return whether every scheduled run of a deployment that waits is to start, and not the newest alone."""
    limits = _limits(deployment_id)
    return limits is not None and limits.all_waiting


def check_limits(deployment_id: str, settings: Sections) -> dict[str, str]:
    """Return path -> SHA-256 of the Python files that a deployment's run may execute.

    Raises ConfigError with everything that its parameters name outside of the deployment's limits.
    """
    limits = _limits(deployment_id)
    if limits is None:
        raise ConfigError(
            f"{_record(deployment_id)}, the record of what runs of this deployment may use, does not exist; {AGAIN}. A "
            f"worker without that home needs the same {KEY} in its environment as `onward deploy` had"
        )
    problems = list(_outside(settings, limits))
    code = code_digests(settings)
    problems += list(_unknown_code(settings, limits, code))
    uri = without_password(settings["monitor"].tracking_uri)
    if uri != limits.tracking_uri:
        problems.append(f"monitor.tracking_uri {uri!r} is not {limits.tracking_uri!r}, as it was deployed")
    if problems:
        remedy = f"deploy {limits.deployment!r} with other limits: `onward deploy --allow DIRECTORY`"
        raise ConfigError([*problems, remedy])
    return code


def _limits(deployment_id: str) -> Limits | None:
    """Return what runs of a deployment may use; None if nothing says so. An absent or damaged record allows nothing."""
    # first: another machine may have deployed again since the record was written in this home
    if published := published_limits(deployment_id):
        return Limits.model_validate_json(published)
    path = _record(deployment_id)
    if not path.exists():
        return None
    try:
        return read_record(path, Limits)
    except OnwardError:
        what = "the record of what runs of this deployment may use"
        raise ConfigError(f"{path}, {what}, is damaged; {AGAIN}") from None


def _outside(settings: Sections, limits: Limits) -> Iterator[str]:
    """Yield what is wrong with each path or URL that is not below one of the roots."""
    known = ", ".join(limits.roots) or "none"
    urls = [root for root in limits.roots if url_of(root)]
    for key, value in _places(settings):
        if url := url_of(value):
            # the slash keeps s3://data-of-others out of the root s3://data
            is_allowed = is_registered(url) or any(url.startswith(root + "/") for root in urls)
            if not is_allowed:
                yield f"{key} {redacted(url)} is not below what this deployment may use: {known}"
            continue
        # a pattern is checked itself and with every file that it finds, because a link may lead elsewhere
        for found in (Path(value), *_found(value)):
            if not _is_below(real := Path(os.path.realpath(found)), limits):
                shown = str(found) if real == found else f"{found} ({real})"
                yield f"{key} {shown} is not below a directory that this deployment may use: {known}"
                break


def _is_below(real: Path, limits: Limits) -> bool:
    """Return whether a path without links is below a root. A root above Onward's home does not open all of that."""
    # a root such as the user's home would open the login and the records of limits in Onward's home
    home = Path(os.path.realpath(onward_home()))
    if any(real.is_relative_to(home / name) for name in OF_HOME):
        return True
    below = [root for root in map(Path, limits.roots) if real.is_relative_to(root)]
    return any(root.is_relative_to(home) or not real.is_relative_to(home) for root in below)


def _unknown_code(settings: Sections, limits: Limits, code: Mapping[str, str]) -> Iterator[str]:
    """Yield the Python files that are not those of the limits. code: path -> SHA-256 of those that there are."""
    for key, file in named_files(settings):
        # compared by the real path: a link that was moved to other code is another file
        known = limits.code.get(os.path.realpath(file.location))
        if file.is_code and known is None:
            named = ", ".join(limits.code) or "none"
            url = url_of(file.location)
            shown = redacted(url) if url else file.location
            yield f"{key} {shown} executes Python that the deployment's author has not named; named are: {named}"
        elif file.is_code and code.get(file.location) != known:
            yield (
                f"{key} {file.location} is not the file that was deployed: it has changed since; look at it and deploy "
                "again"
            )


def _places(settings: Sections) -> Iterator[tuple[str, str]]:
    """Yield (setting, value) of each path and URL that is given; not of code, and not of names of bundled data."""
    yield from ((key, file.location) for key, file in named_files(settings) if not file.is_code)
    data: DataConfig = settings["data"]
    beside = {}  # relative to each source
    if data.image:
        beside = {"data.image.masks": data.image.mask_folder, "data.image.boxes": data.image.box_place}
    for key, folder in beside.items():
        if not folder:
            continue
        named = [*(each.source for each in data.mixture), data.evaluation_source, data.test_source]
        for source in named:
            if not source or source in BUNDLED_SOURCES:
                continue
            if not url_of(source):
                yield key, str(folder_of(source) / folder.replace("{source}", folder_of(source).name))
            elif Path(folder).is_absolute() or ".." in Path(folder).parts:  # out of the copy that is fetched
                yield key, str(Path("/") / folder)


def _roots(value: str) -> set[str]:
    """Return a path if it is a directory, else that of the path; of a pattern those of its fixed part and files."""
    if url := url_of(value):
        return {url.rpartition("/")[0]}
    # the fixed part and each file that is found: links in a pattern may lead to several directories
    real = [Path(os.path.realpath(each)) for each in (_fixed(value), *_found(value))]
    return {str(each if each.is_dir() else each.parent) for each in real}


def _fixed(value: str) -> Path:
    """Return the directories of a pattern before its first `*`; a path that is no pattern as it is."""
    fixed = Path(value)
    # each turn drops the last part until no wildcard is left
    while set("*?[") & set(str(fixed)):
        fixed = fixed.parent
    return fixed


def _found(value: str) -> list[Path]:
    """Return the files that a pattern finds; [] for a path that is no pattern."""
    fixed = _fixed(value)
    try:
        return [] if fixed == Path(value) else sorted(fixed.glob(str(Path(value).relative_to(fixed))))
    except ValueError:  # such as ** beside other letters, which the run refuses
        return []


def _record(deployment_id: str) -> Path:
    return onward_home() / "deployments" / f"{deployment_id}.json"
