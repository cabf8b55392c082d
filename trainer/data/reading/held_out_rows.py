"""Choose the rows of a source that are held out for evaluation: by hashes, so that no row changes sides later."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from onward.trainer.data.columns import Array
from onward.trainer.data.permutation import hash_key, keyed_hash

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
    stretch = (index * share) >> RESOLUTION
    first = -(-(stretch << RESOLUTION) // share)
    size = -(-((stretch + 1) << RESOLUTION) // share) - first
    pick = keyed_hash(stretch, hash_key("held out", file)) % size.astype(np.uint64)
    return np.asarray(index - first == pick.astype(np.int64))


def held_out_files(names: Sequence[str], fraction: float) -> set[str]:
    """Return the files with the smallest hashes of their names: `fraction` of them, at least one if it is not 0."""
    count = max(1, round(fraction * len(names))) if fraction else 0
    return set(sorted(names, key=lambda name: (hash_key("held out", name), name))[:count])
