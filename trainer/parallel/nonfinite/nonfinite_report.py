"""Make sentences of what the ranks found."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from onward.trainer.data.schema.columns import Array
from onward.trainer.data.storage.shards import Shards, Split
from onward.trainer.parallel.nonfinite.nonfinite_findings import NUM_ROWS, Finding

OUTLIER = 1e3
"""A row whose values are so many times as large as those of the other rows of its step is told apart from them."""


def merged(findings: Sequence[Finding]) -> Finding:
    """Return the first finding, with the rows of all micro-batches and replicas whose first bad value is in the same
    tensor."""
    first = findings[0]
    same = [each for each in findings if (each.phase, each.tensor) == (first.phase, first.tensor)]
    # tensor-parallel ranks have the same samples: of each micro-batch the rank counts that found most
    samples = {(each.replica, each.micro_batch): each for each in sorted(same, key=lambda each: each.num_rows)}
    rows = [row for each in samples.values() for row in each.rows]
    return first.model_copy(
        update={
            "rows": tuple(dict.fromkeys(rows))[:NUM_ROWS],
            "num_rows": sum(each.num_rows for each in samples.values()),
            "num_samples": sum(each.num_samples for each in samples.values()),
        }
    )


def sentence(
    found: Finding, node: str, where: Mapping[int, str], split: Split, num_batches: int, world_size: int
) -> str:
    begins = {
        "weight": f"Replayed, a stored tensor is not finite: {found.found}",
        "input": f"Replayed, an input of the model is not finite: {found.found}",
        "forward": f"Replayed, the first bad value of the forward pass is in {node}: {found.found}",
        "loss": "Replayed, every output of the model is finite, but the loss is not",
        "backward": f"Replayed, the forward pass is finite; the backward pass of {node} makes the first bad gradient: "
        f"{found.found}",
        "gradient": f"Replayed, every backward pass is finite, but not the sum of the gradients: {found.found}",
    }
    place = f"on rank {found.rank}" if world_size > 1 else ""
    place += f"{', ' * bool(place)}in micro-batch {found.micro_batch + 1} of {num_batches}" if num_batches > 1 else ""
    parts = [f"{begins[found.phase]}{f' ({place})' * bool(place)}"]
    if found.operands:
        parts.append(f"Its inputs: {'; '.join(map(str, found.operands))}")

    def named(row: int) -> str:
        text = f"row {row} of the {'training' if split == 'train' else 'evaluation'} data"
        return f"{text} ({where[row]})" if row in where else text

    # a few bad samples point at rows; if all are bad, the largest value among the operands does
    if found.rows and where and found.num_rows < found.num_samples:
        more = f" and {found.num_rows - len(found.rows)} more" if found.num_rows > len(found.rows) else ""
        samples = f"{found.num_rows} of {found.num_samples} samples"
        parts.append(f"It is bad for {samples}: {', '.join(map(named, found.rows))}{more}")
    elif where:
        extreme = next((each for each in found.operands if each.extreme_row in where), None)
        if found.num_rows:
            parts.append(f"It is bad for all {found.num_samples} samples")
        if extreme is not None:
            parts.append(f"The largest magnitude in {extreme.name} is that of {named(extreme.extreme_row)}")
    return ". ".join(parts)


@dataclass(frozen=True)
class Outlier:
    """A row with much greater values than the others of its step."""

    row: int
    column: str
    value: float
    others: float

    def describe(self, where: str) -> str:
        """Return a clause about it."""
        place = f" ({where})" if where else ""
        return (
            f"row {self.row} of the training data{place} has {self.value:.4g} in column {self.column!r}, where the "
            f"others have at most {self.others:.4g} in magnitude: that row is the likely cause"
        )


def find_outlier(rows: Shards, numbers: Array) -> Outlier | None:
    """Return the row with the greatest value among these, int64 [n], if it is far from the others; as stored."""
    found: list[Outlier] = []
    for name, values in rows.read(numbers).items():
        arrays = [np.asarray(each, dtype=np.float64) for each in values if rows.columns[name].holds_numbers]
        sizes = np.array([np.abs(each).max(initial=0.0) for each in arrays])
        if len(sizes) > 1:
            first = int(sizes.argmax())
            others = float(np.delete(sizes, first).max())
            # 1e-30: in a column of zeros any number would be an outlier without a bound
            if sizes[first] > OUTLIER * max(others, 1e-30):
                value = float(arrays[first].flat[int(np.abs(arrays[first]).argmax())])
                found.append(Outlier(int(numbers[first]), name, value, others))
    return max(found, key=lambda each: abs(each.value) / max(each.others, 1e-30), default=None)
