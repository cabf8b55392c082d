"""Arguments and output that several commands share."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from onward.flows.examples import MODELS

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout, and everything else on stderr.")]
ConfigFile = Annotated[
    str,
    typer.Argument(
        metavar="CONFIG",
        help="The TOML file of the run, for example digits.toml; or the name of an example: "
        f"{' or '.join(sorted(MODELS))}.",
        show_default=False,
    ),
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="SECTION.KEY=VALUE",
        help="Settings that replace those of the file, each a line of TOML, for example train.num_epochs=2.",
        show_default=False,
    ),
]
StopOverrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="STOP.KEY=VALUE",
        help="Settings of [stop] that replace those of the run, for example stop.max_hours=16.",
        show_default=False,
    ),
]
ModelFile = Annotated[Path, typer.Argument(metavar="MODEL.onnx", help="The ONNX file to inspect.", show_default=False)]
All = Annotated[bool, typer.Option("--all", help="Print every row; long tables are shortened otherwise.")]
RunName = Annotated[
    str,
    typer.Argument(
        metavar="RUN",
        help="The run: its name, the first characters of its id, its directory, or last for the newest one.",
    ),
]
Output = Annotated[
    Path, typer.Option("--output", "-o", help="The ONNX file to write, for example model.onnx.", show_default=False)
]


def print_facts(facts: dict[str, Any], *, as_json: bool) -> None:
    """Print names and values, as a table or as one JSON object."""
    if as_json:
        print_json(facts)
        return
    from onward.flows.report import table

    table((key.replace("_", " "), str(value)) for key, value in facts.items())


def print_json(facts: dict[str, Any]) -> None:
    # `default`: paths and enums are printed as text.
    print(json.dumps(facts, indent=2, default=str))
