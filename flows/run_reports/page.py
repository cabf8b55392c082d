"""Make the page of one run: what is drawn and listed, and the template that shows it."""

from __future__ import annotations

import datetime
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from onward.flows.run_reports.curves import COLOURS, Line, Marks, draw, draw_counts, draw_precisions, draw_scatter
from onward.flows.run_reports.reported_run import EVALUATION, RunFacts, settings_as_text
from onward.flows.run_reports.summary import results, short_number, verdict
from onward.flows.run_state.costs import cost_line
from onward.flows.shown.terminal_tables import config_lines
from onward.tasks.shown.object_tables import ObjectTable
from onward.trainer.config.flat_settings import changed_settings
from onward.trainer.diagnostics.difference import TensorChange
from onward.trainer.quantities import duration, shown_size
from onward.trainer.run.history import Series
from onward.trainer.run.record_base import Record
from onward.trainer.run.recorded.sample_records import LEAST_SCORE, ImageBox, Sample
from onward.trainer.run.recorded.step_profile import other_rows, slowest_nodes
from onward.trainer.run.timing.time_account import PARTS, TimeAccount

MOST_EVALUATED = 8
"""Metrics of the evaluations that are drawn."""
MOST_CHANGES = 60
"""Weights that are listed."""
TIME_COLOURS: Mapping[str, str] = {
    "start-up": "#9a6700",
    "compile": "#bf8700",
    "data wait": "#bf3989",
    "steps": "#1a7f37",
    "evaluation": "#1f6feb",
    "checkpoint stall": "#8250df",
    "lost work": "#d1242f",
    "recovery": "#fa4549",
    "ending": "#8b949e",
    "export": "#0a7ea4",
    "approval": "#d4a72c",
}
"""Part of the time -> the colour of its bar."""
COSTS: Mapping[str, str] = {
    "tokens_per_s": "Tokens per second",
    "tflops": "TFLOP/s of all ranks",
    "mfu": "MFU (share of the peak)",
    "data_wait": "Share of data wait",
}
"""Curve of what the training costs -> its title."""
RARE = ("compile", "approval", "lost work", "recovery")
"""Parts that are shown only if they took a part of the time that is not rounded to nothing."""


@dataclass(frozen=True)
class Drawing:
    """One drawing with its title, and which colour is what if it has several lines."""

    title: str
    svg: Markup
    legend: Sequence[tuple[str, str]] = ()
    """(name, colour)"""
    note: str = ""


def render(template: str, **values: Any) -> str:
    """Return a template filled in; every text is escaped but for the drawings."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        # a name that a template misspells is an error, and not an empty place in a report
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"duration": duration, "share": share, "short": short_number, "bytes": shown_size}
    now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
    return environment.get_template(template).render(**values, written_at=now)


def page_of(facts: RunFacts) -> str:
    """Return the report of a run as HTML."""
    config = facts.config
    changed = {}
    lines = []
    if config:
        changed = settings_as_text(changed_settings(config))
        lines = [line for line in config_lines(config) if not line.startswith("#")]
    return render(
        "report.html",
        facts=facts,
        verdict=verdict(facts),
        results=results(facts),
        drawings=drawings(facts),
        marks=_marks(facts),
        time=time_rows(facts.account) if facts.account else [],
        parts=PARTS,
        profile=profile_of(facts),
        residuals=_residuals(facts),
        losses=_losses_of_rows(facts),
        precisions=[_precisions(table) for table in facts.objects],
        pictures=pictures(facts),
        least_score=LEAST_SCORE,
        changes=_changes(facts),
        environment=environment_rows(facts),
        changed=changed,
        toml="\n".join(lines),
    )


# -- curves


def drawings(facts: RunFacts) -> list[Drawing]:
    """Return the curves of a run, those that its log has."""
    marks = _marks(facts)
    # training and evaluation loss share a drawing, because their distance is what is looked for
    losses = [("training", facts.curve("loss")), ("evaluation", facts.curves.get(f"{EVALUATION}loss"))]
    named = [(name, series) for name, series in losses if series]
    found = []
    if named:
        # evaluations are few, so their points are marked
        lines = [Line(series, COLOURS[place], dots=place > 0) for place, (_, series) in enumerate(named)]
        found.append(_drawing("Loss", lines, marks, [name for name, _ in named]))
    measured = {name: each for name, each in facts.evaluations.items() if name != f"{EVALUATION}loss"}
    for name, series in list(measured.items())[:MOST_EVALUATED]:
        found.append(_drawing(name.removeprefix(EVALUATION), [Line(series, COLOURS[1], dots=True)], marks))
    for what, title in (("learning_rate", "Learning rate"), ("gradient_norm", "Gradient norm")):
        if curve := facts.curve(what):
            found.append(_drawing(title, [Line(curve, COLOURS[0])], marks, from_zero=what == "learning_rate"))
    if speed := facts.curve("samples_per_s"):
        note = f"median {median(speed):.4g}"
        # rows of equal length are counted as samples only; their tokens follow by multiplication
        if not facts.curve("tokens_per_s") and facts.tokens_per_sample:
            tokens = median(speed) * facts.tokens_per_sample
            note += f", or {tokens:.4g} tokens/s at {facts.tokens_per_sample:.4g} tokens a sample"
        found.append(_drawing("Samples per second", [Line(speed, COLOURS[2])], marks, note=note, from_zero=True))
    for what, title in COSTS.items():
        if curve := facts.curve(what):
            note = f"median {median(curve):.4g}"
            found.append(_drawing(title, [Line(curve, COLOURS[2])], marks, note=note, from_zero=True))
    return [each for each in found if each.svg]


def _drawing(
    title: str,
    lines: Sequence[Line],
    marks: Marks,
    names: Sequence[str] = (),
    *,
    note: str = "",
    from_zero: bool = False,
) -> Drawing:
    legend = [(name, line.colour) for name, line in zip(names, lines, strict=False)]
    # matplotlib's own output, in which no text of the run stands
    return Drawing(title, Markup(draw(lines, marks, from_zero=from_zero)), legend, note)


def _marks(facts: RunFacts) -> Marks:
    # the first attempt begins at the left edge, where a mark says nothing
    starts = [start.step for start in facts.history.starts if start.attempt > 1]
    deaths = [each.step for each in facts.attempts if each.kind not in ("done", "stopped")]
    return Marks(starts, deaths, [event.step for event in facts.history.checkpoints])


def median(series: Series) -> float:
    """Return the median of the finite values; NaN if there are none."""
    # the median, because the first steps and those behind a checkpoint are slower than the others
    ordered = sorted(value for value in series.values if math.isfinite(value))
    return ordered[len(ordered) // 2] if ordered else math.nan


def _residuals(facts: RunFacts) -> list[Drawing]:
    """Return predictions over targets, and the residuals, of a regression."""
    pairs = facts.samples.values if facts.samples else ()
    if not pairs:
        return []
    errors = sorted(predicted - target for target, predicted in pairs if math.isfinite(predicted - target))
    if not errors:
        return []
    # equal residuals have no range, and would give bins of width 0
    width = (errors[-1] - errors[0]) / 30 or 1.0
    edges = [errors[0] + width * number for number in range(31)]
    counts = [0] * 30
    for error in errors:
        # the greatest error lies on the right border of the last bin
        counts[min(29, int((error - errors[0]) / width))] += 1
    note = f"{len(pairs):,} rows"
    return [
        Drawing("Predicted over target", Markup(draw_scatter(pairs)), note=note),
        Drawing("Residuals: predicted - target", Markup(draw_counts(counts, edges, "residual")), note=note),
    ]


def _precisions(table: ObjectTable) -> Drawing:
    """Return the curves of precision and recall of the classes with the most objects."""
    with_objects = [place for place, row in enumerate(table.classes) if row.objects]
    most = sorted(with_objects, key=lambda place: -table.classes[place].objects)[: len(COLOURS)]
    # in the order of the classes, by which the boxes of the images have their colours, too
    shown = [table.classes[place] for place in sorted(most)]
    svg = draw_precisions([row.curve for row in shown])
    legend = [(row.name, colour) for row, colour in zip(shown, COLOURS, strict=False)]
    return Drawing("Precision over recall", Markup(svg), legend, note="at an intersection over union of 0.50")


def _losses_of_rows(facts: RunFacts) -> Drawing | None:
    if not facts.samples or not facts.samples.counts:
        return None
    svg = draw_counts(facts.samples.counts, facts.samples.edges, "loss of a row")
    return Drawing("Losses of single rows", Markup(svg), note=f"mean {facts.samples.mean:.4g}")


# -- pictures

Panels = dict[str, list[dict[str, str]]]
"""Name of a panel -> its boxes, as the template draws them."""


def pictures(facts: RunFacts) -> list[tuple[str, list[tuple[Sample, Panels]]]]:
    """Return the images with boxes: a heading, and each image with what was found in it before and after."""
    if facts.samples is None:
        return []
    groups = (("The greatest losses", facts.samples.worst), ("Drawn at random", facts.samples.ordinary))
    found = []
    for title, samples in groups:
        with_boxes = [each for each in samples if each.objects is not None]
        if with_boxes:
            found.append((title, [(each, _panels(each, facts)) for each in with_boxes]))
    return found


def _panels(sample: Sample, facts: RunFacts) -> Panels:
    found = {"before the training": sample.before, "after the training": sample.after}
    # the greatest score last, so that it is drawn over the others
    drawn = {name: (*(sample.objects or ()), *reversed(boxes)) for name, boxes in found.items()}
    return {name: [_box(each, facts) for each in boxes] for name, boxes in drawn.items()}


def _box(box: ImageBox, facts: RunFacts) -> dict[str, str]:
    """Return a box as HTML draws it: the names of its CSS classes, its style and its text."""
    x1, y1, x2, y2 = (min(max(corner, 0.0), 1.0) for corner in box.corners)
    # a text that would lie outside of the image is put inside of the box, or aligned with its right side
    # the template draws it faintly, so that it is not taken for a detection
    is_weak = box.score is not None and box.score < LEAST_SCORE
    places = {"object": box.score is None, "weak": is_weak, "top": y1 < 0.1, "bottom": y2 > 0.9, "right": x1 > 0.6}
    place = f"left: {x1:.2%}; top: {y1:.2%}; width: {x2 - x1:.2%}; height: {y2 - y1:.2%}"
    name = facts.class_name(box.of_class)
    kind = " ".join(name for name, is_so in places.items() if is_so)
    text = name if box.score is None else f"{name} {box.score:.2f}"
    return {"kind": kind, "style": f"{place}; --of: {COLOURS[box.of_class % len(COLOURS)]}", "text": text}


# -- tables


def time_rows(account: TimeAccount) -> list[dict[str, Any]]:
    """Return the parts of the time, in their order, with the rest that is in none of them."""
    rows = []
    for name, seconds in account.parts.items():
        if name not in RARE or seconds >= 0.0005 * account.wall_s > 0:
            rows.append((name, seconds, TIME_COLOURS[name], PARTS[name]))
    # the parts must add up to the whole, or a reader takes the bar for complete
    rows.append(("in no part", account.unaccounted_s, "#d0d7de", "what the clocks of flow and ranks do not explain"))
    return [
        {
            "name": name,
            "seconds": seconds,
            "part": seconds / account.wall_s if account.wall_s else 0.0,
            "colour": colour,
            "what": what,
        }
        for name, seconds, colour, what in rows
    ]


def profile_of(facts: RunFacts) -> dict[str, Any]:
    """Return the slowest nodes of the profiled steps, and what is not a node; {} without a profile."""
    if not facts.profiles:
        return {}
    first = facts.profiles[0]
    steps = f"step {first.first_step:,}"
    if first.last_step > first.first_step:
        steps += f" to {first.last_step:,}"
    nodes = set()
    for profile in facts.profiles:
        nodes |= {row.name for row in profile.rows if row.kind == "node"}
    return {
        "steps": steps,
        "step_ms": max(each.step_ms for each in facts.profiles),
        "num_ranks": len(facts.profiles),
        "note": first.note,
        "nodes": slowest_nodes(facts.profiles),
        "others": other_rows(facts.profiles),
        "num_nodes": len(nodes),
    }


def _changes(facts: RunFacts) -> dict[str, Any]:
    """Return the changed weights, the ones that moved furthest first, and what else differs."""
    found = facts.changes
    if found is None:
        return {}

    def moved(change: TensorChange) -> tuple[bool, float]:
        return change.is_weight, -1.0 if change.relative is None else change.relative  # None: it was zero

    values = sorted((each for each in found.tensors if each.change == "values"), key=moved, reverse=True)
    others = [f"{each.name}: {each.change}" for each in found.tensors if each.change != "values"]
    others += [f"{each.operator} {each.node}: {each.change}" for each in found.nodes]
    greatest = max((each.relative or 0.0 for each in values[:MOST_CHANGES]), default=0.0)
    return {
        "shown": values[:MOST_CHANGES],
        "greatest": greatest,
        "num_changed": len(values),
        "num_equal": found.equal_tensors,
        "stripped": found.stripped,
        "others": [*others, *found.interface, *found.model],
    }


def environment_rows(facts: RunFacts) -> list[tuple[str, str]]:
    """Return where the run ran, and with what."""
    rows = []
    if facts.runtime and facts.runtime.ranks:
        ranks = facts.runtime.ranks
        hosts = list(dict.fromkeys(rank.host for rank in ranks))
        # ranks of several hosts may have different devices, which are counted by kind
        devices = [rank.gpu or rank.device for rank in ranks]
        counted = ", ".join(f"{devices.count(each)} x {each}" for each in dict.fromkeys(devices))
        # the rank with the least memory is the one that runs out
        memory = min(rank.memory_bytes for rank in ranks)
        rows += [
            ("hosts", ", ".join(hosts)),
            ("ranks", f"{len(ranks)}: {counted}; tensors are sent by {ranks[0].backend}"),
            ("memory", f"{shown_size(memory)} free on a device at the start"),
            *((name, text.split(",")[0]) for name, text in ranks[0].versions.items()),
        ]
    if facts.config:
        parallel = facts.config.parallel
        compute = facts.history.start.compute if facts.history.start else ""
        rows.append(("layout", f"{parallel.layout}, ZeRO {parallel.zero}, computed in {compute or 'fp32'}"))
    if line := cost_line(facts.metrics):
        rows.append(("throughput", line))
    if manifest := facts.manifest:
        skipped = f", bad rows left out: {manifest.skipped:,}" if manifest.skipped else ""
        split = f"{manifest.rows('train'):,} rows to train on, {manifest.rows('evaluation'):,} to evaluate on"
        rows.append(("data", f"{split}{skipped}"))
    if identity := facts.identity:
        rows += [("created", identity.created_at.replace("T", " "))]
        rows += [("git commit", identity.git_commit)] if identity.git_commit else []
        rows += [("original model", f"SHA-256 {identity.model_sha256}")]
        rows += [("MLflow run", identity.mlflow_run_id)] if identity.mlflow_run_id else []
    if facts.exported:
        rows.append(("exported file", f"SHA-256 {facts.exported.sha256}"))
    return [*rows, ("run directory", str(facts.run.root))]


# -- formats


def share(part: float) -> str:
    """Return a share as percent."""
    return f"{100 * part:.1f} %"


class ReportFile(Record):
    """A report that was written."""

    path: Path
    runs: tuple[str, ...]
    """The ids of the runs that it shows."""
    bytes: int
    left_out: tuple[str, ...]
    """What could not be read of the runs, and why."""
