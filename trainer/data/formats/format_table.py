"""The formats of data: one record for each, which says how its files are found, read and counted.

A new format is a file with a reader, which yields blocks of rows, a record here, and its name in `DataConfig.format`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from onward.trainer.config.sections.data import DataConfig
from onward.trainer.data.audio.audio_decoding import AUDIO_SUFFIXES
from onward.trainer.data.formats.arrow_files import arrow_blocks, parquet_blocks, parquet_parts, parquet_rows
from onward.trainer.data.formats.digits import digits_block, digits_schema
from onward.trainer.data.formats.finished_shards import refuse_to_read, shard_columns
from onward.trainer.data.formats.npz_files import npz_blocks, npz_rows
from onward.trainer.data.formats.parquet_footers import check_footers
from onward.trainer.data.formats.table_readers import csv_blocks, csv_parts, estimated_rows, json_blocks, json_parts
from onward.trainer.data.formats.tensorproto_files import proto_blocks
from onward.trainer.data.formats.text_files import text_blocks, window_blocks
from onward.trainer.data.images.image_decoding import IMAGE_SUFFIXES
from onward.trainer.data.images.image_sources import Files, folder_blocks, tar_blocks
from onward.trainer.data.schema.columns import TEXT, WORDS, Block, Column, Schema
from onward.trainer.data.schema.file_parts import FilePart


@dataclass(frozen=True)
class Request:
    """What is read of the files of a source."""

    data: DataConfig
    names: Sequence[str] | None
    """The columns; None for all."""
    text: Collection[str] = ()
    """The columns that are read as text, also where a cell of a CSV file looks like a number."""
    unit: str = ""
    """What one text of a text file is: `file`, `line` or `paragraph`."""
    part: FilePart | None = None
    """The part that is read of the only file, or of the files of a folder; None for all."""

    @classmethod
    def of_columns(cls, data: DataConfig, columns: Sequence[Column]) -> Self:
        """Return the request for these columns."""
        texts = [column.name for column in columns if column.dtype in (TEXT, WORDS)]
        return cls(data, [column.name for column in columns], texts)


Reader = Callable[[Files, Request], Iterator[tuple[str, Block]]]
"""Yields (name of the file in the source, some of its rows), file by file."""


@dataclass(frozen=True)
class DataFormat:
    """How the files of a format are found, read and counted."""

    read: Reader
    suffixes: tuple[str, ...] = ()
    table: str = ""
    """The table of [data] without which the files are no data: `image` or `audio`."""
    may_be_compressed: bool = False
    """Whether files may end in .gz, too."""
    has_types: bool = True
    """Whether the files say which cells are numbers and which are text."""
    rows_vary: bool = False
    """Whether rows are lists, which may differ in length."""
    holds_content: bool = False
    """Whether the files are images or sound, whose size says nothing of the number of rows."""
    path_column: str = ""
    """The column of the paths, where single files lie in folders of classes."""
    settings: frozenset[str] = frozenset()
    """Settings of [data] that decide the rows of this format only."""
    count_rows: Callable[[Path], int] = lambda path: 0
    """Returns about the number of rows of a file; 0 where only reading all of it would tell."""
    check: Callable[[Sequence[Path]], None] | None = None
    """Raises DataError for files that would end the process that reads them; it is called before any is read."""
    divide: Callable[[Path, DataConfig, int], Iterator[FilePart]] | None = None
    """Yields the parts of a file, of about so many bytes each; without it a file is read as a whole."""
    columns: Callable[[DataConfig], Schema] | None = None
    """Returns the columns where they are known without reading the data."""


def _each_part(read: Callable[[Path, Sequence[str] | None, FilePart | None], Iterator[Block]]) -> Reader:
    """Return a reader of one file after the other, or of a part of one."""

    def blocks(files: Files, request: Request) -> Iterator[tuple[str, Block]]:
        return _each_file(lambda path, names: read(path, names, request.part))(files, request)

    return blocks


def _each_file(read: Callable[[Path, Sequence[str] | None], Iterator[Block]]) -> Reader:
    """Return a reader of one file after the other."""

    def blocks(files: Files, request: Request) -> Iterator[tuple[str, Block]]:
        for name, path in files:
            for block in read(path, request.names):
                yield name, block

    return blocks


def _csv(files: Files, request: Request) -> Iterator[tuple[str, Block]]:
    for name, path in files:
        for block in csv_blocks(path, request.names, request.text, request.data.table, request.part):
            yield name, block


def _parquet(files: Files, request: Request) -> Iterator[tuple[str, Block]]:
    # `check` has looked at files that are read in parts
    if request.part is None:
        check_footers([path for _, path in files])
    yield from _each_part(parquet_blocks)(files, request)


def _text(files: Files, request: Request) -> Iterator[tuple[str, Block]]:
    text = request.data.text
    if text is None:
        for block in window_blocks([path for _, path in files], request.data.sequence_length):
            yield "text", block
        return
    column = text.columns if isinstance(text.columns, str) else text.columns[0]
    yield from _each_file(lambda path, names: text_blocks(path, request.unit, column))(files, request)


def _digits(files: Files, request: Request) -> Iterator[tuple[str, Block]]:
    yield "digits", digits_block(request.data)


def _folders(name: str, column: str) -> Reader:
    """Return a reader of single files in folders of classes, whose paths are a column."""

    def blocks(files: Files, request: Request) -> Iterator[tuple[str, Block]]:
        data = request.data
        mask_folder = data.image.mask_folder if data.image else ""
        boxes = data.image.box_place if data.image else ""
        skips_rows = data.bad_rows == "skip"
        blocks = folder_blocks(
            files, request.names, column, mask_folder, boxes, skips_rows=skips_rows, part=request.part
        )
        for block in blocks:
            yield name, block

    return blocks


FORMATS: Mapping[str, DataFormat] = {
    "csv": DataFormat(
        _csv,
        (".csv", ".tsv", ".tab"),
        may_be_compressed=True,
        has_types=False,
        count_rows=estimated_rows,
        divide=csv_parts,
    ),
    "parquet": DataFormat(
        _parquet,
        (".parquet", ".pq"),
        rows_vary=True,
        count_rows=parquet_rows,
        check=check_footers,
        divide=parquet_parts,
    ),
    "jsonl": DataFormat(
        _each_part(json_blocks),
        (".jsonl", ".ndjson"),
        may_be_compressed=True,
        rows_vary=True,
        count_rows=estimated_rows,
        divide=json_parts,
    ),
    "npz": DataFormat(_each_file(npz_blocks), (".npz",), count_rows=npz_rows),
    "arrow": DataFormat(_each_file(arrow_blocks), (".arrow",)),
    "shards": DataFormat(refuse_to_read, columns=shard_columns),
    "pb": DataFormat(_each_file(proto_blocks), (".pb",), rows_vary=True),
    "text": DataFormat(_text, settings=frozenset({"sequence_length"})),
    "digits": DataFormat(_digits, settings=frozenset({"image_size"}), columns=digits_schema),
    "images": DataFormat(
        _folders("images", "image"), IMAGE_SUFFIXES, table="image", holds_content=True, path_column="image"
    ),
    "webdataset": DataFormat(_each_file(tar_blocks), (".tar",), table="image", holds_content=True),
    "audio": DataFormat(
        _folders("audio", "audio"), AUDIO_SUFFIXES, table="audio", holds_content=True, path_column="audio"
    ),
}


_COMPRESSIBLE = [data_format for data_format in FORMATS.values() if data_format.may_be_compressed]
COMPRESSED = frozenset(suffix for data_format in _COMPRESSIBLE for suffix in data_format.suffixes)
"""Suffixes that may stand before .gz."""


def suffixes(tables: Collection[str] = ()) -> dict[str, str]:
    """Return suffix -> format, of the formats that need no table of [data], and of those that need one of `tables`."""
    usable = {name: each for name, each in FORMATS.items() if each.table in ("", *tables)}
    return {suffix: name for name, each in usable.items() for suffix in each.suffixes}


def holds_images(name: str) -> bool:
    """Return whether files of a format, if it is one, are images."""
    return name in FORMATS and FORMATS[name].table == "image"
