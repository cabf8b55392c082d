"""Read rows of data as the ONNX file takes them, strings included, and as its trained part does.

For a file that begins with pre-processing the two differ. A row is known by its number in its split, so that the whole
file and the trained part can be compared on the same rows, each padded to the longest of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from onward.trainer.config.run_config import RunConfig
from onward.trainer.data.batches.batches import Batch, Rows, one_batch
from onward.trainer.data.input_columns import file_feeds
from onward.trainer.data.preprocessing import file_inputs
from onward.trainer.data.schema.columns import Array
from onward.trainer.data.schema.signature import Signature


@dataclass(frozen=True)
class FileRows:
    """Rows with the columns that only the file reads."""

    rows: Rows
    config: RunConfig
    signature: Signature

    @property
    def outputs(self) -> list[str]:
        """The outputs of the trained part, which are among the file's."""
        return [output.name for output in self.signature.outputs]

    def batch(self, numbers: Array) -> Batch:
        """Return the rows of these numbers, int64 [B], as the trained part takes them."""
        return one_batch(self.rows, self.config, self.signature, numbers)

    def inputs(self, numbers: Array) -> Mapping[str, Any]:
        """Return the same rows as the file takes them: input -> array [B, ...], or a list of B arrays."""
        names = [info.name for info in self.signature.inputs]
        given = dict(zip(names, self.batch(numbers).inputs, strict=False))
        feeds = file_feeds(self.config.data, self.signature)
        # what both take is read from the batch, in which rows of varying length are padded
        own = file_inputs({name: feed for name, feed in feeds.items() if name not in given}, self.rows.read(numbers))
        return own | {name: given[name].numpy() for name in feeds if name in given}
