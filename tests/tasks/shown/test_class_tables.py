"""The monitor makes a table of the classes from the last confusion matrix: files, MLflow artifacts, the status."""

from __future__ import annotations

import csv
import json
from pathlib import Path

from onward.flows.run_state.run_status import describe
from onward.infra.mlflow.tracking import Tracker
from onward.tasks.monitor import monitor
from onward.tasks.shown.class_tables import class_table
from onward.trainer.config.loading import build_config
from onward.trainer.data.schema.fitted import Fitted
from onward.trainer.data.storage.shards import ShardManifest
from onward.trainer.events import ConfusionMatrix, Evaluated, EventWriter
from onward.trainer.run.directory import RunDir
from onward.trainer.run.records import RunIdentity, read_record, write_record
from tests.support.stores import client, new_run

COUNTS = [[8, 2, 0], [1, 1, 0], [0, 0, 0]]
"""Of 10 cats 8 are found, of 2 dogs one; there is no cow."""


def make_run(root: Path, **sections: object) -> RunDir:
    run, tracker = RunDir(root / "run"), new_run()
    base = {"model": {"path": root / "m.onnx"}, "data": {"source": "digits"}, "train": {"num_steps": 10}}
    write_record(run.config, build_config(base | sections))
    where = {"mlflow_run_id": tracker.run_id, "tracking_uri": tracker.tracking_uri}
    write_record(run.identity, RunIdentity(run_id="r", name="r", created_at="", model_sha256="", **where))
    fitted = {"label": Fitted(classes=("cat", "dog", "cow"))}
    (run.root / "shards").mkdir()
    manifest = ShardManifest(key="", format="arrow", columns=(), train=(), evaluation=(), fitted=fitted)
    write_record(run.shards / "manifest.json", manifest)
    return run


def log(run: RunDir, *losses: str) -> None:
    events = EventWriter(run.events, attempt=run.begin_attempt(), rank=0)
    for step in (0, 5):
        events.emit(Evaluated(step=step, values={"evaluation/loss": 0.5}))
        for loss in losses:
            events.emit(ConfusionMatrix(step=step, loss=loss, counts=COUNTS if step else [[0] * 3] * 3))
    events.close()
    run.close_log()


def test_the_last_evaluation_becomes_files_and_artifacts_with_the_names_of_the_classes(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    log(run, "")
    monitor.fn(run)
    table = json.loads((run.classes / "classes.json").read_text())
    assert (table["step"], table["confusion"]) == (5, COUNTS)
    assert table["classes"][0] == {
        "name": "cat",
        "precision": 8 / 9,
        "recall": 0.8,
        "f1": 16 / 19,
        "targets": 10,
        "predictions": 9,
    }
    assert [table["classes"][2][key] for key in ("precision", "recall", "f1")] == [None, None, None]
    with (run.classes / "classes.csv").open() as file:
        assert [row["class"] for row in csv.DictReader(file)] == ["cat", "dog", "cow"]
    assert (run.classes / "confusion.csv").read_text().splitlines()[2] == "dog,1,1,0"
    identity = read_record(run.identity, RunIdentity)
    mlflow = client(Tracker(identity.tracking_uri, identity.mlflow_run_id))
    stored = [file.path for file in mlflow.list_artifacts(identity.mlflow_run_id, "classes")]
    assert stored == ["classes/classes.csv", "classes/classes.json", "classes/confusion.csv"]
    assert describe(run).worst_classes == (
        "dog: F1 0.400, recall 0.500 of 2 targets",
        "cat: F1 0.842, recall 0.800 of 10 targets",
    )


def test_of_several_losses_each_has_its_own_table(tmp_path: Path) -> None:
    losses = [{"name": "cross_entropy", "output": "animal"}, {"name": "cross_entropy", "output": "a/b", "label": "c"}]
    run = make_run(tmp_path, loss=losses)
    log(run, "animal", "a/b")
    monitor.fn(run)
    names = sorted(path.name for path in run.classes.glob("*.json"))
    assert names == ["a-b-classes.json", "animal-classes.json"]
    first, second = (json.loads((run.classes / name).read_text())["classes"][1]["name"] for name in reversed(names))
    assert (first, second) == ("dog", "1"), "without names the numbers of the classes"


def test_a_table_as_markdown_keeps_its_columns_whatever_the_names_are(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    fitted = {"label": Fitted(classes=("a|b", "c", "d"))}
    manifest = ShardManifest(key="", format="arrow", columns=(), train=(), evaluation=(), fitted=fitted)
    write_record(run.shards / "manifest.json", manifest)
    text = class_table(ConfusionMatrix(step=5, loss="", counts=COUNTS), run).markdown()
    assert "| a&#124;b | 0.889 | 0.800 | 0.842 | 10 |" in text
    assert "| d |  |  |  | 0 |" in text
    assert "| c | 1 | 1 | 0 |" in text


LABELS = [[[5, 1], [2, 4]], [[9, 1], [0, 2]]]
"""Of 6 rows that are toxic 4 are found and one is found wrongly; both rows that are spam are found."""


def test_yes_or_no_labels_have_a_table_with_the_names_of_their_columns(tmp_path: Path) -> None:
    run = make_run(tmp_path, loss={"name": "bce_with_logits", "label": ["toxic", "spam"]})
    event = ConfusionMatrix(step=5, loss="", counts=LABELS)
    table = class_table(event, run)
    toxic, spam = table.classes
    assert (toxic.name, toxic.precision, toxic.recall, toxic.f1, toxic.targets) == ("toxic", 0.8, 4 / 6, 8 / 11, 6)
    assert (spam.name, spam.precision, spam.recall, spam.predictions) == ("spam", 2 / 3, 1.0, 3)
    files = table.files()
    assert files["confusion.csv"].splitlines() == [
        "label,true negatives,false positives,false negatives,true positives",
        "toxic,5,1,2,4",
        "spam,9,1,0,2",
    ]
    assert files["classes.csv"].startswith("label,precision,")
    assert "| toxic | 5 | 1 | 2 | 4 |" in table.markdown()
    numbered = make_run(tmp_path / "numbered", loss={"name": "bce_with_logits", "label": "tags"})
    assert [row.name for row in class_table(event, numbered).classes] == ["0", "1"]
