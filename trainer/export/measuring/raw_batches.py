"""Read raw rows for a prediction: a table, files of images or audio, or texts, in batches.

data                                   rows are named by        columns
table.csv, .parquet, .jsonl, a glob    row (and file)           as in the table; a cell may name an image or audio file
the same of a run on time series       window, from 0 on        windows over the rows, as training made them
photo.jpg, photos/                     file                     the one column of images (or audio) of the model
reviews.txt                            row: the line            the one column of texts of the model
texts/ with .txt files                 file                     likewise, a text for each file
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from onward.trainer.bounds import CONTENT_BYTES, read_bounded
from onward.trainer.config.sections.data import DataConfig
from onward.trainer.config.sections.tables import TableConfig
from onward.trainer.data.audio.audio_decoding import AUDIO_SUFFIXES
from onward.trainer.data.formats.format_table import suffixes
from onward.trainer.data.formats.text_files import text_blocks
from onward.trainer.data.images.image_decoding import IMAGE_SUFFIXES
from onward.trainer.data.reading import sources
from onward.trainer.data.schema.allowed_files import refuse_outside
from onward.trainer.data.schema.columns import BYTES, Block, Cells, Column, fit
from onward.trainer.errors import DataError, few

SUFFIXES_OF = {"image": IMAGE_SUFFIXES, "audio": AUDIO_SUFFIXES, "text": (".txt",)}
"""What a raw column holds -> the names of files that are rows by themselves."""
MAX_NAMED = 10


@dataclass
class RawBatch:
    """Some rows before any preprocessing."""

    ids: dict[str, list[Any]]
    """Column that names the rows, `row` or `file` -> its cells."""
    cells: dict[str, list[Any]]
    """Column -> its cells."""
    names: list[str]
    """What messages call each row."""
    bad: dict[str, str] = field(default_factory=dict)
    """Row -> why it could not be read; such rows are in none of the others."""

    def leave_out(self, bad: Mapping[int, str]) -> None:
        """Move some rows to `bad`. bad: the place of each row, and why."""
        self.bad |= {self.names[at]: why for at, why in bad.items()}
        kept = [at for at in range(len(self.names)) if at not in bad]
        self.names = [self.names[at] for at in kept]
        # in place, since the batch is one object for whoever reads it
        for columns in (self.ids, self.cells):
            columns.update({name: [cells[at] for at in kept] for name, cells in columns.items()})


def read_raw_batches(
    source: str,
    columns: Mapping[str, str],
    size: int,
    *,
    labels: Mapping[str, str] = MappingProxyType({}),
    data: DataConfig | None = None,
) -> Iterator[RawBatch]:
    """Return an iterator over the rows of a file, a folder or a glob, `size` rows at a time.

    columns: those that the model takes, and what they hold (`Predictor.columns`). labels: columns to read as well, and
    what they hold; of files in folders the first folder. data: the settings by which the run has read tables. Raises
    DataError with everything that is missing, before the first row is given.
    """
    path = Path(source)
    kinds = set(columns.values())
    # files are rows only where the model takes what a file holds
    of_files = next((kind for kind in SUFFIXES_OF if kind in kinds), "")
    if of_files and (files := _files(path, SUFFIXES_OF[of_files])):
        return _batches_of_files(path, files, columns, size, labels)
    # everything else is a table, in one file or several
    _check_there(source, columns)
    return _batches_of_table(_table_settings(source, data, with_future=bool(labels)), columns, size, labels)


def _files(path: Path, suffixes: Sequence[str]) -> list[tuple[str, Path]]:
    """Return (name inside the source, path) of the files with these suffixes ("" = any), sorted by name."""
    if path.is_file():
        return [(path.name, path)] if path.suffix.lower() in suffixes else []
    found = []
    for folder, folders, names in os.walk(path):
        # in place, so that os.walk does not enter hidden folders
        folders[:] = [name for name in folders if not name.startswith(".")]
        files = [Path(folder, name) for name in names if not name.startswith(".")]
        if "" not in suffixes:
            files = [file for file in files if file.suffix.lower() in suffixes]
        found += [(str(file.relative_to(path)), file) for file in files]
    return sorted(found)


def _check_there(source: str, columns: Mapping[str, str]) -> None:
    path = Path(source)
    if set("*?[") & set(source) and not path.exists():
        return  # a pattern, which the reader looks for
    if not path.exists():
        raise DataError(f"there is no file or folder {source}")
    # a model of images takes image files, too, so that the message names these
    own = sorted({suffix for kind in columns.values() for suffix in SUFFIXES_OF.get(kind, ())})
    known = ", ".join([*suffixes(), *own])
    # a compressed table is told from its inner suffix by the reader
    is_table = path.suffix.lower() in suffixes() or path.name.lower().endswith(".gz")
    if path.is_file() and not is_table:
        raise DataError(f"{source} ends in {path.suffix!r}: this model predicts rows of files that end in {known}")
    if path.is_dir() and not _files(path, [*suffixes(), ".gz"]):
        counts = Counter(file.suffix.lower() or "without suffix" for _, file in _files(path, [""]))
        shown = ", ".join(f"{count} {suffix}" for suffix, count in counts.most_common(5)) or "none"
        raise DataError(
            f"{source} has no file that ends in {known}, but {shown}; the model takes {few(columns, MAX_NAMED)}"
        )


# -- files that are rows


def _batches_of_files(
    source: Path, files: list[tuple[str, Path]], columns: Mapping[str, str], size: int, labels: Mapping[str, str]
) -> Iterator[RawBatch]:
    if len(columns) > 1:
        names = ", ".join(f"{name} ({kind})" for name, kind in columns.items())
        raise DataError(f"the model takes the columns {names}: files alone have one of them; give a table with all")
    # links in a folder could lead to any file of the user
    refuse_outside(str(source), files, DataConfig(source=str(source)))
    ((column, kind),) = columns.items()
    # classes are named by the folders of files, as in training
    without_folder = [name for name, _ in files if len(Path(name).parts) < 2]
    if labels and without_folder:
        raise DataError(f"{len(without_folder)} files are in no folder that says their class: {few(without_folder)}")
    if kind == "text" and source.is_file():
        return _lines(files[0][1], column, size)
    return _contents(files, column, kind, size, labels)


def _lines(path: Path, column: str, size: int) -> Iterator[RawBatch]:
    for block in text_blocks(path, "line", column):
        numbers = block.index.tolist()
        texts = block.cells[column]
        bad = {block.where(at): why for at, why in block.bad.items()}
        # once at least: a block of bad rows alone still reports them
        for first in range(0, max(len(numbers), 1), size):
            part = slice(first, first + size)
            names = [block.where(at) for at in numbers[part]]
            yield RawBatch({"row": numbers[part]}, {column: list(texts[part])}, names, {} if first else bad)


def _contents(
    files: list[tuple[str, Path]], column: str, kind: str, size: int, labels: Mapping[str, str]
) -> Iterator[RawBatch]:
    for first in range(0, len(files), size):
        batch = RawBatch({"file": []}, {name: [] for name in (column, *labels)}, [])
        for name, path in files[first : first + size]:
            try:
                # bounded, since a folder may hold a file that does not fit into memory
                content: Any = read_bounded(path, CONTENT_BYTES)
                content = content.decode() if kind == "text" else content
            except (OSError, UnicodeDecodeError) as error:
                reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
                batch.bad[str(path)] = f"cannot be read: {reason}"
                continue
            batch.ids["file"].append(name)
            batch.names.append(str(path))
            batch.cells[column].append(content)
            for label in labels:
                batch.cells[label].append(Path(name).parts[0])
        yield batch


# -- tables


def _table_settings(source: str, data: DataConfig | None, *, with_future: bool) -> DataConfig:
    """Return settings that read all rows of `source` in order, as the run has read its tables.

    Windows over time series have no future, which is to be predicted, unless it is read as labels.
    """
    # how tables are read, and nothing else of the run's data: these are other rows
    table = data.table if data else TableConfig()
    if table.window and not with_future:
        table = table.model_copy(update={"window": table.window.model_copy(update={"horizon": 0})})
    allowed = data.files_from if data else ()
    return DataConfig(source=source, table=table, files_from=allowed, evaluation_fraction=0.0)


def _batches_of_table(
    data: DataConfig, columns: Mapping[str, str], size: int, labels: Mapping[str, str]
) -> Iterator[RawBatch]:
    wanted = [*columns, *(name for name in labels if name not in columns)]
    located = sources.locate(data.source, data)
    # the first block has all columns: what is missing is said before a row is predicted
    first = next(iter(sources.first_blocks(data)), None)
    if first is None or not (len(first.index) or first.bad):
        raise DataError(f"{data.source} holds no rows")
    if missing := [name for name in wanted if name not in first.cells]:
        raise DataError(f"{data.source} has no column {few(missing, MAX_NAMED)}; it has {few(first.cells, MAX_NAMED)}")
    # labels first, so that what the model takes decides the type of a column that is both
    texts = [name for name, kind in {**labels, **columns}.items() if kind in ("text", "category")]
    # their cells may be paths, which are replaced by the content of the files
    encoded = [name for name in columns if columns[name] in ("image", "audio")]
    many = len(located.files) > 1 and not data.table.window

    def batches() -> Iterator[RawBatch]:
        for block in _blocks(data, wanted, texts):
            bad = {block.where(at): why for at, why in block.bad.items()}
            # likewise once at least, for the bad rows
            for start in range(0, max(len(block.index), 1), size):
                yield _part(block, slice(start, start + size), wanted, encoded, many=many, bad={} if start else bad)

    return batches()


def _blocks(data: DataConfig, wanted: list[str], texts: list[str]) -> Iterator[Block]:
    if data.table.window:  # all windows, of which none are held out
        yield from sources.first_blocks(data, texts)
        return
    for block, _ in sources.read(data, wanted, texts):
        yield block


def _part(
    block: Block, part: slice, wanted: Sequence[str], encoded: Sequence[str], *, many: bool, bad: dict[str, str]
) -> RawBatch:
    """Return some rows of a block, with the content of the files that cells name."""
    numbers = block.index[part]
    cells: dict[str, Cells] = {name: block.cells[name][part] for name in wanted if name in block.cells}
    # a later file of a glob may lack a column: its cells are missing values
    cells |= {name: [None] * len(numbers) for name in wanted if name not in block.cells}
    # a row is left out if one of its files cannot be read
    good = np.ones(len(numbers), bool)
    for name in encoded:
        values, wrong = fit(cells[name], Column(name=name, dtype=BYTES), block) if len(numbers) else ([], {})
        cells[name] = values
        for at, why in wrong.items():
            good[at] = False
            bad.setdefault(block.where(int(numbers[at])), f"{name} {why}")
    # labels and names of rows must leave out the same rows as the cells
    kept = np.flatnonzero(good).tolist()
    ids: dict[str, list[Any]] = {block.unit if block.unit == "window" else "row": numbers[kept].tolist()}
    if many:
        ids = {"file": [block.file] * len(kept), **ids}
    chosen = {name: _chosen(column, kept) for name, column in cells.items()}
    return RawBatch(ids, chosen, [block.where(int(at)) for at in numbers[kept]], bad)


def _chosen(cells: Cells, kept: list[int]) -> list[Any]:
    if isinstance(cells, np.ndarray):
        found: list[Any] = cells[kept].tolist()
        return found
    return [cells[at] for at in kept]


def frame_batches(
    frame: Any, columns: Mapping[str, str], size: int, *, labels: Mapping[str, str] = MappingProxyType({})
) -> Iterator[RawBatch]:
    """Return an iterator over the rows of a pandas DataFrame. Raises DataError for columns that are missing."""
    wanted = [*columns, *(name for name in labels if name not in columns)]
    if missing := [name for name in wanted if name not in frame.columns]:
        raise DataError(f"the table has no column {few(missing, MAX_NAMED)}; it has {few(frame.columns, MAX_NAMED)}")

    def batches() -> Iterator[RawBatch]:
        for first in range(0, len(frame), size):
            # as objects, so that a missing number stays None in place of NaN
            part = frame[wanted].iloc[first : first + size].astype(object)
            part = part.where(part.notna(), None)
            rows = list(range(first, first + len(part)))
            yield RawBatch({"row": rows}, {name: part[name].tolist() for name in wanted}, [f"row {at}" for at in rows])

    return batches()
