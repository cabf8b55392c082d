"""Refuse rows without labels where the loss needs a target of every row.

A row of an empty list is padded like a shorter one. Cross-entropy, Dice and CTC leave padding out, and a loss of the
user's own counts what it wants. Every other loss would take the padding for targets.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence

from onward.trainer.config.losses import LossConfig
from onward.trainer.data.schema.columns import Column, Schema, Values

TAKES_NONE = ("classes", "sequences", "own", "none")
"""Labels of which a row may have none (`LossRule.labels`)."""


class EmptyTargets:
    """Computes nothing, and refuses the rows without labels of one loss: a ColumnComputer."""

    columns: tuple[Column, ...] = ()
    pad_values: Mapping[str, float] = {}
    file_only = consumed = frozenset[str]()

    def __init__(self, loss: LossConfig) -> None:
        self._loss = loss
        self.digest = json.dumps(["empty targets", loss.name, loss.columns])
        self.summary = f"labels {', '.join(loss.columns)}, of which no row is empty"

    def describe(self, values: Mapping[str, Values]) -> None:
        """There are no results to describe."""

    def compute(self, rows: Mapping[str, Values], count: int) -> tuple[dict[str, Values], dict[int, str]]:
        """Return no results, and row -> why the loss has no target of it."""
        why = (
            f"is empty, and the loss {self._loss.name} needs a target of every row; leave such rows out "
            "(data.bad_rows = 'skip'), or set a loss that takes none (loss.file with loss.count)"
        )
        bad: dict[int, str] = {}
        for name in self._loss.columns:
            labels = rows.get(name)
            # an array has rows of one length
            if isinstance(labels, list):
                empty = [at for at, row in enumerate(labels) if not len(row)]
                bad |= dict.fromkeys(empty, f"{name} {why}")
        return {}, bad


def open_empty_targets(losses: Sequence[LossConfig], schema: Schema) -> Iterator[EmptyTargets]:
    """Yield what refuses rows without labels, for each loss that needs them and whose columns hold lists of numbers."""
    for loss in losses:
        columns = [schema[name] for name in loss.columns if name in schema]
        numbers = [column for column in columns if column.holds_numbers]
        has_lists = any(column.variable or len(column.shape) == 1 for column in numbers)
        if loss.rule.labels not in TAKES_NONE and has_lists:
            yield EmptyTargets(loss)
