"""Divide the sources into parts that several processes read: together they give the blocks that one process reads.

    a.csv   200 MB    |  part 0  |  part 1  |  part 2  |      between two rows, where a block ends
    b.csv, c.csv      |         part 3           |            files that are small are read together

What a row of a block is depends on the rows before it in few cases, whose files or sources are not divided: stratified
splits count the rows of each class in a file, windows join rows, and texts are joined across files.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

from onward.trainer.config.sections.data import DataConfig
from onward.trainer.data.formats.format_table import Request
from onward.trainer.data.reading.sources import Source, SourceRange, read_source
from onward.trainer.data.schema.columns import PART_ROWS, Array, Block
from onward.trainer.data.schema.file_parts import FilePart
from onward.trainer.run.records import Record

UNDIVIDED = ("digits", "text")
"""Formats whose sources are read as a whole."""


class SourcePart(Record):
    """Consecutive blocks of one range of the sources."""

    number: int
    """Of all parts of all ranges, in the order of their rows."""
    range: int
    """The number of the range in `source_ranges`."""
    files: tuple[int, int]
    """The first of the source's files, and the one behind the last."""
    within: FilePart = FilePart()
    """The part of the only file, or of the files of folders."""


def may_be_divided(data: DataConfig, sources: Sequence[Source]) -> bool:
    """Return whether the sources are read in parts at all."""
    return not data.table.window and not any(source.format in UNDIVIDED for source in sources)


def divide(
    data: DataConfig, ranges: Sequence[SourceRange], sources: Sequence[Source], part_bytes: int
) -> Iterator[SourcePart]:
    """Yield the parts of all ranges, of about this size each, in the order of their rows. sources: of each range.

    A file is read to its end before its last part is yielded. Raises DataError for files that cannot be divided.
    """
    for source in sources:
        if check := source.data_format.check:
            # all files of a source, as who reads all of it: what was looked at is not looked at again
            check([path for _, path in source.files])
    number = 0
    for at, (rows, source) in enumerate(zip(ranges, sources, strict=True)):
        counts_classes = data.split == "stratified" and rows.is_trained
        for files, within in _divided_files(data, source, part_bytes, whole_files=counts_classes):
            yield SourcePart(number=number, range=at, files=files, within=within)
            number += 1


def _divided_files(
    data: DataConfig, source: Source, part_bytes: int, *, whole_files: bool
) -> Iterator[tuple[tuple[int, int], FilePart]]:
    sizes = [path.stat().st_size for _, path in source.files]
    if source.data_format.path_column:
        # the class and the mask of a file are found with all files of the source
        whole = [0, len(sizes)]
        # a stratified split counts the rows of a class over all of these files, as if they were one
        places = whole if whole_files else _groups_of_rows(len(sizes), sum(sizes), part_bytes)
        for begin, end in pairwise(places):
            yield (0, len(sizes)), FilePart(begin=begin, end=end)
        return
    first = total = 0
    for at, ((_, path), size) in enumerate(zip(source.files, sizes, strict=True)):
        if size >= 2 * part_bytes and source.data_format.divide and not whole_files:
            if first < at:
                yield (first, at), FilePart()
            for part in source.data_format.divide(path, data, part_bytes):
                yield (at, at + 1), part
            first, total = at + 1, 0
            continue
        total += size
        if total >= part_bytes:
            yield (first, at + 1), FilePart()
            first, total = at + 1, 0
    if first < len(sizes):
        yield (first, len(sizes)), FilePart()


def _groups_of_rows(count: int, total_bytes: int, part_bytes: int) -> list[int]:
    """Return where parts of files in folders begin, and the end of the last: at multiples of the rows of a block."""
    blocks = -(-count // PART_ROWS)
    parts = max(1, min(blocks, total_bytes // part_bytes))
    return [min(number * blocks // parts * PART_ROWS, count) for number in range(parts + 1)]


def read_part(
    part: SourcePart, ranges: Sequence[SourceRange], sources: Sequence[Source], request: Request
) -> Iterator[tuple[Block, Array]]:
    """Yield the rows of a part in blocks, each with bool [n]: which of its rows are held out; as `read_range`."""
    source = sources[part.range]
    some = replace(source, files=source.files[slice(*part.files)])
    return read_source(ranges[part.range], some, replace(request, part=part.within))
