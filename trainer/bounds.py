"""The limits of what is read, and the only way to open what a user, a file or a record names.

A size that a file states is compared with the file, or with a limit, before memory is taken for it. Only regular files
are read: a FIFO would block for ever, and a device may have no end.
"""

from __future__ import annotations

import errno
import os
import stat
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path


@dataclass(frozen=True)
class Limit:
    """The most that is read of one thing."""

    what: str
    """Plural, such as "columns in the header of a CSV file"."""
    most: int

    def exceeded(self, found: int) -> str:
        """Return the end of a sentence: how many were found, and how many may be."""
        return f"{found:,} {self.what}, more than the limit of {self.most:,}"


MODEL_BYTES = Limit("bytes in an ONNX file, without its external data (protobuf's own limit)", 2**31 - 1)
MODEL_MESSAGES = Limit("messages inside each other in an ONNX file (protobuf's own limit)", 100)
MODEL_NODES = Limit("nodes in an ONNX file, once its functions are expanded", 1_000_000)
FUNCTION_DEPTH = Limit("functions of an ONNX file that call each other in a chain", 100)
TENSOR_DIMS = Limit("dimensions of a tensor", 64)
TENSOR_VALUES = Limit("values of a declared shape, dynamic dimensions counted as 1", 2**36)
CONFIG_BYTES = Limit("bytes in a configuration file", 4 << 20)
CODE_BYTES = Limit("bytes in a Python file of a loss or of converters", 16 << 20)
CONFIG_DEPTH = Limit("tables or lists inside each other in a configuration", 32)
CONFIG_ENTRIES = Limit("losses, or metrics, of a configuration", 1000)
PATH_PART_BYTES = Limit("bytes in one part of a path", 255)
PATH_BYTES = Limit("bytes in a path", 4095)
NAME_LETTERS = Limit("letters in the name of a run", 100)
RECORD_BYTES = Limit("bytes in a record of a run, of shards or of a checkpoint", 256 << 20)
SOURCE_FILES = Limit("files in a data source", 20_000_000)
CSV_COLUMNS = Limit("columns in the header of a CSV file", 200_000)
CSV_ROW_BYTES = Limit("bytes in a row of a CSV file", 256 << 20)
JSON_ROW_BYTES = Limit("bytes in a line of a JSON Lines file", 32 << 20)
JSON_CELLS = Limit("cells, also missing ones, in 4 MiB of a JSON Lines file", 1 << 24)
ROW_BYTES = Limit("bytes in a row of a .npz or a Parquet file", 256 << 20)
ARROW_BATCH_BYTES = Limit("bytes in memory of a compressed record batch of an Arrow file", 512 << 20)
TEXT_BYTES = Limit("bytes in one text of a text file", 256 << 20)
CONTENT_BYTES = Limit("bytes in an image, audio or other file that is a cell of a row", 512 << 20)
IMAGE_BYTES = Limit("bytes of the pixels of a decoded image, and of its copy if it is converted", 832 << 20)
ANNOTATION_BYTES = Limit("bytes in a file with the boxes of images", 4 << 30)
AUDIO_SAMPLES = Limit("samples in one channel of an audio file", 2**26)
AUDIO_RATE = Limit("samples a second in an audio file", 1_000_000)
TAR_HEADER_BYTES = Limit("bytes in a header of a tar file", 1 << 20)
TOKENIZER_BYTES = Limit("bytes in a tokenizer.json", 256 << 20)

LIMITS = tuple(value for value in list(vars().values()) if isinstance(value, Limit))
"""All of them, in the order of docs/reference/limits.md."""

_KINDS = {
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


class NotAFile(OSError):
    """A path names something else than a regular file."""


def opened(path: Path) -> BufferedReader:
    """Open a regular file to read bytes. Raises OSError, NotAFile for anything else."""
    # without O_NONBLOCK, opening a FIFO would wait for a writer
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        _check(os.fstat(descriptor), path)
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def check_regular(path: Path) -> int:
    """Return the size of a regular file, which a library will open. Raises OSError, NotAFile for anything else."""
    found = os.stat(path)  # noqa: PTH116 - Path.stat is called by it
    _check(found, path)
    return found.st_size


def read_bounded(path: Path, limit: Limit) -> bytes:
    """Return the content of a regular file that is not larger than a limit. Raises OSError for anything else."""
    with opened(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > limit.most:
            raise OSError(errno.EFBIG, f"it holds {limit.exceeded(size)}", str(path))
        # not up to the limit at once: read() takes memory for all that it is asked for
        content = file.read(size + 1) or b""  # None: a file of the kernel that has nothing just now
        if len(content) > size:  # a file in /proc has the size 0, and one that grows must not fill the memory
            content += file.read(limit.most + 1 - len(content)) or b""
    if len(content) > limit.most:
        raise OSError(errno.EFBIG, f"it holds {limit.exceeded(len(content))}", str(path))
    return content


def _check(found: os.stat_result, path: Path) -> None:
    if not stat.S_ISREG(found.st_mode):
        what = _KINDS.get(stat.S_IFMT(found.st_mode), "no file")
        raise NotAFile(errno.EINVAL, f"it is {what}, and only regular files are read", str(path))
