"""The record of where the settings of a run came from: RUN_DIR/origins.json, beside config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import Field

from onward.trainer.run.directory import RunDir
from onward.trainer.run.records import Record, write_record


class Origins(Record):
    """Where each setting of a run came from; of a deployed run there is no such record."""

    settings: dict[str, str]
    """`section.key` -> the file and its table, the profile or the override that has set it. A setting that is absent
    has its default, or follows from others."""
    given: dict[str, Any] = Field(default_factory=dict)
    """All settings before the run has completed them from its model and data, as `flat_settings`; {} in runs of earlier
    versions."""


def record_origins(run: RunDir, origins: Mapping[str, str], given: Mapping[str, Any]) -> None:
    """Write the record of a new run. origins: of all settings; given: all settings, as `flat_settings`."""
    known = ("default", "follows from other settings")
    settings = {key: where for key, where in origins.items() if where not in known}
    run.root.mkdir(parents=True, exist_ok=True)
    write_record(run.origins, Origins(settings=settings, given=dict(given)))
