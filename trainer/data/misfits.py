"""Name the setting that solves a misfit: the input wants X, the column has Y -> setting Z.

The table is the one place of this knowledge: the checks of a run, `onward init` and the sharding take their advice from
it, and docs/how-to/own-data.md shows it row by row.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass

from onward.trainer.data.input_columns import Feed
from onward.trainer.data.schema.columns import BYTES, TEXT, Column
from onward.trainer.errors import few

LONG = 256
"""Numbers in a vector from which on it may be a waveform."""


@dataclass(frozen=True)
class Misfit:
    """What an input wants and a column has in its place, and the setting that makes one of the other."""

    wants: str
    has: str
    setting: str
    """As the page shows it."""
    why: str
    """What the setting does, as the page and a message say it."""
    applies: Callable[[Feed, Column], bool] | None = None
    """None where not the type of a column shows it, but single cells."""


def _is_integer(feed: Feed) -> bool:
    return feed.dtype in ("int32", "int64") and not feed.is_label


def _is_float(feed: Feed) -> bool:
    return "float" in feed.dtype and not feed.is_label


def _is_encoded(column: Column) -> bool:
    return column.dtype in (TEXT, BYTES)


def _rank(feed: Feed) -> int:
    """Return the axes of a sample; -1 if they are not known. A stacked vector of single columns has one."""
    return -1 if feed.sample_shape is None else len(feed.sample_shape)


def _takes_single(feed: Feed) -> bool:
    return feed.stacked or feed.sample_shape in ((), (1,))


def _takes_sequence(feed: Feed) -> bool:
    return _rank(feed) == 1 and not feed.stacked


def _takes_numbers(feed: Feed) -> bool:
    return _takes_single(feed) or _rank(feed) == 1


def _takes_window(feed: Feed) -> bool:
    """Return whether a sample is a series, [length] or [length, columns], of more than one row."""
    if feed.stacked or _rank(feed) not in (1, 2):
        return False
    return (feed.sample_shape or (0,))[0] not in (None, 1)


def _stacks_classes(feed: Feed) -> bool:
    return feed.is_label and feed.stacked and feed.dtype == "int64"


def _is_number(column: Column) -> bool:
    return column.holds_numbers and not column.shape


def _takes_sound(feed: Feed) -> bool:
    """Return whether a sample may be a waveform, [T] or [channels, T], or a spectrogram, [M, F] or [1, M, F]."""
    if feed.stacked or not _is_float(feed):
        return False
    shape = feed.sample_shape or ()
    is_wave = len(shape) in (1, 2) and (shape[-1] is None or shape[-1] >= LONG)
    is_spectrogram = len(shape) == 2 or (len(shape) == 3 and shape[0] == 1)
    return is_wave or is_spectrogram


IMAGE = Misfit(
    "floats `[?, 3, H, W]` or `[?, H, W, 3]`",
    "JPEG or PNG files, their paths or their bytes",
    "[data.image]",
    "makes Onward decode images",
    lambda feed, column: _is_float(feed) and _rank(feed) == 3 and _is_encoded(column),
)
AUDIO = Misfit(
    "floats `[?, T]`, `[?, M, F]` or `[?, 1, M, F]`",
    "audio files, their paths or their bytes",
    "[data.audio]",
    "makes Onward decode audio files to waveforms or log-mel spectrograms",
    lambda feed, column: _takes_sound(feed) and _is_encoded(column),
)
CATEGORIES = Misfit(
    "single integers `[?]`",
    "texts such as names of cities",
    'data.table.categories = ["COLUMN"]',
    "makes ids of texts",
    lambda feed, column: _is_integer(feed) and _takes_single(feed) and column.dtype == TEXT,
)
TOKENS = Misfit(
    "integers `[?, length]`, such as `input_ids`",
    "texts",
    '[data.text] tokenizer = "tokenizer.json"',
    "makes token ids of texts; data.text.columns names their column",
    lambda feed, column: _is_integer(feed) and _takes_sequence(feed) and column.dtype == TEXT,
)
ONE_HOT = Misfit(
    "single floats, or a vector of them",
    "texts such as names of cities",
    "no setting: write a column of 0 and 1 for each text",
    "(pandas.get_dummies does) and of dates their numbers, or give the model an input of integers for "
    "data.table.categories",
    lambda feed, column: _is_float(feed) and _takes_numbers(feed) and column.dtype == TEXT,
)
WINDOW = Misfit(
    "floats `[?, L]` or `[?, L, C]`",
    "one number in a row, and rows that follow each other in time",
    "[data.table.window] length = L",
    "makes windows of L rows; horizon = H the labels NAME_ahead, [H]",
    lambda feed, column: _is_float(feed) and _takes_window(feed) and _is_number(column),
)
SEVERAL_LABELS = Misfit(
    "labels: one class for each row",
    "several columns of 0 and 1, of which a row may have more than one",
    'model.loss = "bce_with_logits"',
    "compares each column with a score of its own; model.num_classes makes a head for as many",
    lambda feed, column: _stacks_classes(feed) and column.holds_numbers,
)
MISSING = Misfit(
    "numbers, or categories",
    "cells that are missing (empty, `NA`, `null`)",
    'data.table.missing = "mean"',
    'or "median", or a constant, fills what an input of floats misses; "skip" leaves the row out',
)
MISSING_LABEL = Misfit(
    "labels",
    "cells that are missing",
    'data.bad_rows = "skip"',
    "leaves out rows that cannot be read",
)
MISFITS = (IMAGE, AUDIO, CATEGORIES, TOKENS, ONE_HOT, WINDOW, SEVERAL_LABELS, MISSING, MISSING_LABEL)
"""In order: the first one that applies is named."""


def remedy(feed: Feed, column: Column) -> str:
    """Return the setting that makes a column fit a feed, and what it does; "" if the table has none."""
    for misfit in MISFITS:
        if misfit.applies is None or not misfit.applies(feed, column):
            continue
        # these two settings are tables, not a line to copy
        if misfit is IMAGE or misfit is AUDIO:
            return f"a table {misfit.setting} {misfit.why}"
        setting = misfit.setting.replace("COLUMN", column.name)
        if misfit is WINDOW:
            # a number in a row feeds a series only if the rows are in the order of time, which no type shows
            setting = setting.replace("L", str((feed.sample_shape or (0,))[0]))
            return f"if the rows follow each other in time, {setting} {misfit.why.replace(' L ', ' so many ')}"
        return f"{setting} {misfit.why}"
    return ""


def remedy_of_absence(feed: Feed, columns: Iterable[Column]) -> str:
    """Return the setting that makes a column of the data fit an input for which there is no column of its name.

    Only of columns that are texts or bytes: a number may be anything.
    """
    for column in columns:
        if _is_encoded(column) and not feed.stacked and (found := remedy(feed, column)):
            return f"{found} (column {column.name!r} holds {column.kind})"
    return ""


def numbers_for(feed: Feed, columns: Iterable[Column]) -> str:
    """Return the columns of numbers that a vector input may stack, in words; "" where they are too few."""
    shape = feed.sample_shape or ()
    is_vector = len(shape) == 1 and shape[0] not in (None, 1)
    if not _is_float(feed) or feed.stacked or not is_vector:
        return ""
    numbers = [column.name for column in columns if _is_number(column)]
    return f"a list of {shape[0]} columns of numbers ({few(numbers)})" if len(numbers) >= (shape[0] or 0) else ""


def undivided_header(name: str, columns: Collection[str]) -> str:
    """Return what to do with a table whose only column has the name of another one inside its own; "" for others."""
    only = next(iter(columns), "")
    if len(columns) != 1 or name not in re.split(r"[,;|\s]", only):
        return ""
    return f"the data has a single column, {only!r}; set data.table.separator to the mark between its columns"


def label_as_input(feeds: Iterable[Feed], targets: Collection[str]) -> Iterator[str]:
    """Yield the inputs that stack other columns with the only one that they are to predict."""
    for feed in feeds:
        if feed.stacked and len(targets) == 1 and set(targets) < set(feed.columns):
            (name,) = targets
            yield f"{feed.target} reads column {name!r}, the label; leave it out of data.inputs, or change data.label"


def loss_of_numbers(key: str) -> str:
    """Return how to choose a loss of numbers. key: the setting that names the loss, `model.loss` or `loss.1.name`."""
    return f'to predict numbers, set {key} = "mse" (or "l1", "huber", "quantile")'


def remedy_of_missing(inputs: Collection[str]) -> str:
    """Return what solves missing cells of inputs, as a clause behind a semicolon; "" if there are none.

    inputs: the columns that have them and are no labels, for which `MISSING_LABEL` is the setting.
    """
    return f"; {MISSING.setting} {MISSING.why} ({', '.join(sorted(inputs))})" if inputs else ""
