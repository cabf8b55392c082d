"""Know large files again of which every byte was read before, without reading them a second time.

    CACHE/.known/<fingerprint>      what was found when all was read: the key of a source, or that shards are intact

A fingerprint has the name, size, inode, and times of each file, and some kilobytes of their content. The kernel sets
the time of a change (ctime) at each write and offers no call to set it back, as it does for the time of modification.
So only content that changes below the file system stays unnoticed where it is in no sample: flipped bits of a disk,
which `onward verify` finds, and writes on file systems that keep no such time. Files are also read again where a copy,
a rename or a change of permissions gave them another time or inode, and after `onward verify` found them damaged.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from onward.trainer.bounds import opened
from onward.trainer.data.schema.permutation import hash_key, keyed_hash
from onward.trainer.run.durable_files import write_durably

log = logging.getLogger(__name__)

CHEAP_BYTES = 256 << 20
"""Less than this is read again each time, in less than half a second."""
NUM_SAMPLES = 256
"""Of all files together, at places that depend on their sizes alone."""
SAMPLE_BYTES = 4096
UNSETTLED_S = 2.0
"""A file that was changed so shortly before it was read may change again without another time."""


def once_read(known: Path, what: object, files: Sequence[Path], read: Callable[[], str]) -> str:
    """Return what `read` returns for the content of these files, or has returned for the same before.

    known: the folder of what was found. what: all else that decides the result. Results that are empty are not kept.
    Raises what `read` raises.
    """
    if (path := _path(known, what, files)) is None:
        return read()
    try:
        return path.read_text()
    except OSError:
        began_at = time.time()
        found = read()
        newest = max(file.stat().st_ctime for file in files)
        # also if a file changed while it was read: then its fingerprint is another one
        if found and newest < began_at - UNSETTLED_S and _path(known, what, files) == path:
            write_durably(path, found.encode())
        return found


def forget(known: Path, what: object, files: Sequence[Path]) -> None:
    """Remove what `once_read` knows of these files, which were found to be others: it reads them again."""
    if path := _path(known, what, files):
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            # whoever checks the files of another user may not be allowed to, and still says what is wrong with them
            log.warning("%s still says that these files did not change; remove it: %s", path, error)


def known_before(known: Path, what: object, files: Sequence[Path]) -> bool:
    """Return whether `once_read` knows the result, and would read nothing."""
    path = _path(known, what, files)
    return path is not None and path.is_file()


def _path(known: Path, what: object, files: Sequence[Path]) -> Path | None:
    """Return where the result for these files is kept; None for files that are small, or missing."""
    try:
        states = [file.stat() for file in files]
        if sum(state.st_size for state in states) < CHEAP_BYTES:
            return None
        digest = hashlib.sha256(json.dumps(what, sort_keys=True).encode())
        for file, state in zip(files, states, strict=True):
            times = state.st_mtime_ns, state.st_ctime_ns
            digest.update(json.dumps([str(file.resolve()), state.st_size, state.st_ino, *times]).encode())
        for sample in _samples(files, [state.st_size for state in states]):
            digest.update(sample)
    except OSError:
        # who reads them says why
        return None
    return known / digest.hexdigest()[:32]


def _samples(files: Sequence[Path], sizes: Sequence[int]) -> list[bytes]:
    """Return some bytes of the files, at places that a hash spreads over all of them."""
    ends = np.cumsum(sizes)
    places = keyed_hash(np.arange(NUM_SAMPLES), hash_key("samples", int(ends[-1]))) % np.uint64(ends[-1])
    found = []
    # sorted, so that a disk reads in one direction
    for place in np.sort(places).astype(np.int64):
        number = int(np.searchsorted(ends, place, side="right"))
        with opened(files[number]) as file:
            file.seek(max(0, int(place) - int(ends[number]) + sizes[number]))
            found.append(file.read(SAMPLE_BYTES))
    return found
