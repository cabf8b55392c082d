"""The command init: write a configuration for a model and its data."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

from typer import Argument, Exit, Option

from onward.flows import first_config
from onward.flows.commands.common import Boxes, Json, Overrides, print_json, with_boxes


def init(
    model: Annotated[Path, Argument(metavar="MODEL.onnx", help="The ONNX file to train.")],
    data: Annotated[str, Argument(metavar="DATA", help="A file, a folder or a glob, as data.source.")],
    overrides: Overrides = None,
    output: Annotated[Path, Option("--output", "-o", help="The configuration to write.")] = Path("config.toml"),
    force: Annotated[bool, Option("--force", help="Replace the configuration if there is one.")] = False,
    no_try: Annotated[bool, Option("--no-try", help="Train no steps as a proof.")] = False,
    steps: Annotated[int, Option(help="Steps of the proof, for a minute at most.", min=1, max=100_000)] = 20,
    range_test: Annotated[
        bool, Option("--range-test", help="Find the learning rate by a range test of at most 60 steps.")
    ] = False,
    boxes: Boxes = None,
    as_json: Json = False,
) -> None:
    """Write a configuration for a model and data, and prove it by 20 steps.

    Looks at the inputs and outputs of the file and at the data, and guesses columns, preprocessing, loss, head, batch
    size and learning rate. The file has each guess with its reason. What cannot be decided is asked in it: a setting
    that is "?", with its choices above; no run starts with such a file, and this command ends with status 2.
    """
    from onward.flows.shown.inspection_report import show_proposed

    found = first_config.init(
        model,
        data,
        with_boxes(overrides, boxes),
        output=output,
        force=force,
        steps=0 if no_try else steps,
        range_test=range_test,
    )
    to_train = f"onward run {shlex.quote(str(output))}"
    if as_json:
        print_json({**found.model_dump(mode="json"), "to_train_it": to_train})
    else:
        show_proposed(found, to_train)
    if found.questions or found.refused:
        raise Exit(2)
