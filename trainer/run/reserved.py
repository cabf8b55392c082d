"""Record why something failed although the disk is full: space for the record is taken at the start.

    at the start     attempts/001/rank-00001.reserved   64 KiB of zeros, on the disk
    on a failure     the error is written over the zeros, and the file is renamed to errors/001-rank-00001.json
    without one      the file is deleted

The blocks of the file exist before the disk fills up, and writing over them takes no further space.
"""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel

from onward.trainer.run.durable_files import fsync, sync, write_durably

RESERVED_BYTES = 1 << 16
"""More than an error with its traceback has."""


def reserve(path: Path) -> None:
    """Take the space of a record that is written when everything else has failed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        # bytes are written and not only announced: a sparse file has no space on the disk
        file.write(bytes(RESERVED_BYTES))
        sync(file)


def write_reserved(path: Path, record: BaseModel, reserved: Path) -> None:
    """Write a record durably, in the space that `reserved` has taken; like any other file if that is gone."""
    content = record.model_dump_json(indent=2).encode()
    try:
        file = reserved.open("r+b")
    except OSError:
        write_durably(path, content)
        return
    with file:
        file.write(content)
        file.truncate()
        sync(file)
    path.parent.mkdir(parents=True, exist_ok=True)
    # a rename needs no space
    reserved.replace(path)
    fsync(path.parent)
