"""What the commands and functions take as a configuration: files, examples, mappings, a profile and overrides."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from onward.trainer.errors import ConfigError, RuntimeUnavailable

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient

    from onward.trainer.config.layers import Layered, Source
    from onward.trainer.config.loading import Check, Override
    from onward.trainer.config.run_config import RunConfig

AnyPath: TypeAlias = "str | os.PathLike[str]"
Config: TypeAlias = "AnyPath | Mapping[str, Any] | RunConfig | Sequence[AnyPath | Mapping[str, Any]]"
"""A configuration: the path of a TOML file, the name of an example, sections as nested mappings, or a RunConfig; or
several files, examples and mappings, of which later ones win."""
Overrides: TypeAlias = "Mapping[str, Any] | Iterable[str]"
"""Settings that replace those of a configuration: {"train.num_steps": 10}, or lines such as "train.num_steps=10"."""


def changes_in(overrides: Overrides) -> list[Any]:
    """Return overrides as `load_config` takes them: pairs of setting and value, or lines."""
    return [*(overrides.items() if isinstance(overrides, Mapping) else overrides)]


@dataclass(frozen=True)
class Given:
    """What was given, ready for `load_config`."""

    source: Source
    changes: list[Override]
    check: Check
    """Returns what is wrong with the files and the data; also writes the model of an example."""
    profile: str = ""

    @classmethod
    def of(cls, config: Config, overrides: Overrides, sections: Mapping[str, Any], *, profile: str = "") -> Given:
        """Find files and examples by their names. Raises ConfigError when there is neither."""
        from onward.flows.examples import Example, find_config

        given: list[Any] = [config]
        # a string is a sequence, too, but names one file
        if isinstance(config, Sequence) and not isinstance(config, str):
            given = list(config)
        layers: list[Any] = []
        examples: list[Example] = []
        for each in given:
            found = find_config(os.fspath(each)) if isinstance(each, str | os.PathLike) else each
            if isinstance(found, Example):
                examples.append(found)
                # before what the user gives, which may name another model
                layers += [found.config, {"model": {"path": found.model}}]
            else:
                layers.append(found)
        changes = [*changes_in(overrides), *sections.items()]

        def check(sections: Mapping[str, Any]) -> list[str]:
            from onward.tasks.checks.file_check import check_files  # here: it takes a second to import

            for example in examples:
                # the user may have replaced the example's model, which is then not written
                if (model := sections.get("model")) and model.path == example.model:
                    with contextlib.suppress(OSError):  # reported below: no such file, ONWARD_HOME is not writable
                        example.write_model()
            return check_files(sections).problems

        return cls(layers[0] if len(layers) == 1 else layers, changes, check, profile)

    def load(self, check: Check = lambda sections: ()) -> RunConfig:
        """Return the resolved configuration, not checked against files unless `check` does. Raises ConfigError."""
        from onward.trainer.config.loading import load_config

        return load_config(self.source, self.changes, profile=self.profile, check=check)

    def layered(self) -> Layered:
        """Return the settings before they are validated, and where each came from."""
        from onward.trainer.config.loading import layered

        return layered(self.source, self.changes, profile=self.profile)

    def checked_here(self, *, resumed: bool = False) -> RunConfig:
        """Return the configuration after checking also this machine, on which it runs.

        Raises ConfigError with all problems, RuntimeUnavailable where only the machine lacks something.
        """
        from onward.tasks.checks.host_table import host_problems
        from onward.tasks.checks.machine_check import machine_problems

        missing = []

        def both(sections: Mapping[str, Any]) -> Iterable[str]:
            # collected beside the check, because a machine that lacks something is another error than a wrong setting
            missing.extend(machine_problems(sections, resumed=resumed))
            # of a run that goes on, the flow may wait for a host
            if not resumed:
                missing.extend(host_problems(sections))
            return self.check(sections)

        try:
            found = self.load(both)
        except ConfigError as error:
            raise ConfigError([*error.problems, *missing]) from None
        if missing:
            raise RuntimeUnavailable(missing)
        return found


MOST_READ_BYTES = 4 << 20
"""Data that is larger is read when it is sharded: the first command of a run should not wait for it."""


def check_all_rows(config: RunConfig) -> None:
    """Read all rows of small data, so that a bad one is named before anything is started.

    Labels that are one class in all rows are refused as well. Nothing is left of it. Larger data, and what lies behind
    URLs, is read by the task shard data alone. Raises DataError, and ConfigError for rows that do not fit the model.
    """
    from onward.infra.job.temporary_folders import owned_folder
    from onward.trainer.data.completed_settings import completed
    from onward.trainer.data.storage.first_rows import source_bytes
    from onward.trainer.data.storage.sharding import make_training_shards
    from onward.trainer.data.tables.class_names import single_classes
    from onward.trainer.run.remote.local_copies import urls_in

    # remote data would be fetched before the run shows anything
    if any(urls_in(dict(config))) or source_bytes(config.data) > MOST_READ_BYTES:
        return
    # the run says what the machine lacks
    with contextlib.suppress(OSError, RuntimeUnavailable), owned_folder("onward-rows-") as folder:
        _, manifest, _ = make_training_shards(completed(config), folder)
        if problems := list(single_classes(config.losses, manifest.table, manifest.fitted, is_short=not config.loss)):
            raise ConfigError(problems)


def config(config: Config, overrides: Overrides = (), /, *, profile: str = "", **sections: Any) -> RunConfig:
    """Return the resolved configuration: defaults, then `config`, then `overrides`, then `sections`.

        onward.config("config.toml", {"train.num_steps": 10})
        onward.config(["config.toml", "gpu.toml"], profile="long", train={"num_steps": 10}, parallel={"data": 2})

    Of several files later ones win: tables are merged, lists and other values replaced. `profile`: the tables
    [profiles.NAME] of the files, which win over the files. A section given as a mapping replaces the settings that it
    names, and no others. Does not open the files that the configuration names. Raises ConfigError with everything that
    is wrong.
    """
    return Given.of(config, overrides, sections, profile=profile).load()


def origins(config: Config, overrides: Overrides = (), /, *, profile: str = "", **sections: Any) -> dict[str, str]:
    """Return `section.key` -> where the value of `onward.config` came from, for every setting.

    That is a file and its table, a profile, "override", "default", or "follows from other settings". Raises as
    `onward.config`.
    """
    from onward.trainer.config.flat_settings import origins_of

    given = Given.of(config, overrides, sections, profile=profile)
    return origins_of(given.load(), given.layered().origins)


def checked_config(config: Config, overrides: Overrides = (), /, *, profile: str = "", **sections: Any) -> RunConfig:
    """Return what `config` returns, after checking it against its model, its data and its directories.

    Writes the model of an example that is given by its name, if the file does not exist yet.
    """
    given = Given.of(config, overrides, sections, profile=profile)
    return given.load(given.check)


@contextlib.contextmanager
def prefect_at_home() -> Iterator[None]:
    """Import Prefect inside: it makes its directory then, in Onward's home unless the user has one already."""
    from onward.trainer.run.directory import onward_home

    # who uses Prefect already keeps its profiles
    if "PREFECT_HOME" in os.environ or Path("~/.prefect").expanduser().exists():
        yield
        return
    os.environ["PREFECT_HOME"] = str(onward_home() / "prefect")
    try:
        yield
    finally:
        del os.environ["PREFECT_HOME"]


def prefect_client() -> SyncPrefectClient:
    """Return a client of the Prefect server, for a `with` statement. Imports Prefect, which reads its settings then."""
    from prefect.client.orchestration import get_client

    return get_client(sync_client=True)
