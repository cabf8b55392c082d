"""Compute the loss of a file on rows without labels: a batch of them has labels without values, [B, 0]."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from onward.trainer.data.batches.batches import Batch
from onward.trainer.data.schema.columns import Array
from onward.trainer.data.storage.first_rows import FirstRows
from onward.trainer.rehearsal.findings import Findings
from onward.trainer.rehearsal.rehearsed_graph import RehearsedGraph

MOST_ROWS = 2


def check_empty_labels(
    graph: RehearsedGraph, rows: FirstRows, batch_of: Callable[[Array], Batch], findings: Findings
) -> None:
    """Refuse a loss of a file, or its count, that fails on a batch of the first rows that have no labels.

    batch_of: makes a batch of the rows of these numbers.
    """
    if findings.failures:
        return
    values = rows.read(np.arange(rows.num_rows))
    for loss in graph.losses.each:
        # a column of lists is one in which a row may have no label
        columns = [values[name] for name in loss.config.columns if isinstance(values.get(name), list)]
        if not loss.config.is_own or not columns:
            continue
        empty = []
        for row in range(rows.num_rows):
            if not any(len(column[row]) for column in columns):
                empty.append(row)
        empty = empty[:MOST_ROWS]
        if not empty:
            continue
        try:
            batch = batch_of(np.array(empty))
            loss(graph.outputs(batch), batch.labels[graph.losses.each.index(loss)], batch.size)
        except Exception as error:  # whatever the user's code raises
            findings.refuse(
                f"loss.file {loss.config.file!r}: {len(empty)} of the first rows have no labels ("
                f"{', '.join(loss.config.columns)}), and a batch of them cannot be computed: labels without values, "
                f"[{len(empty)}, 0]: {str(error).splitlines()[0]}; let loss and count take these, or leave "
                "such rows out of the data"
            )
