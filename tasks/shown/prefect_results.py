"""What the page of a flow run shows of its result: a table of metrics before and after, and the curve of the loss."""

from __future__ import annotations

import base64
import contextlib
import html
import math
from collections.abc import Sequence

from prefect import runtime
from prefect.artifacts import create_image_artifact, create_table_artifact

from onward.tasks.shown.prefect_server import prefect_answers
from onward.trainer.run.directory import RunDir, read_config
from onward.trainer.run.history import RunHistory
from onward.trainer.run.records import ExportedModel, RunIdentity, TrainResult, read_record


def show_curve(run: RunDir, history: RunHistory) -> None:
    """Show the loss of all attempts as a picture. Outside of a flow run it does nothing."""
    with contextlib.suppress(Exception):  # a missing picture must not fail the run
        curves = curves_of(history)
        if curves and runtime.flow_run.get_id() and prefect_answers():
            svg = picture(curves, f"loss of {read_record(run.identity, RunIdentity).name}")
            create_image_artifact(as_url(svg), key="loss", description="Loss of the training and of its evaluations")


def show_result(run: RunDir, exported: ExportedModel, result: TrainResult) -> None:
    """Show the result as a table. Outside of a flow run it does nothing."""
    with contextlib.suppress(Exception):
        if runtime.flow_run.get_id() and prefect_answers():
            version = f"version {exported.version} of `{exported.registered_as}`: " if exported.version else ""
            decision = f"\n\n{exported.promotion.reason}" if exported.promotion else ""
            page = read_record(run.identity, RunIdentity).mlflow_url
            create_table_artifact(
                result_rows(exported, result, first=read_config(run).promote_metric),
                key="result",
                description=f"{version}`{exported.path}`{decision}" + (f"\n\n[In MLflow]({page})" if page else ""),
            )


def result_rows(exported: ExportedModel, result: TrainResult, *, first: str) -> list[dict[str, str]]:
    """Return the rows of the table: each metric before and after the training, the deciding one first; then facts."""
    facts = {
        "step of the exported checkpoint": exported.step,
        "steps": result.step,
        "attempts": result.attempts,
        "minutes of training": f"{result.elapsed_s / 60:.1f}",
        "changed tensors": exported.changed,
        "difference of onnxruntime": f"{exported.parity:.2g}",
    }
    rows = metric_rows(exported, first)
    return rows + [{"what": name, "before": "", "after": str(value)} for name, value in facts.items()]


def metric_rows(exported: ExportedModel, first: str) -> list[dict[str, str]]:
    """Return a row of each metric before and after the training, that named `first` first; then those of the test."""
    # False sorts before True
    names = sorted(exported.after, key=lambda name: (name != first, name))
    rows = [
        {
            "what": name.removeprefix("evaluation/"),
            "before": _rounded(exported.before.get(name)),
            "after": _rounded(exported.after[name]),
        }
        for name in names
    ]
    return rows + [{"what": name, "before": "", "after": _rounded(value)} for name, value in exported.test.items()]


def _rounded(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


# -- draw the loss of the training and of its evaluations as a small picture, for the page of a run in Prefect

Curve = Sequence[tuple[int, float]]

WIDTH = 720
HEIGHT = 320
LEFT = 64
RIGHT = 16
TOP = 36
BOTTOM = 36
MOST_POINTS = 400
"""Points of a curve; of more, the mean of neighbours is drawn."""
COLOURS = {"train/loss": "#3b6fd4", "evaluation/loss": "#d4703b"}


def curves_of(history: RunHistory) -> dict[str, Curve]:
    """Return name -> (step, loss) of each step of a run; of several attempts the first value counts."""
    curves: dict[str, Curve] = {}
    for name in COLOURS:
        finite = [point for point in history.curve(name).points() if math.isfinite(point[1])]
        if finite:
            curves[name] = finite
    return curves


def picture(curves: dict[str, Curve], title: str) -> str:
    """Return an SVG image. curves: name -> (step, value) in the order of steps, one at least."""
    # the range is that of the drawn points: a single spike would press the rest flat
    thinned = {name: _thinned(curve) for name, curve in curves.items()}
    steps = [step for curve in curves.values() for step, _ in curve]
    values = [value for curve in thinned.values() for _, value in curve]
    low = min(values)
    high = max(values)
    first = min(steps)
    last = max(steps)

    def x(step: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * (step - first) / max(1e-9, last - first)

    def y(value: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * (value - low) / max(1e-12, high - low)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{LEFT}" y="20" font-size="14">{html.escape(title)}</text>',
    ]
    for value in (low, (low + high) / 2, high):
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(value):.1f}" y2="{y(value):.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y(value) + 4:.1f}" text-anchor="end">{value:.3g}</text>')
    for step, anchor in ((first, "start"), (last, "end")):
        parts.append(f'<text x="{x(step):.1f}" y="{HEIGHT - 12}" text-anchor="{anchor}">step {step}</text>')
    for place, (name, curve) in enumerate(thinned.items()):
        path = " ".join(f"{x(step):.1f},{y(value):.1f}" for step, value in curve)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{COLOURS[name]}" stroke-width="1.5"/>')
        parts += [
            f'<circle cx="{x(step):.1f}" cy="{y(value):.1f}" r="2.5" fill="{COLOURS[name]}"/>'
            for step, value in (curve if len(curve) <= 60 else ())
        ]
        at = WIDTH - RIGHT - 110 * (len(thinned) - place)
        parts.append(f'<text x="{at}" y="20" fill="{COLOURS[name]}">{html.escape(name)}</text>')
    return "".join([*parts, "</svg>"])


def as_url(svg: str) -> str:
    """Return an image as a `data:` URL, which needs no server."""
    return "data:image/svg+xml;base64," + base64.b64encode(svg.encode()).decode()


def _thinned(curve: Curve) -> Curve:
    size = math.ceil(len(curve) / MOST_POINTS)
    groups = [curve[start : start + size] for start in range(0, len(curve), size)]
    # a mean stands at the last step of its group, at which all of it is known
    return [(group[-1][0], sum(value for _, value in group) / len(group)) for group in groups]
