"""Fill, scale and number the columns of a table while shards are written: [data.table].

    number    3.0  missing  5.0  -- fill --> 3.0 4.0 5.0 -- log1p, standardise --> -1.2 0 1.2     float32, same name
    city      "oslo"  "rome"  "bonn" (new) -- categories --> 1 2 0                                int64, same name

Everything is fitted on the training rows before the first shard is written, and kept in the manifest of the shards
(`Fitted`), as plain formulas that serving can repeat: (log1p(x or fill) - center) / scale.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from onward.trainer.config.losses import LossConfig
from onward.trainer.config.sections.data import DataConfig
from onward.trainer.config.sections.tables import Missing, Scaling
from onward.trainer.data.input_columns import file_feeds
from onward.trainer.data.schema.columns import TEXT, Array, Column, ColumnType, LeftOut, Schema, Values
from onward.trainer.data.schema.fitted import Fitted, FittedComputer
from onward.trainer.data.schema.signature import Signature
from onward.trainer.data.tables.column_patterns import matching, unmatched
from onward.trainer.data.tables.column_statistics import ColumnStatistics
from onward.trainer.errors import ConfigError, DataError

INDICATOR = "_missing"
"""Behind the name of a column: the column that says where it is missing."""
NOTHING: Array = np.empty(0)
MAX_CATEGORIES = 1_000_000
"""More different texts than this are no categories."""


@dataclass(frozen=True)
class Plan:
    """What is computed of one column of numbers."""

    scaling: Scaling = "none"
    missing: Missing = "fail"
    log1p: bool = False
    indicator: bool = False
    is_integer: bool = False
    """Whether the column feeds an input of integers, so that nothing but `missing = "skip"` is done with it."""


def open_table_columns(
    data: DataConfig, losses: Sequence[LossConfig], signature: Signature, schema: Schema
) -> list[NumberColumns | Categories]:
    """Return what [data.table] computes of columns of the source, which `schema` describes.

    Raises ConfigError for patterns that match no column that feeds the model, and for labels.
    """
    table = data.table
    if table == type(table)():
        return []
    feeds = file_feeds(data, signature).values()
    read = {name for feed in feeds for name in feed.columns}
    # a model may read only whether a column is missing
    read |= {name.removesuffix(INDICATOR) for name in read}
    inputs = [name for name in schema if name in read]
    labels = {name for loss in losses for name in loss.columns}
    problems = _pattern_problems(data, inputs, labels)
    texts = matching([*table.categories], inputs) if table.categories else ()
    categories = [Categories(schema[name], table.vocabularies.get(name), data) for name in texts if name in schema]
    of_integers = [feed for feed in feeds if "float" not in feed.dtype]
    integers = {name for feed in of_integers for name in feed.columns}
    plans: dict[str, Plan] = {}
    for name in inputs:
        plan = _plan(data, name, inputs)
        given = isinstance(table.standardise, dict) and plan.scaling != "none"
        if name in texts or not schema[name].holds_numbers or plan == Plan():
            continue
        if len(schema[name].shape) > 1 and not given and replace(plan, scaling="none") == Plan():
            continue  # images and the like
        makes_floats = given or plan.log1p or not isinstance(plan.missing, str)
        if name in labels:
            problems.append(
                f"data.table changes column {name!r}, which is a label, too; its loss and metrics would be in other "
                "units: keep a copy of the column under another name"
            )
        elif name in integers and makes_floats:
            problems.append(f"data.table makes floats of column {name!r}, which feeds an input of integers")
        elif name not in integers:
            plans[name] = plan
        elif plan.missing == "skip":
            plans[name] = Plan(missing="skip", is_integer=True)
        if schema[name].variable or len(schema[name].shape) > 1:
            problems.append(f"data.table changes column {name!r}, which is {schema[name].kind}, not numbers or vectors")
    if problems:
        raise ConfigError(problems)
    return [*categories, *([NumberColumns(plans, whole=table.window is not None)] if plans else [])]


def _pattern_problems(data: DataConfig, inputs: Sequence[str], labels: set[str]) -> list[str]:
    table = data.table
    patterns = {
        "standardise": table.standardise if isinstance(table.standardise, dict) else (),
        "missing": table.missing if isinstance(table.missing, dict) else (),
        "indicators": table.indicators,
        "log1p": table.log1p,
        "categories": table.categories,
    }
    problems = []
    for setting, given in patterns.items():
        for pattern in unmatched(given, inputs):
            why = "is a label: its loss and metrics would be in other units" if pattern in labels else "feeds no input"
            problems.append(f"data.table.{setting} names {pattern!r}, which {why}; inputs read {', '.join(inputs)}")
    return problems


def _plan(data: DataConfig, name: str, inputs: Sequence[str]) -> Plan:
    table = data.table

    def chosen(given: object, default: object) -> object:
        if not isinstance(given, dict):
            return given
        # a later pattern has precedence over an earlier one
        return next((kind for each, kind in reversed(given.items()) if name in matching([each], inputs)), default)

    return Plan(
        scaling=chosen(table.standardise, "none"),  # type: ignore[arg-type]
        missing=chosen(table.missing, "fail"),  # type: ignore[arg-type]
        log1p=name in matching(table.log1p, inputs),
        indicator=name in matching(table.indicators, inputs),
    )


class NumberColumns(FittedComputer):
    """Computes columns of numbers: missing ones filled, logarithms, scales, and indicators of missing ones.

    whole: whether all elements of a row have one mean and scale, because they are one value at several times.
    """

    def __init__(self, plans: Mapping[str, Plan], *, whole: bool = False) -> None:
        self._plans = plans
        self._whole = whole
        self._sizes: dict[str, int] = {}
        self.reads = {
            name: ColumnType("float64", gaps=plan.missing != "fail" or plan.indicator) for name, plan in plans.items()
        }
        self.leaves_out = frozenset(name for name, plan in plans.items() if plan.missing == "skip")
        self.consumed = frozenset(plans)
        self._indicators = [name for name, plan in plans.items() if plan.indicator]
        self.makes = self.consumed | {name + INDICATOR for name in self._indicators}
        digests = {}
        for name, plan in plans.items():
            digests[name] = dict(vars(plan))
            # earlier versions had no such field: without it their shards are found
            if not plan.is_integer:
                del digests[name]["is_integer"]
        self.digest = json.dumps(["table", digests])
        self._statistics = {
            name: ColumnStatistics(plan.log1p, plan.missing == "median" or plan.scaling == "robust")
            for name, plan in plans.items()
        }
        self._missing: dict[str, int] = {}

    @property
    def summary(self) -> str:
        """Return what was computed of which columns."""
        kinds: dict[str, list[str]] = {}
        for name, plan in self._plans.items():
            if plan.scaling != "none":
                kinds.setdefault(f"standardised ({plan.scaling})", []).append(name)
            if plan.log1p:
                kinds.setdefault("log1p", []).append(name)
            if plan.missing == "skip":
                kinds.setdefault("rows left out where missing", []).append(name)
            elif plan.missing != "fail":
                kinds.setdefault(f"missing = {plan.missing}", []).append(f"{name} ({self._missing.get(name, 0):,})")
        few = {kind: names[:10] + ["..."] * (len(names) > 10) for kind, names in kinds.items()}
        return "; ".join(f"{kind}: {', '.join(names)}" for kind, names in few.items()) + "; fitted on training rows"

    # -- fitting

    def observe(self, rows: Mapping[str, Values], training: Array) -> None:
        """Add the training rows to the statistics."""
        # rows that `compute` refuses must not count
        wrong = self._without_logarithm(rows)
        for name, statistics in self._statistics.items():
            values = _flat(rows[name])[[at for at in np.flatnonzero(training).tolist() if at not in wrong]]
            self._sizes[name] = values.shape[1]
            # with a window all elements are one column, of as many rows as the window is long
            statistics.add(values.reshape(-1, 1) if self._whole else values)

    def finish(self) -> None:
        """Compute fills and scales. Raises DataError for a column without any value to fit."""
        found = {}
        for name, plan in self._plans.items():
            statistics = self._statistics[name]
            if statistics.plain is None or (statistics.plain.count == 0).any():
                raise DataError(f"column {name!r} has no value in the training rows; leave it out of data.inputs")
            fill: Array | None = None
            if plan.missing == "mean":
                fill = statistics.plain.mean
            elif plan.missing == "median":
                fill = statistics.median()
            elif not isinstance(plan.missing, str):
                fill = np.full_like(statistics.plain.mean, plan.missing)
            center, scale = statistics.scale(plan.scaling, fill) if plan.scaling != "none" else (NOTHING, NOTHING)
            self._missing[name] = statistics.missing
            if self._whole:  # the elements of a window have one mean
                size = self._sizes[name]
                fill = None if fill is None else fill.repeat(size)
                center = center.repeat(size)
                scale = scale.repeat(size)
            found[name] = Fitted(
                fill=() if fill is None else tuple(fill.tolist()),
                log1p=plan.log1p,
                scaling=plan.scaling,
                center=tuple(center.tolist()),
                scale=tuple(scale.tolist()),
            )
        self.restore(found)

    def restore(self, found: Mapping[str, Fitted]) -> None:
        """Set fills and scales that were found."""
        self.fitted = {name: found[name] for name in self._plans}
        # they hold temporary files
        self._statistics = {}

    # -- computing

    def describe(self, values: Mapping[str, Values]) -> None:
        """Find the shapes of the columns from the first rows."""
        columns = []
        for name, plan in self._plans.items():
            dtype = "int64" if plan.is_integer else "float32"
            columns.append(Column(name=name, dtype=dtype, shape=np.shape(values[name])[1:]))
        columns += [Column(name=name + INDICATOR, dtype="float32") for name in self._indicators]
        self.columns = tuple(columns)

    def compute(self, rows: Mapping[str, Values], count: int) -> tuple[dict[str, Values], dict[int, str]]:
        """Return the columns, and row -> why it has none."""
        failed = self._without_logarithm(rows)
        results: dict[str, Values] = {}
        for name, plan in self._plans.items():
            found = self.fitted[name]
            values: Array = _flat(rows[name])
            # before anything is filled: an indicator says what was missing in the source
            missing = np.isnan(values)
            if plan.indicator:
                results[name + INDICATOR] = np.asarray(missing.any(axis=1), np.float32)
            if found.fill:
                values = np.where(missing, found.fill, values)
            elif plan.missing == "skip":
                why = LeftOut(f"{name} is missing")
                failed |= {int(at): why for at in np.flatnonzero(missing.any(axis=1)) if int(at) not in failed}
            elif missing.any():  # an indicator, and nothing to put in its place
                failed |= {int(at): f"{name} is missing" for at in np.flatnonzero(missing.any(axis=1))}
            with np.errstate(invalid="ignore", divide="ignore"):  # rows in `failed`
                values = np.log1p(values) if plan.log1p else values
            if found.center:
                values = (values - np.array(found.center)) / np.array(found.scale)
            if plan.is_integer:
                # above 2^53 a float64, in which missing numbers are read, is not every integer
                wrong = ~missing & ((values != np.trunc(values)) | (abs(values) > 2**53))
                values = np.where(missing | wrong, 0.0, values)
                for at in np.flatnonzero(wrong.any(axis=1)).tolist():
                    failed[at] = f"{name} holds {np.ravel(rows[name][at])[wrong[at]][0]:g}, which is not of type int64"
            stored = np.int64 if plan.is_integer else np.float32
            results[name] = values.astype(stored).reshape(np.shape(rows[name]))
        return results, failed

    def _without_logarithm(self, rows: Mapping[str, Values]) -> dict[int, str]:
        failed: dict[int, str] = {}
        for name in (name for name, plan in self._plans.items() if plan.log1p):
            values = _flat(rows[name])
            for at in np.flatnonzero((values <= -1).any(axis=1)).tolist():
                failed[at] = f"{name} is {values[at].min():g}, but log(1 + x) needs more than -1"
        return failed


def _flat(values: Values) -> Array:
    """Return rows as float64 [n, k]."""
    array = np.asarray(values, np.float64)
    return array.reshape(len(array), -1)


class Categories(FittedComputer):
    """Computes the ids of a column of categories in its place. vocabulary: None = the texts of the training rows."""

    def __init__(self, column: Column, vocabulary: Sequence[str] | None, data: DataConfig) -> None:
        table = data.table
        self._name = column.name
        chosen = table.missing
        if isinstance(chosen, dict):
            # the last pattern that matches decides, as for numbers
            kinds = [kind for each, kind in chosen.items() if matching([each], [column.name]) == (column.name,)]
            chosen = kinds[-1] if kinds else "fail"
        self._gaps = chosen != "fail"
        self._skips = chosen == "skip"
        self._is_text = column.dtype == TEXT
        self.reads = {column.name: ColumnType(TEXT, gaps=self._gaps) if self._is_text else ColumnType("int64", ())}
        self.leaves_out = frozenset({column.name} if self._skips and self._is_text else ())
        self.makes = self.consumed = frozenset({column.name})
        self.columns = (Column(name=column.name, dtype="int64"),)
        self.digest = json.dumps(
            ["categories", column.name, vocabulary and list(vocabulary), self._gaps] + ["skip"] * self._skips
        )
        self._seen: set[str] = set()
        if vocabulary is not None:
            self._set(vocabulary)

    @property
    def summary(self) -> str:
        """Return the number of categories."""
        texts = self.fitted[self._name].vocabulary if self.fitted else ()
        few = ", ".join(f"{number} = {text or 'unknown'}" for number, text in enumerate(texts[:5]))
        return f"categories of {self._name}: {few}" + (f", ... {len(texts) - 5:,} more" if len(texts) > 5 else "")

    def observe(self, rows: Mapping[str, Values], training: Array) -> None:
        """Collect the texts of training rows."""
        self._seen |= {str(text) for text in np.asarray(rows[self._name], object)[training]} - {""}
        if len(self._seen) > MAX_CATEGORIES:
            raise DataError(f"column {self._name!r} holds more than {MAX_CATEGORIES:,} different texts; drop it")

    def finish(self) -> None:
        """Sort the texts."""
        # integers in the order of numbers: 10 comes behind 9
        texts = sorted(self._seen) if self._is_text else [str(number) for number in sorted(map(int, self._seen))]
        # id 0 is the unknown category: texts that training has not seen, and missing ones
        self._set(["", *texts])

    def restore(self, found: Mapping[str, Fitted]) -> None:
        """Set the texts that were found."""
        self._set(found[self._name].vocabulary)

    def _set(self, vocabulary: Sequence[str]) -> None:
        self.fitted = {self._name: Fitted(vocabulary=tuple(vocabulary), integers=not self._is_text)}
        self._ids = {text: number for number, text in enumerate(vocabulary)}

    def describe(self, values: Mapping[str, Values]) -> None:
        """Do nothing: the ids are single numbers."""

    def compute(self, rows: Mapping[str, Values], count: int) -> tuple[dict[str, Values], dict[int, str]]:
        """Return the ids, and row -> the text that has none."""
        ids = np.zeros(count, np.int64)
        unknown = self._ids.get("")
        failed: dict[int, str] = {}
        for at, cell in enumerate(rows[self._name]):
            # without the entry "" a vocabulary that the user gave has no id for other texts
            found = self._ids.get(str(cell), unknown)
            if cell == "" and self._skips:
                failed[at] = LeftOut(f"{self._name} is missing")
            elif cell == "" and not self._gaps:
                failed[at] = f"{self._name} is missing"
            elif found is None:
                failed[at] = f"{self._name} is {str(cell)[:40]!r}, which data.table.categories does not have"
            else:
                ids[at] = found
        return {self._name: ids}, failed
