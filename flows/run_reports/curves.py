"""Draw the curves of a report with matplotlib, as SVG that stands inside of the HTML page.

Names, which may come from a configuration, are in the HTML around a drawing and never in it. A drawing has the marks of
the run below its curves: where an attempt began after the first one, and where checkpoints were saved.
"""

from __future__ import annotations

import io
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from onward.trainer.run.directory import onward_home
from onward.trainer.run.history import Series

# before matplotlib is imported, which would keep its list of fonts in the user's home
os.environ.setdefault("MPLCONFIGDIR", str(onward_home() / "matplotlib"))

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter

COLOURS = ("#1f6feb", "#d1242f", "#1a7f37", "#9a6700", "#8250df", "#bf3989", "#0a7ea4", "#57606a")
"""Of the lines of a drawing, in order."""
MOST_POINTS = 600
"""Points of a line; a longer one is thinned out so that its extremes stay."""
SIZE = (4.2, 2.3)
"""Inches: legible on a phone, and two of them side by side on a desktop."""
MANY_CHECKPOINTS = 60

matplotlib.rcParams.update(
    {
        "svg.fonttype": "none",  # text stays text, so that it can be searched and is small
        "svg.hashsalt": "onward",
        "font.family": "sans-serif",
        "font.size": 9,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.edgecolor": "#8b949e",
        "axes.labelcolor": "#57606a",
        "xtick.color": "#57606a",
        "ytick.color": "#57606a",
        "axes.grid": True,
        "axes.axisbelow": True,
        "grid.color": "#d8dee4",
        "grid.linewidth": 0.6,
        "text.parse_math": False,
    }
)


@dataclass(frozen=True)
class Line:
    """One line of a drawing."""

    series: Series
    colour: str
    dots: bool = False
    """Whether its points are few, and shown."""


@dataclass(frozen=True)
class Marks:
    """The steps at which something happened in the run."""

    starts: Sequence[int] = ()
    """At which an attempt after the first one began."""
    deaths: Sequence[int] = ()
    """At which an attempt died."""
    checkpoints: Sequence[int] = ()


def draw(lines: Sequence[Line], marks: Marks = Marks(), *, from_zero: bool = False) -> str:
    """Return lines over the steps as SVG; "" without a finite value."""
    figure, axes = _figure()
    least = math.inf
    most = -math.inf
    for line in lines:
        steps, values = thinned(line.series)
        finite = [value for value in values if math.isfinite(value)]
        # the axis is chosen over all lines together
        least = min([least, *finite])
        most = max([most, *finite])
        markers: dict[str, Any] = (
            {"marker": "o", "markersize": 2.5} if line.dots and len(steps) < MANY_CHECKPOINTS else {}
        )
        axes.plot(steps, values, color=line.colour, linewidth=1.4, **markers)
    if not math.isfinite(least):
        return ""
    # on a linear axis all but the greatest values would lie on the bottom
    if least > 0 and most / least > 50 and not from_zero:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())
    if from_zero:
        axes.set_ylim(bottom=0)
    for step in marks.starts:
        axes.axvline(step, color="#8b949e", linestyle=(0, (4, 3)), linewidth=1)
    under = axes.get_xaxis_transform()  # x in steps, y in parts of the axes
    axes.plot(marks.deaths, [0.97] * len(marks.deaths), "x", color="#d1242f", markersize=5, transform=under)
    if marks.checkpoints:
        # more marks would run into a line
        places = list(marks.checkpoints)[:: max(1, len(marks.checkpoints) // MANY_CHECKPOINTS)]
        axes.plot(places, [0.02] * len(places), "^", color="#57606a", markersize=3.5, transform=under, clip_on=False)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.set_xlabel("step")
    return _svg(figure)


def draw_scatter(pairs: Sequence[tuple[float, float]]) -> str:
    """Return predictions over targets, with the diagonal on which both are equal."""
    finite = [pair for pair in pairs if all(map(math.isfinite, pair))]
    if not finite:
        return ""
    figure, axes = _figure()
    targets, predicted = zip(*finite, strict=True)
    # the diagonal spans the targets, so that predictions outside of them stand out
    ends = [min(targets), max(targets)]
    axes.plot(ends, ends, color="#8b949e", linewidth=1)
    axes.plot(targets, predicted, "o", color=COLOURS[0], markersize=2.2, alpha=0.6, markeredgewidth=0)
    axes.set_xlabel("target")
    axes.set_ylabel("predicted")
    return _svg(figure)


def draw_precisions(curves: Sequence[Sequence[float]]) -> str:
    """Return precisions over recalls from 0 to 1, a line for each class; "" without a class."""
    if not curves:
        return ""
    figure, axes = _figure()
    for curve, colour in zip(curves, COLOURS, strict=False):
        recalls = [place / (len(curve) - 1) for place in range(len(curve))]
        axes.plot(recalls, curve, color=colour, linewidth=1.4)
    # lines at 1 stay visible below the upper border
    axes.set_ylim(0, 1.03)
    axes.set_xlabel("recall")
    axes.set_ylabel("precision")
    return _svg(figure)


def draw_counts(counts: Sequence[int], edges: Sequence[float], label: str) -> str:
    """Return a histogram; "" without counts."""
    if not counts:
        return ""
    figure, axes = _figure()
    axes.stairs(counts, edges, fill=True, color=COLOURS[0], alpha=0.8)
    axes.set_xlabel(label)
    axes.set_ylabel("rows")
    axes.yaxis.set_major_locator(MaxNLocator(5, integer=True))
    return _svg(figure)


def thinned(series: Series) -> tuple[list[int], list[float]]:
    """Return at most about MOST_POINTS points: of each stretch of steps the least and the greatest value."""
    steps = series.steps
    values = series.values
    if len(steps) <= MOST_POINTS:
        return list(steps), list(values)
    # each stretch gives two points; rounded up, so that there are not more than allowed
    width = -(-len(steps) * 2 // MOST_POINTS)
    kept = []
    for first in range(0, len(steps), width):
        places = range(first, min(first + width, len(steps)))
        # NaN compares with nothing, and would hide the others
        finite = [place for place in places if math.isfinite(values[place])]
        drawn = finite or [places[0]]
        kept += sorted({min(drawn, key=values.__getitem__), max(drawn, key=values.__getitem__)})
    # the first and the last point stay, so that the curve has its whole length
    kept = sorted({0, *kept, len(steps) - 1})
    return [steps[place] for place in kept], [values[place] for place in kept]


def _figure() -> tuple[Figure, Axes]:
    figure = Figure(figsize=SIZE, layout="constrained")
    FigureCanvasSVG(figure)
    return figure, figure.subplots()


def _svg(figure: Figure) -> str:
    """Return a figure as an SVG element that grows with the page, without the header of a file."""
    content = io.StringIO()
    nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    figure.savefig(content, format="svg", transparent=True, metadata=nothing)
    text = content.getvalue()
    # the element is put into an HTML page, where an XML header is an error
    return text[text.index("<svg") :].replace("<svg ", '<svg class="curve" role="img" ', 1).strip()
