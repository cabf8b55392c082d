"""Checks shards against the digests in their manifest; production code checks sizes only."""

from __future__ import annotations

from pathlib import Path

from onward.trainer.data.storage.shards import ShardManifest
from onward.trainer.run.durable_files import sha256
from onward.trainer.run.records import read_record


def damaged_files(directory: Path) -> list[str]:
    """Return one sentence for each file that is missing or does not have the content that was written."""
    manifest = read_record(directory / "manifest.json", ShardManifest)
    problems = []
    for file in (*manifest.train, *manifest.evaluation):
        path = directory / file.name
        if not path.is_file():
            problems.append(f"{path} is missing")
        elif (size := path.stat().st_size) != file.bytes:
            problems.append(f"{path} has {size} bytes, not {file.bytes}")
        elif (digest := sha256(path)) != file.sha256:
            problems.append(f"{path} has SHA-256 {digest[:12]}, not {file.sha256[:12]}: its content changed")
    return problems
