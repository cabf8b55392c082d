"""Find the tokens that a task needs in a tokenizer: those that pad, end and mask."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from onward.trainer.data.schema.fitted import Vocabulary
from onward.trainer.errors import ConfigError

if TYPE_CHECKING:
    from onward.trainer.data.text.text_columns import TextColumns
    from onward.trainer.data.text.tokenizer import OpenTokenizer

PADDING = ("[PAD]", "<pad>", "<|padding|>", "<|pad|>", "<PAD>")
END = ("<|endoftext|>", "</s>", "<eos>", "[EOS]", "<|end_of_text|>", "<end_of_text>")
MASK = ("[MASK]", "<mask>")


@dataclass(frozen=True)
class SpecialTokens:
    """The ids of special tokens."""

    added: int
    """How many the tokenizer adds to a sample."""
    pad: int
    """Pads samples of a batch; unused where windows are full."""
    end: int | None
    """Put behind each text; None where nothing is."""
    vocabulary: Vocabulary | None
    """What masking needs; None for other tasks."""


def find_special_tokens(columns: TextColumns, tokenizer: OpenTokenizer) -> SpecialTokens:
    """Return the tokens that the task needs. Raises ConfigError with all that are missing or ambiguous."""
    config = columns.config
    problems = list[str]()

    def find(key: Literal["pad", "end", "mask"], usual: Sequence[str], what: str, *, needed: bool) -> int | None:
        given = config.tokens.get(key, "")
        try:
            found = tokenizer.find(f"data.text.tokens.{key}", given, usual)
        except ConfigError as error:
            problems.extend(error.problems if needed or given else ())
            return None
        if found is None and needed:
            problems.append(f"{tokenizer.path} has no {what}; name one of its tokens in data.text.tokens.{key}")
        return found

    is_causal = config.task == "causal"
    is_masked = config.is_masked
    is_pair = len(columns.sources) == 2
    added = tokenizer.library.num_special_tokens_to_add(is_pair) if config.special_tokens else 0
    end = None
    if is_causal or columns.is_packed:
        end = find("end", END, "token that ends a text", needed=is_causal or not added)
    mask = find("mask", MASK, "mask token", needed=True) if is_masked else None
    pad = 0
    if columns.packing != "joined":
        # behind the last token of a text a causal model computes nothing that counts
        own = tokenizer.own_pad_id if not config.tokens.get("pad") else None
        needed = own is None and not is_causal
        found = find("pad", PADDING, "padding token", needed=needed)
        # the user's choice or the tokenizer's own, then a usual name, then the end token, as GPT-2 pads
        pad = next((each for each in (own, found, end) if each is not None), 0)
    if problems:
        raise ConfigError(problems)
    vocabulary = None
    if mask is not None:
        # the mask token counts as special also where the tokenizer does not say so
        special = tuple(sorted({*tokenizer.special_ids.values(), mask}))
        names = tuple(str(tokenizer.library.id_to_token(number)) for number in special)
        vocabulary = Vocabulary(mask_id=mask, special_ids=special, size=tokenizer.greatest_id + 1, names=names)
    return SpecialTokens(added, pad, end, vocabulary)
