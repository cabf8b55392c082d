"""The monitor makes a table of the objects of each class from the last evaluation of a detector."""

from __future__ import annotations

import json
from pathlib import Path

from onward.tasks.monitor import monitor
from onward.tasks.shown.object_tables import ObjectTable, object_table
from onward.trainer.events import ClassPrecision, Evaluated, EventWriter, ObjectPrecision
from onward.trainer.run.records import read_record
from tests.tasks.shown.test_class_tables import make_run

DOG = ClassPrecision(
    of_class=1,
    objects=3,
    map=0.5,
    map_50=0.75,
    map_small=None,
    map_medium=0.5,
    map_large=0.25,
    curve=[1.0, 0.5, 0.0],
    found_as=[2, 1, 0],
    without_object=5,
)


def test_the_last_evaluation_becomes_files_with_the_names_of_the_classes(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    events = EventWriter(run.events, attempt=run.begin_attempt(), rank=0)
    unknown = DOG.model_copy(update={"of_class": 7})
    for step, classes in ((0, [unknown]), (5, [DOG, unknown])):
        events.emit(Evaluated(step=step, values={"evaluation/loss": 0.5}))
        events.emit(ObjectPrecision(step=step, loss="", classes=classes))
    events.close()
    run.close_log()
    monitor.fn(run)
    assert sorted(path.name for path in run.classes.iterdir()) == [
        "objects-confusion.csv",
        "objects.csv",
        "objects.json",
    ]
    assert (run.classes / "objects-confusion.csv").read_text().splitlines() == [
        "object,dog,7,not found",
        "dog,2,1,0",
        "7,2,1,0",
        "no object,5,5,",
    ]
    assert (run.classes / "objects.csv").read_text().splitlines() == [
        "class,objects,map,map_50,map_small,map_medium,map_large",
        "dog,3,0.5,0.75,,0.5,0.25",
        "7,3,0.5,0.75,,0.5,0.25",
    ]
    written = json.loads((run.classes / "objects.json").read_text())
    assert (written["step"], written["classes"][0]["curve"]) == (5, [1.0, 0.5, 0.0])
    text = read_record(run.classes / "objects.json", ObjectTable).markdown()
    assert "| dog | 3 | 0.500 | 0.750 |  | 0.500 | 0.250 |" in text
    assert "| no object | 5 | 5 |  |" in text


def test_a_run_of_an_earlier_version_has_no_table_of_confused_classes(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    event = ObjectPrecision(step=5, loss="", classes=[DOG.model_copy(update={"found_as": ()})])
    table = object_table(event, run)
    assert sorted(table.files()) == ["objects.csv", "objects.json"]
    assert "found class" not in table.markdown()
