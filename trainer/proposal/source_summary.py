"""Read what a source holds: its columns, and the values of those that may be labels or numbers of a table."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from onward.trainer.bounds import opened
from onward.trainer.config.sections.data import DataConfig
from onward.trainer.data.images.image_decoding import IMAGE_SUFFIXES, check_size
from onward.trainer.data.reading import sources
from onward.trainer.data.reading.inferred_schema import infer_schema
from onward.trainer.data.schema.allowed_files import allowed_files, content_of
from onward.trainer.data.schema.columns import BYTES, TEXT, Array, Column, Schema, Values, fit, joined
from onward.trainer.errors import DataError

if TYPE_CHECKING:
    from PIL.Image import Image

T = TypeVar("T")

MOST_ROWS = 20_000
"""Rows that are read at most; what is found in them is said to be of the first rows."""
MOST_BYTES = 64 << 20
"""About the most that these rows may take."""
MOST_VALUES = 4096
"""Numbers in one cell of a column whose values are read."""
FEW_FILES = 40
"""Images or masks that are opened."""


@dataclass(frozen=True)
class Facts:
    """What the first rows of a source hold."""

    data: DataConfig
    format: str
    schema: Schema
    values: Mapping[str, Values]
    """Column -> its values, of rows in which they are neither missing nor bad. Only columns of small cells."""
    missing: Mapping[str, int]
    """Column -> the number of rows in which its value is missing or bad."""
    num_rows: int
    num_training: int
    """Those of them that are not for evaluation."""
    is_all: bool
    """Whether the source has no more rows."""
    folder: Path
    """The folder that paths in its cells are relative to."""

    def column(self, name: str) -> Column:
        """Return a column."""
        return self.schema[name]

    def distinct(self, name: str) -> list[Any]:
        """Return the different values of a column of single values, sorted; [] if they were not read."""
        values = self.values.get(name)
        return [] if values is None else np.unique(np.asarray(values)).tolist()

    def joined(self, name: str) -> Array:
        """Return all numbers of a column in one array, [n]."""
        values = self.values[name]
        if isinstance(values, list):
            return np.concatenate([np.ravel(array) for array in values]) if values else np.empty(0)
        return np.ravel(values)

    @cached_property
    def numbers(self) -> list[str]:
        """Return the columns of single numbers."""
        scalars = {name: column for name, column in self.schema.items() if not column.shape}
        return [name for name, column in scalars.items() if column.holds_numbers]

    @cached_property
    def texts(self) -> list[str]:
        """Return the columns of texts."""
        return [name for name, column in self.schema.items() if column.dtype == TEXT]

    @property
    def rows(self) -> str:
        """Return in words which rows were read."""
        return f"{self.num_rows} rows" if self.is_all else f"the first {self.num_rows} rows"

    @cached_property
    def cells(self) -> Mapping[str, Sequence[Any]]:
        """Return column -> its first cells as they are, of columns of bytes and texts."""
        names = [name for name, column in self.schema.items() if column.dtype in (BYTES, TEXT)]
        # the first block alone: a few cells are enough to look at
        for block, _ in sources.read(self.data, names, names):
            return {name: list(block.cells[name][:FEW_FILES]) for name in names if name in block.cells}
        return {}

    def of_images(self, column: str, measure: Callable[[Image], T]) -> list[T]:
        """Return what `measure` says of the first images of a column; those that cannot be opened are left out."""
        from PIL import Image

        found = []
        allowed = allowed_files(self.data.source, self.data)
        for cell in self.cells.get(column, ()):
            content = content_of(cell)
            try:
                # a table of unknown origin must not name any file of the machine
                if not isinstance(content, bytes) and allowed.refusal_of_cell(self.folder, str(content)):
                    continue
                source = io.BytesIO(content) if isinstance(content, bytes) else opened(self.folder / str(content))
                with source, Image.open(source) as image:
                    check_size(image)
                    found.append(measure(image))
            # the errors of Pillow's decoders for damaged files have no common base class
            except Exception:
                continue
        return found

    def image_sizes(self, column: str) -> list[tuple[int, int]]:
        """Return height and width of the first images of a column."""
        return self.of_images(column, lambda image: (image.height, image.width))

    def looks_like_images(self, column: str) -> bool:
        """Return whether the first cells of a column are encoded images, or paths of such."""
        cells = self.cells.get(column, ())
        paths = [cell for cell in cells if isinstance(cell, str)]
        # a path says by its suffix what it names, also where the file itself may not be read
        if paths:
            return all(path.lower().endswith(IMAGE_SUFFIXES) for path in paths)
        return bool(cells) and bool(self.image_sizes(column))


def read_facts(data: DataConfig) -> Facts:
    """Read the columns of a source and its first rows. Raises DataError for a source without rows."""
    source = sources.locate(data.source, data)
    schema = infer_schema(data)
    # boxes are neither texts nor numbers, and are looked at where they are read
    boxes = data.image.box_column if data.image else ""
    small = [name for name, column in schema.items() if _has_small_cells(column)]
    small = [name for name in small if name != boxes]
    texts = [name for name in small if schema[name].dtype == TEXT]
    parts: dict[str, list[Values]] = {name: [] for name in small}
    missing = dict.fromkeys(small, 0)
    num_rows = 0
    num_training = 0
    num_bytes = 0
    is_all = True
    # a column of large cells alone: only to count its rows
    names = small or list(schema)[:1]
    for block, held_out in sources.read(data, names, texts):
        count = len(held_out)
        for name in small:
            # a JSON key that no row of this block has
            cells = block.cells.get(name, [None] * count)
            values, bad = fit(cells, schema[name], block)
            good = np.ones(count, bool)
            good[list(bad)] = False
            if schema[name].dtype == TEXT:
                good &= np.asarray(values) != ""  # of a CSV file an empty cell is a text
            if isinstance(values, list):
                parts[name].append([values[row] for row in np.flatnonzero(good)])
            else:
                parts[name].append(values[good])
            missing[name] += count - int(good.sum())
            num_bytes += count * math.prod(schema[name].shape) * 8
        num_rows += count
        num_training += int((~held_out).sum())
        # after whole blocks: the last one may go beyond the limits, but all columns have the same rows
        if num_rows >= MOST_ROWS or num_bytes >= MOST_BYTES:
            is_all = False
            break
    if not num_rows:
        raise DataError(f"{data.source} holds no row to train on")
    first = source.files[0][1] if source.files else Path()
    values_of = {name: joined(arrays) for name, arrays in parts.items()}
    return Facts(data, source.format, schema, values_of, missing, num_rows, num_training, is_all, first.parent)


def _has_small_cells(column: Column) -> bool:
    """Return whether the values of a column are read: texts, and at most MOST_VALUES numbers in a cell."""
    if column.dtype == TEXT:
        return True
    return column.holds_numbers and math.prod(column.shape) <= MOST_VALUES
