"""Read text files as texts (whole files, lines, or paragraphs), or as windows of bytes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path

import numpy as np

from onward.trainer.bounds import TEXT_BYTES, opened, read_bounded
from onward.trainer.data.schema.columns import BLOCK_BYTES, Array, Block
from onward.trainer.errors import DataError


def unit_of(documents: str, num_files: int) -> str:
    """Return what one text is, `file`, `line` or `paragraph`; `documents` as in data.text.documents."""
    if documents == "auto":
        return "file" if num_files > 1 else "paragraph"
    return documents


def text_blocks(path: Path, unit: str, column: str) -> Iterator[Block]:
    """Yield the texts of a file in blocks, in a column of this name. Lines and paragraphs that are blank are left out.

    A text keeps its line ends, but for the last one of lines and paragraphs. What is not UTF-8 is reported as a bad
    row.
    """
    if unit == "file":
        yield Block(str(path), np.arange(1), {column: [_decoded(_content(path))]}, unit="text")
        return
    texts: list[str | bytes] = []
    index: list[int] = []
    size = 0
    for first, text in _pieces(path, unit):
        texts.append(_decoded(text))
        index.append(first)
        size += len(text)
        if size >= BLOCK_BYTES:
            yield _block(path, index, texts, column)
            texts = []
            index = []
            size = 0
    if texts:
        yield _block(path, index, texts, column)


def _block(path: Path, index: Sequence[int], texts: Sequence[str | bytes], column: str) -> Block:
    return Block(str(path), np.array(index, np.int64), {column: texts}, unit="line")


def _pieces(path: Path, unit: str) -> Iterator[tuple[int, bytes]]:
    """Yield (number of the first line, from 0; the text) of each line or paragraph."""
    lines: list[bytes] = []
    first = size = 0
    with opened(path) as file:
        # with a limit, because a file may have no line end
        read = iter(lambda: file.readline(TEXT_BYTES.most + 1), b"")
        # a blank line behind the last one ends its text, too
        for number, line in enumerate(chain(read, [b""])):
            if line.strip():
                # a text has the number of its first line
                first, size = (first, size + len(line)) if lines else (number, len(line))
                if size > TEXT_BYTES.most:
                    raise DataError(f"{path}, line {number + 1}: a text has {TEXT_BYTES.exceeded(size)}")
                lines.append(line)
                if unit == "paragraph":
                    continue
            if lines:
                yield first, b"".join(lines).rstrip(b"\r\n")
                lines = []


def _content(path: Path) -> bytes:
    try:
        return read_bounded(path, TEXT_BYTES)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}; data.text.documents may divide it") from None


def _decoded(text: bytes) -> str | bytes:
    try:
        return text.decode("utf-8-sig")
    except UnicodeDecodeError:
        return text  # reported as a bad row


# -- bytes in windows


def window_blocks(paths: Sequence[Path], length: int) -> Iterator[Block]:
    """Yield windows [n, length] over the bytes of all files, with a 0 byte after each file.

    `label` is `input_ids` shifted by one byte. Windows do not overlap; the last bytes, at most `length`, are unused:

        bytes       a b c d e f g h i      length 4
        input_ids   a b c d|e f g h
        label       b c d e|f g h i
    """
    rest = np.empty(0, np.uint8)
    index = 0
    step = max(1, BLOCK_BYTES // length)
    for piece in _joined(paths):
        data = np.concatenate([rest, piece])
        # the last label is the byte behind the last window: one more byte is needed
        count = (len(data) - 1) // length
        inputs = data[: count * length].reshape(count, length)
        labels = data[1 : count * length + 1].reshape(count, length)
        for first in range(0, count, step):
            rows = slice(first, first + step)
            cells = {"input_ids": inputs[rows], "label": labels[rows]}
            yield Block("text", np.arange(index + first, index + min(first + step, count)), cells, unit="window")
        index += count
        # carried into the next piece, so that windows do not depend on how the files are read
        rest = data[count * length :]


def _joined(paths: Sequence[Path]) -> Iterator[Array]:
    """Yield the bytes of all files, some megabytes at a time."""
    pieces = []
    size = 0
    for path in paths:
        with opened(path) as file:
            while data := file.read(BLOCK_BYTES):
                pieces.append(data)
                size += len(data)
                if size >= BLOCK_BYTES:
                    yield np.frombuffer(b"".join(pieces), np.uint8)
                    pieces = []
                    size = 0
        # files are told apart by a byte that text does not have
        pieces.append(b"\0")
    yield np.frombuffer(b"".join(pieces), np.uint8)
