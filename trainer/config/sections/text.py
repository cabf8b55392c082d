"""The settings of raw text: [data.text]."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from onward.trainer.config.section import LengthOrZero, Section
from onward.trainer.config.urls import FilePath

MASKED = ("masked", "masked_words")
"""The tasks that predict masked tokens: each token by itself, or all tokens of a word or none."""
PACKED = ("causal", *MASKED)
"""The tasks that make all labels from the text, and whose samples may be windows over several texts."""
MASK_PROBABILITY = 0.15
"""The default of `mask_probability`."""
TextRole = Literal["input_ids", "attention_mask", "token_type_ids", "position_ids", "labels"]
"""What a tokenizer computes for an input of a graph; `labels` of a graph that computes its own loss."""


class TextConfig(Section):
    """Columns of raw text, and the model's own tokenizer, which turns them into the inputs of the graph."""

    tokenizer: FilePath
    """The `tokenizer.json` of the model, as Hugging Face's tokenizers library writes it, or its directory. Relative to
    the config file; on the command line, to the working directory."""
    columns: str | tuple[str, ...] = "text"
    """The column of texts, or two columns, whose texts are encoded as pairs."""
    task: Literal["classification", "regression", "tokens", "causal", "masked", "masked_words"] = "classification"
    """What is learned of a text: the class or the number in the column `data.label`; the class of each word (`tokens`),
    where both columns hold lists, or texts divided by spaces; each next token (`causal`); or tokens that are masked, as
    BERT is trained: single ones (`masked`), or whole words (`masked_words`). The last three make the labels from the
    text."""
    max_length: LengthOrZero = 0
    """Tokens that a sample has at most, with special tokens; longer ones are truncated as the tokenizer says. 0 = the
    fixed length of the graph's inputs, else the number of its position embeddings, else no limit."""
    stride: LengthOrZero | None = None
    """Divide longer texts into windows of `max_length` tokens, of which successive ones share this many, in place of
    truncating them. Each window is a row, with the label of its text, or with those of its words. Not for packed texts,
    `causal` and pairs. Not set = longer texts are truncated."""
    pad_side: Literal["auto", "left", "right"] = "auto"
    """Where shorter samples of a batch get their padding. `auto` = as tokenizer.json says, else right; and right where
    padding in front would change what the model computes: without an input attention_mask of a causal model, and where
    the model itself counts positions."""
    special_tokens: bool = True
    """Add the special tokens of the tokenizer, such as [CLS] and [SEP]."""
    lowercase: bool = False
    """Make texts lower-case before they are tokenized, for a model that was trained so by a tokenizer.json that does
    not do it itself."""
    packing: Literal["auto", "none", "joined", "separate"] = "auto"
    """Tasks `causal`, `masked` and `masked_words`: what a sample is. `none` = one text. `joined` = a window of
    `max_length` tokens of all texts one after the other, each with the end token behind it, which attend to each other.
    `separate` = whole texts that share a window, each of which attends to itself alone: for models whose mask is
    [batch, length, length]. `auto` = joined for `causal`, else none."""
    documents: Literal["auto", "file", "line", "paragraph"] = "auto"
    """Of text files: what one text is. Paragraphs end at blank lines. `auto` = the file, or the paragraph if there is
    one file only. Evaluation sets whole texts aside."""
    inputs: dict[TextRole, str] = Field(default={})
    """What is computed -> the graph's input that takes it, where the input has another name, such as
    { input_ids = "ids" }."""
    tokens: dict[Literal["pad", "end", "mask"], str] = {}
    """Special tokens where the tokenizer does not say them, such as { end = "</s>" }. `pad`: what pads shorter samples
    of a batch. `end`: what ends each text, for the task `causal` and for `packing`. `mask`: what replaces masked
    tokens, for the tasks `masked` and `masked_words`."""
    mask_probability: Annotated[float, Field(gt=0.0, lt=1.0)] = MASK_PROBABILITY
    """Tasks `masked` and `masked_words`: the share of tokens that are predicted. 8 of 10 of them are replaced by the
    mask token, 1 by a token drawn at random, and 1 stays. Which ones is a function of `train.seed` and the sample's
    position; in evaluation of the row alone."""

    @property
    def masks_words(self) -> bool:
        """Whether all tokens of a word are predicted, or none."""
        return self.task == "masked_words"

    @property
    def is_masked(self) -> bool:
        """Whether masked tokens are predicted."""
        return self.task in MASKED
