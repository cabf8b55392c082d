"""Open what a configuration computes of the data while it is sharded (of batches: batch_computations.py)."""

from __future__ import annotations

from onward.trainer.config.run_config import RunConfig
from onward.trainer.data.column_computers import ColumnComputer
from onward.trainer.data.preprocessing import open_preprocessor
from onward.trainer.data.signature import Signature
from onward.trainer.data.text.checks import open_tokenized_rows


def open_computers(config: RunConfig, signature: Signature) -> list[ColumnComputer]:
    """Return what computes columns from those that are read, in order.

    Raises UnsupportedModel as Preprocessor, ConfigError as TokenizedRows.
    """
    opened = (open_preprocessor(config, signature), open_tokenized_rows(config, signature))
    return [computer for computer in opened if computer]
