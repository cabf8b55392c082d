"""Convert columns of a CSV file, as pandas has split them, to numbers or texts."""

from __future__ import annotations

from typing import Any

import numpy as np

from onward.trainer.data.formats.csv_dialect import MISSING, Dialect
from onward.trainer.data.schema.columns import Array, Cells


def texts_of(series: Any) -> Cells:
    """Return a pandas column of text; as bytes the cells whose bytes are not UTF-8, so that they are reported."""
    return [text.encode() if "\ufffd" in text else text for text in _objects(series)]


def of_numbers(frame: Any) -> dict[str, Array]:
    """Return the columns of a pandas frame that hold numbers only: name -> array [rows].

    Those of one type are taken out together: taken one by one, 20,000 columns of one row take a second.
    """
    found = dict[str, Array]()
    kinds = frame.dtypes.to_numpy()
    for kind in {kind for kind in kinds if kind.kind in "biuf"}:
        chosen = kinds == kind
        found |= dict(zip(frame.columns[chosen], frame.loc[:, chosen].to_numpy().T, strict=True))
    return found


def cells_of(series: Any, dialect: Dialect) -> Cells:
    """Return a pandas column as an array if all cells are numbers, else as a list of numbers and texts."""
    import pandas as pd

    if series.dtype.kind in "biuf":
        return np.asarray(series)
    written = _localised(series, dialect) if dialect.is_localised else series
    parsed = pd.to_numeric(written, errors="coerce")
    found = parsed.to_numpy(np.float64, na_value=np.nan)
    wrong = np.flatnonzero(np.isnan(found))
    if not wrong.size:
        return np.asarray(parsed)
    # numbers stay numbers; the text of other cells is kept, for messages
    cells = found.astype(object)
    texts = [cell if isinstance(cell, str) else "" for cell in _objects(series.iloc[wrong])]
    cells[wrong] = [None if text.strip() in MISSING else text for text in texts]
    return list(cells)


def _objects(series: Any) -> Array:
    """Return the cells as Python's objects, which pandas makes twenty times as fast as its iterator."""
    return np.asarray(series.to_numpy(object))


def _localised(series: Any, dialect: Dialect) -> Any:
    """Return numbers in Python's notation; "" for what is no number in the file's."""
    text = series.str.strip()
    text = text.where(text.str.fullmatch(dialect.number), "")
    if dialect.thousands:
        text = text.str.replace(dialect.thousands, "", regex=False)
    return text.str.replace(dialect.decimal, ".", regex=False)
