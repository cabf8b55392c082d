"""Guess how a file's inputs read labelled data, for a trial without a configuration; what is given decides."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from onward.trainer.config.loading import Override, load_config
from onward.trainer.config.run_config import RunConfig
from onward.trainer.config.sections.data import DataConfig
from onward.trainer.config.sections.images import ImageConfig
from onward.trainer.config.sections.model import ModelConfig
from onward.trainer.data.formats.format_table import holds_images
from onward.trainer.data.reading import sources
from onward.trainer.data.reading.inferred_schema import infer_schema
from onward.trainer.data.schema.columns import BYTES, TEXT, Schema
from onward.trainer.data.schema.signature import Signature, read_training_signature
from onward.trainer.diagnostics.config_check import check_files_and_data
from onward.trainer.errors import DataError

LABELS = ("label", "labels", "target", "class", "y")
"""Names of columns that are taken for labels."""
IMAGE_COLUMNS = ("image", "img", "picture", "path", "file", "file_name", "filename")
"""Names of columns of text that are taken for the paths of images."""


def settings_for(model: Path, source: str, overrides: Sequence[Override]) -> RunConfig:
    """Return a configuration of a model and its data, in which `overrides` replace what is guessed.

    Raises ConfigError with everything in which the data does not fit the model.
    """
    raw: dict[str, Any] = {"model": {"path": model}, "data": {"source": source}, "train": {"num_steps": 1}}
    data = load_config(raw, overrides).data
    guessed = _guessed(data, read_training_signature(ModelConfig(path=model)), model)
    # what is given comes last, so that it replaces settings, and single ones in a guessed table
    return load_config(raw, [*guessed.items(), *overrides], check=check_files_and_data)


def _guessed(data: DataConfig, signature: Signature, model: Path) -> dict[str, Any]:
    """Return settings of [data] and [model] that fit the names, types and shapes."""
    found: dict[str, Any] = {}
    takes_images = any(info.shape is not None and len(info.shape) == 4 for info in signature.fed)
    if takes_images and data.image is None:
        try:
            kind = sources.locate(data.source, data.model_copy(update={"image": ImageConfig()})).format
        except DataError:
            kind = ""
        if holds_images(kind):
            return {"data.image": {}}
    schema = infer_schema(data)
    if takes_images and data.image is None and (column := image_column(schema)):
        found["data.image"] = {"column": column}
    label = next((name for name in (data.label, *LABELS) if name in schema), data.label)
    found["data.label"] = label
    tokenizer = model.parent / "tokenizer.json"
    takes_ids = any(info.name == "input_ids" for info in signature.fed)
    if data.text is None and takes_ids and tokenizer.exists():
        texts = [name for name, column in schema.items() if column.dtype == TEXT]
        texts = [name for name in texts if name != label]
        if texts and "input_ids" not in schema:
            found["data.text"] = {"tokenizer": str(tokenizer), "columns": "text" if "text" in texts else texts[0]}
    labels = schema.get(label) if isinstance(label, str) else None
    if labels is not None and labels.holds_numbers and np.dtype(labels.dtype).kind == "f":
        found["model.loss"] = "mse"
    if (stacked := stacked_columns(schema, signature, label)) and not data.inputs:
        found["data.inputs"] = stacked
    return found


def image_column(schema: Schema) -> str:
    encoded = [name for name, column in schema.items() if column.dtype == BYTES]
    if len(encoded) == 1:
        return encoded[0]
    # paths are texts, as other columns are: only the name of the column says that it names images
    texts = {name for name, column in schema.items() if column.dtype == TEXT}
    return next((name for name in IMAGE_COLUMNS if name in texts), "")


def stacked_columns(schema: Schema, signature: Signature, label: object) -> dict[str, list[str]]:
    """Return the one input of floats -> all columns of single numbers but the label, if it takes so many."""
    if len(signature.fed) != 1 or signature.fed[0].name in schema:
        return {}
    (info,) = signature.fed
    if "float" not in info.dtype or info.shape is None or len(info.shape) != 2:
        return {}
    scalars = {name: column for name, column in schema.items() if not column.shape}
    numbers = [name for name, column in scalars.items() if column.holds_numbers]
    numbers = [name for name in numbers if name != label]
    return {info.name: numbers} if info.shape[1] == len(numbers) else {}
