"""The functions behind `onward predict` and `onward evaluate`: run a trained file on rows of any data."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

from onward.flows.configuration import AnyPath, Overrides, changes_in
from onward.trainer.errors import ConfigError, DataError, say

if TYPE_CHECKING:
    import pandas as pd

    from onward.trainer.config.run_config import RunConfig
    from onward.trainer.export.measuring.predictions import Predictions
    from onward.trainer.export.measuring.raw_batches import RawBatch
    from onward.trainer.export.served.predictor import Predictor

BadRows = Literal["fail", "skip"]


@dataclass(frozen=True)
class OpenedModel:
    """A file that predicts, and what is known of it."""

    path: Path
    predictor: Predictor
    recipe: Mapping[str, Any] | None
    """The content of its preprocessing.json; None if it has none."""
    config: RunConfig | None
    """The settings of the run that has trained it, if the run is here."""


@dataclass(frozen=True)
class Evaluated:
    """What a file scores on labelled rows."""

    rows: int
    metrics: dict[str, float]
    """`loss` and the metrics; of several losses with the name of the output in front."""
    guessed: tuple[str, ...] = ()
    """What was guessed of a file without preprocessing.json, in words."""
    skipped: Mapping[str, str] = field(default_factory=dict)
    """Row -> why it was left out."""


def predict(
    source: AnyPath,
    data: Any,
    *,
    top: int = 0,
    inputs: Mapping[str, Sequence[str]] | None = None,
    batch_size: int = 0,
    bad_rows: BadRows = "fail",
) -> pd.DataFrame:
    """Return what a trained file predicts for raw rows: class and probability, or numbers, as a pandas DataFrame.

        onward.predict("last", "customers.csv")
        onward.predict("models:/digits@champion", "photos/", top=3)

    `source`: an ONNX file with its preprocessing.json, a run as `status` takes it, or a model in MLflow's registry.
    `data`: a table, a folder or a file of images, audio or texts, a glob; or a DataFrame with the columns of training.
    `top`: the best so many classes in place of the probability of each. `inputs`: of a file without
    preprocessing.json, input -> the columns that are stacked to it. `bad_rows`: "skip" leaves rows out that cannot be
    predicted. Raises ConfigError for a source that cannot predict, DataError with the columns that are missing and the
    rows that are bad.
    """
    import pandas as pd

    found = predictions(source, data, inputs=inputs, batch_size=batch_size, bad_rows=bad_rows)
    return pd.concat([pd.DataFrame(table) for table in found.tables(top)], ignore_index=True)


def evaluate(
    source: AnyPath,
    data: Any,
    overrides: Overrides = (),
    /,
    *,
    batch_size: int = 0,
    bad_rows: BadRows = "fail",
    report: Callable[[int, float], None] | None = None,
) -> Evaluated:
    """Return the loss and all metrics that fit it, measured on labelled rows; nothing is trained.

        onward.evaluate("last", "new.csv").metrics["accuracy"]
        onward.evaluate("resnet18.onnx", "photos/", {"data.image.mean": 0.5})

    Takes what `predict` takes; `data` has the column of the labels as well, or a folder for each class. `overrides`:
    settings for a file without preprocessing.json, as `onward doctor` takes them: what is not given is guessed, and
    `guessed` of the record says what. Of a detector `data.image.boxes` names the boxes of the images, relative to them,
    and `file/map` is that of what the file itself returns. Raises as `predict`, and ConfigError for a loss that
    labelled rows do not give.
    """
    from onward.trainer.export.measuring import evaluating
    from onward.trainer.export.measuring.predictions import Predictions, batch_rows

    _check_rows(batch_size, bad_rows)
    opened = open_model(source)
    guessed: tuple[str, ...] = ()
    changes = changes_in(overrides)
    if _finds_boxes(opened, changes):
        from onward.flows.box_evaluation import measure_boxes

        if not isinstance(data, str | os.PathLike):
            raise ConfigError("boxes are labels of images in a folder or a table; give its path")
        read = {"model", "data", "loss", "metrics"}
        known = opened.config.model_dump(mode="json", include=read) if opened.config else None
        measured = measure_boxes(opened.path, os.fspath(data), opened.recipe, known, changes)
        return Evaluated(*measured)
    if opened.recipe is None:
        opened, guessed = _guessed(opened, data, changes)
    elif overrides:
        raise ConfigError(f"{opened.path} has a preprocessing.json, which decides; leave out the settings")
    meanings = opened.predictor.meanings
    config = opened.config
    # the loss by which the run was trained, else one that fits the meaning of the output
    losses = evaluating.losses_of(meanings, config.losses if config else ())
    kinds = evaluating.label_kinds(losses, meanings)
    # a mask is an image, which the reader of raw rows does not take as a label
    masks = set(config.data.image.mask_columns if config and config.data.image else ())
    if masks & set(kinds):
        raise ConfigError(f"the labels {', '.join(masks)} are masks, which are not measured here; a run measures them")
    batches = raw_batches(opened, data, batch_rows(opened.predictor, batch_size), kinds)
    found = Predictions(opened.predictor, batches, skips=bad_rows == "skip", report=report)
    # the widest output: metrics of several classes need their number
    widths = [max(opened.predictor.row_shape(meaning["name"]), default=1) for meaning in meanings]
    chosen = evaluating.metrics_that_fit(losses, config.metrics if config else (), num_classes=max(widths))
    metrics = evaluating.evaluate(found, losses, meanings, chosen)
    return Evaluated(found.num_rows, metrics, guessed, dict(found.bad))


def _finds_boxes(opened: OpenedModel, changes: Sequence[Any]) -> bool:
    """Return whether a file is a detector: by its preprocessing.json, else by settings for boxes."""
    if opened.recipe:
        return any(meaning["holds"] == "objects" for meaning in opened.recipe["outputs"])
    keys = [each.partition("=")[0] if isinstance(each, str) else each[0] for each in changes]
    return "data.image.boxes" in keys


def _guessed(opened: OpenedModel, data: Any, changes: Sequence[Any]) -> tuple[OpenedModel, tuple[str, ...]]:
    """Return a file without preprocessing.json with a guessed one, and what was guessed in words."""
    from onward.trainer.export.served.predictor import Predictor, UnusableModel
    from onward.trainer.onnx_graph.files.onnxruntime_session import guarded_content
    from onward.trainer.rehearsal.trials.guessed_recipe import guess_recipe

    if not isinstance(data, str | os.PathLike):
        raise ConfigError(f"{opened.path} has no preprocessing.json; give a path, from which the labels can be guessed")
    # labels in the data let the guess be judged: the preprocessing with the best result is taken
    try:
        recipe, folder, config, words = guess_recipe(opened.path, os.fspath(data), changes)
    except ConfigError as error:
        if Path(data).is_dir():
            error.add_note("of a detector, --boxes PLACE names the boxes: a .json of COCO, or a folder of labels")
        raise
    try:
        predictor = Predictor(opened.path, recipe, folder, content=guarded_content(opened.path))
    except UnusableModel as error:
        raise ConfigError(f"{opened.path}: {error}") from error
    return OpenedModel(opened.path, predictor, recipe, config), words


def predictions(
    source: AnyPath,
    data: Any,
    *,
    inputs: Mapping[str, Sequence[str]] | None = None,
    batch_size: int = 0,
    bad_rows: BadRows = "fail",
    report: Callable[[int, float], None] | None = None,
) -> Predictions:
    """Return the predictions of `predict`, which are computed while they are read. Raises as `predict`."""
    from onward.trainer.export.measuring.predictions import Predictions, batch_rows

    _check_rows(batch_size, bad_rows)
    opened = open_model(source, inputs=inputs)
    batches = raw_batches(opened, data, batch_rows(opened.predictor, batch_size))
    return Predictions(opened.predictor, batches, skips=bad_rows == "skip", report=report)


def _check_rows(batch_size: int, bad_rows: str) -> None:
    if batch_size < 0 or bad_rows not in ("fail", "skip"):
        raise ConfigError(f"batch_size is {batch_size} and bad_rows {bad_rows!r}: 0 or more, and fail or skip")


def raw_batches(
    opened: OpenedModel, data: Any, size: int, labels: Mapping[str, str] = MappingProxyType({})
) -> Iterator[RawBatch]:
    """Return the rows of a file, a folder or a DataFrame for a model. Raises DataError for what is missing."""
    from onward.trainer.export.measuring.raw_batches import frame_batches, read_raw_batches

    columns = opened.predictor.columns
    if hasattr(data, "columns") and hasattr(data, "iloc"):  # a DataFrame, without importing pandas for the others
        return frame_batches(data, columns, size, labels=labels)
    if not isinstance(data, str | os.PathLike):
        raise ConfigError(f"data is {type(data).__name__}; give a path, or a pandas DataFrame")
    known = opened.config.data if opened.config else None
    try:
        return read_raw_batches(os.fspath(data), columns, size, labels=labels, data=known)
    except DataError as error:
        if opened.recipe is None:
            error.add_note(
                f"{opened.path.name} has no preprocessing.json, so that each input reads the column of its name: "
                "`--input INPUT=COLUMN,...` stacks others; images need one, which a run writes beside its file "
                f"(`onward init {opened.path.name} DATA`, then `onward run`)"
            )
        raise


def open_model(source: AnyPath, *, inputs: Mapping[str, Sequence[str]] | None = None) -> OpenedModel:
    """Open an ONNX file, the exported file of a run, or a registered model, with its preprocessing.

    Raises ConfigError when there is no such file, run or model, or it cannot predict.
    """
    from onward.trainer.export.measuring.predictions import content_of, recipe_of
    from onward.trainer.export.served.predictor import Predictor, UnusableModel

    path, config = _file_of(os.fspath(source))
    recipe, folder = recipe_of(path)
    if recipe and inputs:
        raise ConfigError(f"{folder}/preprocessing.json says which columns feed {path.name}; leave out inputs")
    try:
        opened_as = Predictor
        objects = (recipe or {}).get("objects")
        if objects and not objects["form"]:
            from onward.trainer.export.detections.decoding import DecodingPredictor

            opened_as = DecodingPredictor
        predictor = opened_as(path, recipe, folder, inputs=inputs, content=content_of(path, recipe))
    except UnusableModel as error:
        raise ConfigError(f"{source}: {error}") from error
    return OpenedModel(path, predictor, recipe, config)


def _file_of(source: str) -> tuple[Path, RunConfig | None]:
    """Return the ONNX file that a source names, and the settings of the run if it is one."""
    from onward.trainer.config.urls import url_of

    # a run may have any name but one that ends like a file
    if url_of(source) or source.lower().endswith(".onnx"):
        from onward.tasks.checks.registered_models import local_model

        path = local_model(Path(source))
        if not path.is_file():
            raise ConfigError(f"there is no file {path}")
        return path, None
    from onward.flows.run_state.runs import find_run
    from onward.trainer.run.directory import read_config
    from onward.trainer.run.records import ExportedModel, read_record

    run = find_run(source)
    if not run.exported.exists():
        raise ConfigError(
            f"run {run.root.name} has no exported file yet; `onward export {source} -o model.onnx` writes that of its "
            "newest checkpoint"
        )
    exported = read_record(run.exported, ExportedModel).path
    # the record has an absolute path, and the run directory may have been moved
    return exported if exported.is_file() else run.export / exported.name, read_config(run)


def print_progress(rows: int, elapsed_s: float) -> None:
    """Print how many rows are predicted, and how fast, on stderr."""
    say(f"{rows:,} rows, {rows / elapsed_s:,.0f} rows/s")
