"""Decide on which side the rows of a batch are padded.

right   a  b  c        left   a  b  c        positions  0  1  2
        d  -  -               -  -  d                   -  -  0        - = padding, which the mask hides
"""

from __future__ import annotations

import onnx

from onward.trainer.data.text.graph_limits import position_rows
from onward.trainer.data.text.text_columns import TextColumns
from onward.trainer.data.text.tokenizer import OpenTokenizer
from onward.trainer.errors import ConfigError


def pads_left(columns: TextColumns, tokenizer: OpenTokenizer, graph: onnx.GraphProto) -> tuple[bool, str]:
    """Return whether rows are padded in front, and why they are not although the tokenizer says so, or "".

    Raises ConfigError where data.text.pad_side = "left" would change what the model computes of a text.
    """
    wanted = columns.config.pad_side
    padding = tokenizer.settings.get("padding")
    tokenizer_pads_left = isinstance(padding, dict) and padding.get("direction") == "Left"
    is_left = wanted == "left" or (wanted == "auto" and tokenizer_pads_left)
    if not is_left or columns.is_packed:
        return False, ""
    why = _hindrance(columns, graph)
    if why and wanted == "left":
        raise ConfigError(f"data.text.pad_side 'left': {why}; use pad_side = 'right'")
    return not why, why


def _hindrance(columns: TextColumns, graph: onnx.GraphProto) -> str:
    """Return why padding in front would change what the model computes of a text, or ""."""
    if columns.config.task == "causal" and "attention_mask" not in columns.inputs:
        return "the model has no input attention_mask, so that each token would attend to the padding in front of it"
    counts_places = "position_ids" not in columns.inputs and not columns.fixed_length
    # positions that are the running sum of the mask do not count the padding
    table = position_rows(graph, with_masks=False) if counts_places else None
    if table is None:
        return ""
    return (
        f"the model counts positions through the row (embedding {table[1]}) and has no input position_ids, so that the "
        "positions of a text would depend on the longest text of its batch"
    )
