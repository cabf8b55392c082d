"""Mask tokens of a batch for masked language modelling: BERT's 80 / 10 / 10, as a function of seed and position.

    ids      [CLS]  the  film  was  good  [SEP]
    chosen           .     x    .    x              by a hash of (seed, position in the stream, token)
    ids      [CLS]  the [MASK] was  good  [SEP]     8 of 10 masked, 1 of 10 another token, 1 of 10 as it is
    labels     -     -   film   -   good    -       - = ignored by the loss

In evaluation the hash is one of the row's number alone, so each evaluation masks the same tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from onward.trainer.data.schema.permutation import hash_key, keyed_hash
from onward.trainer.errors import ConfigError

if TYPE_CHECKING:
    from onward.trainer.config.sections.data import DataConfig
    from onward.trainer.data.schema.batch_transforms import Samples
    from onward.trainer.data.schema.columns import Array, Values
    from onward.trainer.data.schema.fitted import Fitted, Vocabulary
    from onward.trainer.data.text.text_columns import TextColumns

WORDS = "/words"
"""Behind the name of the input of ids: the column with the number of each token's word."""
MASKED = 0.8
REPLACED = 0.9
"""Below the first share of 0..1 a chosen token becomes the mask token, below the second a random one."""


@dataclass(frozen=True)
class Masking:
    """Masks the input of ids and makes labels: a BatchTransform."""

    ids: str
    labels: Sequence[str]
    vocabulary: Vocabulary
    probability: float
    whole_words: bool
    seed: int
    ignore_index: int

    def __call__(self, values: Mapping[str, Values], samples: Samples) -> dict[str, Values]:
        """Return the columns with masked ids and with labels."""
        training = samples.positions is not None
        key = hash_key("masking", self.seed) if training else hash_key("masking of evaluation")
        # a position is another one in each epoch, so that an epoch masks other tokens; a row has one number
        numbers = samples.positions if samples.positions is not None else samples.rows
        keys = keyed_hash(numbers.astype(np.uint64), key)
        # a random token is never a special one
        drawn = np.setdiff1d(np.arange(self.vocabulary.size), self.vocabulary.special_ids)
        rows = values[self.ids]
        words = values.get(self.ids + WORDS)
        masked = []
        labels = []
        for at, ids in enumerate(rows):
            ids = np.asarray(ids)
            found = self._mask(ids, ids if words is None else np.asarray(words[at]), keys[at], drawn)
            masked.append(found[0])
            labels.append(found[1])
        fixed = isinstance(rows, np.ndarray)
        result = {**values, self.ids: np.stack(masked) if fixed else masked}
        return result | {name: np.stack(labels) if fixed else labels for name in self.labels}

    def _mask(self, ids: Array, words: Array, key: np.uint64, drawn: Array) -> tuple[Array, Array]:
        """Return the masked ids and the labels of one sample, [n] each."""
        places = np.arange(len(ids), dtype=np.uint64)
        # neighbours of one number are one word; numbers begin anew in each text of a window
        groups = np.cumsum(np.diff(words, prepend=words[:1]) != 0) if self.whole_words else places
        chosen = _fractions(groups, key, "choose") < self.probability
        chosen &= ~np.isin(ids, self.vocabulary.special_ids)
        kind = _fractions(places, key, "kind")
        other = drawn[(keyed_hash(places, key ^ hash_key("token")) % np.uint64(len(drawn))).astype(np.int64)]
        masked = np.where(chosen & (kind < MASKED), self.vocabulary.mask_id, ids)
        masked = np.where(chosen & (kind >= MASKED) & (kind < REPLACED), other, masked)
        return masked.astype(ids.dtype), np.where(chosen, ids.astype(np.int64), self.ignore_index)


def open_masking(columns: TextColumns | None, fitted: Mapping[str, Fitted], *, seed: int) -> Masking | None:
    """Return what masks the tokens of a batch; None for other tasks. fitted: by column, of the shards."""
    if columns is None or not columns.config.is_masked:
        return None
    text = columns.config
    ids = columns.inputs["input_ids"].name
    vocabulary = fitted[ids].token_vocabulary if ids in fitted else None
    if vocabulary is None:
        raise ConfigError(f"the shards were made for another task than data.text.task {text.task!r}; start a new run")
    # the loss reads one column, a graph that computes its own loss an input: both get the same labels
    labels = [columns.label] if columns.label else []
    labels += [columns.inputs["labels"].name] if "labels" in columns.inputs else []
    return Masking(
        ids,
        labels,
        vocabulary,
        text.mask_probability,
        text.masks_words,
        seed=seed,
        ignore_index=columns.ignore_index,
    )


def describe_masks(data: DataConfig, fitted: Mapping[str, Fitted]) -> str:
    """Return which tokens a masked language model predicts, in words; "" for other tasks. fitted: of the shards."""
    text = data.text
    vocabulary = next((each.token_vocabulary for each in fitted.values() if each.token_vocabulary), None)
    if text is None or not text.is_masked or vocabulary is None:
        return ""
    names = dict(zip(vocabulary.special_ids, vocabulary.names, strict=False))  # shards of earlier versions have none
    never = ", ".join(names.get(number, f"id {number}") for number in vocabulary.special_ids)
    mask = names.get(vocabulary.mask_id, f"id {vocabulary.mask_id}")
    what = "tokens (whole words)" if text.masks_words else "tokens"
    return (
        f"{100 * text.mask_probability:g} % of the {what} are predicted: 8 of 10 of them become {mask}, 1 another "
        f"token, 1 stays; never {never}"
    )


def _fractions(values: Array, key: np.uint64, purpose: str) -> Array:
    """Return a number in 0..1 for each value, float64 [n]."""
    hashed = keyed_hash(values.astype(np.uint64), key ^ hash_key(purpose))
    return np.asarray(hashed >> np.uint64(11)) * 2.0**-53
