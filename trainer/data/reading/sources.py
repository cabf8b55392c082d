"""Find and read data sources: files by format, directories of text, the digits; say which rows are held out."""

from __future__ import annotations

import json
import os
import sysconfig
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import filter as fnmatch_filter
from fnmatch import fnmatch
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from onward.trainer.bounds import RECORD_BYTES, SOURCE_FILES, check_regular, read_bounded
from onward.trainer.config.sections.data import DataConfig
from onward.trainer.data.formats.finished_shards import MANIFEST, shards_at
from onward.trainer.data.formats.format_table import COMPRESSED, FORMATS, DataFormat, Request, suffixes
from onward.trainer.data.formats.text_files import unit_of
from onward.trainer.data.images.image_sources import check_classes, held_out_names, refuse_empty_classes
from onward.trainer.data.reading.held_out_rows import held_out, held_out_files, stratified
from onward.trainer.data.reading.series_windows import source_columns, windowed
from onward.trainer.data.reading.source_kinds import TEXT_SUFFIXES, kinds_found
from onward.trainer.data.schema.allowed_files import allowed_files, folder_of, refuse_outside
from onward.trainer.data.schema.columns import Array, Block
from onward.trainer.data.schema.columns import is_unicode as _is_unicode
from onward.trainer.errors import DataError

CODE = "*.py"
"""What is read of a directory of text first, as of the `stdlib`: a folder of code has notes and licences beside it."""
NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
"""Directories left out of the `stdlib` text: installed packages, and tests, which are as large as the rest."""


@dataclass(frozen=True)
class Source:
    """The files of one source, in reading order."""

    format: str
    files: tuple[tuple[str, Path], ...]
    """(name relative to the source, path), sorted by name."""
    name: str = ""
    """As the settings name it; "" for data that every machine has."""

    @property
    def data_format(self) -> DataFormat:
        """Return how files of this format are read."""
        return FORMATS[self.format]


# -- finding the files


def locate(source: str, data: DataConfig) -> Source:
    """Find the files of a source and their format. Raises DataError when there are none, or of several formats."""
    if source == "digits" or data.format == "digits":
        return Source("digits", ())
    if source == "stdlib":
        library = Path(sysconfig.get_paths()["stdlib"])
        return Source("text", tuple((name, library / name) for name in _walk(library, CODE, NOT_LIBRARY)))
    path = Path(source)
    if path.exists() and not path.is_dir():
        try:
            check_regular(path)  # for the reason: it may be a FIFO or a device
        except OSError as error:
            raise DataError(f"{source} cannot be read: {error.strerror}") from None
        found = {path.name: path}
    elif data.format in ("auto", "shards") and shards_at(data.model_copy(update={"source": source})):
        return Source("shards", ((MANIFEST, path / MANIFEST),), source)
    elif path.is_dir() and (found := saved_dataset(path)):
        refuse_outside(source, found.items(), data)
        return Source("arrow", tuple(found.items()), source)
    elif path.is_dir():
        _refuse_root(source, path)
        found = {name: path / name for name in _walk(path, "*", set())}
    else:
        # a glob begins at its last folder without a wildcard
        base = folder_of(source)
        pattern = str(path.relative_to(base))
        if "**" in pattern:
            _refuse_root(source, base)
        try:
            matches = list(islice(base.glob(pattern), SOURCE_FILES.most + 1)) if path != base else []
        except ValueError as error:  # such as ** beside other letters
            raise DataError(f"{source} is not a pattern of files: {error}") from None
        found = {str(match.relative_to(base)): match for match in matches}
        if "/." not in f"/{pattern}":  # a pattern that names no hidden file means none, as in a shell
            found = {name: match for name, match in found.items() if "/." not in f"/{name}"}
    if len(found) > SOURCE_FILES.most:
        raise DataError(f"{source} has {SOURCE_FILES.exceeded(len(found))}")
    if wrong := next((name for name in found if not _is_unicode(name)), None):
        raise DataError(f"{source}: the name of file {wrong!a} is not UTF-8; rename it")
    located = _of_one_format(source, found, data)
    if not path.is_file():  # which the settings name itself
        refuse_outside(source, located.files, data)
    return located


def _refuse_root(source: str, directory: Path) -> None:
    """Raise DataError for the root of the file system, in which a search would not end."""
    if directory.resolve() == Path(directory.anchor or "/").resolve():
        raise DataError(f"{source} is the whole file system; name the directory of the data")


def _walk(directory: Path, pattern: str, pruned: set[str]) -> list[str]:
    """Return the sorted relative names of matching files, without hidden ones and pruned directories."""
    names = []
    for folder, folders, files in os.walk(directory):
        visible = [name for name in folders if not name.startswith(".")]
        # os.walk enters only the folders that are left in its own list
        folders[:] = [name for name in visible if name not in pruned]
        inside = Path(folder).relative_to(directory)
        visible = [name for name in files if not name.startswith(".")]
        names += [str(inside / name) for name in visible if fnmatch(name, pattern)]
        if len(names) > SOURCE_FILES.most:
            break
    return sorted(names)


def _suffix(path: Path) -> str:
    """Return the end of a file's name; of tables that are compressed, what is before .gz."""
    inner = Path(path.stem).suffix.lower()
    return inner if path.suffix.lower() == ".gz" and inner in COMPRESSED else path.suffix.lower()


def _of_one_format(source: str, found: dict[str, Path], data: DataConfig) -> Source:
    # images beside data of another format are no data, unless there is a table [data.image]
    tables = {table for table in ("image", "audio") if getattr(data, table)}
    if data.format != "auto":
        tables.add(FORMATS[data.format].table)
    by_suffix = suffixes(tables)
    formats = {name: by_suffix.get(_suffix(path), "text") for name, path in found.items() if path.is_file()}
    if data.format != "auto":
        wanted: str = data.format
        # of a directory or a glob, only files of this format are read; any file can be read as text
        is_several = len(formats) > 1 or FORMATS[wanted].path_column
        if is_several and wanted != "text":
            formats = {name: of_file for name, of_file in formats.items() if of_file == wanted}
    else:
        known = Counter(of_file for of_file in formats.values() if of_file != "text")
        # a choice would silently leave out files
        if len(known) > 1:
            counts = ", ".join(f"{count} {of_file}" for of_file, count in known.most_common())
            raise DataError(f"{source} holds files of several formats ({counts}); set data.format")
        # files that no format claims are text
        wanted = "text" if not known else next(iter(known))
        formats = {name: of_file for name, of_file in formats.items() if of_file == wanted}
    names = sorted(formats)
    # a single file is read whatever its name, once its format is certain
    is_text_file = len(found) == 1 and (data.format == "text" or bool(fnmatch_filter(names, "*.txt")))
    if wanted == "text" and not is_text_file:
        names = _texts(source, names, data)
    if not names:
        raise DataError(_nothing_to_read(source, found, wanted, data))
    files = tuple((name, found[name]) for name in names)
    if FORMATS[wanted].path_column and not _has_labels_beside(data):
        refuse_empty_classes(Path(source), files)
    return Source(wanted, files, source)


def _has_labels_beside(data: DataConfig) -> bool:
    """Return whether images have labels of their own beside them, masks or boxes, so that folders are no classes."""
    return data.image is not None and bool(data.image.mask_folder or data.image.box_place)


def _texts(source: str, names: Sequence[str], data: DataConfig) -> list[str]:
    """Return which files are read as texts: all that a glob names; of a directory, which may have notes, only code."""
    if not Path(source).is_dir():
        texts = [name for name in names if _suffix(Path(name)) in TEXT_SUFFIXES]
        return [*names] if data.format == "text" else texts
    code = fnmatch_filter(names, CODE)
    # texts to tokenize usually end in .txt
    return fnmatch_filter(names, "*.txt") if data.text and not code else code


def _nothing_to_read(source: str, found: Mapping[str, Path], wanted: str, data: DataConfig) -> str:
    """Return why none of the files that were found is read, and what each kind of them needs."""
    files = {name: path for name, path in found.items() if path.is_file()}
    if not found and Path(source).is_dir():
        return f"{source} is a folder without files; put the data into it, or set data.source"
    if data.format != "auto" or not files:
        what = f"none are {wanted if data.format != 'auto' else 'data'}"
    else:
        what = "none can be read as they are"
    kinds = kinds_found(files)
    return f"{source}: of {len(found)} files {what}" + (f": {kinds}" if kinds else "; set data.source or data.format")


# -- reading


@dataclass(frozen=True)
class SourceRange:
    """Rows that are read, packed and counted together: those of one source."""

    source: str
    """As the settings name it."""
    is_trained: bool
    """Whether its rows are trained on, but for those that are held out."""
    held_split: str = "evaluation"
    """What the rows that are held out are for: `evaluation` or `test`."""


def source_ranges(data: DataConfig) -> list[SourceRange]:
    """Return what is read, in order: what is trained on, then `data.evaluation_source`, then `data.test_source`.

    Raises DataError if images to evaluate on have classes that none to train on has.
    """
    if (data.audio or data.image) and not _has_labels_beside(data):
        _check_image_classes(data)
    ranges = [SourceRange(each.source, is_trained=True) for each in data.mixture]
    if data.evaluation_source:
        ranges.append(SourceRange(data.evaluation_source, is_trained=False))
    if data.test_source:
        ranges.append(SourceRange(data.test_source, is_trained=False, held_split="test"))
    return ranges


def read_range(rows: SourceRange, request: Request) -> Iterator[tuple[Block, Array]]:
    """Yield the rows of a range in blocks, each with bool [n]: which of its rows are held out.

    Raises DataError for what cannot be read at all.
    """
    return read_source(rows, locate(rows.source, request.data), request)


def read_source(rows: SourceRange, source: Source, request: Request) -> Iterator[tuple[Block, Array]]:
    """Yield the rows of a range that are in the files of `source`, as `read_range`."""
    if rows.is_trained and not request.data.evaluation_source:
        return _divided(source, request)
    return _whole(source, request, held=not rows.is_trained)


def read(data: DataConfig, names: Sequence[str] | None, text: Collection[str] = ()) -> Iterator[tuple[Block, Array]]:
    """Yield every row to train and to evaluate on, as `read_range`. names, text: as in `Request`."""
    for rows in source_ranges(data):
        if rows.held_split != "test":
            yield from read_range(rows, Request(data, names, text))


def _check_image_classes(data: DataConfig) -> None:
    """Raise DataError if images to evaluate on are in folders of classes that no source to train on has."""
    located = [locate(each.source, data) for each in data.mixture]
    of_images = [source for source in located if source.data_format.path_column]
    training = [file for source in of_images for file in source.files]
    for key in ("evaluation_source", "test_source"):
        name = getattr(data, key)
        if training and name and (held_out := locate(name, data)).data_format.path_column:
            check_classes(training, held_out.files, f"data.{key}")


def _divided(source: Source, request: Request) -> Iterator[tuple[Block, Array]]:
    """Yield the rows of a source of training data, with those among them that are set aside for evaluation."""
    data = request.data
    names = request.names
    fraction = request.data.evaluation_fraction
    if window := data.table.window:
        blocks = _blocks(source, replace(request, names=source_columns(names, window)))
        yield from windowed((block for _, block in blocks), window, names, fraction, data.split)
    elif data.split == "stratified" and isinstance(data.label, str):
        # the label decides the split, also if it is not asked for
        read = names if names is None or data.label in names else [*names, data.label]
        yield from stratified(_blocks(source, replace(request, names=read)), data.label, fraction, names)
    # a file of text is held out as a whole: windows of one file on both sides would share their text
    elif source.format == "text" and _text_unit(data) in ("", "file"):
        chosen = held_out_files([name for name, _ in source.files], fraction)
        # all files to train on come first, because texts are packed across files
        for held in (False, True):
            files = tuple(file for file in source.files if (file[0] in chosen) == held)
            for _, block in _blocks(Source("text", files), request):
                yield block, np.full(len(block.index), held)
    else:
        of_folders = bool(source.data_format.path_column)
        for name, block in _blocks(source, request):
            yield block, held_out_names(block, fraction) if of_folders else held_out(name, block.index, fraction)


def _whole(source: Source, request: Request, *, held: bool) -> Iterator[tuple[Block, Array]]:
    for block in _all_blocks(source, request):
        yield block, np.full(len(block.index), held)


def _all_blocks(source: Source, request: Request) -> Iterator[Block]:
    """Yield all rows of a source; with data.table.window, all windows."""
    window = request.data.table.window
    wanted = replace(request, names=source_columns(request.names, window)) if window else request
    blocks = (block for _, block in _blocks(source, wanted))
    return (block for block, _ in windowed(blocks, window, request.names, None)) if window else blocks


def all_sources(data: DataConfig) -> list[Source]:
    """Return the files of every source that is read: for training, evaluation and the test. Raises as `locate`."""
    named = [*(each.source for each in data.mixture), data.evaluation_source, data.test_source]
    return [locate(source, data) for source in named if source]


def first_blocks(data: DataConfig, text: Collection[str] = (), number: int = 0) -> Iterator[Block]:
    """Return an iterator over the rows of one of the sources, from its beginning; `text` as in `Request`."""
    return _all_blocks(locate(data.mixture[number].source, data), Request(data, None, text))


def _blocks(source: Source, request: Request) -> Iterator[tuple[str, Block]]:
    """Yield (name of the file in the source, some of its rows), file by file, with the files that cells may name."""
    allowed = allowed_files(source.name, request.data) if source.name else None
    unit = _text_unit(request.data) if source.format == "text" else ""
    for name, block in source.data_format.read(source.files, replace(request, unit=unit)):
        yield name, replace(block, allowed=allowed)


def _text_unit(data: DataConfig) -> str:
    """Return what one text of a source of text files is; empty without [data.text], where it is bytes in windows."""
    return unit_of(data.text.documents, len(locate(data.mixture[0].source, data).files)) if data.text else ""


# -- read the directories that `Dataset.save_to_disk` of Hugging Face `datasets` writes, without that package
#
# DIRECTORY/dataset_dict.json                splits, one directory for each    (of a DatasetDict)
# DIRECTORY/state.json                       names of the data files, in order
# DIRECTORY/data-00000-of-00002.arrow        Arrow's IPC stream format
# DIRECTORY/cache-....arrow                  results of `map`, which are no part of the data


def saved_dataset(directory: Path) -> dict[str, Path]:
    """Return name -> path of the data files of a saved dataset, in order; {} if the directory holds none.

    Raises DataError for a directory of several splits, for absent files and for rows in another order than the files'.
    """
    if (directory / "dataset_dict.json").is_file():
        splits = _read(directory / "dataset_dict.json").get("splits", [])
        splits = splits if isinstance(splits, list) else []
        example = f"{directory}/{splits[0]}" if splits else f"{directory}/train"
        raise DataError(
            f"{directory} holds the splits {', '.join(map(str, splits)) or '(none)'} of a Hugging Face dataset; name "
            f"one of them: data.source = {example!r}, and another one as data.evaluation_source"
        )
    if not (directory / "state.json").is_file():
        return {}
    state = _read(directory / "state.json")
    if "_data_files" not in state:
        return {}  # a file of somebody else's
    if state.get("_indices_data_files"):
        raise DataError(
            f"{directory} chooses rows by an index, as datasets before 2.0 saved them; save it again after "
            "dataset.flatten_indices()"
        )
    entries = state["_data_files"]
    if not isinstance(entries, list) or not all(map(_names_a_file, entries)):
        raise DataError(f"{directory}/state.json does not list its files under _data_files, as `datasets` writes them")
    files = {str(entry["filename"]): directory / str(entry["filename"]) for entry in entries}
    # a name with a folder in it would be a file of another dataset
    inside = {name for name, path in files.items() if path.parent == directory}
    present = {name for name in inside if files[name].is_file()}
    if absent := [name for name in files if name not in present]:
        raise DataError(f"{directory}/state.json names files that are not there: {', '.join(absent)}")
    if not files:
        raise DataError(f"{directory} is a Hugging Face dataset without rows")
    return files


def _names_a_file(entry: Any) -> bool:
    return isinstance(entry, dict) and "filename" in entry


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(read_bounded(path, RECORD_BYTES))
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path} cannot be read: {error}") from None
    return found if isinstance(found, dict) else {}
