"""Count what the rows of a micro-batch hold before they are padded: the lengths of inputs, and the tokens of texts.

    input_ids of two rows, as padded   [[5, 7, 9], [4, 8, -]]
    lengths                            [[3], [2]]             one column for each input whose rows vary
    tokens                             5

What training costs is counted with these numbers (trainer/parallel/planning/sample_flops.py, throughput.py), so padding
is in none of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from onward.trainer.config.losses import LossConfig
from onward.trainer.data.input_columns import Feed
from onward.trainer.data.schema.columns import Array, Schema, Values
from onward.trainer.data.text.text_columns import TextColumns

PREDICTS_TOKENS = ("causal", "tokens")
"""The tasks of text whose labels have one class for each token; those of `masked` have one for a few of them."""


class RowLengths:
    """Counts rows. inputs: the feeds of the graph's inputs, in their order. pad_values: of columns in stored rows."""

    def __init__(
        self,
        inputs: Sequence[Feed],
        columns: Schema,
        text: TextColumns | None,
        pad_values: Mapping[str, float],
    ) -> None:
        varying = {place: feed.columns[0] for place, feed in enumerate(inputs) if columns[feed.columns[0]].variable}
        self.places = tuple(varying)
        """The inputs whose rows have lengths of their own, by their places."""
        self._varying = tuple(varying.values())
        self._pad_values = pad_values
        self._text = text
        """None: the data is no text, and has no tokens."""
        self._mask = text.inputs["attention_mask"].name if text and "attention_mask" in text.inputs else ""

    @property
    def is_text(self) -> bool:
        return self._text is not None and "input_ids" in self._text.inputs

    def lengths(self, columns: Mapping[str, Values], num_rows: int) -> Array:
        """Return the lengths of the first rows: int64 [num_rows, inputs whose rows vary]."""
        found = [[len(row) for row in columns[name][:num_rows]] for name in self._varying]
        return np.array(found, np.int64).reshape(len(found), num_rows).T

    def tokens(self, columns: Mapping[str, Values], num_rows: int) -> int:
        """Return the tokens of the first rows, without padding; 0 if the data is no text.

        Those that the loss has as targets, where it predicts a class for each token, else those that the graph reads.
        """
        text = self._text
        if text is None or not self.is_text:
            return 0
        if text.config.task in PREDICTS_TOKENS and text.label in columns:
            return sum(int((np.asarray(row) != text.ignore_index).sum()) for row in columns[text.label][:num_rows])
        name = text.inputs["input_ids"].name
        ids = columns[name][:num_rows]
        if not isinstance(ids, np.ndarray):  # rows as long as their texts
            return sum(map(len, ids))
        if text.is_packed:  # full windows
            return ids.size
        # of the length that the graph declares: padded when the shards were made
        mask = columns.get(self._mask)
        # without a mask the padding id says it
        padded = ids == self._pad_values.get(name, 0) if mask is None else np.asarray(mask[:num_rows]) == 0
        return int(ids.size - padded.sum())


# -- pad rows of varying length into one array
#
# rows    [a b c]  [d]        [[a, b, c],          behind the values, or in front of them
#                              [d, -, -]]


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
