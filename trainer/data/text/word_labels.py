"""Tokenize lists of words whose labels are one for each word, for token classification.

    words    [Anna     lives  in  Berlin]          labels  [B-PER    O      O   B-LOC]
    tokens   [CLS] An ##na  lives  in  Ber ##lin [SEP]
    labels     -    0   -     2    2    1    -     -       - = ignored by the loss

The label of a word is that of its first token, as Hugging Face's examples do it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from onward.trainer.data.schema.columns import Array, Values
from onward.trainer.data.schema.fitted import Fitted, describe_classes
from onward.trainer.data.text.text_columns import TextColumns
from onward.trainer.data.text.tokenized_rows import Storage, TokenizedRows
from onward.trainer.data.text.tokenizer import OpenTokenizer
from onward.trainer.errors import ConfigError


class WordLabels(TokenizedRows):
    """Computes tokens and labels of words. Raises ConfigError as TokenizedRows, and for byte-level tokenizers that put
    no space in front of words.

    `classes`: data.classes; "auto" = labels that are all integers are class ids, and others names, which are sorted.
    """

    def __init__(
        self,
        columns: TextColumns,
        tokenizer: OpenTokenizer,
        max_length: int,
        storage: Storage,
        *,
        classes: str | Sequence[str],
    ) -> None:
        super().__init__(columns, tokenizer, max_length, storage)
        if _joins_words(tokenizer.settings.get("pre_tokenizer")):
            raise ConfigError(
                f"{tokenizer.path} puts no space in front of words (add_prefix_space is false), so that the words of a "
                "list would be tokenized as if they were written without spaces; save it with add_prefix_space = true"
            )
        self._label = columns.label_source
        self._keeps_integers = classes == "auto"
        self._seen: set[str] = set()
        self._classes: dict[str, int] | None = None
        self._is_sorted = isinstance(classes, str)
        self.digest = json.dumps([self.digest, self._label, classes])
        if not isinstance(classes, str):
            self._set(classes)

    @property
    def is_fitted(self) -> bool:
        """Return whether the classes are known."""
        return self._classes is not None

    def observe(self, rows: Mapping[str, Values], training: Array) -> None:
        """Collect the labels of some rows; those of the evaluation rows, too."""
        self._seen |= {label for row in rows[self._label] for label in row}

    def finish(self) -> None:
        """Sort the names, or find that the labels are class ids."""
        # labels that are all integers are the model's own class ids, which sorting as names would renumber
        if self._keeps_integers and all(re.fullmatch(r"-?\d+", label) for label in self._seen):
            self._classes = {label: int(label) for label in self._seen}
        else:
            self._set(sorted(self._seen))

    def _set(self, names: Sequence[str]) -> None:
        self._classes = {name: number for number, name in enumerate(names)}
        # known by the column that the loss reads
        name = self._of.label or self._of.inputs["labels"].name
        is_sorted = self._is_sorted
        self.fitted[name] = Fitted(classes=tuple(names), sorted_by_name=is_sorted, pad_left=self._storage.pads_left)

    @property
    def summary(self) -> str:
        """Return the tokenizer and the classes in words."""
        found = [each for each in self.fitted.values() if each.classes]
        return "; ".join([super().summary, *(describe_classes(self._label, each) for each in found)])

    def _encoded(self, rows: Mapping[str, Values]) -> tuple[Sequence[Any], dict[int, str]]:
        words = [[self._cased(word) for word in row] for row in rows[self._sources[0]]]
        encodings = self._tokenizer.library.encode_batch(
            words, is_pretokenized=True, add_special_tokens=self._config.special_tokens
        )
        name = self._sources[0]
        return encodings, {at: f"{name} is empty" for at, row in enumerate(words) if not row}

    def _labels(
        self,
        rows: Mapping[str, Values],
        ids: Sequence[list[int]],
        windows: Sequence[Sequence[Any]],
        failed: dict[int, str],
        *,
        shifted: bool,
    ) -> list[list[int]]:
        """Return the label of each word at its first token; adds to `failed` rows whose labels do not fit."""
        assert self._classes is not None
        found = []
        words = rows[self._sources[0]]
        for at, (labels, own) in enumerate(zip(rows[self._label], windows, strict=True)):
            unknown = [label for label in labels if label not in self._classes]
            if len(labels) != len(words[at]):
                failed.setdefault(at, f"{self._label} has {len(labels)} labels for {len(words[at])} words")
            elif unknown:
                known = ", ".join(list(self._classes)[:10])
                failed.setdefault(at, f"{self._label} holds {unknown[0]!r}, which is none of the classes {known}")
            if at in failed:
                # a bad row keeps its place in the block until it is left out
                found += [[self._ignore_index] * len(encoding) for encoding in own]
                continue
            ids_of_words = [self._classes[label] for label in labels]
            for word_ids in self._first_tokens(own):
                found.append([self._ignore_index if word is None else ids_of_words[word] for word in word_ids])
        return found

    def _first_tokens(self, windows: Sequence[Any]) -> Iterator[list[int | None]]:
        """Yield the number of each token's word for each window of a text; None unless the token is its first."""
        last: int | None = None
        for window in windows:
            row: list[int | None] = []
            # a window may begin in the middle of a word, whose first token is in the window before
            before = last
            for word in window.word_ids:
                # a special token has no word, and does not end the word before it
                row.append(word if word != before else None)
                before = before if word is None else word
            yield row
            # the token in front of the next window, which begins with the last `stride` tokens of this one
            words = [word for word in window.word_ids if word is not None]
            overlap = self._config.stride or 0
            last = words[-1 - overlap] if len(words) > overlap else None


def _joins_words(settings: Any) -> bool:
    """Return whether the pre-tokenizer works on bytes and puts no space in front of a word."""
    parts = settings.get("pretokenizers", [settings]) if isinstance(settings, dict) else []
    return any(part.get("type") == "ByteLevel" and not part.get("add_prefix_space", True) for part in parts)
