"""Compute the inputs of a model from raw rows, by preprocessing.json: bit for bit what training's evaluation read."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from .media import Array, How, audio, image

RECORD = "preprocessing.json"
LOG = "/log_probabilities"
"""The end of a name that training gives the logarithm of a classifier's own probabilities (LinearClassifier)."""
Rows = Mapping[str, Sequence[Any]]
"""Column of the training data -> its cells."""


def read_recipe(folder: Path | str) -> dict[str, Any]:
    """Return the content of the preprocessing.json in a directory."""
    content: dict[str, Any] = json.loads((Path(folder) / RECORD).read_text(encoding="utf-8"))
    return content


def raw_columns(described: Mapping[str, Any]) -> dict[str, str]:
    """Return raw column -> what it holds, in the order of the inputs."""
    text = described["text"]
    found = dict.fromkeys(text["columns"], "text") if text else {}
    for how in described["inputs"].values():
        if how["kind"] in ("image", "audio"):
            found[how["column"]] = how["kind"]
        for column in how.get("columns", ()):
            kind = "text" if how["dtype"] == "string" else "number"
            if column.get("categories"):
                kind = "integers" if column["integers"] else "category"
            # the first input that reads a column says what it holds
            found.setdefault(column["name"], kind)
    return found


def unusable(recipe: Mapping[str, Any], inputs: Sequence[str]) -> str:
    """Return why a file with these inputs cannot be fed by its preprocessing.json; "" if it can."""
    described = recipe["inputs"]
    if missing := [name for name in inputs if name not in described]:
        return (
            f"the file takes {few(inputs)}, but its preprocessing.json says how to compute "
            f"{few(list(described)) or 'no input'}: nothing is known of {few(missing)}"
        )
    if recipe["text"] and recipe["text"]["stride"] is not None:
        return "long texts were divided into windows (data.text.stride), so that a text has no one result"
    return ""


def few(names: Sequence[str]) -> str:
    """Return some names for a message."""
    return ", ".join(map(str, names[:12])) + (f" and {len(names) - 12} more" if len(names) > 12 else "")


def model_inputs(recipe: Mapping[str, Any], rows: Rows, folder: Path | str) -> dict[str, Array]:
    """Return input -> array [n, ...] of n rows for onnxruntime; `folder` has the tokenizer."""
    found = RawInputs(recipe, Path(folder)).compute(rows)
    return found | values(recipe["inputs"], len(next(iter(found.values()))))


def values(inputs: Mapping[str, How], count: int) -> dict[str, Array]:
    """Return the inputs that have one value for all rows, for so many rows."""
    found = {}
    for name, how in inputs.items():
        if how["kind"] == "value":
            shape = [count if length is None else length for length in how["shape"]]
            found[name] = np.broadcast_to(np.array(how["value"], how["dtype"]), shape)
    return found


class RawInputs:
    """Computes the inputs of rows that a preprocessing.json describes. The tokenizer, if any, is in `folder`."""

    def __init__(self, recipe: Mapping[str, Any], folder: Path) -> None:
        self._recipe = recipe
        self._folder = folder

    def compute(self, rows: Rows) -> dict[str, Array]:
        """Return input -> array [n, ...] of n rows. Raises ValueError for a cell that cannot be used."""
        found = {}
        tokens = self._encoded(rows) if self._recipe["text"] else None
        for name, how in self._recipe["inputs"].items():
            if how["kind"] == "image":
                found[name] = np.stack(_decoded(image, rows[how["column"]], how))
            elif how["kind"] == "tokens":
                found[name] = _token_values(tokens, how)
            elif how["kind"] == "audio":
                clips = _decoded(audio, rows[how["column"]], how)
                is_fixed = bool(how["samples"])
                found[name] = np.stack(clips) if is_fixed else padded(clips, how["pad_value"]).astype(how["dtype"])
            elif how["kind"] == "columns":
                found[name] = _table_values(rows, how)
        return found

    # -- texts

    @cached_property
    def _tokenizer(self) -> Any:
        """The tokenizer with training's truncation and no padding, and the direction of its windows."""
        from tokenizers import Tokenizer

        how = self._recipe["text"]
        tokenizer = Tokenizer.from_file(str(self._folder / how["file"]))
        # padding depends on the batch, and is done below, as in training
        tokenizer.no_padding()
        # the file's own truncation gives side and strategy, the recipe gives the length
        own = tokenizer.truncation or {}
        tokenizer.no_truncation()
        if how["max_length"]:
            kept = {key: own[key] for key in ("strategy", "direction") if key in own}
            tokenizer.enable_truncation(how["max_length"], stride=how["stride"] or 0, **kept)
        return tokenizer, own.get("direction")

    def _encoded(self, rows: Rows) -> list[Any]:
        how = self._recipe["text"]
        (tokenizer, direction), texts = self._tokenizer, []
        for name in how["columns"]:
            wrong = next((cell for cell in rows[name] if not isinstance(cell, str | list | tuple)), "")
            if wrong != "":
                raise ValueError(f"{name} is {'missing' if wrong is None else repr(wrong)[:40]}, not a text")
            texts.append([_lower(cell) for cell in rows[name]] if how["lowercase"] else rows[name])
        given: list[Any] = list(zip(*texts, strict=True)) if len(texts) == 2 else list(texts[0])
        if how["words"]:  # lists of words, or words with spaces between them
            given = [cell.split() if isinstance(cell, str) else list(cell) for cell in given]
        found = tokenizer.encode_batch(given, is_pretokenized=how["words"], add_special_tokens=how["special_tokens"])
        if how["stride"] is None:
            return list(found)
        # each window of a long text is a row of its own, in the order of the text
        step = -1 if direction == "left" else 1
        return [window for each in found for window in [each, *each.overflowing][::step]]


def _decoded(decode: Callable[[Any, How], Array], cells: Sequence[Any], how: How) -> list[Array]:
    """Return what each cell is decoded to, on all processors; an error names the column."""

    def named(cell: Any) -> Array:
        try:
            return decode(cell, how)
        except ValueError as error:
            raise ValueError(f"{how['column']}: {error}") from error

    if len(cells) < 2:
        return [named(cell) for cell in cells]
    with ThreadPoolExecutor(os.cpu_count()) as threads:  # decoders release Python's lock
        return list(threads.map(named, cells))


def _lower(cell: Any) -> Any:
    return cell.lower() if isinstance(cell, str) else [word.lower() for word in cell]


def _token_values(tokens: Any, how: How) -> Array:
    values = []
    for encoding in tokens:
        by_role = {
            "input_ids": encoding.ids,
            "attention_mask": [1] * len(encoding),
            "token_type_ids": encoding.type_ids,
            "position_ids": list(range(len(encoding))),
        }
        values.append(by_role[how["role"]])
    return padded(values, how["pad_value"], how["length"], how["pad_side"]).astype(how["dtype"])


def padded(values: Sequence[Any], pad_value: float, length: int | None = None, side: str = "right") -> Array:
    """Return rows of different lengths as one array [n, length], by default as long as the longest."""
    length = length or max(map(len, values))
    added = [[pad_value] * (length - len(row)) for row in values]
    return np.array([[*pad, *row] if side == "left" else [*row, *pad] for row, pad in zip(values, added, strict=True)])


# -- tables


def _table_values(rows: Rows, how: How) -> Array:
    columns = [_cells(rows[column["name"]], column, how) for column in how["columns"]]
    values = np.stack(columns, axis=-1) if how["stacked"] else columns[0]
    if how["shape"] == [1] and values.ndim == 1:
        values = values.reshape(-1, 1)
    return values


def _cells(given: Sequence[Any], column: How, how: How) -> Array:
    """Return what becomes of the cells of one column. Raises ValueError for a cell that training would refuse."""
    if how.get("as_it_is"):
        return _as_it_is(given, column, how)
    if how["dtype"] == "string":
        return np.array(given, object)
    if how["pad_value"] is not None:
        return padded(given, how["pad_value"]).astype(how["dtype"])
    if column["categories"]:
        # "" stands for missing and unknown cells, if training had any
        places = {text: number for number, text in enumerate(column["categories"])}
        return np.array([_category(cell, column, places) for cell in given]).astype(how["dtype"])
    values = _numbers(given, column)
    # before the gaps are filled
    if column["indicates_missing"]:
        return np.isnan(values.astype(np.float64)).astype(how["dtype"])
    if column["fill"]:
        values = values.astype(np.float64)
        values = np.where(np.isnan(values), np.array(column["fill"]).reshape(values.shape[1:]), values)
    _refuse_gaps(values, column)
    if column["log1p"]:
        values = np.log1p(values.astype(np.float64))
    if column["center"]:
        # in float64, as training standardises before it stores float32
        center, scale = (np.array(column[key]).reshape(values.shape[1:]) for key in ("center", "scale"))
        values = (values.astype(np.float64) - center) / scale
    if values.dtype == np.float64:
        values = values.astype(np.float32)
    return values.astype(how["dtype"])


def _refuse_gaps(values: Array, column: How) -> None:
    """Raise ValueError for a missing number that training has nothing for, and for an infinite one."""
    if values.dtype.kind == "f" and not np.isfinite(values).all():
        wrong = values[~np.isfinite(values)][0]
        if np.isnan(wrong):
            raise ValueError(f"{column['name']} is missing, and training had no value for missing cells of it")
        raise ValueError(f"{column['name']} is {wrong}")


def _numbers(given: Sequence[Any], column: How) -> Array:
    """Return cells as an array of numbers, with NaN where one is missing."""
    try:
        values = np.array(given)
        return values.astype(np.float64) if values.dtype.kind in "OUS" else values
    except (TypeError, ValueError):
        wrong = next((cell for cell in given if not isinstance(cell, int | float | list)), given[0])
        raise ValueError(f"{column['name']} holds {str(wrong)[:40]!r}, not a number") from None


def _as_it_is(cells: Sequence[Any], column: How, how: How) -> Array:
    """Return cells in the type of an input that has no preprocessing."""
    if how["dtype"] == "string":
        texts = []
        for cell in cells:
            is_missing = cell is None or cell != cell  # NaN is how tables show a missing cell
            texts.append("" if is_missing else str(cell))
        return np.array(texts, object)
    return _numbers(cells, column).astype(how["dtype"])


def _category(cell: Any, column: How, places: Mapping[str, int]) -> int:
    is_missing = cell is None or cell != cell  # NaN is not equal to itself
    try:
        # 3.0 and 3 are one category: tables make floats of columns with missing cells
        text = "" if is_missing else str(int(cell) if column["integers"] else cell)
    except (TypeError, ValueError):
        text = str(cell)
    if text not in places and "" not in places:
        known = ", ".join(list(places)[:10])
        what = "a missing cell" if is_missing else repr(str(cell)[:40])
        raise ValueError(f"{what} is no category of {column['name']}; training had {known}")
    return places.get(text, places.get("", -1))
