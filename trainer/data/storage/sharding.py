"""Write shards from a data source, once for each content, into a cache directory (layout: shards.py).

    source files --read in blocks--> columns --checked, cast--> train / evaluation writers --> .KEY.*.partial
                                                                                                   | fsync, rename
                                                                                                   v
                                                                                               CACHE/KEY

KEY is a digest of the source's bytes and of the settings that decide the shards. Because a finished directory appears
by one rename, it is complete or absent; of two processes that build the same one, the first wins. What is found in the
cache is used after the digest of every file was compared with the manifest: disks and copies flip bits.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import time
import uuid
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any

from onward.trainer.config.run_config import RunConfig
from onward.trainer.config.sections.data import DataConfig
from onward.trainer.data.computations import read_and_computed
from onward.trainer.data.formats.finished_shards import MANIFEST, shards_at
from onward.trainer.data.formats.format_table import FORMATS
from onward.trainer.data.images.box_annotations import annotation_files
from onward.trainer.data.reading import sources
from onward.trainer.data.reading.files_of_cells import digests_of_named_files, naming_columns, outside_files
from onward.trainer.data.reading.inferred_schema import infer_schema
from onward.trainer.data.schema.allowed_files import folder_of
from onward.trainer.data.schema.column_computers import describe_all, stored_of
from onward.trainer.data.schema.columns import MAX_NAMED_ROWS, Schema, fit_block, in_parts, select
from onward.trainer.data.schema.fitted import Fitted, all_fitted
from onward.trainer.data.schema.signature import Signature, read_training_signature
from onward.trainer.data.storage.known_content import forget, known_before, once_read
from onward.trainer.data.storage.label_statistics import (
    check_label_statistics,
    refuse_more_objects,
    with_label_statistics,
)
from onward.trainer.data.storage.opened_shards import damaged_files
from onward.trainer.data.storage.part_processes import THIS_MACHINE
from onward.trainer.data.storage.recipe import Recipe, recipe_of, stored_columns
from onward.trainer.data.storage.shard_cache import server_of
from onward.trainer.data.storage.shard_space import check_space
from onward.trainer.data.storage.sharding_progress import Report
from onward.trainer.data.storage.shards import SHARD_VERSION, ShardManifest, manifest_problems
from onward.trainer.data.storage.written_parts import StepRunner, is_divided
from onward.trainer.data.storage.written_shards import write_shards
from onward.trainer.errors import DataError, OnwardError, RuntimeUnavailable
from onward.trainer.run.directory import RunDir, read_config
from onward.trainer.run.durable_files import fsync, sha256
from onward.trainer.run.machine.this_machine import usable_cores
from onward.trainer.run.recorded.checked_data import CheckedData
from onward.trainer.run.records import read_record, write_record

log = logging.getLogger(__name__)

KNOWN = ".known"
"""The folder of the cache with what known_content.py keeps."""
STALE_S = 86400.0
"""A partial directory that is older than this was left by a process that died."""

IN_EVERY_KEY = frozenset({"evaluation_fraction", "bad_rows", "rows_per_shard"})
"""Settings of [data] that are in the key of the cache, also where they have their defaults."""
COUNTED_OTHERWISE = frozenset(
    {"source", "format", "sources", "evaluation_source", "test_source"}  # by the files
    | {"inputs", "label", "classes", "split"}  # by the columns, and by what is computed of them
    | {"image", "audio", "text", "table", "files_from"}  # by the digests of computers and of the files that cells name
)
"""Settings of [data] that decide the shards by way of something else that is in the key."""
HARMLESS = frozenset({"evaluation_rows", "pad_values", "shard_on"})
"""Settings of [data] that do not change the shards. A new setting counts until it is listed here."""


def make_training_shards(
    config: RunConfig, cache: Path, *, report: Report | None = None, runner: StepRunner = THIS_MACHINE
) -> tuple[Path, ShardManifest, bool]:
    """Shard the data that a configuration trains on, with the columns that are computed; else as `shard`.

    Finished shards are used where they are. Raises the errors of `shard`, `read_training_signature` and
    `read_and_computed`.
    """
    signature = read_training_signature(config.model)
    if directory := shards_at(config.data):
        manifest = _finished_manifest(directory, cache)
        check_label_statistics(manifest, config.losses)
        refuse_more_objects(directory, manifest, config.losses, None)
        # a run finds the key again as the name of what its link leads to, which must not be another link
        return directory if directory.name == manifest.key else directory.resolve(), manifest, True
    labels = {name for loss in config.losses for name in loss.columns}
    recipe = recipe_of(config, signature)
    directory, manifest, cached = shard(recipe, cache, labels, report, runner)
    refuse_more_objects(directory, manifest, config.losses, recipe)
    return directory, with_label_statistics(directory, manifest, config.data, config.losses, signature), cached


def _finished_manifest(directory: Path, cache: Path) -> ShardManifest:
    """Return the manifest of finished shards. Raises DataError for a directory that was renamed or is damaged."""
    manifest = read_record(directory / MANIFEST, ShardManifest)
    if directory.resolve().name != manifest.key:
        # a run knows by this name whether its data is the same
        raise DataError(f"{directory} holds the shards {manifest.key}: rename it to {directory.parent / manifest.key}")
    problems = _damage(directory, manifest, cache / KNOWN)
    if problems:
        raise DataError(problems[:MAX_NAMED_ROWS])
    return manifest


def try_first_rows(
    config: RunConfig, signature: Signature, schema: Schema | None = None
) -> tuple[Schema, Mapping[str, Fitted]]:
    """Return the columns of the source with those that are computed, and what is fitted, both of the first rows.

    schema: the columns of the source, if they are known. Raises DataError, also for results that cannot be stored, and
    the errors of `read_and_computed`.
    """
    schema = schema or infer_schema(config.data)
    if directory := shards_at(config.data):
        return schema, read_record(directory / MANIFEST, ShardManifest).fitted
    read, computers = read_and_computed(config, signature, schema)
    if not computers:
        return schema, {}
    recipe = Recipe(config.data, stored_columns(config.data, read, schema), computers)
    # the first rows suffice to see whether results can be stored
    recipe.fit(most_blocks=1)
    blocks = ((block, block.index) for block in sources.first_blocks(config.data, recipe.request.text))
    for block, _ in in_parts(blocks, recipe.columns):
        values, good, _ = fit_block(block, recipe.columns)
        if good.any():
            describe_all(computers, select(values, good))
            computed = {column.name: column for column in stored_of(computers)}
            return {**schema, **computed}, all_fitted(computers)
    return schema, {}


def check_named_files(recipe: Recipe) -> None:
    """Raise DataError with the cells of all rows that name files which must not be read."""
    if problems := outside_files(recipe.data, recipe.columns):
        raise DataError(problems)


def check_held_out(recipe: Recipe) -> None:
    """Read the first rows of the evaluation and test data. Raises DataError where none can be read as the others."""
    held_out = [rows for rows in sources.source_ranges(recipe.data) if not rows.is_trained]
    for rows in held_out:
        for block, _ in islice(sources.read_range(rows, recipe.request), 1):
            _, good, bad = fit_block(block, recipe.columns)
            if len(good) and not good.any() and recipe.data.bad_rows == "fail":
                raise DataError(f"{block.where(row)}: {bad[row]}" for row in sorted(bad)[:MAX_NAMED_ROWS])


def shard(
    recipe: Recipe,
    cache: Path,
    labels: Collection[str] = (),
    report: Report | None = None,
    runner: StepRunner = THIS_MACHINE,
) -> tuple[Path, ShardManifest, bool]:
    """Shard the data into `cache`, unless the same content is there; return (directory, manifest, was it there).

    labels: the columns that losses read, which messages name apart. runner: makes the parts of large sources.
    Raises DataError: bad rows (policy `fail`) with file and line, no rows for a split, unreadable files; and as
    `check_space`.
    """
    key = cache_key(recipe, cache)
    final = cache / key
    if manifest := _intact_manifest(final, explain=True):
        return final, manifest, True
    cache.mkdir(parents=True, exist_ok=True)
    for stale in cache.glob(".*.partial"):
        if time.time() - stale.stat().st_mtime > STALE_S:  # a younger one may be of a process that still writes
            shutil.rmtree(stale, ignore_errors=True)
    fits_twice = check_space(cache, recipe)
    used = runner if is_divided(recipe, runner) else None
    if used and not fits_twice:
        # parts are joined before they are removed
        log.warning("the shards are written by this process alone: %s has no room for them and for parts", cache)
        used = None
    # beside the final directory, because a rename is atomic only inside one file system
    partial = cache / f".{key}.{uuid.uuid4().hex}.partial"
    partial.mkdir()
    try:
        recipe.fit()
        manifest = write_shards(recipe, key, partial, labels, report, used).with_digest()
        write_record(partial / "manifest.json", manifest)
        return final, _publish(partial, final) or manifest, False
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def cache_key(recipe: Recipe, cache: Path | None = None) -> str:
    """Digest all that decides the content of the shards: file names and contents, settings, columns, computed ones.

    cache: where the keys of large sources are known, if these did not change; None = every byte is read.
    """
    located = sources.all_sources(recipe.data)
    files = [path for source in located for _, path in source.files]

    def read() -> str:
        return _key(recipe, located, _digests(files))

    # the files that cells name are found by reading the table
    if cache is None or naming_columns(recipe.data, recipe.columns):
        return read()
    return once_read(*_known_source(recipe, located, cache), read)


def check_data(run: RunDir) -> tuple[CheckedData, ...]:
    """Read every byte of the shards of a run, and of the source that they were made of. () if they are gone.

    What is found to be damaged is known no longer, so that the next run reads it, too.
    """
    if not run.shards.is_dir():
        return ()
    config = read_config(run)
    try:
        manifest = read_record(run.shards / MANIFEST, ShardManifest)
        problems = tuple(damaged_files(run.shards, manifest))
    except RuntimeUnavailable as error:
        return (CheckedData(name="shards", result=f"cannot be read: {error}"),)
    except OnwardError as error:
        return (CheckedData(name="shards", result="differ", problems=error.problems),)
    # the run has a link to the directory in the cache
    directory = run.shards.resolve()
    if problems:
        forget(*_known_shards(directory, manifest))
    shards = CheckedData(name="shards", result="differ" if problems else "as written", problems=problems)
    if shards_at(read_config(run).data):
        return (shards,)
    try:
        recipe = recipe_of(config, read_training_signature(config.model))
        key = cache_key(recipe)
        # as in `cache_key`: of a table that names files nothing is known
        if key != manifest.key and not naming_columns(recipe.data, recipe.columns):
            forget(*_known_source(recipe, sources.all_sources(recipe.data), directory.parent))
    except (OnwardError, OSError) as error:
        # a source may be gone after it was sharded
        return shards, CheckedData(name="source", result=f"cannot be read: {error}")
    if key == manifest.key:
        return shards, CheckedData(name="source", result="as sharded")
    changed = f"{config.data.source} changed since it was sharded (key {manifest.key[:12]}, now {key[:12]})"
    return shards, CheckedData(name="source", result="differs", problems=(changed,))


def is_known(recipe: Recipe, cache: Path) -> bool:
    """Return whether `cache_key` reads none of the source's files, because their content is known."""
    located = sources.all_sources(recipe.data)
    if naming_columns(recipe.data, recipe.columns):
        return False
    return known_before(*_known_source(recipe, located, cache))


def _known_source(recipe: Recipe, located: Sequence[sources.Source], cache: Path) -> tuple[Path, object, list[Path]]:
    """Return by what the key of the sources is known, as `once_read` takes it."""
    files = [path for source in located for _, path in source.files]
    return cache / KNOWN, ["source", _key(recipe, located, {})], files


def _known_shards(directory: Path, manifest: ShardManifest) -> tuple[Path, object, list[Path]]:
    """Return by what shards are known to be intact, as `once_read` takes it."""
    files = [directory / file.name for file in manifest.all_files]
    return directory.parent / KNOWN, ["shards", manifest.model_dump_json()], files


def _digests(files: Sequence[Path]) -> dict[Path, str]:
    # SHA-256 lets other threads run
    with ThreadPoolExecutor(usable_cores()) as threads:
        return dict(zip(files, threads.map(sha256, files), strict=True))


def _key(recipe: Recipe, located: Sequence[sources.Source], digests: Mapping[Path, str]) -> str:
    data = recipe.data
    # contents and not modification times: a copied or touched file gives the same shards
    files = [[source.format, *((name, digests.get(path, "")) for name, path in source.files)] for source in located]
    settings = counted_settings(data, {source.format for source in located})
    content = [SHARD_VERSION, settings, files, [column.model_dump() for column in recipe.columns]]
    content += [computer.digest for computer in recipe.computers]
    # what follows is added only where it is set, so that the keys of earlier versions stay as they are
    # how a CSV file is written decides its rows
    if reading := data.table.reading_settings():
        content.append(reading)
        if data.split == "series":  # a setting of windows before
            reading["window"]["split"] = data.split
    if data.split == "stratified" and not data.evaluation_source:
        content.append([data.split, data.label])
    if data.sources or data.test_source:
        content.append([len(data.mixture), bool(data.evaluation_source), bool(data.test_source)])
    if data.image and data.image.box_place:
        place = data.image.box_place
        folders = [folder_of(source.name) for source in located]
        # with their names, by which they belong to images
        for folder in folders:
            content.append([(file.parent.name, file.name, sha256(file)) for file in annotation_files(folder, place)])
    # files that cells name are content, too, and may change while the table does not
    if named := naming_columns(data, recipe.columns):
        content.append(digests_of_named_files(data, named))
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:32]


def counted_settings(data: DataConfig, formats: Collection[str]) -> dict[str, Any]:
    """Return the settings of [data] that are in the key as they are, for sources of these formats."""
    # a setting of one format is left out for others, whose shards it does not change
    always = set(IN_EVERY_KEY).union(*(FORMATS[name].settings for name in formats))
    of_other_formats = set[str]().union(*(each.settings for each in FORMATS.values())) - always
    # a new setting counts once it is set, so that the shards that exist are used until then
    settings = data.model_dump(exclude={*COUNTED_OTHERWISE, *HARMLESS, *of_other_formats}, exclude_defaults=True)
    settings |= {name: getattr(data, name) for name in always}
    if "image_size" in always:  # earlier versions had two settings for it
        settings["image_channels"], settings["image_size"] = data.digits_shape
    # earlier versions had a choice of formats
    return {**settings, "shard_format": "arrow"}


def _intact_manifest(directory: Path, *, explain: bool = False) -> ShardManifest | None:
    """Return the manifest if every file has the content that was written, else None; explain: log what is damaged."""
    if not directory.exists():
        return None
    try:
        manifest = read_record(directory / "manifest.json", ShardManifest)
        damaged = _damage(directory, manifest)
    except (OnwardError, OSError) as error:
        damaged = [str(error)]
    if damaged and explain:
        log.warning("the shards are made again, because they are damaged: %s", "; ".join(damaged[:MAX_NAMED_ROWS]))
    return None if damaged else manifest


def _damage(directory: Path, manifest: ShardManifest, known: Path | None = None) -> list[str]:
    """Return what is damaged. Large files that were intact before, and did not change since, are not read again.

    known: where that is kept. Files on a server are compared when they are fetched: only the manifest is read.
    """
    if server_of(directory):
        return manifest_problems(directory, manifest)
    problems: list[str] = []

    def read() -> str:
        problems.extend(damaged_files(directory, manifest))
        return "" if problems else "intact"

    place, what, files = _known_shards(directory, manifest)
    once_read(known or place, what, files, read)
    return problems


def _publish(partial: Path, final: Path) -> ShardManifest | None:
    """Rename to the final name; return the other manifest if another process was first."""
    fsync(partial)
    if final.exists() and _intact_manifest(final) is None:
        # moved away before it is removed: ranks that still read it keep their open files
        damaged = final.with_name(f".{final.name}.{uuid.uuid4().hex}.partial")
        final.rename(damaged)
        shutil.rmtree(damaged, ignore_errors=True)
    try:
        os.rename(partial, final)  # noqa: PTH104 - fails if there is a directory that is not empty
    except OSError:
        if winner := _intact_manifest(final):
            return winner
        # not another process, but an error of the file system
        raise
    fsync(final.parent)
    return None
