"""A run directory with every record that a report shows, written by hand, and the reading of an HTML page."""

from __future__ import annotations

from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from onward.tasks.shown.class_tables import ClassRow, ClassTable
from onward.trainer.config.loading import build_config
from onward.trainer.diagnostics.difference import Difference, TensorChange
from onward.trainer.events import CheckpointSaved, Ended, Evaluated, EventWriter, Started, Times, read_events
from onward.trainer.run.directory import RunDir
from onward.trainer.run.export_folder import changes_in, samples_in
from onward.trainer.run.outcomes.attempt_endings import AttemptEnding
from onward.trainer.run.outcomes.run_ending import RunEnding
from onward.trainer.run.recorded.sample_records import Sample, Samples
from onward.trainer.run.records import (
    AttemptResult,
    ExportedModel,
    MetricsSummary,
    Promotion,
    RankReport,
    RunIdentity,
    RuntimeReport,
    TrainResult,
    Variant,
    write_record,
)
from onward.trainer.run.timing.phases import enter_phase
from tests.support.graphs import tiny_conv_net

PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="  # a PNG file


def reported_run(root: Path, *, name: str = "digits", num_steps: int = 40, **sections: Any) -> RunDir:
    """An exported run whose first attempt died in step 27, after the checkpoint of step 20."""
    run = RunDir(root)
    root.mkdir(parents=True)
    (root / "model.onnx").write_bytes(tiny_conv_net().SerializeToString())
    write_record(run.config, build_config({"name": name, **_sections(root), **sections}))
    write_record(
        run.identity, RunIdentity(run_id=root.name, name=name, created_at="2026-01-01T00:00:00", model_sha256="0" * 64)
    )
    for phase in ("configure", "preflight", "data", "train"):
        enter_phase(run, phase)
    _write_events(run, num_steps)
    enter_phase(run, "export")
    _write_records(run, num_steps)
    enter_phase(run, "end")
    return run


def _sections(root: Path) -> dict[str, Any]:
    return {
        "model": {"path": root / "model.onnx"},
        "data": {"source": "digits"},
        "train": {"num_steps": 40, "global_batch_size": 8},
        "checkpoint": {"period": 10},
    }


def _write_events(run: RunDir, num_steps: int) -> None:
    for attempt, first, last in ((1, 0, 27), (2, 20, num_steps)):
        events = EventWriter(run.events, attempt=attempt, rank=0)
        seconds = {"setup": 0.0}
        sizes = {"num_steps": num_steps, "num_samples": 8 * num_steps, "num_parameters": 123}
        events.emit(Started(step=first, **sizes, compute="fp32"))
        events.emit(Times(step=first, seconds=seconds))
        for step in range(first + 1, last + 1):
            cost = {"samples_per_s": 100.0 + step, "tflops": 0.25, "mfu": 0.5, "memory_bytes": 3e8}
            events.scalars(step, loss=2 / step, learning_rate=1e-3, gradient_norm=step / 7, **cost)
            if step % 10 == 0:
                values = {"evaluation/loss": 1 / step, "evaluation/accuracy": step / num_steps}
                events.emit(Evaluated(step=step, values=values))
                events.emit(CheckpointSaved(step=step, path=f"step-{step:09d}"))
                events.emit(Times(step=step, seconds=seconds))
        events.emit(Times(step=last, seconds=seconds))
        if attempt == 2:
            events.emit(Ended(step=last, status="done", ended_early=""))
        events.close()


def _write_records(run: RunDir, num_steps: int) -> None:
    rank = {"world_size": 1, "expected_world_size": 1, "pid": 1, "all_reduce": 0.0, "all_reduce_expected": 0.0}
    report = RankReport(rank=0, host="node-1", device="cpu", versions={"torch": "2.13"}, memory_bytes=10**9, **rank)
    write_record(run.runtime, RuntimeReport(ranks=(report,), launch_s=1.0, disk_free_bytes=1))
    last_ms = {event.attempt: event.at_ms for event, _ in read_events(run.events)}
    died = {
        "kind": "rank_lost",
        "step": 27,
        "sentence": "rank 1 on h0 was ended by SIGKILL",
        "action": "it goes on from step 20",
    }
    for number, what in ((1, died), (2, {"kind": "done", "sentence": "the run is done", "action": ""})):
        times = dict.fromkeys(("began_ms", "detected_ms", "ended_ms"), last_ms[number])
        ending = {"attempt": number, **times, "checkpoint": 20, **what}
        write_record(run.ending(number), AttemptEnding.model_validate(ending))
    result = {"status": "done", "step": num_steps, "samples_seen": 8, "metrics": {}, "elapsed_s": 1.0}
    write_record(run.train, TrainResult.model_validate({**result, "attempts": 2}))
    write_record(run.result(2), AttemptResult.model_validate({**result, "attempt": 2}))
    costs = {"tflops": 0.25, "mfu": 0.5, "memory_bytes": 3 * 2.0**30, "checkpoint_stall_s": 0.5}
    summary = {
        "status": "FINISHED",
        "step": num_steps,
        "num_events": 9,
        "first": {},
        "last": {},
        "samples_per_s": 120.0,
    }
    write_record(run.metrics, MetricsSummary.model_validate({**summary, "costs": costs}))
    run.begin_attempt(), run.begin_attempt()
    made = Variant(kind="fp16", path=run.export / "v.onnx", bytes=10, size_ratio=0.5, latency_ratio=0.75, metrics={})
    refused = made.model_copy(update={"kind": "int8_static", "path": None, "refused": "it is 0.1 off"})
    exported = ExportedModel(
        path=run.export / "model.onnx",
        sha256="1" * 64,
        step=num_steps,
        parity=2.5e-7,
        before={"evaluation/loss": 2.0, "evaluation/accuracy": 0.1},
        after={"evaluation/loss": 0.5, "evaluation/accuracy": 0.9},
        test={"test/accuracy": 0.875},
        changed=4,
        removed={"Dropout": 1},
        variants=(made, refused),
        registered_as="digits",
        version="3",
        promotion=Promotion(alias="champion", status="served", reason="it is better by 0.1"),
    )
    write_record(run.exported, exported)
    write_record(
        samples_in(run.export),
        Samples(
            judged_by="onnxruntime",
            num_rows=100,
            of_rows=120,
            why_not_all="the time is over",
            worst=(
                Sample(row=7, loss=3.5, target=1, predicted=0, num_targets=1, num_right=0, image=PIXEL),
                Sample(row=9, loss=3.25, num_targets=8, num_right=5, inputs={"text": "<script>alert(1)</script>"}),
            ),
            mean=0.5,
            counts=(90, 10),
            edges=(0.0, 1.0, 4.0),
        ),
    )
    moved = TensorChange(
        name="conv.weight", change="values", after="float32 [3]", changed=3, relative=0.25, greatest=1.5
    )
    zero = moved.model_copy(update={"name": "conv.bias", "relative": None})
    difference = {
        "a": run.root / "a",
        "b": run.root / "b",
        "same_bytes": False,
        "model": (),
        "interface": (),
        "nodes": (),
        "stripped": {"Dropout": 2},
    }
    write_record(
        changes_in(run.export), Difference.model_validate({**difference, "tensors": (zero, moved), "equal_tensors": 2})
    )
    rows = [
        ClassRow(name=each, precision=0.5, recall=0.75, f1=0.6, targets=4, predictions=6) for each in ("zero", "one")
    ]
    run.classes.mkdir()
    table = ClassTable(step=num_steps, loss="", classes=tuple(rows), confusion=((3, 1), (2, 2)))
    write_record(run.classes / "classes.json", table)
    write_record(run.flow_ending, RunEnding(status="completed", at="2026-01-01T00:10:00"))


@dataclass
class Page(HTMLParser):
    """The elements, attributes and texts of an HTML page."""

    source: str
    tags: list[str] = field(default_factory=list)
    attributes: list[tuple[str, str, str]] = field(default_factory=list)
    """(tag, name, value)"""
    texts: list[str] = field(default_factory=list)
    sections: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()
        self.feed(self.source)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag == "section":
            self.sections.append(dict(attrs).get("id") or dict(attrs).get("class") or "")

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    @property
    def text(self) -> str:
        """All text, with single spaces."""
        return " ".join(" ".join(self.texts).split())
