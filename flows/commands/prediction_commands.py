"""Commands that run a trained file on rows of any data: predict, evaluate."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option

from onward.flows import predict as api
from onward.flows.commands.common import Boxes, Json, print_facts, print_json, with_boxes
from onward.trainer.errors import ConfigError, say

SHOWN_ROWS = 20
"""Rows that are printed without a file to write them into."""

Source = Annotated[
    str,
    Argument(
        metavar="FILE|RUN|MODEL",
        help="An exported ONNX file, a run as in `onward status`, for example last, or models:/NAME@ALIAS.",
    ),
]
Data = Annotated[
    str,
    Argument(
        metavar="DATA",
        help="A table (CSV, Parquet, JSON lines), a folder or a file of images, audio or texts, or a glob.",
    ),
]
Inputs = Annotated[
    list[str] | None,
    Option(
        "--input",
        metavar="INPUT=COLUMN,...",
        help="Of a file without preprocessing.json: the columns that are stacked to an input. Repeatable.",
    ),
]
BatchSize = Annotated[
    int, Option(min=0, max=1_000_000, help="Rows at a time; 0 = 32 images or texts, 1024 rows of numbers.")
]
OnBadRows = Annotated[api.BadRows, Option(help="Fail with all rows that cannot be read, or skip them.")]


def predict(
    source: Source,
    data: Data,
    output: Annotated[
        str,
        Option(
            "--output",
            "-o",
            help="The file to write: .csv, .parquet, .npz with the outputs of the file as they are, or .json with "
            "boxes of COCO. A folder, whose name ends in /, gets masks as PNG files.",
        ),
    ] = "",
    top: Annotated[
        int,
        Option(
            min=0, max=1000, help="Give the best so many classes, not the probability of each; or boxes of an image."
        ),
    ] = 0,
    inputs: Inputs = None,
    batch_size: BatchSize = 0,
    bad_rows: OnBadRows = "fail",
    overwrite: Annotated[bool, Option("--overwrite", help="Replace the file if there is one.")] = False,
    as_json: Json = False,
) -> None:
    """Predict the class and its probability, numbers or boxes for each row of some data.

    Rows are computed as training computed them, by the preprocessing.json of the exported file: names of columns,
    missing cells, scaling, categories, images, tokens. Rows are named by their number, images by their file. Boxes are
    in pixels of the images as they are. Without --output the first rows are printed. Needs no torch, unless the file
    returns raw outputs.
    """
    from onward.trainer.export.measuring.predictions import output_problems, write_predictions
    from onward.trainer.export.preprocessing.mask_files import write_masks

    path = Path(output)
    into_folder = output.endswith("/")
    # before anything is computed
    if output and not into_folder and (problems := output_problems(path, overwrite=overwrite)):
        raise ConfigError(problems)
    found = api.predictions(
        source, data, inputs=parsed_inputs(inputs), batch_size=batch_size, bad_rows=bad_rows, report=api.print_progress
    )
    if output:
        if into_folder:
            write_masks(path, found, overwrite=overwrite)
        else:
            write_predictions(path, found, top=top, overwrite=overwrite)
        print_facts({"path": output, "rows": found.num_rows, **_skipped(found.bad)}, as_json=as_json)
    else:
        _print_rows(found, top, as_json=as_json)


def _skipped(bad: dict[str, str]) -> dict[str, Any]:
    return {"skipped": [f"{row}: {why}" for row, why in bad.items()]} if bad else {}


def _print_rows(found: Any, top: int, *, as_json: bool) -> None:
    """Print the first rows as a table, or as JSON."""
    from onward.flows.shown.printed_table import table

    rows = (row for columns in found.tables(top) for row in _rows_of(columns))
    # one more, to know whether there are more; the rest is not computed
    first = list(islice(rows, SHOWN_ROWS + 1))
    if as_json:
        print_json({"predictions": first[:SHOWN_ROWS], "more": len(first) > SHOWN_ROWS, **_skipped(found.bad)})
        return
    if not first:
        print(f"no box was found in {found.num_rows} images")
        return
    heads = tuple(first[0])
    table((tuple(map(_cell, row.values())) for row in first[:SHOWN_ROWS]), heads=heads)
    for row, why in found.bad.items():
        say(f"skipped {row}: {why}")
    if len(first) > SHOWN_ROWS:
        print(f"... -o FILE.csv writes all rows, not only the first {SHOWN_ROWS}")


def _rows_of(columns: dict[str, Any]) -> list[dict[str, Any]]:
    plain = [cells.tolist() if hasattr(cells, "tolist") else cells for cells in columns.values()]
    return [dict(zip(columns, row, strict=True)) for row in zip(*plain, strict=True)]


def _cell(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def parsed_inputs(words: list[str] | None) -> dict[str, list[str]]:
    """Return input -> columns of the words INPUT=COLUMN,... Raises ConfigError for a word of another form."""
    inputs = {}
    wrong = []
    for word in words or ():
        name, _, columns = word.partition("=")
        if name and columns:
            inputs[name] = columns.split(",")
        else:
            wrong.append(word)
    if wrong:
        raise ConfigError(f"--input {word!r} is not of the form INPUT=COLUMN,COLUMN" for word in wrong)
    return inputs


def evaluate(
    source: Source,
    data: Data,
    overrides: Annotated[
        list[str] | None,
        Argument(
            metavar="SECTION.KEY=VALUE",
            help="Settings for a file without preprocessing.json, such as data.label=price model.loss=mse.",
        ),
    ] = None,
    boxes: Boxes = None,
    batch_size: BatchSize = 0,
    bad_rows: OnBadRows = "fail",
    as_json: Json = False,
) -> None:
    """Measure the loss and all metrics that fit it on labelled rows. Nothing is trained.

    Rows are computed as `onward predict` computes them. The label is the column that training had; of images and audio
    in folders the first folder. A file without preprocessing.json is measured as `onward init` would guess it, and the
    command says how. Of a detector --boxes names the boxes of these images.
    """
    found = api.evaluate(
        source, data, with_boxes(overrides, boxes), batch_size=batch_size, bad_rows=bad_rows, report=api.print_progress
    )
    skipped = _skipped(dict(found.skipped))
    if as_json:
        print_json({"rows": found.rows, "metrics": found.metrics, "guessed": found.guessed, **skipped})
        return
    for line in found.guessed:
        say(line)
    print_facts({"rows": found.rows, **found.metrics, **skipped}, as_json=False)
