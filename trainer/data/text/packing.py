"""Pack tokenized texts into windows of one length, each split for itself.

    texts        a b c | d e | f g h i j          each with the end token E behind it
    stream       a b c E d e E f g h i j E        length 4
    input_ids    a b c E|d e E f|g h i j|
    causal       b c E d|e E f g|h i j E|         the label of a token is the token after it, also in the next window

Windows do not overlap. The last tokens of a split, fewer than a window and its next token, are left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from onward.trainer.data.schema.column_computers import RowPacker
from onward.trainer.data.schema.columns import Array, Column, Values
from onward.trainer.data.text.byte_counts import TEXT_BYTES
from onward.trainer.data.text.masking import WORDS
from onward.trainer.data.text.text_columns import TextColumns
from onward.trainer.data.text.tokenized_rows import Storage, TokenizedRows
from onward.trainer.data.text.tokenizer import OpenTokenizer
from onward.trainer.errors import ConfigError

if TYPE_CHECKING:
    from onward.trainer.data.text.text_columns import TextColumns
    from onward.trainer.data.text.tokenizer import OpenTokenizer


class PackedTexts(TokenizedRows, RowPacker):
    """Tokenizes texts, and packs them into windows of `length` tokens. Raises ConfigError as TokenizedRows."""

    def __init__(
        self,
        columns: TextColumns,
        tokenizer: OpenTokenizer,
        length: int,
        storage: Storage,
    ) -> None:
        if not length:
            raise ConfigError(
                "data.text packs texts into windows of one length, but neither the model nor data.text.max_length "
                "says how long they are; set data.text.max_length, or data.text.packing = 'none'"
            )
        super().__init__(columns, tokenizer, length, storage)
        self._window = length
        self._ids = columns.inputs["input_ids"].name
        self._words = self._ids + WORDS if columns.config.masks_words else ""
        # the label of a window's last token is the first token of the next one
        self._ahead = 1 if columns.config.task == "causal" and columns.label else 0
        types = {info.name: self.types[role] for role, info in columns.inputs.items()}
        types |= {name: kind for name, kind in ((columns.label, types[self._ids]), (self._words, "int32")) if name}
        each = (Column(name=name, dtype=kind, shape=(length,)) for name, kind in types.items())
        self._text_bytes = self._ids + TEXT_BYTES if storage.counts_bytes else ""
        counts = (Column(name=self._text_bytes, dtype="int64"),) if self._text_bytes else ()
        self.packed_columns = (*each, *counts)
        self._waiting: dict[tuple[str, str], list[Array]] = {}

    def pack(self, rows: Mapping[str, Values], split: str) -> dict[str, Values]:
        """Return the windows that are full with these rows of a split: column -> [n, length]."""
        ids = self._stream(rows, split, self._ids)
        words = self._stream(rows, split, self._words)
        sizes = self._stream(rows, split, self._text_bytes)
        # a window counts as full when the labels of its last tokens are there, too
        count = max(0, (len(ids) - self._ahead) // self._window)
        used = count * self._window
        shape = (count, self._window)
        streams = {self._ids: ids, self._words: words, self._text_bytes: sizes}
        # what fills no window waits for the next rows; the token ahead stays, as the next window's first
        self._waiting |= {(split, name): [stream[used:]] for name, stream in streams.items()}
        windows = ids[:used].reshape(shape)
        # labels are the same stream, one token later
        targets = slice(self._ahead, used + self._ahead)
        found = {self._of.label: ids[targets].reshape(shape), self._words: words[:used]}
        if self._text_bytes:
            found[self._text_bytes] = sizes[targets].reshape(shape).sum(axis=1)
        for role, info in self._of.inputs.items():
            if role == "position_ids":
                found[info.name] = np.arange(used) % self._window
            elif role in ("attention_mask", "token_type_ids"):
                # windows are full: each token is attended to, and of one type
                found[info.name] = np.full(used, int(role == "attention_mask"))
            else:
                found[info.name] = windows
        columns = self.packed_columns
        return {each.name: found[each.name].reshape(count, *each.shape).astype(each.dtype) for each in columns}

    def rest(self, split: str) -> dict[str, Values]:
        """Return no windows: what waits of a split does not fill one."""
        # windows of one split do not mix sources: the rest of this one is dropped
        self._waiting = {key: parts for key, parts in self._waiting.items() if key[0] != split}
        return {each.name: np.empty((0, *each.shape), each.dtype) for each in self.packed_columns}

    def _stream(self, rows: Mapping[str, Values], split: str, name: str) -> Array:
        """Return what waits of a column, and what is added to it: [n]."""
        parts = [*self._waiting.get((split, name), []), *(rows[name] if name else ())]
        return np.concatenate(parts) if parts else np.empty(0, np.int32)


# -- let whole texts share windows of one length, kept apart by masks (batches/batch_computations.py) and positions
#
#     texts           a b c E | d E | f g h i E          length 6
#     input_ids       a b c E d E | f g h i E P          P = padding
#     text            1 1 1 1 2 2 | 1 1 1 1 1 0
#     position_ids    0 1 2 3 0 1 | 0 1 2 3 4 0
#     causal          b c E - E - | g h i E - -          - = ignored by the loss
#
# A window takes texts in their order while they fit. A text that is longer than a window is cut into pieces, which are
# texts of their own.

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
