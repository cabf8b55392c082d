"""Find what stands in the way of an exported file: directories that cannot be written, files that must stay."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from onward.trainer.config.urls import redacted, url_of
from onward.trainer.data.schema.signature import model_digest
from onward.trainer.errors import Refused, UnsupportedModel
from onward.trainer.onnx_graph.files.index import locations
from onward.trainer.onnx_graph.files.model_files import read_model
from onward.trainer.run.directory import onward_home
from onward.trainer.run.home import nearest_existing
from onward.trainer.run.recorded.exported_files import not_ours, variant_beside
from onward.trainer.run.remote.stores import refuse_unwritable


def url_conflicts(url: str) -> list[str]:
    """Return why no file can be written to a URL of `export.path`."""
    if not url.endswith(".onnx"):
        return [
            f"export.path: {redacted(url)} names no file; name the file to write, such as {redacted(url)}/model.onnx"
        ]
    return _unwritable("export.path", url)


def store_problems(store: str) -> list[str]:
    """Return why checkpoints cannot be sent to a URL or a directory; [] also for ""."""
    if not store:
        return []
    if not url_of(store):
        return [] if is_writable(Path(store)) else [f"checkpoint.store: cannot write to {store}"]
    return _unwritable("checkpoint.store", store)


def _unwritable(setting: str, url: str) -> list[str]:
    try:
        refuse_unwritable(url)
    except Refused as error:
        return [f"{setting}: {problem}" for problem in error.problems]
    return []


def export_conflicts(target: Path, source: Path | None, variants: Iterable[str] = ()) -> list[str]:
    """Return why the trained file, its variants and its external data cannot be written to `target` and beside it.

    `source`: the original file. Neither it, nor its external data, nor that of another model may be overwritten.
    """
    if target.is_dir():
        return [f"{target} is a directory; name the file to write, such as {target}/model.onnx"]
    if not is_writable(target.parent):
        return [f"cannot write to {target.parent}"]
    # an absent model is reported elsewhere, and nothing can be overwritten
    if source is None or not source.is_file():
        return []
    places = [target, *(variant_beside(target, kind) for kind in variants)]
    problems = [
        f"{place} is the model that is trained; choose another name" for place in places if _same(place, source)
    ]
    # the exported file keeps its weights in files of the same names as the original's
    own = _external_files(source)
    if taken := [name for name in own if _same(target.parent / name, source.parent / name)]:
        problems.append(
            f"the exported file keeps weights in {', '.join(taken)}, and in {target.parent} those belong to the "
            "original; choose another directory"
        )
    # files of an earlier export to the same target may be replaced
    former = _external_files(target) if target.is_file() else []
    others = [name for name in own if name not in (*taken, *former)]
    if foreign := [name for name in others if (target.parent / name).exists()]:
        problems.append(
            f"the exported file keeps weights in {', '.join(foreign)}, which in {target.parent} is not a file of "
            f"{target.name}; choose another directory"
        )
    return problems


def files_in_the_way(target: Path, variants: Iterable[str] = (), others: Iterable[Path] = ()) -> list[str]:
    """Return why existing files at `target`, those of its variants and `others` must not be replaced, one text each.

    A file that an export has left there may be replaced.
    """
    places = [target, *(variant_beside(target, kind) for kind in variants), *others]
    # each export remembers what it has written where, with its digest
    foreign = not_ours(places)
    if target in foreign and _is_export_of_a_run(target):
        return []  # of a version that did not record where it exported to
    return [
        f"{place} exists, and no export has left it so; choose another name, move the file away, or replace it: "
        "export.overwrite = true, or `onward export --overwrite`"
        for place in foreign
    ]


def _is_export_of_a_run(file: Path) -> bool:
    """Return whether the file equals one that a run has exported and still has."""
    if not file.is_file():
        return False
    records = (onward_home() / "runs").glob("*/export/model.json")
    texts = [record.read_text(errors="replace") for record in records]
    # the digest is computed only if there is a record to compare it with
    return bool(texts) and any(model_digest(file) in text for text in texts)


def _external_files(model: Path) -> list[str]:
    """Return the names of a model's external data files; [] if it cannot be read."""
    try:
        return locations(read_model(model))
    except (UnsupportedModel, OSError):
        return []


def _same(one: Path, other: Path) -> bool:
    return one.exists() and other.exists() and one.samefile(other)


def is_writable(directory: Path) -> bool:
    """Return whether files can be written there, or the directory can be made."""
    # missing directories are made by the export, below the nearest that exists
    nearest = nearest_existing(directory)
    return nearest.is_dir() and os.access(nearest, os.W_OK | os.X_OK)
