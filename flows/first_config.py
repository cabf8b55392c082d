"""The function behind `onward init` and `onward.init`: write a first configuration for a model and its data."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from onward.flows.configuration import AnyPath, Overrides, changes_in
from onward.trainer.errors import ConfigError

if TYPE_CHECKING:
    from onward.trainer.proposal.initialise import Proposed


def init(
    model: AnyPath,
    data: AnyPath,
    overrides: Overrides = (),
    /,
    *,
    output: AnyPath = "config.toml",
    force: bool = False,
    steps: int = 20,
    range_test: bool = False,
) -> Proposed:
    """Write a configuration for an ONNX file and data, and train `steps` steps of it as a proof; return what was found.

        onward.init("model.onnx", "train.csv", {"data.label": "price"}, output="price.toml")

    Each guess has its reason in a comment. What cannot be decided is a question in the file (`questions` of the
    record): a setting "?", with which a configuration does not load; nothing is trained then. `overrides`: settings
    that are decided. `steps`: 0 = no proof. `range_test`: find the learning rate by a short range test. `refused` of
    the record says why a written configuration does not train. Raises ConfigError for an `output` that exists (without
    `force`), and ConfigError, DataError or UnsupportedModel where nothing can be proposed; nothing is written then.
    """
    from onward.tasks.checks.registered_models import with_registered
    from onward.trainer.data.reading.fetching import fetch
    from onward.trainer.proposal.initialise import initialise

    named = {"model": {"path": os.fspath(model)}, "data": {"source": os.fspath(data)}}
    copies, problems = fetch(named, with_registered(named))
    if problems:
        raise ConfigError(problems)
    changes = changes_in(overrides)
    path = Path(named["model"]["path"])
    source = named["data"]["source"]
    return initialise(
        path, source, Path(output), changes, copies=copies, force=force, steps=steps, range_test=range_test
    )
