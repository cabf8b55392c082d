"""Say how a model that is registered predicts from raw rows: by its preprocessing.json, and the files that read it."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from onward.infra.mlflow.model_package import RawColumn, RawPrediction
from onward.trainer.data.schema.signature import read_signature
from onward.trainer.export import served
from onward.trainer.export.served.raw_inputs import LOG, RECORD, raw_columns, read_recipe, unusable
from onward.trainer.export.served.result_columns import NoColumns, result_columns
from onward.trainer.onnx_graph.files.model_files import read_model
from onward.trainer.run.records import ExportedModel

Outputs = Mapping[str, tuple[int | None, ...] | None]
"""Output of the file -> the shape that it declares, None for a length that is not known."""
KINDS: dict[str, Literal["number", "text", "content"]] = {
    "image": "content",
    "audio": "content",
    "text": "text",
    "category": "text",
    "integers": "number",
    "number": "number",
}
"""What a raw column holds -> how MLflow describes it."""
PACKAGES = {
    "image": ("pillow",),
    "audio": ("soundfile", "scipy"),
    "tokens": ("tokenizers",),
    "columns": (),
    "value": (),
}
"""Kind of an input -> the packages that compute it."""


def raw_prediction_of(exported: ExportedModel) -> RawPrediction | None:
    """Return how an exported file predicts from raw rows; None if what is beside it does not say."""
    signature = read_signature(exported.path)
    tensors = set()
    for node in read_model(exported.path).graph.node:
        tensors.update(node.output)
    return raw_prediction(
        exported.preprocessing,
        [info.name for info in signature.inputs],
        {info.name: info.shape for info in signature.outputs},
        tensors,
    )


def raw_prediction(
    documents: Iterable[Path], inputs: Sequence[str], outputs: Outputs, tensors: Collection[str]
) -> RawPrediction | None:
    """Return how a file with these inputs and outputs predicts from raw rows; None if the documents beside it do not
    say, or training read an output that is none of the file's tensors."""
    record = next((path for path in documents if path.name == RECORD), None)
    if record is None:
        return None
    recipe = read_recipe(record.parent)
    read = [meaning["name"].removesuffix(LOG) for meaning in recipe["outputs"]]
    if unusable(recipe, inputs) or not set(read) <= set(tensors):
        return None
    columns = raw_columns(recipe)
    return RawPrediction(
        code=Path(served.__file__).parent,
        columns=tuple(RawColumn(name, KINDS[kind]) for name, kind in columns.items()),
        requirements=tuple(dict.fromkeys(["pandas", *_packages(recipe)])),
        example=_example(recipe, columns),
        predicted=tuple(_predicted(recipe, outputs)),
    )


def _predicted(recipe: dict[str, Any], outputs: Outputs) -> Iterator[RawColumn]:
    """Yield the columns that are predicted; none if that is known only when the file runs, or it has no columns."""
    zeros = {}
    for meaning in recipe["outputs"]:
        shape = outputs.get(meaning["name"].removesuffix(LOG))
        if not shape:
            return
        known = [length for length in shape[1:] if length is not None]
        if len(known) < len(shape) - 1:
            return
        zeros[meaning["name"]] = np.zeros((1, *known))
    with contextlib.suppress(NoColumns):
        for name, cells in result_columns(zeros, recipe["outputs"]).items():
            yield RawColumn(name, "text" if cells.dtype == object else "number")


def _packages(recipe: dict[str, Any]) -> Iterator[str]:
    for how in recipe["inputs"].values():
        yield from PACKAGES[how["kind"]]
        if how["kind"] == "image" and not how["antialias"]:
            yield from ("torch", "torchvision")


def _example(recipe: dict[str, Any], columns: dict[str, str]) -> dict[str, list[Any]]:
    """Return one row of the kind that training had, made of means and names: no row of the data leaves the machine.

    {} where some column cannot be made up.
    """
    known: dict[str, Any] = {}
    for how in recipe["inputs"].values():
        # an indicator of a missing value has the name of its column
        known |= {column["name"]: column for column in how.get("columns", ()) if not column["indicates_missing"]}
    found: dict[str, list[Any]] = {}
    for name, kind in columns.items():
        column = known.get(name, {})
        if kind == "text":
            found[name] = ["a text"]
        elif kind in ("category", "integers"):
            texts = [text for text in column["categories"] if text]
            if texts:
                found[name] = [int(texts[0]) if kind == "integers" else texts[0]]
        elif kind == "number":
            means: Sequence[float] = column.get("center") or column.get("fill") or []
            if len(means) == 1:
                found[name] = [means[0]]
    # the cells of windows are lists
    if recipe["window_length"] or not all(found.get(name) for name in columns):
        return {}
    return found
