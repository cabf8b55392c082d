"""The settings of columns of tables: [data.table]."""

from __future__ import annotations

import codecs
from typing import Any, Literal, TypeAlias

from pydantic import field_validator, model_validator

from onward.trainer.config.section import Length, Section

Scaling = Literal["none", "standard", "min_max", "robust"]
Missing = Literal["fail", "skip", "mean", "median"] | float
"""What becomes of a missing number: a bad row, no row, the mean or median of the training rows, or a constant."""


OF_COLUMNS = frozenset({"standardise", "missing", "indicators", "log1p", "categories"})
"""Settings of [data.table] that decide what is computed of the columns; a new setting decides what is read."""


Categories: TypeAlias = tuple[str, ...] | dict[str, Literal["sorted"] | tuple[str, ...]]


class WindowConfig(Section):
    """Windows over the rows of time series: a past of `length` rows, and a future of `horizon` rows behind it. Column
    NAME becomes the past, [length], and NAME_ahead the future, [horizon]."""

    length: Length
    """Rows of the past."""
    horizon: Length = 1
    """Rows of the future."""
    stride: Length = 1
    """Rows from the beginning of one window to that of the next."""
    by: str = ""
    """The column that names the series of a row; empty = all rows are one series."""
    time: str = ""
    """The column of times, which must increase in each series; empty = the order of the rows is trusted."""


class TableConfig(Section):
    """What is computed of the columns of a table before they feed the model. Everything is fitted on training rows."""

    separator: Literal["", ",", ";", "\t", "|", " "] = ""
    """CSV: what separates cells; empty = tab in .tsv, else what is certain from the header: comma, semicolon, tab or
    bar."""
    decimal: Literal["auto", ".", ","] = "auto"
    """CSV: the decimal mark. `auto` = the point; a file that is not separated by commas and has cells such as 1,5 is
    refused then."""
    thousands: Literal["", ",", ".", " ", "'", "_"] = ""
    """CSV: what separates groups of three digits; empty = nothing."""
    quote: Literal['"', "'", "none"] = '"'
    """CSV: what is around cells that hold separators and line ends."""
    encoding: str = "utf-8"
    """CSV: a name of Python's, such as latin-1, cp1252 or utf-16. A UTF-8 byte order mark is left out."""
    header: bool = True
    """CSV: whether the first line has the names of the columns; else they are c0, c1, c2, ..."""
    standardise: Scaling | dict[str, Scaling] = "none"
    """Scale numbers that feed inputs of floats: `standard` = mean 0, standard deviation 1; `min_max` = 0 to 1; `robust`
    = median 0, interquartile range 1. A table has it by pattern of columns, such as { "f*" = "standard" }; the last
    pattern that matches decides. Labels have `loss.standardise_label`."""
    missing: Missing | dict[str, Missing] = "fail"
    """What a missing number becomes: `fail` = a bad row (`data.bad_rows`), `skip` = its row is left out and counted,
    `mean` or `median` of the training rows, or a constant such as 0. By pattern as `standardise`. A missing text of
    `categories` becomes the unknown category, unless this is `fail` or `skip`."""
    indicators: tuple[str, ...] = ()
    """Patterns of columns of which a further column NAME_missing is computed: 1 where NAME is missing, else 0."""
    log1p: tuple[str, ...] = ()
    """Patterns of columns of which log(1 + x) is taken, before they are standardised."""
    categories: Categories = ()
    """Patterns of columns whose values are categories, and become ids for an input of integers: 0 = unknown, 1, 2, ...
    = the texts of the training rows, sorted. A table gives a column's texts in the order of the ids, from 0 on, for a
    model that has an order already: { city = ["", "Oslo", "Roma"], "s*" = "sorted" }. The entry "" is the id of unknown
    texts; without it they are bad rows."""
    window: WindowConfig | None = None
    """Windows over time series: `[data.table.window]`."""

    @property
    def vocabularies(self) -> dict[str, tuple[str, ...]]:
        """Column of categories -> its texts, where they are given."""
        given = self.categories if isinstance(self.categories, dict) else {}
        return {name: texts for name, texts in given.items() if isinstance(texts, tuple)}

    def reading_settings(self) -> dict[str, Any]:
        """Return the settings that decide what rows are read from a file, as far as they are not the defaults."""
        return self.model_dump(mode="json", exclude=set(OF_COLUMNS), exclude_defaults=True)

    @field_validator("categories")
    @classmethod
    def _has_texts_of_single_columns(cls, categories: Categories) -> Categories:
        given = categories if isinstance(categories, dict) else {}
        texts = [name for name in given if given[name] != "sorted"]
        if patterns := [name for name in texts if set("*?[") & set(name)]:
            raise ValueError(f"{patterns[0]!r} is a pattern, and texts are of one column; give each column its texts")
        return categories

    @field_validator("encoding")
    @classmethod
    def _is_an_encoding(cls, name: str) -> str:
        try:
            return codecs.lookup(name).name
        except LookupError:
            raise ValueError("is no encoding that Python knows, such as utf-8, latin-1, cp1252 or utf-16") from None

    @model_validator(mode="after")
    def _marks_differ(self) -> TableConfig:
        # equal marks would make a cell two cells, or a group a fraction
        marks = [mark for mark in (self.separator, self.decimal.replace("auto", "."), self.thousands) if mark]
        if len(set(marks)) < len(marks):
            raise ValueError("separator, decimal and thousands must be different characters")
        return self
