"""The files that cells of a table name: their digests, and which of them must not be read."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path

from onward.trainer.bounds import CONTENT_BYTES
from onward.trainer.config.sections.data import DataConfig
from onward.trainer.data.formats.format_table import Request
from onward.trainer.data.reading import sources
from onward.trainer.data.schema.allowed_files import named_path
from onward.trainer.data.schema.columns import BYTES, Column
from onward.trainer.errors import first_lines
from onward.trainer.run.durable_files import sha256


def naming_columns(data: DataConfig, columns: Sequence[Column]) -> list[str]:
    """Return the columns whose cells may name files; [] for tar files, which are read as a stream."""
    formats = [source.data_format for source in sources.all_sources(data)]
    if any(each.holds_content and not each.path_column for each in formats):
        return []
    # files in folders are those of the source; masks in folders of their own are not
    of_source = {each.path_column for each in formats}
    encoded = [column.name for column in columns if column.dtype == BYTES]
    return [name for name in encoded if name not in of_source]


def outside_files(data: DataConfig, columns: Sequence[Column]) -> list[str]:
    """Return a sentence for each cell that names a file which must not be read, the first ones and their number."""
    names = naming_columns(data, columns)
    # else the whole source would be read for nothing
    if not names:
        return []
    refused = (f"{where}: {name} names {why}" for where, name, _, why in _named(data, names) if why)
    return first_lines(refused)


def digests_of_named_files(data: DataConfig, names: Sequence[str]) -> list[str]:
    """Return the digest of each file that a cell of these columns names, in order; "" if it is not read."""
    digests = []
    for _, _, path, why in _named(data, names):
        # unlike Path's, this raises no error for a name that is too long
        is_file = not why and os.path.isfile(path)  # noqa: PTH113
        is_read = is_file and path.stat().st_size <= CONTENT_BYTES.most
        digests.append(sha256(path) if is_read else "")
    return digests


def _named(data: DataConfig, names: Sequence[str]) -> Iterator[tuple[str, str, Path, str]]:
    """Yield (row, column, file, why it must not be read) of each cell that names a file."""
    ranges = [sources.read_range(rows, Request(data, names)) for rows in sources.source_ranges(data)]
    for block, _ in chain.from_iterable(ranges):
        folder = Path(block.file).parent
        allowed = block.allowed_files
        for name in names:
            for at, cell in enumerate(block.cells.get(name, ())):
                if given := named_path(cell):
                    why = allowed.refusal_of_cell(folder, given)
                    yield block.where(int(block.index[at])), name, folder / given, why
