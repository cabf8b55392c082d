"""A part of a file, which is read as the same blocks that reading the whole file gives there."""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING

from onward.trainer.bounds import opened
from onward.trainer.run.records import Record

if TYPE_CHECKING:
    from collections.abc import Iterator


class FilePart(Record):
    """Some blocks of a file that follow each other."""

    begin: int = 0
    """CSV and JSON Lines: the byte where a row begins; Parquet: a run of row groups; folders: the number of a file."""
    end: int | None = None
    """Where the next part begins; None = the end of the file."""
    line: int = 0
    """CSV and JSON Lines: the number of lines before `begin`."""

    @property
    def is_whole(self) -> bool:
        """Whether it is all of the file."""
        return not self.begin and self.end is None

    @property
    def stop(self) -> int:
        """Return `end`, or a number that is beyond any file."""
        return 1 << 62 if self.end is None else self.end


class PartOfFile:
    """The bytes of a part. The first read ends where a read of the whole file ends, as all that follow do."""

    def __init__(self, file: IO[bytes], part: FilePart) -> None:
        self._file = file
        self._at = file.seek(part.begin)
        self._stop = part.stop

    def read(self, size: int, /) -> bytes:
        """Return the bytes up to the end of the next `size` bytes of the file, or to the end of the part."""
        # a part begins in the last row of what was read together, or behind it: . . . .|. . . b|. . . .|
        next_read = -(-self._at // size) + 1
        data = self._file.read(min(next_read * size, self._stop) - self._at)
        self._at += len(data)
        return data


@contextmanager
def opened_part(path: Path, part: FilePart) -> Iterator[PartOfFile]:
    """Open a part of a file."""
    with opened(path) as file:
        yield PartOfFile(file, part)
