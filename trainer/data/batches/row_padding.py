"""Pad rows of varying length into one array.

rows    [a b c]  [d]        [[a, b, c],          behind the values, or in front of them
                             [d, -, -]]
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from onward.trainer.config.losses import LossConfig
from onward.trainer.data.input_columns import Feed
from onward.trainer.data.schema.columns import Array, Values


def longest_row(values: Values) -> int:
    """Return the length of the longest row; 0 for arrays, whose rows have one length."""
    return 0 if isinstance(values, np.ndarray) else max(map(len, values), default=0)


def least_lengths(columns: Iterable[str], losses: Sequence[LossConfig], inputs: Sequence[Feed]) -> dict[str, int]:
    """Return for each column how long its rows are in a batch, at least.

    Rows that are all empty get one value of padding. The labels of a loss of a file stay without values: only the user
    knows how many belong to a target. So do boxes, of which each has several.
    """
    of_any_number = [loss for loss in losses if loss.takes_boxes]
    may_be_empty = {name for loss in of_any_number for name in loss.columns}
    # a column that feeds an input, too, must not be empty: the graph gets at least one value of it
    may_be_empty -= {name for feed in inputs for name in feed.columns}
    return {name: int(name not in may_be_empty) for name in columns}


def padded_rows(values: Values, pad_value: float, least: int, *, left: bool) -> Array:
    """Pad rows of varying length to the longest, and to at least `least`: [B, length]. Arrays are returned as is.

    left: in front of the values, not behind them.
    """
    if isinstance(values, np.ndarray):
        return values
    longest = max(longest_row(values), least)
    padded = np.full((len(values), longest), pad_value, values[0].dtype if values else np.float32)
    for row, value in zip(padded, values, strict=True):
        first = longest - len(value) if left else 0
        row[first : first + len(value)] = value
    return padded
