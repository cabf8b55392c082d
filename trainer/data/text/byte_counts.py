"""Count the bytes of text that each token stands for, so that bits per byte are those of the original UTF-8 text.

    text      n  a  ï  v  e     x              offsets of the library, in characters
    bytes     1  1  2  1  1  1  1  1
    tokens    [na ][ ï ][ve ]   [x ]   END
    counted     2    2    2       2     1      what no token covers belongs to the next one, the rest to the last

The bytes of a text's tokens add up to those of the text. A row of a batch stands for the bytes of its targets; their
number is a column of the shards.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from onward.trainer.config.sections.data import DataConfig
    from onward.trainer.config.sections.metrics import MetricConfig
    from onward.trainer.data.schema.columns import Array
    from onward.trainer.data.schema.fitted import LabelledRows
    from onward.trainer.data.text.text_columns import TextColumns

TEXT_BYTES = "/bytes"
"""Behind the name of the input of ids: the column with the bytes of text that the targets of a row stand for."""
ROWS_AT_ONCE = 1024


def counts_bytes(data: DataConfig, metrics: Sequence[MetricConfig]) -> bool:
    """Return whether a metric needs the bytes of the text that the targets stand for."""
    text = data.text
    unknown = any(each.name == "bits_per_byte" and each.bytes_per_target is None for each in metrics)
    return unknown and text is not None and text.task == "causal"


def bytes_of_tokens(text: str, encoding: Any, length: int) -> Array:
    """Return the bytes of the text that each token stands for, int64 [length], which add up to all of them.

    length: tokens of the encoding, and possibly one more, which ends the text.
    """
    # the offsets of the library count characters: one code of 32 bits is one of them
    codes = np.frombuffer(text.encode("utf-32-le"), np.uint32)
    # UTF-8 takes 1 byte up to U+007F, 2 up to U+07FF, 3 up to U+FFFF, else 4
    sizes = 1 + (codes >= 0x80).astype(np.int64) + (codes >= 0x800) + (codes >= 0x10000)
    upto = np.concatenate([[0], np.cumsum(sizes)])
    ends = np.array([end for _, end in encoding.offsets], np.int64)
    reached = np.full(length, upto[-1])
    # tokens of one character have the same end; special tokens have none
    reached[: length - 1] = np.maximum.accumulate(upto[ends])[: length - 1]
    return np.diff(reached, prepend=0)


def metrics_from_data(
    metrics: Sequence[MetricConfig], columns: TextColumns | None, rows: LabelledRows
) -> tuple[MetricConfig, ...]:
    """Return the metrics with `bytes_per_target` of bits_per_byte as in these rows, unchanged if these have no text.

    metrics: `counts_bytes` holds for them. rows: the evaluated ones, all of which are read. So the metric is the exact
    quotient of the bits of all targets and the bytes of their text, because an evaluation counts each row once.
    """
    assert columns is not None
    name = columns.inputs["input_ids"].name + TEXT_BYTES
    num_bytes = 0
    num_targets = 0
    for first in range(0, rows.num_rows, ROWS_AT_ONCE):
        values = rows.read(np.arange(first, min(first + ROWS_AT_ONCE, rows.num_rows)))
        # both sums are exact integers: the quotient is rounded once
        num_bytes += int(np.sum(values[name]))
        num_targets += sum(int((np.asarray(row) != columns.ignore_index).sum()) for row in values[columns.label])
    completed = []
    for metric in metrics:
        if num_bytes and metric.name == "bits_per_byte" and metric.bytes_per_target is None:
            metric = metric.model_copy(update={"bytes_per_target": num_bytes / num_targets})
        completed.append(metric)
    return tuple(completed)
