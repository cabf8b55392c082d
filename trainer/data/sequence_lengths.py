"""Check that a CTC can reach its labels: it needs a time step for each of them, and a blank between equal neighbours.

    labels      c a l l      4 labels, 1 repetition
    shortest    c a l _ l    5 time steps: with fewer the probability is 0 and the loss infinite

Where `loss.input_lengths` names a column, rows are checked while the data is sharded, and are bad rows like any other.
The length of the output itself may be known only when a batch is computed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from onward.trainer.config.losses import LossConfig
from onward.trainer.data.schema.columns import Array, Column, Values
from onward.trainer.data.schema.signature import Signature


def sequence_problems(labels: Array, lengths: Array | None, loss: LossConfig, *, steps: int | None) -> dict[int, str]:
    """Return row -> why the CTC of the row is not what is meant, or infinite.

    labels: [B, L], shorter ones padded with the ignored label. lengths: [B], the time steps of each row; None = the
    infinite ones are not looked for. steps: those of the output, None where they are not known.
    """
    counted = labels != loss.ignored
    numbers = counted.sum(1)
    # equal neighbours need a blank between them, which takes a time step of its own
    repetitions = (counted[:, 1:] & (labels[:, 1:] == labels[:, :-1])).sum(1)
    # a label behind an ignored one: not padding, then
    has_gap = (counted[:, 1:] & ~counted[:, :-1]).any(1)
    has_blank = (counted & (labels == loss.blank)).any(1)
    found: dict[int, str] = {}
    for row in np.flatnonzero(has_gap).tolist():
        found[row] = f"the ignored label {loss.ignored} is followed by others, but pads the end of a row only"
    for row in np.flatnonzero(has_blank).tolist():
        found[row] = (
            f"a label is {loss.blank}, which is loss.blank; labels that only pad a row are set in loss.ignore_index"
        )
    if lengths is None:
        return found
    column = f" ({loss.input_lengths})" if loss.input_lengths else ""
    most = np.inf if steps is None else steps
    for row in np.flatnonzero(numbers + repetitions > lengths).tolist():
        found[row] = (
            f"its labels need {numbers[row] + repetitions[row]} time steps ({numbers[row]} labels, of which "
            f"{repetitions[row]} repeat the one before), but its input length{column} is {lengths[row]}"
        )
    for row in np.flatnonzero((lengths < 1) | (lengths > most)).tolist():
        limit = "1 or more" if steps is None else f"1..{steps}, the time steps of the output"
        found[row] = f"its input length{column} is {lengths[row]}, but must be {limit}"
    return found


class SequenceLengths:
    """Computes nothing, and refuses the rows of `sequence_problems`: a ColumnComputer.

    steps: of the output, as the file declares them; None = dynamic.
    """

    columns: tuple[Column, ...] = ()
    pad_values: Mapping[str, float] = {}
    file_only = consumed = frozenset[str]()

    def __init__(self, loss: LossConfig, steps: int | None) -> None:
        self._loss = loss
        self._steps = steps
        settings = loss.input_lengths, loss.columns, loss.ignored, loss.blank
        self.digest = json.dumps(["input lengths", *settings, steps])
        self.summary = f"input lengths {loss.input_lengths}, which suffice for the labels {', '.join(loss.columns)}"

    def describe(self, values: Mapping[str, Values]) -> None:
        """There are no results to describe."""

    def compute(self, rows: Mapping[str, Values], count: int) -> tuple[dict[str, Values], dict[int, str]]:
        """Return no results, and row -> why its labels cannot be reached."""
        columns = [_padded(rows[name], self._loss.ignored) for name in self._loss.columns]
        labels = np.concatenate(columns, axis=1)
        lengths = np.asarray(rows[self._loss.input_lengths]).reshape(count)
        return {}, sequence_problems(labels, lengths, self._loss, steps=self._steps)


def _padded(values: Values, pad_value: int) -> Array:
    """Return labels as [n, L]."""
    if isinstance(values, np.ndarray):
        return values.reshape(len(values), -1)
    padded = np.full((len(values), max(map(len, values), default=0)), pad_value)
    for row, value in zip(padded, values, strict=True):
        row[: len(value)] = value
    return padded


def open_sequence_lengths(losses: Sequence[LossConfig], signature: Signature) -> Iterator[SequenceLengths]:
    """Yield what checks the input lengths of each loss that has any."""
    for loss in losses:
        if loss.input_lengths:
            output = signature.output(loss.outputs[0])
            shape = output.shape if output and output.shape else ()
            yield SequenceLengths(loss, shape[1] if len(shape) == 3 else None)
