"""What Prefect shows of a run: the result in rows, the curve as a picture, and errors without a traceback."""

from __future__ import annotations

import base64
import logging
import sys
import xml.etree.ElementTree
from pathlib import Path

from onward.tasks.attempts.explained_errors import Explained
from onward.tasks.shown.prefect_results import as_url, curves_of, picture, result_rows
from onward.trainer.errors import ConfigError
from onward.trainer.events import Evaluated, EventWriter
from onward.trainer.run.history import RunHistory
from onward.trainer.run.records import ExportedModel, TrainResult


def test_the_rows_of_the_result_are_the_metrics_before_and_after_and_then_the_facts() -> None:
    exported = ExportedModel(
        path=Path("m.onnx"),
        sha256="",
        step=90,
        parity=1e-6,
        changed=4,
        before={"evaluation/accuracy": 0.25, "evaluation/loss": 1.386294},
        after={"evaluation/accuracy": 0.97, "evaluation/loss": 0.1},
        test={"test/accuracy": 0.9},
    )
    result = TrainResult(status="done", attempts=2, step=100, samples_seen=800, metrics={}, elapsed_s=90)
    rows = result_rows(exported, result, first="evaluation/loss")
    assert rows[:3] == [
        {"what": "loss", "before": "1.386", "after": "0.1"},
        {"what": "accuracy", "before": "0.25", "after": "0.97"},
        {"what": "test/accuracy", "before": "", "after": "0.9"},
    ]
    assert {"what": "attempts", "before": "", "after": "2"} in rows


def test_the_curve_has_each_step_once_over_all_attempts_and_is_a_picture_that_needs_no_server(tmp_path: Path) -> None:
    log = EventWriter(tmp_path / "events.jsonl", attempt=1, rank=0)
    for step in (*range(1, 1001), *range(900, 1001)):
        log.scalars(step, loss=1000.0 / step)
    log.emit(Evaluated(step=500, values={"evaluation/loss": 3.0}))
    log.scalars(1001, loss=float("nan"))
    log.close()
    curves = curves_of(RunHistory.of(tmp_path / "events.jsonl"))
    assert [step for step, _ in curves["train/loss"]] == list(range(1, 1001))
    assert curves["evaluation/loss"] == [(500, 3.0)]
    svg = picture(curves, "loss of <mlp> & more")
    drawn = xml.etree.ElementTree.fromstring(svg)
    texts = [each.text for each in drawn.iter("{http://www.w3.org/2000/svg}text")]
    assert {"loss of <mlp> & more", "train/loss", "evaluation/loss", "step 1", "step 1000"} <= set(texts)
    (line, _) = drawn.iter("{http://www.w3.org/2000/svg}polyline")
    assert 300 < len(line.attrib["points"].split()) <= 400
    kind, _, content = as_url(svg).partition(",")
    assert (kind, base64.b64decode(content).decode()) == ("data:image/svg+xml;base64", svg)
    assert curves_of(RunHistory.of(tmp_path / "absent.jsonl")) == {}


def test_an_error_of_onwards_is_shown_as_its_sentences_and_another_one_with_its_traceback() -> None:
    def shown(error: Exception) -> str:
        try:
            raise error
        except Exception:
            record = logging.LogRecord("prefect.flow_runs", logging.ERROR, "", 1, "Encountered %s", (), sys.exc_info())
            record.args = ("an exception",)
        text = Explained().format(record)
        assert record.exc_info, "the log file still has the traceback"
        return text

    text = shown(ConfigError(["model.path: there is no file 5%.onnx", "train.num_steps must be greater than 0"]))
    assert text.splitlines() == [
        "ConfigError:",
        "- model.path: there is no file 5%.onnx",
        "- train.num_steps must be greater than 0",
        "The traceback is in the log of the flow.",
    ]
    assert "Traceback (most recent call last)" in shown(ZeroDivisionError("x"))
