"""The settings of raw text: [data.text]."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, NonNegativeInt

from onward.trainer.config.section import Section
from onward.trainer.config.urls import FilePath

TextRole = Literal["input_ids", "attention_mask", "token_type_ids", "position_ids"]
"""What a tokenizer computes for an input of a graph."""


class TextConfig(Section):
    """Columns of raw text, and the model's own tokenizer, which turns them into the inputs of the graph."""

    tokenizer: FilePath
    """The `tokenizer.json` of the model, as Hugging Face's tokenizers library writes it, or its directory. Relative to
    the config file; on the command line, to the working directory."""
    columns: str | tuple[str, ...] = "text"
    """The column of texts, or two columns, whose texts are encoded as pairs."""
    task: Literal["classification", "regression"] = "classification"
    """What is learned of a text: the class or the number in the column `data.label`."""
    max_length: NonNegativeInt = 0
    """Tokens that a sample has at most, with special tokens; longer ones are truncated as the tokenizer says. 0 = the
    fixed length of the graph's inputs, else the number of its position embeddings, else no limit."""
    special_tokens: bool = True
    """Add the special tokens of the tokenizer, such as [CLS] and [SEP]."""
    inputs: dict[TextRole, str] = Field(default={})
    """What is computed -> the graph's input that takes it, where the input has another name, such as
    { input_ids = "ids" }."""
    pad_token: str = ""
    """The token that pads shorter samples of a batch; empty = the padding token of the tokenizer."""
