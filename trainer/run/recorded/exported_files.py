"""Remember which files outside of the run directories an export has written, so that it replaces no others.

A schedule exports to the same `export.path` every night and replaces the file of the night before. A file that no
export has written, or that was changed since, may be someone's only copy: it is not replaced without
`export.overwrite`. The records are HOME/exports/KEY.json, one for each path that was exported to.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path

from onward.trainer.bounds import RECORD_BYTES, read_bounded
from onward.trainer.run.directory import onward_home
from onward.trainer.run.durable_files import sha256, write_durably


def variant_beside(target: Path, kind: str) -> Path:
    """Return where a variant of the exported file `target` lies."""
    return target.with_name(f"{target.stem}.{kind}.onnx")


def remember(place: Path, content: Path) -> None:
    """Record that an export is about to write the file `place` with the content of the file `content`.

    Before it is written, and beside the digest of what is there now: whatever a crash leaves there is known.
    """
    # the old digest stays as well: a crash before the copy leaves the old file
    digests = [sha256(content)] + ([sha256(place)] if place.exists() and not not_ours([place]) else [])
    write_durably(_record(place), json.dumps({"path": str(place.absolute()), "sha256": digests}).encode())


def not_ours(places: Iterable[Path]) -> list[Path]:
    """Return existing files that no export wrote, or that changed since."""
    existing = (place for place in places if place.exists())
    return [place for place in existing if not _is_ours(place)]


def _is_ours(place: Path) -> bool:
    try:
        # first the record: a file without one may be large
        known = json.loads(read_bounded(_record(place), RECORD_BYTES))["sha256"]
        return sha256(place) in known
    except (OSError, ValueError, KeyError, TypeError):
        return False  # without a readable record it is treated as someone's


def _record(file: Path) -> Path:
    key = hashlib.sha256(str(file.absolute()).encode(errors="surrogateescape")).hexdigest()
    return onward_home() / "exports" / f"{key[:32]}.json"
