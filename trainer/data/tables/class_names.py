"""Convert labels that are class names, such as "cat" and "dog", to class ids while shards are written.

    label column    dog cat dog        data.classes ["cat", "dog"]       ids 1 0 1
                                       data.classes "auto": the names of all rows, training and evaluation, sorted
                                       as torchvision's ImageFolder sorts its folders

The names are in the manifest of the shards (`ShardManifest.fitted`), in the order of the classes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from onward.trainer.config.losses import LossConfig, key_of
from onward.trainer.config.sections.data import DataConfig
from onward.trainer.data.reading import sources
from onward.trainer.data.schema.columns import BYTES, TEXT, Array, Column, ColumnType, Schema, Values
from onward.trainer.data.schema.fitted import Fitted, FittedComputer, describe_classes
from onward.trainer.data.text.text_columns import MAKES_LABELS
from onward.trainer.errors import ConfigError, DataError, few

MAX_CLASSES = 100_000
"""More different names than this are no class names."""
BOOLEANS = ("false", "true")
"""The names of booleans, as JSON and TOML write them."""


def open_class_names(data: DataConfig, losses: Sequence[LossConfig], schema: Schema) -> list[ClassNames]:
    """Return a computer for each label column that holds class names. `schema` describes the columns of the source.

    Raises ConfigError for `data.classes` that the column cannot have.
    """
    # "auto" and "sorted" are rules, anything else is the list of names
    given = data.classes
    found = []
    for name, ignored in _class_columns(data, losses):
        column = schema.get(name)
        if column is None or column.dtype == BYTES:
            continue  # `data_problems` refuses it
        # integers are class ids already, unless data.classes says that they are names
        if column.dtype != TEXT and (given == "auto" or np.dtype(column.dtype).kind not in "biu"):
            continue
        # only in CSV the type of a cell is not written down: 007 may be a name
        is_untyped = not sources.locate(data.source, data).data_format.has_types
        as_text = column.dtype == TEXT or (is_untyped and not isinstance(given, str))
        found.append(ClassNames(column, None if isinstance(given, str) else given, as_text=as_text, ignored=ignored))
    return found


def _class_columns(data: DataConfig, losses: Sequence[LossConfig]) -> Iterator[tuple[str, int]]:
    """Yield (column, the label that is left out) for each column of class labels."""
    of_classes = [loss for loss in losses if loss.has_classes]
    # of several losses on one column the last one decides
    ignored = {name: loss.ignored for loss in of_classes for name in loss.columns}
    if data.text is not None and data.text.task in MAKES_LABELS and isinstance(data.label, str):
        ignored.pop(data.label, None)  # made from the text
    if data.image:
        # masks are files of class numbers, which have no names
        for name in data.image.mask_columns:
            ignored.pop(name, None)
    yield from ignored.items()


class ClassNames(FittedComputer):
    """Computes the class ids of one column of names, or of any integers, in its place.

    column: as the source has it. names: in the order of the classes; None = the names in the data, sorted. as_text:
    whether the column is read as text. ignored: the integer that stays as it is, `model.ignore_index`.
    """

    def __init__(self, column: Column, names: Sequence[str] | None, *, as_text: bool, ignored: int) -> None:
        self._name = column.name
        self._as_text = as_text
        self._ignored = ignored
        self._is_boolean = column.dtype == "bool" and not as_text
        self.reads = {column.name: ColumnType(TEXT) if as_text else ColumnType("int64")}
        self.makes = self.consumed = frozenset({column.name})
        self.digest = json.dumps(["class names", column.name, as_text, ignored, names and list(names)])
        self._seen: set[str] = set()
        self._seen_integers: Array = np.empty(0, np.int64)
        # given names are an order that the user has chosen
        if names is not None:
            self._set([name.strip() for name in names], sorted_by_name=False)

    @property
    def summary(self) -> str:
        """Return the classes in words."""
        return describe_classes(self._name, self.fitted[self._name]) if self.fitted else f"classes of {self._name}"

    # -- which names there are

    def observe(self, rows: Mapping[str, Values], training: Array) -> None:
        """Collect the names of some rows; those of the evaluation rows, too."""
        cells = rows[self._name]
        if self._as_text:
            self._seen |= {str(cell).strip() for cell in cells} - {""}
        else:
            # labels of varying length are lists of arrays, others one array
            flat = np.concatenate(cells) if isinstance(cells, list) else np.ravel(cells)
            # ids are sparse or negative integers, in their order; the ignored label is no class
            self._seen_integers = np.union1d(self._seen_integers, flat[flat != self._ignored])
        if (count := max(len(self._seen), len(self._seen_integers))) > MAX_CLASSES:
            few = ", ".join(sorted(self._seen)[:3]) or ", ".join(map(str, self._seen_integers[:3]))
            raise DataError(
                f"column {self._name!r} holds at least {count:,} different values, such as {few}; they are no class "
                "names: name another column in data.label"
            )

    def finish(self) -> None:
        """Sort the names."""
        integers = [BOOLEANS[each] if self._is_boolean else str(each) for each in self._seen_integers.tolist()]
        if not (names := sorted(self._seen) or integers):
            raise DataError(f"column {self._name!r} holds no class name")
        self._set(names, sorted_by_name=True)

    def restore(self, found: Mapping[str, Fitted]) -> None:
        """Set the names that were found."""
        fitted = found[self._name]
        self._set(fitted.classes, sorted_by_name=fitted.sorted_by_name)

    def _set(self, names: Sequence[str], *, sorted_by_name: bool) -> None:
        self.fitted = {self._name: Fitted(classes=tuple(names), sorted_by_name=sorted_by_name)}
        if self._as_text:
            self._ids = {name: number for number, name in enumerate(names)}
            return
        try:
            values = np.array([BOOLEANS.index(each) if self._is_boolean else int(each) for each in names], np.int64)
        except (ValueError, OverflowError):
            kind = "booleans, named false and true" if self._is_boolean else "integers"
            raise ConfigError(f"column {self._name!r} holds {kind}, but data.classes is {few(names)}") from None
        self._order = np.argsort(values)
        # sorted, so that a binary search finds the class of each integer
        self._sorted = values[self._order]

    # -- ids

    def describe(self, values: Mapping[str, Values]) -> None:
        """Find the shape of the labels from the first rows. Raises DataError if all of these have unknown names."""
        # the first rows tell the shape, and whether the names are those of this column
        cells = values[self._name]
        # names that do not occur in all of the first rows are probably those of another column
        _, failed = self.compute(values, len(cells))
        if len(failed) == len(cells):
            raise DataError(f"{failed[0]} (and for all of the first rows); set data.classes to the names in the data")
        varies = isinstance(cells, list)
        shape = (max(map(len, cells)),) if varies else () if self._as_text else np.shape(cells)[1:]
        self.columns = (Column(name=self._name, dtype="int64", shape=shape, variable=varies),)

    def compute(self, rows: Mapping[str, Values], count: int) -> tuple[dict[str, Values], dict[int, str]]:
        """Return the class ids, and row -> the name that is no class."""
        cells = rows[self._name]
        if self._as_text:
            return self._ids_of_texts(cells)
        # labels of one shape are looked up in one call
        if not isinstance(cells, list):
            ids, wrong = self._ids_of_integers(np.asarray(cells).astype(np.int64))
            bad = np.flatnonzero(wrong.reshape(count, -1).any(axis=1))
            return {self._name: ids}, {int(at): self._unknown(cells[at][wrong[at]].flat[0]) for at in bad}
        pairs = [self._ids_of_integers(cell.astype(np.int64)) for cell in cells]
        failed = {at: self._unknown(cells[at][wrong][0]) for at, (_, wrong) in enumerate(pairs) if wrong.any()}
        return {self._name: [ids for ids, _ in pairs]}, failed

    def _ids_of_texts(self, cells: Values) -> tuple[dict[str, Values], dict[int, str]]:
        ids = np.zeros(len(cells), np.int64)
        failed = {}
        for at, cell in enumerate(cells):
            name = str(cell).strip()
            if (number := self._ids.get(name)) is not None:
                ids[at] = number
            else:
                failed[at] = self._unknown(name) if name else f"{self._name} is missing"
        return {self._name: ids}, failed

    def _ids_of_integers(self, cells: Array) -> tuple[Array, Array]:
        """Return the ids, and which of the integers are no class."""
        # an integer above all classes is sought behind the last one
        places = np.minimum(np.searchsorted(self._sorted, cells), len(self._sorted) - 1)
        kept = cells == self._ignored
        return np.where(kept, cells, self._order[places]), (self._sorted[places] != cells) & ~kept

    def _unknown(self, name: object) -> str:
        classes = self.fitted[self._name].classes
        shown = BOOLEANS[int(str(name))] if self._is_boolean else name
        return f"{self._name} is {str(shown)[:40]!r}, which is none of the {len(classes)} classes {few(classes)}"


def class_problems(name: str, found: Fitted, num_classes: int | None, output: str) -> list[str]:
    """Return what is wrong with the number of class names for an output with `num_classes` classes (None: any)."""
    if num_classes is None or len(found.classes) <= num_classes:
        return []
    where = "the data" if found.sorted_by_name else "data.classes"
    return [
        f"{where} has {len(found.classes):,} class names for column {name!r} ({few(found.classes)}), but output "
        f"{output} has {num_classes} classes; name another column in data.label, correct the names, or give the model "
        "a new head (model.num_classes)"
    ]


def single_classes(
    losses: Sequence[LossConfig], table: Schema, fitted: Mapping[str, Fitted], *, is_short: bool
) -> Iterator[str]:
    """Yield the labels of a cross-entropy that are the same class in all rows, of which `table` has the extremes.

    is_short: whether there is no [loss], only its short form.
    """
    for loss in losses:
        column = table.get(loss.label) if isinstance(loss.label, str) else None
        if not loss.rule.needs_two_scores or column is None:
            continue
        if column.shape or column.variable:
            continue
        classes = fitted[column.name].classes if column.name in fitted else ()
        only = column.extremes[:1] if column.extremes and column.extremes[0] == column.extremes[-1] else ()
        if len(classes) == 1 or (only and not classes):
            key = "data.label" if is_short else key_of(losses, losses.index(loss), "label")
            yield (
                f"every row has the class {[*classes, *only][0]!r} in column {column.name!r}, so there is nothing to "
                f"learn; add rows of other classes, or name another column in {key}"
            )
