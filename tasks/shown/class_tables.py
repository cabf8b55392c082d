"""The table of classes or labels of the last evaluation: precision, recall, F1, targets of each; confusion matrices.

    event "confusion" --ClassTable--> RUN_DIR/classes/classes.json    for programs
                                      RUN_DIR/classes/classes.csv     one row for each class
                                      RUN_DIR/classes/confusion.csv   targets by class (rows) and prediction (columns)

Each yes-or-no label has a confusion matrix of its own, which is a row of confusion.csv.
Of several losses the files are named after their outputs: boxes-classes.json.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Sequence
from typing import Any, Literal, Protocol

from onward.tasks.shown.markdown import table
from onward.trainer.config.losses import titles
from onward.trainer.data.storage.shards import ShardManifest
from onward.trainer.events import ConfusionMatrix
from onward.trainer.run.directory import RunDir, read_config
from onward.trainer.run.durable_files import write_durably
from onward.trainer.run.records import Record, read_record


class ClassRow(Record):
    """How well one class or label is recognised."""

    name: str
    """The name of the class or label, or its number."""
    precision: float | None
    """Share of its predictions that are right; None if it is never predicted."""
    recall: float | None
    """Share of its targets that are found; None without targets."""
    f1: float | None
    """2 x found / (targets + predictions); None if there are neither."""
    targets: int
    predictions: int


CELLS = ("true negatives", "false positives", "false negatives", "true positives")
"""The confusion matrix of a label."""


class ClassTable(Record):
    """The classes or labels of one loss in one evaluation."""

    step: int
    loss: str
    """The output that the loss reads, if there are several; else ""."""
    classes: tuple[ClassRow, ...]
    confusion: tuple[tuple[int, ...], ...]
    """Number of targets by [class][predicted class]; of labels `CELLS` by [label]."""
    of: Literal["class", "label"] = "class"

    @property
    def worst(self) -> list[ClassRow]:
        """The classes with targets, the one with the least F1 first."""
        with_targets = [row for row in self.classes if row.targets]
        known = [row for row in with_targets if row.f1 is not None]
        return sorted(known, key=lambda row: row.f1 or 0.0)

    def files(self) -> dict[str, str]:
        """Return file name -> content."""
        names = [row.name for row in self.classes]
        columns = [name for name in ClassRow.model_fields if name != "name"]
        rows = [[row.name, *(getattr(row, name) for name in columns)] for row in self.classes]
        counts = [[name, *row] for name, row in zip(names, self.confusion, strict=True)]
        prefix = prefix_of(self.loss)
        return {
            f"{prefix}classes.json": self.model_dump_json(indent=2),
            f"{prefix}classes.csv": as_csv([[self.of, *columns], *rows]),
            f"{prefix}confusion.csv": as_csv([["target \\ predicted", *names], *counts])
            if self.of == "class"
            else as_csv([["label", *CELLS], *counts]),
        }

    def markdown(self) -> str:
        """Return both tables as Markdown."""
        shares = [[_share(row.precision), _share(row.recall), _share(row.f1)] for row in self.classes]
        rows = [[row.name, *share, str(row.targets)] for row, share in zip(self.classes, shares, strict=True)]
        counts = [[row.name, *map(str, own)] for row, own in zip(self.classes, self.confusion, strict=True)]
        if self.of == "class":
            heading = "Targets by class (rows) and predicted class (columns):"
            columns = ["", *(row.name for row in self.classes)]
        else:
            heading = "Right and wrong predictions of each label:"
            columns = ["", *CELLS]
        return "\n".join(
            [
                f"Evaluation at step {self.step}{f', loss of {self.loss}' if self.loss else ''}",
                "",
                *table([self.of, "precision", "recall", "F1", "targets"], rows),
                "",
                heading,
                "",
                *table(columns, counts),
            ]
        )


def class_table(event: ConfusionMatrix, run: RunDir) -> ClassTable:
    """Return the table of a confusion matrix."""
    counts: list[Any] = event.counts
    is_of_labels = isinstance(counts[0][0], list)
    names = class_names(run, event.loss, are_labels=is_of_labels)
    # names of another number of classes would be those of other classes
    names = names if len(names) == len(counts) else [str(number) for number in range(len(counts))]
    if is_of_labels:  # [label][is][predicted]
        found = [matrix[1][1] for matrix in counts]
        targets = [sum(matrix[1]) for matrix in counts]
        predictions = [matrix[0][1] + matrix[1][1] for matrix in counts]
        confusion = tuple((*matrix[0], *matrix[1]) for matrix in counts)
    else:  # [class][predicted class]
        found = [row[number] for number, row in enumerate(counts)]
        targets = [sum(row) for row in counts]
        predictions = [sum(column) for column in zip(*counts, strict=True)]
        confusion = tuple(map(tuple, counts))
    rows = tuple(map(_row, names, found, targets, predictions))
    of: Literal["class", "label"] = "label" if is_of_labels else "class"
    return ClassTable(step=event.step, loss=event.loss, classes=rows, confusion=confusion, of=of)


def _row(name: str, found: int, targets: int, predictions: int) -> ClassRow:
    return ClassRow(
        name=name,
        precision=_ratio(found, predictions),
        recall=_ratio(found, targets),
        f1=_ratio(2 * found, targets + predictions),
        targets=targets,
        predictions=predictions,
    )


def _ratio(part: int, total: int) -> float | None:
    return part / total if total else None


def class_names(run: RunDir, title: str, *, are_labels: bool = False) -> Sequence[str]:
    """Return the names of the classes of a loss, as the shards have them; [] if the data has numbers only.

    are_labels: the names of its yes-or-no labels, which are those of the columns where each has one.
    """
    losses = read_config(run).losses
    found = [loss for loss, name in zip(losses, titles(losses), strict=True) if title in ("", name)]
    # classes are named by the one column that holds them; several columns have none in common
    if not found or (len(found[0].columns) != 1 and not are_labels):
        return []
    if are_labels:
        return found[0].columns
    fitted = read_record(run.shards / "manifest.json", ShardManifest).fitted.get(found[0].columns[0])
    return fitted.classes if fitted else []


class Table(Protocol):
    """A table of the classes of one loss."""

    @property
    def loss(self) -> str: ...
    def files(self) -> dict[str, str]: ...
    def markdown(self) -> str: ...


def write_tables(run: RunDir, tables: Iterable[Table]) -> None:
    """Write the files of each table into the run directory."""
    for each in tables:
        for name, content in each.files().items():
            run.classes.mkdir(exist_ok=True)
            write_durably(run.classes / name, content.encode())


def prefix_of(loss: str) -> str:
    """Return what the names of the files of a loss begin with; "" for the only loss."""
    # the name of an output may have slashes
    return f"{re.sub(r'[^A-Za-z0-9._-]+', '-', loss)}-" if loss else ""


def as_csv(rows: Iterable[Sequence[object]]) -> str:
    """Return rows as the content of a CSV file."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"
