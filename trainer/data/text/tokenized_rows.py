"""Tokenize columns of text while the data is read: each row becomes token ids, mask, type ids and positions.

    text      "a good film"                       input_ids        [101, 7, 42, 9, 102]
    or pair   "a good film", "it is liked"  -->   token_type_ids   [0, 0, 0, 0, 0]
                                                  attention_mask   [1, 1, 1, 1, 1]

They are stored in the length of the row and padded when a batch is made, or, where the graph takes one length, padded
to it here. The ids are those of the library's `encode_batch` with the same truncation and padding. With
data.text.stride a long text gives several rows, the windows that the library cuts. Where texts are packed into windows,
only ids are computed here, of the whole text with its end token; packing.py does the rest.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from onward.trainer.data.schema.column_computers import RowDivider
from onward.trainer.data.schema.columns import Array, Column, Values
from onward.trainer.data.schema.fitted import Fitted, FittedComputer
from onward.trainer.data.text.byte_counts import TEXT_BYTES, bytes_of_tokens
from onward.trainer.data.text.masking import WORDS
from onward.trainer.data.text.special_tokens import find_special_tokens
from onward.trainer.errors import ConfigError

if TYPE_CHECKING:
    from onward.trainer.config.sections.text import TextRole
    from onward.trainer.data.text.text_columns import TextColumns
    from onward.trainer.data.text.tokenizer import OpenTokenizer

STORED_AS: dict[TextRole, str] = {
    "input_ids": "int32",
    "attention_mask": "uint8",
    "token_type_ids": "uint8",
    "position_ids": "int32",
    "labels": "int32",
}
NO_WORD = -1
"""The number of the word of a special token."""
WINDOWS = "/window"
"""Behind the name of the input of ids: the column that counts the windows of a text, from 0."""


@dataclass(frozen=True)
class Storage:
    """How the columns of tokens are stored."""

    counts_bytes: bool = False
    """Whether the bytes of text that the targets of a row stand for are a column, too."""
    pads_left: bool = False
    why_right: str = ""
    """Why rows are padded behind, although the tokenizer says in front."""


class TokenizedRows(FittedComputer, RowDivider):
    """Computes what a tokenizer feeds, row by row: a ColumnComputer. What it is fitted to is the tokenizer alone.

    `max_length`: 0 = no truncation. Raises ConfigError for a tokenizer that lacks a token that is needed.
    """

    def __init__(self, columns: TextColumns, tokenizer: OpenTokenizer, max_length: int, storage: Storage) -> None:
        self._of = columns
        self._sources = columns.sources
        self._config = columns.config
        self._storage = storage
        self._tokenizer = tokenizer
        self._max_length = max_length
        self._ignore_index = columns.ignore_index
        # rows that are packed keep the lengths of their texts until then
        self._length = 0 if columns.is_packed else columns.fixed_length
        self.types = {role: STORED_AS[role] for role in columns.inputs}
        """What is fed -> numpy's name of the type that it is stored in."""
        self._special = find_special_tokens(columns, tokenizer)
        self._pad: dict[TextRole, int] = {"input_ids": self._special.pad, "labels": columns.ignore_index}
        self.window_column = columns.inputs["input_ids"].name + WINDOWS if columns.config.stride is not None else ""
        results = [*self._results()]
        # the file by its content; masking is done when batches are made
        without = {"tokenizer", "mask_probability", "stride", "pad_side"}
        settings = dict[str, Any]()
        for name, value in columns.config.model_dump(mode="json", exclude=without).items():
            # under their former names, so that earlier runs keep their shards
            former = {f"{key}_token": value.get(key, "") for key in ("pad", "end", "mask")} if name == "tokens" else {}
            settings |= former or {name: value}
        if columns.config.is_masked:  # which earlier versions said in two settings
            settings["task"] = "masked"
        settings["whole_words"] = columns.config.masks_words
        decides = (tokenizer.digest, settings, max_length, self._length, columns.ignore_index, columns.label, results)
        # only where they are used, so that other runs keep their shards
        used = [f"stride {columns.config.stride}"] if self.window_column else []
        used += [name for name in ("counts_bytes", "pads_left") if getattr(storage, name)]
        self.digest = json.dumps([*decides, sorted(self.types.items()), *used])
        self.reads = columns.read
        self.makes = columns.computed
        self.consumed = frozenset(columns.read)
        self.fitted: dict[str, Fitted] = {}
        if storage.pads_left:
            self.fitted = {name: Fitted(pad_left=True) for _, name, _ in results}
        if vocabulary := self._special.vocabulary:
            ids = columns.inputs["input_ids"].name
            self.fitted[ids] = Fitted(token_vocabulary=vocabulary, pad_left=storage.pads_left)
        self.pad_values = {name: float(self._pad.get(role, 0)) for role, name, _ in results}
        self._tokens = self._rows = self._truncated = self._divided = self._bytes = 0
        self._seconds = 0.0
        self._prepare()

    @property
    def is_fitted(self) -> bool:
        """Return True: nothing is found on the data."""
        return True

    def observe(self, rows: Mapping[str, Values], training: Array) -> None:
        """Take note of nothing."""

    def finish(self) -> None:
        """Leave everything as it is."""

    def _prepare(self) -> None:
        """Set the library's truncation and padding."""
        library = self._tokenizer.library
        # the settings of the file are replaced: rows are padded when a batch is made
        library.no_padding()
        library.no_truncation()
        stride = self._config.stride
        if stride is not None and not self._max_length:
            raise ConfigError(
                "data.text.stride divides texts that are longer than data.text.max_length, which is not set and which "
                "the model does not say; set it"
            )
        if not self._max_length or self._of.is_packed:
            return
        if self._max_length <= self._special.added:
            raise ConfigError(
                f"data.text.max_length {self._max_length} leaves no token of the text beside "
                f"{self._special.added} special tokens"
            )
        if stride is not None and stride >= self._max_length - self._special.added:
            raise ConfigError(
                f"data.text.stride {stride}: windows of {self._max_length} tokens, {self._special.added} of them "
                f"special, would not move on; set it below {self._max_length - self._special.added}"
            )
        if self._config.task != "causal":  # whose end token counts, too
            own = self._tokenizer.settings.get("truncation") or {}
            names = {"LongestFirst": "longest_first", "OnlyFirst": "only_first", "OnlySecond": "only_second"}
            library.enable_truncation(
                self._max_length,
                stride=stride or 0,
                strategy=names[own.get("strategy", "LongestFirst")],
                direction=str(own.get("direction", "Right")).lower(),
            )

    # -- what is computed

    @property
    def summary(self) -> str:
        """Return one sentence for people."""
        rate = f" ({self._tokens / self._seconds:,.0f} a second)" if self._seconds else ""
        length = f"at most {self._max_length} tokens" if self._max_length else "any number of tokens"
        length = f"windows of {self._max_length}" if self._of.is_packed else f"{length} a row"
        truncated = f"; {self._truncated:,} rows were truncated" if self._truncated else ""
        if self._divided:
            truncated = (
                f"; {self._divided:,} longer texts are divided into windows that share {self._config.stride} tokens: "
                "losses and metrics are over windows, not over texts"
            )
        if self._storage.pads_left or self._storage.why_right:
            why = f", although {self._tokenizer.path.name} says left: {self._storage.why_right}"
            truncated += "; padded on the left" if self._storage.pads_left else f"; padded on the right{why}"
        return (
            f"{self._tokenizer.path.name} turns {' and '.join(self._sources)} into "
            f"{', '.join(info.name for info in self._of.inputs.values())}, {length}: {self._tokens:,} tokens "
            f"in {self._rows:,} rows{rate}{self._text_of_a_token}{truncated}"
        )

    @property
    def _text_of_a_token(self) -> str:
        """Return how much text a token stands for, in words: what the metric bits_per_byte needs."""
        counts = self._config.task == "causal" and self._tokens and not self._truncated
        return f", {self._bytes / self._tokens:.4g} bytes of text a token" if counts else ""

    def _results(self) -> Iterator[tuple[TextRole, str, str]]:
        """Yield (what, the name of its column, numpy's name of its type) of each result."""
        needs_words = self._config.masks_words
        ids = self._of.inputs["input_ids"].name
        if self._of.is_packed:
            yield "input_ids", ids, self.types["input_ids"]
        else:
            yield from ((role, info.name, self.types[role]) for role, info in self._of.inputs.items())
            if self._of.label:
                yield "labels", self._of.label, self.types["input_ids"]
        if needs_words:
            yield "token_type_ids", ids + WORDS, "int32"
        if self._of.is_packed and self._storage.counts_bytes:
            yield "token_type_ids", ids + TEXT_BYTES, "int32"  # of each token; packed they become those of a row

    def _counts(self) -> Iterator[Column]:
        """Yield the columns with one number for each row."""
        if self.window_column:
            yield Column(name=self.window_column, dtype="int32")
        if self._storage.counts_bytes and not self._of.is_packed:
            yield Column(name=self._of.inputs["input_ids"].name + TEXT_BYTES, dtype="int64")

    def describe(self, values: Mapping[str, Values]) -> None:
        """Find `columns`: of the length of the graph, or of varying length."""
        rows, _ = self._encoded(values)
        # one more than the encoding: `_ended` may put an end token behind it
        longest = max((len(encoding) + 1 for encoding in rows), default=1)
        # packed rows are not cut here; others are cut at the most that is allowed
        most = longest if self._of.is_packed else self._max_length or longest
        length = self._length or most
        self.columns = (
            *(
                Column(name=name, dtype=dtype, shape=(length,), variable=not self._length)
                for _, name, dtype in self._results()
            ),
            *self._counts(),
        )

    def compute(self, rows: Mapping[str, Values], count: int) -> tuple[dict[str, Values], dict[int, str]]:
        """Return the columns of `count` rows or of all their windows, and row -> why it has none."""
        started_at = time.monotonic()
        texts, failed = self._encoded(rows)
        self._seconds += time.monotonic() - started_at
        windows = [self._windows(encoding) for encoding in texts]
        encodings = [window for each in windows for window in each]
        ids = [self._ended(encoding.ids) for encoding in encodings]
        # a bad row is bad in all of its windows; it counts neither as rows nor as tokens
        good = [at not in failed for at, each in enumerate(windows) for _ in each]
        self._rows += sum(good)
        self._tokens += sum(len(row) for row, is_good in zip(ids, good, strict=True) if is_good)
        if self._config.task == "causal":
            # the text as it is in the data: bits per byte are those of the original, not of the lowercased one
            given = rows[self._sources[0]]
            self._bytes += sum(len(str(text).encode()) for at, text in enumerate(given) if at not in failed)
        if self._max_length and not self._of.is_packed and self._config.task != "causal":
            # the library has cut these texts; of a causal model, `_ended` cuts and counts
            cut = sum(bool(encoding.overflowing) for encoding in texts)
            self._truncated += 0 if self.window_column else cut
            self._divided += cut if self.window_column else 0
        results: dict[str, Values] = {}
        if self.window_column:
            results[self.window_column] = np.concatenate([np.arange(len(each), dtype=np.int32) for each in windows])
        for role, name, dtype in self._results():
            if role == "labels":
                labels = self._labels(rows, ids, windows, failed, shifted=name == self._of.label)
                values = [np.array(row, dtype) for row in labels]
            elif name.endswith(TEXT_BYTES):
                values = self._bytes_of_tokens(rows, ids, encodings)
            else:
                values = self._values(role, name, dtype, ids, encodings)
            results[name] = self._padded(role, values, dtype) if self._length else values
        if self._storage.counts_bytes and not self._of.is_packed:
            # the first token of a text is no target
            of_targets = [int(row[1:].sum()) for row in self._bytes_of_tokens(rows, ids, encodings)]
            results[self._of.inputs["input_ids"].name + TEXT_BYTES] = np.array(of_targets, np.int64)
        return results, failed

    def _windows(self, encoding: Any) -> list[Any]:
        """Return the windows of a text in its order; without data.text.stride only itself, truncated or not."""
        if not self.window_column:
            return [encoding]
        found = [encoding, *encoding.overflowing]
        # cut on the left, the first window is the end of the text
        is_left = (self._tokenizer.library.truncation or {}).get("direction") == "left"
        return found[::-1] if is_left else found

    def _bytes_of_tokens(
        self, rows: Mapping[str, Values], ids: Sequence[list[int]], encodings: Sequence[Any]
    ) -> list[Array]:
        """Return the bytes of text that each token stands for, int32 [tokens] for each row."""
        found = []
        for text, encoding, row in zip(rows[self._sources[0]], encodings, ids, strict=True):
            own = encoding.ids
            # with the end token, which `_ended` puts behind ids that do not have it
            length = len(own) + (own[-1:] != [self._special.end])
            found.append(bytes_of_tokens(str(text), encoding, length)[: len(row)].astype(np.int32))
        return found

    def _labels(
        self,
        rows: Mapping[str, Values],
        ids: Sequence[list[int]],
        windows: Sequence[Sequence[Any]],
        failed: dict[int, str],
        *,
        shifted: bool,
    ) -> list[list[int]]:
        """Return the label of each token: the ids, or the next ids; not those of a graph that computes its own loss,
        because such graphs shift the labels themselves. Adds to `failed` rows that have none."""
        if self._config.task == "causal" and shifted:
            return [[*row[1:], self._ignore_index] for row in ids]
        return list(ids)

    def _encoded(self, rows: Mapping[str, Values]) -> tuple[Sequence[Any], dict[int, str]]:
        """Return the encoding of each row, and row -> what is wrong with its texts."""
        texts = [[self._cased(str(text)) for text in rows[name]] for name in self._sources]
        given: list[Any] = list(zip(*texts, strict=True)) if len(texts) == 2 else texts[0]
        library = self._tokenizer.library
        # the faster one gives no words and offsets
        is_exact = self._config.masks_words or self._storage.counts_bytes
        encode = library.encode_batch if is_exact else library.encode_batch_fast
        failed: dict[int, str] = {}
        try:
            encodings = encode(given, add_special_tokens=self._config.special_tokens)
        except Exception:  # the library raises no other class, such as for a word of no token
            # one text fails the whole call: each by itself shows which
            encodings, failed = self._encoded_alone(given)
        for at, encoding in enumerate(encodings):
            if at in failed:
                continue
            # of a single text the length says it, which is much faster
            has_tokens = {0} if len(encoding) > self._special.added else set[int]()
            found = set(encoding.sequence_ids) if len(texts) == 2 else has_tokens
            for number, name in enumerate(self._sources):
                if number not in found:
                    failed.setdefault(at, f"{name} {'is empty' if not texts[number][at] else 'has no token'}")
        return encodings, failed

    def _encoded_alone(self, given: Sequence[Any]) -> tuple[list[Any], dict[int, str]]:
        """Return the encodings of texts, each by itself, and text -> why the tokenizer refuses it; its encoding is
        empty."""
        from tokenizers import Encoding

        library = self._tokenizer.library
        found = list[Any]()
        failed = dict[int, str]()
        for at, text in enumerate(given):
            try:
                [encoding] = library.encode_batch([text], add_special_tokens=self._config.special_tokens)
            except Exception as error:
                encoding, failed[at] = Encoding.merge([]), f"the tokenizer refuses the text: {error}"
            found.append(encoding)
        return found, failed

    def _cased(self, text: str) -> str:
        return text.lower() if self._config.lowercase else text

    def _ended(self, ids: list[int]) -> list[int]:
        """Return the ids of a text with its end token, truncated if it is a sample of its own."""
        if self._special.end is not None and ids[-1:] != [self._special.end]:
            ids = [*ids, self._special.end]
        if self._max_length and not self._of.is_packed and len(ids) > self._max_length:
            self._truncated += 1
            ids = ids[: self._max_length]
        return ids

    def _values(
        self, role: TextRole, name: str, dtype: str, ids: Sequence[list[int]], encodings: Sequence[Any]
    ) -> list[Array]:
        if name.endswith(WORDS):
            found = [_words(encoding, len(row)) for row, encoding in zip(ids, encodings, strict=True)]
        elif role == "input_ids":
            found = [np.array(row, dtype) for row in ids]
        elif role == "token_type_ids":
            pairs = zip(ids, encodings, strict=True)
            found = [np.array([*encoding.type_ids, 0][: len(row)], dtype) for row, encoding in pairs]
        elif role == "attention_mask":
            found = [np.ones(len(row), dtype) for row in ids]
        else:
            found = [np.arange(len(row), dtype=dtype) for row in ids]
        return found

    def _padded(self, role: TextRole, rows: Sequence[Array], dtype: str) -> Array:
        padded: Array = np.full((len(rows), self._length), self._pad.get(role, 0), dtype)
        for row, values in zip(padded, rows, strict=True):
            # the row has its values at one end and the padding value at the other
            first = self._length - len(values) if self._storage.pads_left else 0
            row[first : first + len(values)] = values
        return padded


def _words(encoding: Any, length: int) -> Array:
    """Return the number of each token's word, of special tokens and the end token NO_WORD: int32 [length]."""
    words = [NO_WORD if word is None else word for word in encoding.word_ids]
    return np.array([*words, NO_WORD][:length], np.int32)
