"""Write the safetensors file of one rank, and compute its digest meanwhile.

    length of the header (8 bytes) | header (JSON) | piece | piece | ...

The largest items are first, so that every piece is aligned to its item size. The content comes either from the tensors
themselves, one piece at a time, or from a copy of all pieces in host memory, which training does not change.

Format: https://github.com/huggingface/safetensors#format. The library writes a file in one call, without heartbeats,
and the file would have to be read again for its digest.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Generator, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from onward.trainer.checkpoint.manifest import CHUNK_BYTES, Beat
from onward.trainer.checkpoint.write_plan import DTYPES, Piece, TensorPart
from onward.trainer.run.durable_files import sync

SYNC_BYTES = 64 << 20
"""What a rank writes between two fsyncs and exchanges with the other ranks. One fsync of everything at the end could
take longer than the heartbeat and the other ranks wait."""


class RankFile:
    """The pieces that one rank writes, in the order of its file."""

    def __init__(self, pieces: Iterable[Piece]) -> None:
        self.pieces = sorted(pieces, key=lambda piece: (-piece.itemsize, piece.key))
        self.num_bytes = 0
        """Of all pieces, without the header."""
        header: dict[str, Any] = {}
        for piece in self.pieces:
            start = self.num_bytes
            self.num_bytes += piece.num_bytes
            offsets = (start, self.num_bytes)
            header[piece.key] = {"dtype": piece.entry.dtype, "shape": piece.entry.shape, "data_offsets": offsets}
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)  # aligned in the file as well, so that pieces can be memory-mapped
        self.header = len(text).to_bytes(8, "little") + text

    def read(self, parts: Mapping[str, TensorPart]) -> Iterator[memoryview]:
        """Yield the bytes of all pieces from this rank's tensors. Copies at most one piece at a time."""
        for piece in self.pieces:
            yield from chunks(piece.content(parts).cpu().contiguous().reshape(-1).view(torch.uint8))

    def copy(self, parts: Mapping[str, TensorPart], target: Tensor) -> None:
        """Copy all pieces into `target`, uint8 [num_bytes] on the host; from a GPU to pinned memory it only starts."""
        end = 0
        for piece in self.pieces:
            start = end
            end += piece.num_bytes
            place = target[start:end].view(DTYPES[piece.entry.dtype]).view(piece.entry.shape)
            place.copy_(piece.content(parts), non_blocking=True)

    def write(self, path: Path, content: Iterable[memoryview], beat: Beat) -> Generator[str]:
        """Write the file. Yield "" whenever another SYNC_BYTES are on the disk, and at last "bytes sha256" of it."""
        digest = hashlib.sha256(self.header)
        unsynced = 0
        # hashing takes longer than writing, and lets go of the interpreter's lock
        with path.open("xb") as file, ThreadPoolExecutor(1, thread_name_prefix="digest") as digester:
            file.write(self.header)
            for chunk in content:
                hashed = digester.submit(digest.update, chunk)
                file.write(chunk)
                hashed.result()
                unsynced += len(chunk)
                beat()
                if unsynced >= SYNC_BYTES:
                    sync(file)
                    unsynced = 0
                    yield ""
            sync(file)
            result = f"{file.tell()} {digest.hexdigest()}"
        yield result


def chunks(flat: Tensor) -> Iterator[memoryview]:
    """Yield the bytes of a uint8 tensor [n] in the host's memory, CHUNK_BYTES at a time."""
    content = flat.numpy().data
    for start in range(0, len(content), CHUNK_BYTES):
        yield content[start : start + CHUNK_BYTES]
