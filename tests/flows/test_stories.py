"""What newcomers bring: each example is written by `onward example`, trained by `onward run` and reaches its metric."""

from __future__ import annotations

import contextlib
import json
import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import psutil
import pytest

from onward.flows.examples.folders import CONFIGS, FOLDERS
from onward.flows.examples.pictures import OBJECTS
from onward.trainer.config.loading import load_config
from onward.trainer.events import read_events
from onward.trainer.export.measuring.samples import MOST_PICTURES, NUM_ORDINARY
from onward.trainer.run.directory import RunDir
from tests.support.report_runs import Page
from tests.support.workshop import Workshop, ranks_of, reached, until

pytestmark = pytest.mark.usefixtures("only_servers")


@dataclass(frozen=True)
class Goal:
    """What docs/how-to/stories.md promises of an example."""

    metric: str
    value: float
    greatest: bool = True


GOALS: dict[str, tuple[Goal, ...]] = {
    "images": (Goal("accuracy", 0.95),),
    "reviews": (Goal("accuracy", 0.95),),
    "language": (Goal("perplexity", 55.0, greatest=False),),
    "masks": (Goal("mean_iou", 0.85),),
    "boxes": (Goal("map_50", 0.8),),
    "table": (Goal("r2", 0.85),),
    "two-heads": (Goal("kind/accuracy", 0.95), Goal("centre/mse", 0.02, greatest=False)),
}


@pytest.fixture
def workshop(tmp_path: Path) -> Iterator[Workshop]:
    workshop = Workshop(tmp_path)
    yield workshop
    workshop.close()


@pytest.mark.slow
@pytest.mark.mpi
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", FOLDERS)
def test_an_example_reaches_its_metric(name: str, workshop: Workshop) -> None:
    folder = workshop.root / name
    written = workshop.onward("example", name, str(folder))
    assert written["config"] == str(folder / f"{name}.toml")
    facts = workshop.onward(*written["to_train_it"].split()[1:], limit_s=800)
    assert (facts["state"], facts["attempts"]) == ("exported", 1)
    assert facts["parity"] < 1e-3
    for goal in GOALS[name]:
        reached_value = facts["after"][f"evaluation/{goal.metric}"]
        assert (reached_value >= goal.value) if goal.greatest else (reached_value <= goal.value), facts["after"]
    given, trained = onnx.load(folder / "model.onnx"), onnx.load(facts["model"])
    assert (trained.graph.input, trained.graph.output) == (given.graph.input, given.graph.output)
    onnxruntime.InferenceSession(facts["model"], providers=["CPUExecutionProvider"])
    (run,) = workshop.mlflow_runs(RunDir(Path(facts["directory"])))
    assert run.info.status == "FINISHED"
    for goal in GOALS[name]:
        assert f"evaluation/{goal.metric}" in run.data.metrics


@pytest.mark.slow
@pytest.mark.mpi
@pytest.mark.timeout(900)
def test_the_report_of_a_detector_shows_what_it_finds(workshop: Workshop) -> None:
    folder = workshop.root / "boxes"
    workshop.onward("example", "boxes", str(folder))
    facts = workshop.onward("run", str(folder / "boxes.toml"), "train.num_epochs=2", "monitor.report=true", limit_s=800)
    run = RunDir(Path(facts["directory"]))
    page = Page(run.report.read_text())
    assert {"objects", "samples"} <= set(page.sections)
    assert "left-out" not in page.sections
    pixels = [value for tag, name, value in page.attributes if (tag, name) == ("image", "href")]
    assert len(pixels) == MOST_PICTURES + NUM_ORDINARY
    assert page.texts.count("before the training") == page.texts.count("after the training") == len(pixels)
    kinds = [value for tag, name, value in page.attributes if (tag, name) == ("span", "class") and "box" in value]
    # objects of the labels, and boxes that were found
    assert 0 < sum("object" in kind for kind in kinds) < len(kinds)
    assert any(re.fullmatch(rf"({'|'.join(OBJECTS)}) 0\.\d\d", text) for text in page.texts)
    table = json.loads((run.classes / "objects.json").read_text())
    assert [row["name"] for row in table["classes"]] == list(OBJECTS)
    samples = json.loads((run.export / "samples.json").read_text())
    content = json.loads((folder / "boxes.json").read_text())
    numbers = {image["file_name"]: image["id"] for image in content["images"]}
    for sample in (*samples["worst"], *samples["ordinary"]):
        own = [each for each in content["annotations"] if each["image_id"] == numbers[Path(sample["where"]).name]]
        assert [box["of_class"] + 1 for box in sample["objects"]] == [each["category_id"] for each in own]


@pytest.mark.mpi
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_detector_learns_from_mosaics_and_mixed_images(workshop: Workshop) -> None:
    folder = workshop.root / "boxes"
    workshop.onward("example", "boxes", str(folder))
    augment = ["data.image.augment.mosaic=1.0", "data.image.augment.mixup=32.0", "data.image.resize=pad_grey"]
    facts = workshop.onward("run", str(folder / "boxes.toml"), "train.num_epochs=3", *augment, limit_s=800)
    run = RunDir(Path(facts["directory"]))
    losses = [event.values for event, _ in read_events(run.events) if event.kind == "scalars"]
    trained = [values["train/loss"] for values in losses if "train/loss" in values]
    assert np.isfinite(trained).all()
    assert np.mean(trained[-10:]) < 0.7 * np.mean(trained[:10])
    assert facts["after"]["evaluation/map_50"] > 0.2


@pytest.mark.mpi
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ["images", "reviews"])
def test_an_example_that_is_killed_and_resumed_ends_with_the_bits_of_one_that_is_not(
    name: str, workshop: Workshop
) -> None:
    folder = workshop.root / name
    workshop.onward("example", name, str(folder))
    words = ["run", str(folder / f"{name}.toml"), "train.num_epochs=2", "checkpoint.period=10", "launch.retries=0"]
    words += ["parallel.data=2", "launch.threads_per_rank=1"]
    whole = workshop.onward(*words, limit_s=600)

    process = workshop.start(*words)
    run = workshop.new_run()
    until(lambda: reached(run, 25), limit_s=300)
    ranks = ranks_of(run)
    assert len(ranks) == 2
    for rank in ranks:
        kill(rank)
    process.communicate(timeout=120)
    assert process.returncode == 70
    resumed = workshop.onward("resume", run.root.name, limit_s=600)
    assert (resumed["state"], resumed["attempts"]) == ("exported", 2)
    assert resumed["sha256"] == whole["sha256"]
    assert resumed["after"] == whole["after"]


def kill(rank: psutil.Process) -> None:
    """Kill -9, unless the launcher has ended the rank already."""
    with contextlib.suppress(psutil.NoSuchProcess):
        rank.kill()


# -- the files


def test_every_example_has_a_configuration_of_about_fifteen_lines_that_loads_and_a_goal() -> None:
    assert set(GOALS) == set(FOLDERS)
    for name in FOLDERS:
        text = (CONFIGS / f"{name}.toml").read_text()
        settings = [line for line in text.splitlines() if "=" in line.partition("#")[0]]
        assert len(settings) <= 15, name
        assert load_config(CONFIGS / f"{name}.toml").name == name
        assert tomllib.loads(text)["model"]["path"] == "model.onnx"


def test_the_page_of_the_examples_shows_their_configurations() -> None:
    page = (Path(__file__).parents[2] / "docs" / "how-to" / "stories.md").read_text()
    for name in FOLDERS:
        assert f'```toml title="{name}.toml"\n{(CONFIGS / f"{name}.toml").read_text()}```' in page
        assert f"onward example {name}\nonward run {name}/{name}.toml\n" in page


@pytest.mark.slow
def test_an_example_is_written_whole_and_never_over_other_files(workshop: Workshop) -> None:
    folder = workshop.root / "here"
    assert workshop.onward("example")["examples"].keys() == FOLDERS.keys()
    workshop.onward("example", "table", str(folder))
    assert {path.name for path in folder.iterdir()} == {"model.onnx", "table.parquet", "table.toml"}
    again = workshop.onward("example", "table", str(folder), status=2)
    assert again["problems"] == [f"{folder} exists already; name a folder that does not"]
    unknown = workshop.onward("example", "tables", status=2)
    assert unknown["problems"][0].startswith("no example 'tables' has files to write; these have: images, reviews")
    by_name = workshop.onward("run", "table", status=2)
    assert "`onward example table` writes them" in by_name["problems"][0]
    assert [path.name for path in workshop.root.iterdir()] == ["here"]


@pytest.mark.slow
def test_an_example_is_the_same_each_time(tmp_path: Path) -> None:
    from onward.flows.examples.folders import write_example

    for name in ("reviews", "language", "masks", "boxes", "table"):
        folders = [write_example(name, tmp_path / place / name).parent for place in ("a", "b")]
        first, second = ({p.name: p.read_bytes() for p in folder.rglob("*") if p.is_file()} for folder in folders)
        assert first == second, name
