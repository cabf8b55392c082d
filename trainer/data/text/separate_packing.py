"""Let whole texts share windows of one length, kept apart by masks (batches/batch_computations.py) and positions.

    texts           a b c E | d E | f g h i E          length 6
    input_ids       a b c E d E | f g h i E P          P = padding
    text            1 1 1 1 2 2 | 1 1 1 1 1 0
    position_ids    0 1 2 3 0 1 | 0 1 2 3 4 0
    causal          b c E - E - | g h i E - -          - = ignored by the loss

A window takes texts in their order while they fit. A text that is longer than a window is cut into pieces, which are
texts of their own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from onward.trainer.data.schema.columns import Array, Values
from onward.trainer.data.text.packing import PackedTexts
from onward.trainer.data.text.text_columns import TextColumns
from onward.trainer.data.text.tokenized_rows import Storage
from onward.trainer.data.text.tokenizer import OpenTokenizer

Piece = tuple[Array, Array, Array]
"""Ids, numbers of words and bytes of a text, or of a part of it that fills a window: [n] each."""


class SeparateTexts(PackedTexts):
    """Tokenizes texts, and puts them into windows in which each is kept apart. Raises ConfigError as PackedTexts."""

    def __init__(self, columns: TextColumns, tokenizer: OpenTokenizer, length: int, storage: Storage) -> None:
        super().__init__(columns, tokenizer, length, storage)
        self._open: dict[str, list[Piece]] = {}  # the texts of the window that is being filled, by split
        mask = columns.block_mask.name if columns.block_mask else ""
        # there may be more texts in a window than a small type counts
        self.packed_columns = tuple(
            each.model_copy(update={"dtype": "int32"}) if each.name == mask else each for each in self.packed_columns
        )

    def pack(self, rows: Mapping[str, Values], split: str) -> dict[str, Values]:
        """Return the windows that are complete with these rows of a split: column -> [n, length]."""
        ids = rows[self._ids]
        size = self._window
        words = rows[self._words] if self._words else ids
        sizes = rows[self._text_bytes] if self._text_bytes else ids
        windows = list[list[Piece]]()
        open_window = self._open.pop(split, [])
        for text, numbers, counts in zip(ids, words, sizes, strict=True):
            for first in range(0, len(text), size):
                part = slice(first, first + size)
                piece = text[part], numbers[part], counts[part]
                # the first text that does not fit closes the window: the order of the data decides, not the best fit
                if sum(len(each) for each, *_ in open_window) + len(piece[0]) > size:
                    windows.append(open_window)
                    open_window = []
                open_window.append(piece)
        # the window stays open for the texts of the next block
        self._open[split] = open_window
        return self._columns_of(windows)

    def rest(self, split: str) -> dict[str, Values]:
        """Return the last window of a split, which is padded."""
        last = self._open.pop(split, [])
        return self._columns_of([last] if last else [])

    def _columns_of(self, windows: Sequence[Sequence[Piece]]) -> dict[str, Values]:
        shape = (len(windows), self._window)
        # text 0 is padding
        ids, texts, places, words = (np.zeros(shape, np.int64) for _ in range(4))
        ids += self._special.pad
        # everything is ignored but what a text fills in below
        labels = np.full(shape, self._ignore_index, np.int64)
        is_causal = self._config.task == "causal"
        sizes = np.zeros(len(windows), np.int64)
        for row, pieces in enumerate(windows):
            first = 0
            for number, (text, of_words, counts) in enumerate(pieces, start=1):
                part = slice(first, first + len(text))
                ids[row, part], texts[row, part], words[row, part] = text, number, of_words
                places[row, part] = np.arange(len(text))
                # the next token, but of the last one, or (masked) the token itself
                known = slice(first, first + len(text) - is_causal)
                labels[row, known] = text[1:] if is_causal else text
                sizes[row] += counts[1:].sum()  # the first token is no target
                first += len(text)
        found = {self._of.label: labels, self._words: words, self._text_bytes: sizes}
        for role, info in self._of.inputs.items():
            # a graph that computes its own loss shifts the labels itself
            own = np.where(texts > 0, ids, self._ignore_index) if role == "labels" else np.zeros(shape, np.int64)
            known_roles = {"input_ids": ids, "attention_mask": texts, "position_ids": places}
            found[info.name] = known_roles.get(role, own)
        return {each.name: found[each.name].astype(each.dtype) for each in self.packed_columns}
