"""Check that targets are counted as the loss is summed, and what the user's code says of it: sums over rows, and values
for rows without labels.

    rows        0   1   2   3
    whole       loss(0 .. 3)
    parts       loss(0)  +  loss(1 .. 3)        equal, since micro-batches and ranks divide the rows

A batch of rows without labels has labels without values, [B, 0].
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
from torch import Tensor

from onward.trainer.data.batches.batches import Batch
from onward.trainer.data.schema.columns import Array
from onward.trainer.data.storage.first_rows import FirstRows
from onward.trainer.model.losses.loss import Loss
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


def check_counts(graph: RehearsedGraph, batch: Batch, findings: Findings) -> None:
    """Refuse a `loss.count` that is no sum over rows: the loss would depend on how they are divided. Refuse raw outputs
    of a grid whose sizes are not those that the host has counted with."""
    first = 0
    for place, loss in enumerate(graph.losses.each):
        labels = batch.labels[place]
        counts = batch.num_targets[first : first + loss.config.num_terms]
        first += loss.config.num_terms
        if loss.config.rule.by_level and not findings.failures:
            _check_levels(loss, graph.outputs(batch), labels, counts, findings)
        if loss.config.count and labels is not None and batch.size > 1:
            whole, others = counts[0], batch.size - 1
            parts = [float(loss.count(labels[:1], 1)), float(loss.count(labels[1:], others))]
            if not math.isclose(whole, sum(parts), rel_tol=1e-6):
                findings.refuse(
                    f"loss.count {loss.config.count!r} returned {whole:g} for {batch.size} rows, but {parts[0]:g} for "
                    f"the first of them and {parts[1]:g} for the other {others}; it must be a sum over rows, as they "
                    "are divided among micro-batches and ranks"
                )


def _check_levels(
    loss: Loss, outputs: Sequence[Tensor], labels: Tensor | None, counts: Sequence[float], findings: Findings
) -> None:
    loss(outputs, labels, int(counts[0]))
    assert loss.own_divisor is not None
    if (found := loss.own_divisor.tolist()) != list(counts):
        sides = [list(outputs[place].shape[2:]) for place in loss.indices]
        findings.refuse(
            f"loss {loss.config.name!r} matches {found[1:]} times by level with its raw outputs, but "
            f"{list(counts[1:])} times with the images: height and width {sides} x loss.strides "
            f"{list(loss.config.strides)} are to be the size of the images; correct loss.strides, loss.output or "
            "data.image.size"
        )


def check_sums(graph: RehearsedGraph, batch: Batch, findings: Findings) -> None:
    """Refuse a loss of a file that is no sum over rows, such as a mean."""
    if findings.failures or batch.size < 2:
        return
    outputs = graph.outputs(batch)
    for place, loss in enumerate(graph.losses.each):
        labels, others = batch.labels[place], batch.size - 1
        if not loss.config.is_own or labels is None or len(outputs[loss.index]) != batch.size:
            continue

        def part(rows: slice, size: int, loss: Loss = loss, labels: Tensor = labels) -> float:
            return float(loss([each[rows] if each.ndim else each for each in outputs], labels[rows], size))

        whole, one, rest = part(slice(None), batch.size), part(slice(0, 1), 1), part(slice(1, None), others)
        if not math.isclose(whole, one + rest, rel_tol=1e-3, abs_tol=1e-6):
            mean = math.isclose(whole * batch.size, one + rest * others, rel_tol=1e-3)
            remedy = "; it seems to be a mean: return the sum, such as by reduction='sum'" if mean else ""
            findings.refuse(
                f"loss.file {loss.config.file!r} is {whole:g} for {batch.size} rows, but {one:g} for the first of them "
                f"and {rest:g} for the other {others}; it must be a sum over rows, as they are divided among "
                f"micro-batches and ranks{remedy}"
            )
