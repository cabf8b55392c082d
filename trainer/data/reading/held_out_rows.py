"""Choose the rows of a source that are held out for evaluation: by hashes, so that no row changes sides later.

split = "random"        of each ten consecutive rows one         . . E . . . . . . . | . . . . . . . E . .
split = "stratified"    the same among the rows of each class    a: . E . ...   b: . . . E ...
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from onward.trainer.data.schema.columns import Array, Block
from onward.trainer.data.schema.permutation import hash_key, keyed_hash
from onward.trainer.errors import DataError

RESOLUTION = 20
"""Fractions are counted in 2^-20."""


def held_out(file: str, index: Array, fraction: float) -> Array:
    """Return which rows of a file are for evaluation: bool [n].

    Of each 1 / fraction consecutive rows one is held out, chosen by a hash of the file's name and the group's number.
    So the fraction is exact to a row, and no row changes sides when rows are appended or files are added:

        fraction 0.25      . . E . | E . . . | . . . E | . E ..
    """
    # groups of one row would leave nothing to choose
    if fraction > 0.5:
        return ~held_out(file, index, 1.0 - fraction)
    share = round(fraction * (1 << RESOLUTION))
    if not share:
        return np.zeros(len(index), bool)
    # row i is in group floor(i · fraction); a group is the rows between two steps of this function, ceil(g / fraction)
    # onwards
    stretch = (index * share) >> RESOLUTION
    first = -(-(stretch << RESOLUTION) // share)
    size = -(-((stretch + 1) << RESOLUTION) // share) - first
    # the row of each group depends on the file's name and the group alone, not on what follows
    pick = keyed_hash(stretch, hash_key("held out", file)) % size.astype(np.uint64)
    return np.asarray(index - first == pick.astype(np.int64))


def stratified(
    blocks: Iterator[tuple[str, Block]], label: str, fraction: float, names: Sequence[str] | None
) -> Iterator[tuple[Block, Array]]:
    """Yield blocks with the rows that are held out: of each class in a file the share `fraction`, exact to a row.

    blocks: (file, rows), with the column `label`, which is left out again if `names` does not have it. Rows that are
    appended to a file move none to the other side. Raises DataError if there is no such column.
    """
    seen = Counter[tuple[str, str]]()
    for file, block in blocks:
        if label not in block.cells:
            raise DataError(
                f"data.split is 'stratified', but {block.file} has no column {label!r} (data.label) whose classes it "
                "divides; set data.label, or data.split = 'random'"
            )
        cells = block.cells[label]
        if isinstance(cells, np.ndarray) and cells.ndim > 1:
            raise DataError(
                f"data.split is 'stratified', but column {label!r} of {block.file} holds several numbers in a row, not "
                "a class; set data.split = 'random'"
            )
        places: dict[str, list[int]] = {}
        for at, cell in enumerate(cells):
            places.setdefault(_class_of(cell), []).append(at)
        held = np.zeros(len(block.index), bool)
        for name, rows in places.items():
            index = np.arange(seen[file, name], seen[file, name] + len(rows))
            seen[file, name] += len(rows)
            # rows are numbered inside their class, and the hash has its name: each class is divided by itself
            held[rows] = held_out(f"{file}\0{name}", index, fraction)
        # the label was read for the split alone
        if names is not None and label not in names:
            block = replace(block, cells={key: each for key, each in block.cells.items() if key != label})
        yield block, held


def _class_of(cell: Any) -> str:
    """Return the class of a cell: a CSV file is read as text or as numbers, and 1, 1.0 and "1" are one class."""
    try:
        number = float(cell)
    except (TypeError, ValueError):
        return "" if cell is None else str(cell)
    # NaN is a missing cell in a table of numbers, as "" is in one of texts
    return f"{number:.17g}" if number == number else ""


def held_out_files(names: Sequence[str], fraction: float) -> set[str]:
    """Return the files with the smallest hashes of their names: `fraction` of them, at least one if it is not 0."""
    return of_least_hashes(names, max(1, round(fraction * len(names))) if fraction else 0)


def of_least_hashes(names: Iterable[str], count: int) -> set[str]:
    """Return the `count` names of files or series that are held out: those with the smallest hashes."""
    return set(sorted(names, key=lambda name: (hash_key("held out", name), name))[:count])
