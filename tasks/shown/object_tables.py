"""The table of the objects of the last evaluation: the average precision of each class, also by size.

    event "precision" --ObjectTable--> RUN_DIR/classes/objects.json    for programs, with the curves
                                       RUN_DIR/classes/objects.csv     one row for each class
                                       RUN_DIR/classes/objects-confusion.csv   objects by class (rows) and found class

Of several losses the files are named after the loss: set_classes-objects.json.
"""

from __future__ import annotations

from collections.abc import Sequence

from onward.tasks.shown.class_tables import as_csv, class_names, prefix_of
from onward.tasks.shown.markdown import table
from onward.trainer.event_records import ObjectPrecision, Precision
from onward.trainer.run.directory import RunDir
from onward.trainer.run.records import Record

PRECISIONS = ("map", "map_50", "map_small", "map_medium", "map_large")


class ObjectRow(Precision):
    """How precisely the objects of one class are found."""

    name: str
    """The name of the class, or its number."""

    @property
    def precisions(self) -> Sequence[float | None]:
        """The values of PRECISIONS."""
        return [getattr(self, name) for name in PRECISIONS]


class ObjectTable(Record):
    """The objects of one loss in one evaluation."""

    step: int
    loss: str
    """The loss, if there are several; else ""."""
    classes: tuple[ObjectRow, ...]

    @property
    def confusion(self) -> list[list[str]]:
        """The objects by class and found class, as a table with a heading; [] of a run of an earlier version."""
        if not all(row.found_as for row in self.classes):
            return []
        rows = [[row.name, *map(str, row.found_as)] for row in self.classes]
        return [
            ["object", *(row.name for row in self.classes), "not found"],
            *rows,
            ["no object", *(str(row.without_object) for row in self.classes), ""],
        ]

    def files(self) -> dict[str, str]:
        """Return file name -> content."""
        rows = [[row.name, row.objects, *row.precisions] for row in self.classes]
        prefix = prefix_of(self.loss)
        content = {
            f"{prefix}objects.json": self.model_dump_json(indent=2),
            f"{prefix}objects.csv": as_csv([["class", "objects", *PRECISIONS], *rows]),
        }
        if counts := self.confusion:
            content[f"{prefix}objects-confusion.csv"] = as_csv(counts)
        return content

    def markdown(self) -> str:
        """Return the tables as Markdown."""
        rows = []
        for row in self.classes:
            shares = ["" if value is None else f"{value:.3f}" for value in row.precisions]
            rows.append([row.name, str(row.objects), *shares])
        of = f", loss {self.loss}" if self.loss else ""
        lines = [f"Evaluation at step {self.step}{of}", "", *table(["class", "objects", *PRECISIONS], rows)]
        if counts := self.confusion:
            lines += ["", "Objects by class (rows) and found class (columns):", "", *table(counts[0], counts[1:])]
        return "\n".join(lines)


def object_table(event: ObjectPrecision, run: RunDir) -> ObjectTable:
    """Return the table of an event."""
    names = dict(enumerate(class_names(run, event.loss)))
    rows = []
    for each in event.classes:
        numbers = each.model_dump(exclude={"of_class"})
        rows.append(ObjectRow(name=names.get(each.of_class, str(each.of_class)), **numbers))
    return ObjectTable(step=event.step, loss=event.loss, classes=tuple(rows))
