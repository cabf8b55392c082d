"""Open shards, and check that they are as they were written, in a directory or on a server (layout: shards.py)."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from onward.trainer.config.sections.data import DataConfig
from onward.trainer.data.formats.finished_shards import MANIFEST
from onward.trainer.data.storage.shard_cache import server_of
from onward.trainer.data.storage.shards import ShardFile, ShardManifest, Shards, Split, manifest_problems
from onward.trainer.run.durable_files import sha256
from onward.trainer.run.records import read_record


def open_shards(directory: Path, split: Split, *, for_file: bool = False, most: int = 0) -> Shards:
    """Open the rows of a split. `for_file`: with the columns that only the whole file reads (not of the train split).

    `most`: only so many of the rows (Shards).

    Raises OnwardError when the directory has no manifest, DataError for damaged files.
    """
    manifest = read_record(directory / MANIFEST, ShardManifest)
    return Shards(directory, manifest, split, for_file=for_file, most=most, server=server_of(directory))


def open_evaluated(directory: Path, data: DataConfig, split: Split = "evaluation", *, for_file: bool = False) -> Shards:
    """Open the rows of a split that an evaluation reads: of "evaluation" at most `data.evaluation_rows`.

    Raises the errors of `open_shards`.
    """
    most = data.evaluation_rows if split == "evaluation" else 0
    return open_shards(directory, split, for_file=for_file, most=most)


def damaged_files(directory: Path, manifest: ShardManifest) -> list[str]:
    """Return one sentence for each file that is missing or does not have the content that was written.

    Reads every byte, two files at a time: the digest of one is computed while another is read from the disk.
    """
    server = server_of(directory)

    def problem(file: ShardFile) -> str:
        path = directory / file.name
        if server:
            return server.problem(file)
        if not path.is_file():
            return f"{path} is missing"
        # the size is the cheapest difference
        if (size := path.stat().st_size) != file.bytes:
            return f"{path} has {size} bytes, not {file.bytes}"
        if (digest := sha256(path)) != file.sha256:
            return f"{path} has SHA-256 {digest[:12]}, not {file.sha256[:12]}: its content changed"
        return ""

    with ThreadPoolExecutor(2) as threads:
        found = list(threads.map(problem, manifest.all_files))
    return [*manifest_problems(directory, manifest), *filter(None, found)]
