"""Read the directories that `Dataset.save_to_disk` of Hugging Face `datasets` writes, without that package.

DIRECTORY/dataset_dict.json                splits, one directory for each    (of a DatasetDict)
DIRECTORY/state.json                       names of the data files, in order
DIRECTORY/data-00000-of-00002.arrow        Arrow's IPC stream format
DIRECTORY/cache-....arrow                  results of `map`, which are no part of the data
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from onward.trainer.bounds import RECORD_BYTES, read_bounded
from onward.trainer.errors import DataError


def saved_dataset(directory: Path) -> dict[str, Path]:
    """Return name -> path of the data files of a saved dataset, in order; {} if the directory holds none.

    Raises DataError for a directory of several splits, for absent files and for rows in another order than the files'.
    """
    if (directory / "dataset_dict.json").is_file():
        splits = _read(directory / "dataset_dict.json").get("splits", [])
        splits = splits if isinstance(splits, list) else []
        example = f"{directory}/{splits[0]}" if splits else f"{directory}/train"
        raise DataError(
            f"{directory} holds the splits {', '.join(map(str, splits)) or '(none)'} of a Hugging Face dataset; name "
            f"one of them: data.source = {example!r}, and another one as data.evaluation_source"
        )
    if not (directory / "state.json").is_file():
        return {}
    state = _read(directory / "state.json")
    if "_data_files" not in state:
        return {}  # a file of somebody else's
    if state.get("_indices_data_files"):
        raise DataError(
            f"{directory} chooses rows by an index, as datasets before 2.0 saved them; save it again after "
            "dataset.flatten_indices()"
        )
    entries = state["_data_files"]
    if not isinstance(entries, list) or not all(map(_names_a_file, entries)):
        raise DataError(f"{directory}/state.json does not list its files under _data_files, as `datasets` writes them")
    files = {str(entry["filename"]): directory / str(entry["filename"]) for entry in entries}
    # a name with a folder in it would be a file of another dataset
    inside = {name for name, path in files.items() if path.parent == directory}
    present = {name for name in inside if files[name].is_file()}
    if absent := [name for name in files if name not in present]:
        raise DataError(f"{directory}/state.json names files that are not there: {', '.join(absent)}")
    if not files:
        raise DataError(f"{directory} is a Hugging Face dataset without rows")
    return files


def _names_a_file(entry: Any) -> bool:
    return isinstance(entry, dict) and "filename" in entry


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(read_bounded(path, RECORD_BYTES))
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path} cannot be read: {error}") from None
    return found if isinstance(found, dict) else {}
