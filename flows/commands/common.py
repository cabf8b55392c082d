"""Arguments and output that several commands share."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option
from typer.core import TyperCommand

from onward.flows.examples import MODELS
from onward.trainer.errors import ConfigError, shown

MAX_SEED = 2**32 - 1
"""The greatest seed that NumPy takes, too."""


Days = Annotated[float, Option(min=0.0, max=36_500.0, help="Keep what was changed or used in this many days.")]
Json = Annotated[bool, Option("--json", help="Print one JSON object on stdout, and everything else on stderr.")]
ConfigFile = Annotated[
    str,
    Argument(
        metavar="CONFIG",
        help="The TOML file of the run, for example digits.toml, of which more may follow; or the name of an example: "
        f"{' or '.join(sorted(MODELS))}.",
    ),
]
Overrides = Annotated[
    list[str] | None,
    Argument(
        metavar="[CONFIG...] SECTION.KEY=VALUE",
        help="Further TOML files, of which later ones win; and settings that replace those of all files, each a line "
        "of TOML, for example train.num_epochs=2.",
    ),
]
Boxes = Annotated[
    Path | None,
    Option(help="Object detection: a .json of COCO, or a folder of YOLO's .txt or Pascal VOC's .xml files."),
]
Profile = Annotated[str, Option(metavar="NAME", help="Also take the tables profiles.NAME of the files.")]
StopOverrides = Annotated[
    list[str] | None,
    Argument(
        metavar="STOP.KEY=VALUE",
        help="Settings of the table stop that replace those of the run, for example stop.max_hours=16.",
    ),
]
ModelFile = Annotated[Path, Argument(metavar="MODEL.onnx", help="The ONNX file to inspect.")]
All = Annotated[bool, Option("--all", help="Print every row; long tables are shortened otherwise.")]


class SettingsCommand(TyperCommand):
    """A command that takes SECTION.KEY=VALUE: an option that it does not have is answered with the setting it means."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the words of the command line. Raises the errors of Typer, which prints them."""
        words = [*args]  # Typer takes them away one by one
        try:
            return super().parse_args(ctx, args)
        except Exception as error:
            option = getattr(error, "option_name", "")
            if type(error).__name__ == "NoSuchOption" and hasattr(error, "message"):
                error.message += _as_setting(option, words)
            raise


def with_boxes(overrides: Sequence[str] | None, boxes: Path | None) -> list[str]:
    """Return settings with the place of boxes that the option names, relative to the working directory."""
    # the string of JSON is one of TOML
    return [*(overrides or ()), *([f"data.image.boxes={json.dumps(str(boxes.resolve()))}"] if boxes else [])]


def _as_setting(option: str, words: Sequence[str]) -> str:
    """Return a clause with the setting that an option such as --epochs was meant to be, and its value; "" for none."""
    from onward.trainer.config.run_config import RunConfig
    from onward.trainer.config.unknown_settings import meant_settings

    meant = meant_settings(option.lstrip("-"), RunConfig)
    if not meant:
        return ""
    value = "VALUE"
    for word, following in pairwise([*words, "-"]):
        if word.startswith(f"{option}="):
            value = word.removeprefix(f"{option}=")
        elif word == option and not following.startswith("-"):
            value = following
    return f". Settings are written without dashes: {' or '.join(f'{setting}={value}' for setting in meant)}"


def names_of_runs(incomplete: str) -> list[str]:
    """Return what a shell completes RUN with: the names of runs that begin as typed, the newest first, and `last`."""
    from onward.flows.run_state.run_index import listed_runs

    names = [status["name"] for _, status in listed_runs() if status["name"]]
    return [name for name in dict.fromkeys([*names, "last"]) if name.startswith(incomplete)]


RunName = Annotated[
    str,
    Argument(
        metavar="RUN",
        autocompletion=names_of_runs,
        help="The run: its name, such as digits-14; that of its configuration, for the newest of it; the end of its "
        "id; its directory; or last for the newest of all.",
    ),
]
Output = Annotated[Path, Option("--output", "-o", help="The ONNX file to write, for example model.onnx.")]


def layers_of(config: str, words: list[str] | None) -> tuple[list[str], list[str]]:
    """Return the files (or examples) of a command line and its overrides; a word without "=" is a file."""
    words = words or []
    overrides = [word for word in words if "=" in word]
    layers = [word for word in words if "=" not in word]
    wrong = []
    for word in layers:
        # a name with .toml may be absent, which the loading reports with the places where it looked
        if not (word.endswith(".toml") or word in MODELS or Path(word).is_file()):
            wrong.append(word)
    if wrong:
        raise ConfigError(
            f"{shown(repr(word))} is neither a setting, SECTION.KEY=VALUE, nor a TOML file" for word in wrong
        )
    return [config, *layers], overrides


def print_facts(facts: dict[str, Any], *, as_json: bool) -> None:
    """Print names and values, as a table or as one JSON object."""
    if as_json:
        print_json(facts)
        return
    from onward.flows.shown.printed_table import table

    table((key.replace("_", " "), as_text(value)) for key, value in facts.items())


def as_text(value: Any) -> str:
    """Return a value as people write it: lists and tables without the brackets of Python."""
    if isinstance(value, dict):
        return ", ".join(f"{key} {as_text(each)}" for key, each in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(map(as_text, value))
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def print_json(facts: dict[str, Any]) -> None:
    # `default`: paths and enums are printed as text.
    print(json.dumps(facts, indent=2, default=str))
