"""The report of a run: complete, true to the records, without any reference to the network, safe, bounded."""

from __future__ import annotations

import logging
import re
import time
from pathlib import Path

import pytest

from onward.flows.run_reports import at_the_end
from onward.flows.run_reports.at_the_end import reported
from onward.flows.run_reports.curves import MOST_POINTS, thinned
from onward.flows.run_reports.page import page_of, time_rows
from onward.flows.run_reports.report_api import report
from onward.flows.run_reports.reported_run import read_facts
from onward.flows.run_reports.summary import markdown
from onward.tasks.shown.object_tables import ObjectRow, ObjectTable
from onward.trainer.config.loading import build_config
from onward.trainer.errors import ConfigError
from onward.trainer.events import Evaluated, EventWriter, Scalars
from onward.trainer.run.directory import RunDir
from onward.trainer.run.export_folder import samples_in
from onward.trainer.run.history import Series
from onward.trainer.run.outcomes.refusals import Refusal, refusal_in
from onward.trainer.run.outcomes.run_ending import RunEnding
from onward.trainer.run.recorded.sample_records import ImageBox, Sample
from onward.trainer.run.recorded.step_profile import ProfileRow, StepProfile, record_of
from onward.trainer.run.records import write_record
from onward.trainer.run.timing.phases import phases
from tests.support.report_runs import PIXEL, Page, reported_run

SECTIONS = ["curves", "time", "attempts", "classes", "samples", "changes", "export", "environment", "configuration"]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ONWARD_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def test_a_report_shows_every_record_of_the_run(tmp_path: Path) -> None:
    run = reported_run(tmp_path / "run")
    page = Page(page_of(read_facts(run)))
    assert page.sections == SECTIONS
    for text in (
        "The run is done, and its trained file passed all checks.",
        "model.onnx on digits: 123 trained parameters, step 40 of 40, on 1 rank.",
        "1 attempt before had failed, and the run went on: the last time because rank 1 on h0 was ended by SIGKILL.",
        "It is registered as digits, version 3. It takes the alias champion: it is better by 0.1.",
        "loss 2 0.5 better accuracy 0.1 0.9 better test: accuracy 0.875",
        "Dashed lines: an attempt began again, at step 20. Crosses: an attempt died, in step 27.",
        "Triangles: 4 checkpoints.",
        "7 steps were made again after a failure.",
        "zero 3 1 one 2 2",  # the confusion matrix
        "the losses of 100 of 120 rows, since the time is over",
        "loss 3.5 , row 7 of the split one, predicted zero",
        "5 of 8 targets right",
        "conv.weight float32 [3] 0.25 1.5 conv.bias float32 [3] was zero",
        "Only training needs what was removed: 2 x Dropout.",
        "2.5e-07 of the largest output; the limit is 0.001",
        "refused: it is 0.1 off",
        "torch 2.13",
        "TFLOP/s of all ranks median 0.25",
        "MFU (share of the peak) median 0.5",
        "throughput 120 samples/s, 0.25 TFLOP/s, MFU 50.0%, 3 GiB a rank, data wait 0.0%, checkpoint stall 0.5 s",
        "data.source digits",
    ):
        assert text in page.text
    assert page.tags.count("svg") == 8  # loss, accuracy, rate, norm, speed, FLOPs, MFU, losses of rows
    assert ("img", "src", "data:image/png;base64,") in [(tag, name, value[:22]) for tag, name, value in page.attributes]


def test_a_report_refers_to_nothing_outside_of_itself(tmp_path: Path) -> None:
    one, two = reported_run(tmp_path / "run"), reported_run(tmp_path / "other")
    for source in (page_of(read_facts(one)), report(str(one.root), str(two.root)).path.read_text()):
        page = Page(source)
        assert not {"script", "link", "iframe", "object", "embed", "base", "form"} & set(page.tags)
        references = [
            value
            for _, name, value in page.attributes
            if name in ("src", "href", "xlink:href", "srcset", "action", "data", "poster", "background")
        ]
        assert references
        assert all(value.startswith(("#", "data:image/png;base64,")) for value in references)
        assert "@import" not in source
        assert all(value.startswith("#") for value in re.findall(r"url\(([^)]*)\)", source))
        policy = next(value for _, name, value in page.attributes if name == "content" and "default-src" in value)
        assert policy == "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


def test_text_of_a_run_is_never_markup(tmp_path: Path) -> None:
    run = reported_run(tmp_path / "run")
    events = EventWriter(run.events, attempt=2, rank=0)
    events.emit(Evaluated(step=40, values={"evaluation/<img src=x onerror=alert(1)>": 0.5}))
    events.close()
    facts = read_facts(run)
    page = Page(page_of(facts))
    assert not {"script"} & set(page.tags)
    assert not [value for _, name, value in page.attributes if name.startswith("on")]
    assert "<script>alert(1)</script>" in page.text  # of a sample, as text
    assert "<img src=x onerror=alert(1)>" in page.text
    assert "<img" not in markdown(facts)


def test_profiled_steps_are_shown_by_node_over_all_ranks(tmp_path: Path) -> None:
    run = reported_run(tmp_path / "run")
    nodes = [
        ProfileRow(kind="node", name=f"n{place}", operator="Relu", calls=2, forward_ms=1.0, ms=1.0, share=0.01)
        for place in range(12)
    ]
    for rank, ms in enumerate((30.0, 50.0)):
        own = ProfileRow(
            kind="node",
            name=f"/layer.{rank}/<Add>",
            operator="MatMul + Add",
            calls=2,
            forward_ms=ms / 4,
            backward_ms=ms / 4,
            ms=ms / 2,
            share=0.5,
            output_bytes=4096,
        )
        shared = ProfileRow(kind="node", name="shared", operator="Gather", forward_ms=ms / 5, ms=ms / 5, share=0.2)
        rest = ProfileRow(kind="other", name="optimizer", ms=ms / 10, share=0.1 * (rank + 1))
        found = StepProfile(
            rank=rank,
            replica=0,
            stage=rank,
            tensor=0,
            attempt=1,
            device="cpu",
            first_step=20,
            last_step=24,
            step_ms=ms,
            rows=(own, shared, rest, *nodes),
        )
        write_record(record_of(run, rank), found)
    page = Page(page_of(read_facts(run)))
    assert page.sections == [*SECTIONS[:2], "profile", *SECTIONS[2:]]
    for text in (
        "Step 20 to 24: 50 ms a step on the slowest of 2 ranks; a node that several ranks compute has their mean.",
        "/layer.1/<Add> MatMul + Add 2 12.500 12.500 50.0 % 4.1 kB",
        "shared Gather 0 8.000 0.000 20.0 %",
        "optimizer 15.0 %",
        "The 10 slowest of 15 nodes",
    ):
        assert text in page.text
    assert page.text.index("/layer.1/") < page.text.index("/layer.0/") < page.text.index("shared Gather")


def test_a_regression_shows_its_residuals(tmp_path: Path) -> None:
    run = reported_run(tmp_path / "run")
    found = read_facts(run).samples
    assert found is not None
    pairs = tuple((float(number), number + 0.5) for number in range(50))
    write_record(samples_in(run.export), found.model_copy(update={"values": pairs}))
    page = Page(page_of(read_facts(run)))
    assert "residuals" in page.sections
    assert "Predicted over target 50 rows" in page.text
    assert page.tags.count("svg") == 10


def test_images_with_boxes_are_shown_before_and_after_the_training(tmp_path: Path) -> None:
    run = reported_run(tmp_path / "run")
    found = read_facts(run).samples
    assert found is not None
    objects = (ImageBox(of_class=1, corners=(0.1, 0.05, 0.5, 0.25)),)
    boxes = (
        ImageBox(of_class=1, corners=(0.1, 0.05, 0.5, 0.3), score=0.875),
        ImageBox(of_class=0, corners=(-0.2, 0.5, 1.5, 1.0), score=0.125),
    )
    sample = Sample(row=7, loss=3.5, image=PIXEL, image_size=(8, 8), objects=objects, after=boxes)
    ordinary = sample.model_copy(update={"row": 8, "loss": 0.5, "after": ()})
    write_record(samples_in(run.export), found.model_copy(update={"worst": (sample,), "ordinary": (ordinary,)}))
    page = Page(page_of(read_facts(run)))
    for text in (
        "The greatest losses one before the training one zero 0.12 one 0.88 after the training loss 3.5 , row 7",
        "Drawn at random one before the training one after the training loss 0.5 , row 8",
    ):
        assert text in page.text
    styles = [value for tag, name, value in page.attributes if (tag, name) == ("span", "style") and "left" in value]
    assert styles[0] == "left: 10.00%; top: 5.00%; width: 40.00%; height: 20.00%; --of: #d1242f"
    # what lies outside of the image is cut off
    assert styles[2] == "left: 0.00%; top: 50.00%; width: 100.00%; height: 50.00%; --of: #1f6feb"
    kinds = [value for tag, name, value in page.attributes if (tag, name) == ("span", "class") and "box" in value]
    assert kinds[:4] == ["box object top", "box object top", "box weak bottom", "box top"]
    # the pixels are in the page once for both files
    assert [value for tag, name, value in page.attributes if (tag, name) == ("use", "href")] == ["#row-7", "#row-8"]


def test_objects_have_a_table_and_curves(tmp_path: Path) -> None:
    run = reported_run(tmp_path / "run")
    precisions = {"map": 0.5, "map_50": 0.75, "map_small": None, "map_medium": 0.5, "map_large": 0.25}
    rows = [ObjectRow(name=name, objects=4, curve=(1.0, 0.5, 0.0), **precisions) for name in ("<disc>", "square")]
    rows.append(rows[0].model_copy(update={"name": "absent", "objects": 0}))
    rows = [row.model_copy(update={"found_as": (2, 1, 0, 1), "without_object": 7}) for row in rows]
    write_record(run.classes / "objects.json", ObjectTable(step=40, loss="", classes=tuple(rows)))
    page = Page(page_of(read_facts(run)))
    assert page.sections == [*SECTIONS[:4], "objects", *SECTIONS[4:]]
    assert "<disc> 4 0.500 0.750 0.500 0.250 square 4 0.500" in page.text
    assert (
        "object <disc> square absent not found <disc> 2 1 0 1 square 2 1 0 1 absent 2 1 0 1 no object 7 7 7"
        in page.text
    )
    # classes without objects have no curve
    assert "Precision over recall <disc> square at an intersection over union of 0.50" in page.text
    assert page.tags.count("svg") == 9


def test_the_shares_of_the_time_are_a_hundred_percent(tmp_path: Path) -> None:
    account = read_facts(reported_run(tmp_path / "run")).account
    assert account is not None
    rows = time_rows(account)
    assert sum(row["part"] for row in rows) == pytest.approx(1, abs=0.001)
    assert sum(row["seconds"] for row in rows) == pytest.approx(account.wall_s, rel=0.001)


def test_a_damaged_record_is_named_and_the_rest_is_shown(tmp_path: Path) -> None:
    run = reported_run(tmp_path / "run")
    run.exported.write_text("{")
    (run.export / "samples.json").write_bytes(b"\xff")
    page = Page(page_of(read_facts(run)))
    assert "left-out" in page.sections
    assert f"{run.exported} is not a ExportedModel, or it is damaged" in page.text
    assert "samples" not in page.sections
    assert "changes" in page.sections


def test_a_directory_with_nothing_but_a_configuration_has_a_report(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    (tmp_path / "model.onnx").touch()
    given = {"model": {"path": tmp_path / "model.onnx"}, "data": {"source": "digits"}, "train": {"num_steps": 1}}
    write_record(run.config, build_config(given))
    page = Page(page_of(read_facts(run)))
    assert page.sections == ["environment", "configuration"]
    assert "no step was made" in page.text


def test_a_failed_run_says_why_and_what_was_refused(tmp_path: Path) -> None:
    run = reported_run(tmp_path / "run")
    run.exported.unlink()
    write_record(refusal_in(run.export), Refusal(kind="ExportRefused", problems=("parity is 0.5",)))
    write_record(run.flow_ending, RunEnding(status="failed", error="ExportRefused", problems=("parity is 0.5",), at=""))
    facts = read_facts(run)
    assert facts.state == "failed"
    page = Page(page_of(facts))
    assert "The trained file was refused by its checks, and not exported." in page.text
    assert "The file was refused: parity is 0.5" in page.text
    assert "parity is 0.5" in markdown(facts)


def test_several_runs_are_compared_by_what_differs(tmp_path: Path) -> None:
    one = reported_run(tmp_path / "one")
    given = {"optimizer": {"learning_rate": 0.5}, "metrics": ["accuracy", {"name": "f1", "average": "macro"}]}
    two = reported_run(tmp_path / "two", name="fast", **given)
    made = report(str(one.root), str(two.root), output=tmp_path / "both.html")
    assert (made.path, made.runs) == (tmp_path / "both.html", ("one", "two"))
    page = Page(made.path.read_text())
    assert page.sections == ["results", "settings", "curves", "time"]
    assert "optimizer.learning_rate 0.001 0.5" in page.text
    assert "metrics name = accuracy; name = f1, average = macro" in page.text
    assert "name digits fast" in page.text
    assert "train.num_steps" not in page.text  # it is the same
    assert page.tags.count("svg") == 7  # loss, two metrics, rate, norm, speed, MFU


def test_the_best_of_several_runs_is_marked_by_the_direction_of_the_metric(tmp_path: Path) -> None:
    one, two = reported_run(tmp_path / "one"), reported_run(tmp_path / "two")
    worse = read_facts(two).exported
    assert worse is not None
    write_record(
        two.exported, worse.model_copy(update={"after": {"evaluation/loss": 0.75, "evaluation/accuracy": 0.8}})
    )
    page = Page(report(str(one.root), str(two.root)).path.read_text())
    assert "loss 0.5 (best) 0.75 accuracy 0.9 (best) 0.8" in page.text


def test_the_report_of_one_run_lies_in_its_directory(tmp_path: Path) -> None:
    run = reported_run(tmp_path / "run")
    made = report(str(run.root))
    assert made.path == run.report
    assert made.bytes == run.report.stat().st_size
    assert made.left_out == ()
    with pytest.raises(ConfigError, match="no run has the name or id 'none'"):
        report("none")


def test_the_page_of_a_long_run_is_small(tmp_path: Path) -> None:
    run = reported_run(tmp_path / "run")
    events = EventWriter(run.events, attempt=2, rank=0)
    for step in range(41, 20_041):
        events.emit(Scalars(step=step, values={"train/loss": 1 / step, "train/samples_per_s": float(step % 100)}))
    events.close()
    began_at = time.monotonic()
    page = page_of(read_facts(run))
    assert len(page) < 1_000_000
    assert time.monotonic() - began_at < 30


def test_a_thinned_curve_keeps_its_ends_and_its_extremes() -> None:
    values = [0.0] * 100_000
    values[77_777], values[5], values[9] = 9.0, -3.0, float("nan")
    steps, kept = thinned(Series(list(range(100_000)), values))
    assert len(kept) < MOST_POINTS + 10
    assert (steps[0], steps[-1]) == (0, 99_999)
    assert {9.0, -3.0} <= set(kept)


# -- at the end of a flow


def test_a_report_that_fails_is_one_warning_and_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run = reported_run(tmp_path / "run")
    monkeypatch.setattr(at_the_end, "run_module", lambda *words, **options: "ended with status 1: boom")
    with caplog.at_level(logging.WARNING), reported(run):
        pass
    (warning,) = [record for record in caplog.records if record.name == at_the_end.__name__]
    assert "no report of the run; `onward report run` writes it: the process ended with status 1" in warning.message
    assert phases(run)[-1].kind == "end"

    def interrupted(*words: str, **options: object) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr(at_the_end, "run_module", interrupted)
    with pytest.raises(ValueError, match="of the run itself"), reported(run):
        raise ValueError("of the run itself")
    with reported(run):
        pass


def test_a_report_that_takes_too_long_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run = reported_run(tmp_path / "run")
    monkeypatch.setattr(at_the_end, "LIMIT_S", 0.05)
    began_at = time.monotonic()
    with caplog.at_level(logging.WARNING), reported(run):
        pass
    assert time.monotonic() - began_at < 10
    assert "was not done after 0.05 s, and was ended" in caplog.text
    assert not run.report.exists()


def test_a_run_may_ask_for_no_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(at_the_end, "run_module", lambda *words, **options: pytest.fail("it was started"))
    with reported(reported_run(tmp_path / "run", monitor={"report": False})):
        pass
    with reported(RunDir(tmp_path / "refused")):  # before it had a configuration
        pass
