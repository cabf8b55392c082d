"""Tokenize columns of text while the data is read: each row becomes token ids, mask, type ids and positions.

    text      "a good film"                       input_ids        [101, 7, 42, 9, 102]
    or pair   "a good film", "it is liked"  -->   token_type_ids   [0, 0, 0, 0, 0]
                                                  attention_mask   [1, 1, 1, 1, 1]

They are stored in the length of the row and padded when a batch is made, or, where the graph takes one length, padded
to it here. The ids are those of the library's `encode_batch` with the same truncation and padding.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from onward.trainer.config.sections_text import TextRole
from onward.trainer.data.columns import Array, Column, Values
from onward.trainer.data.text.text_columns import TextColumns
from onward.trainer.data.text.tokenizer import OpenTokenizer
from onward.trainer.errors import ConfigError

PADDED_WITH: dict[TextRole, int] = {"attention_mask": 0, "token_type_ids": 0, "position_ids": 0}
STORED_AS: dict[TextRole, str] = {
    "input_ids": "int32",
    "attention_mask": "uint8",
    "token_type_ids": "uint8",
    "position_ids": "int32",
}


class TokenizedRows:
    """Computes what a tokenizer feeds, row by row: a ColumnComputer.

    `max_length`: 0 = no truncation. `exact`: store the types of the graph's inputs (data.shard_format = "pb").
    Raises ConfigError for a tokenizer that lacks a token that is needed.
    """

    def __init__(self, columns: TextColumns, tokenizer: OpenTokenizer, max_length: int, *, exact: bool = False) -> None:
        self._inputs, self._sources, self._config = columns.inputs, columns.sources, columns.config
        self._tokenizer, self._max_length = tokenizer, max_length
        self._length = columns.fixed_length
        self._types = {role: info.dtype if exact else STORED_AS[role] for role, info in self._inputs.items()}
        self._pad = {**PADDED_WITH, "input_ids": self._pad_id()}
        self.digest = json.dumps(
            [tokenizer.digest, columns.config.model_dump(mode="json", exclude={"tokenizer"}), max_length, self._length]
            + [[role, info.name, self._types[role]] for role, info in self._inputs.items()]
        )
        self.columns: tuple[Column, ...] = ()
        self.file_only = frozenset[str]()
        # a label may be a text column, too; only the tokenizer reads those of texts
        self.consumed = frozenset(self._sources)
        self.pad_values = {info.name: float(self._pad[role]) for role, info in self._inputs.items()}
        self._tokens = self._rows = self._truncated = 0
        self._seconds = 0.0
        self._prepare()

    def _pad_id(self) -> int:
        found = self._tokenizer.pad_id(self._config.pad_token)
        if found is None:
            raise ConfigError(
                f"{self._tokenizer.path} has no padding token; name one of its tokens in data.text.pad_token"
            )
        return found

    def _prepare(self) -> None:
        """Set the library's truncation and padding."""
        library = self._tokenizer.library
        added = library.num_special_tokens_to_add(len(self._sources) == 2) if self._config.special_tokens else 0
        own = self._tokenizer.settings.get("truncation") or {}
        library.no_padding()
        if not self._max_length:
            library.no_truncation()
            return
        if self._max_length <= added:
            raise ConfigError(
                f"data.text.max_length {self._max_length} leaves no token of the text beside {added} special tokens"
            )
        library.enable_truncation(
            self._max_length,
            strategy={"LongestFirst": "longest_first", "OnlyFirst": "only_first", "OnlySecond": "only_second"}[
                own.get("strategy", "LongestFirst")
            ],
            direction=str(own.get("direction", "Right")).lower(),
        )

    @property
    def summary(self) -> str:
        """Return one sentence for people."""
        rate = f" ({self._tokens / self._seconds:,.0f} a second)" if self._seconds else ""
        length = f"at most {self._max_length}" if self._max_length else "of any number"
        truncated = f"; {self._truncated:,} rows were truncated" if self._truncated else ""
        return (
            f"{self._tokenizer.path.name} turns {' and '.join(self._sources)} into "
            f"{', '.join(info.name for info in self._inputs.values())}, {length} tokens a row: {self._tokens:,} tokens "
            f"in {self._rows:,} rows{rate}{truncated}"
        )

    def describe(self, values: Mapping[str, Values]) -> None:
        """Find `columns`: of the length of the graph, or of varying length."""
        rows, _ = self._encoded(values)
        longest = self._max_length or max(map(len, rows), default=1)
        self.columns = tuple(
            Column(name=info.name, dtype=self._types[role], shape=(self._length or longest,), variable=not self._length)
            for role, info in self._inputs.items()
        )

    def compute(self, rows: Mapping[str, Values], count: int) -> tuple[dict[str, Values], dict[int, str]]:
        """Return the columns of `count` rows, and row -> why it has none."""
        started_at = time.monotonic()
        encodings, failed = self._encoded(rows)
        self._seconds += time.monotonic() - started_at
        self._rows += count - len(failed)
        self._tokens += sum(len(encoding) for at, encoding in enumerate(encodings) if at not in failed)
        self._truncated += sum(bool(encoding.overflowing) for encoding in encodings) if self._max_length else 0
        return {info.name: self._values(role, encodings) for role, info in self._inputs.items()}, failed

    def _encoded(self, rows: Mapping[str, Values]) -> tuple[Sequence[Any], dict[int, str]]:
        """Return the encoding of each row, and row -> what is wrong with its texts."""
        texts = [[str(text) for text in rows[name]] for name in self._sources]
        given: list[Any] = list(zip(*texts, strict=True)) if len(texts) == 2 else texts[0]
        encodings = self._tokenizer.library.encode_batch(given, add_special_tokens=self._config.special_tokens)
        failed: dict[int, str] = {}
        for at, encoding in enumerate(encodings):
            found = set(encoding.sequence_ids)
            for number, name in enumerate(self._sources):
                if number not in found:
                    failed.setdefault(at, f"{name} {'is empty' if not texts[number][at] else 'has no token'}")
        return encodings, failed

    def _values(self, role: TextRole, encodings: Sequence[Any]) -> Values:
        dtype = self._types[role]
        if role == "input_ids":
            found = [np.array(encoding.ids, dtype) for encoding in encodings]
        elif role == "token_type_ids":
            found = [np.array(encoding.type_ids, dtype) for encoding in encodings]
        elif role == "attention_mask":
            found = [np.ones(len(encoding), dtype) for encoding in encodings]
        else:
            found = [np.arange(len(encoding), dtype=dtype) for encoding in encodings]
        if not self._length:
            return found
        padded: Array = np.full((len(found), self._length), self._pad[role], dtype)
        for row, values in zip(padded, found, strict=True):
            row[: len(values)] = values
        return padded
