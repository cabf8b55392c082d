"""Draw the live view in any width; and say the same in one line, where there is no terminal.

    digits-14  train                                              2:31
    start 0:49  configure 0:52  preflight 0:10  data 0:01  train 0:39  export
    ━━━━━━━━━━━━━━━━━━━━────────────────────────  214/899  24%  1:39 left
    loss        0.5026  ▇▆▅▄▃▂▁  -54% in 120 steps
    ...

What does not fit is left out at the end of a line, never wrapped: a line that wraps would break the view.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from onward.flows.live_view.live_state import LiveFacts, curve
from onward.trainer.quantities import gib
from onward.trainer.run.timing.phases import Phase

SHOWN: tuple[Phase, ...] = ("start", "configure", "preflight", "data", "train", "export")
"""Phases that every run has; the others are shown once they begin."""
NAMES: Mapping[Phase, str] = {"end": "report"}
MEANING: Mapping[Phase, str] = {
    "start": "settings and servers",
    "configure": "rehearsal on the first rows",
    "preflight": "hosts, devices, messages",
    "data": "shards",
    "train": "the ranks load the model",
    "export": "the file is written and verified",
    "approval": "waits for an answer in Prefect",
    "end": "an HTML file",
}
"""Phase -> what happens in it; of `train` only until the first step, after which there are numbers."""
LABEL = 12
"""Width of the labels."""
TWO_COLUMNS = 110
"""Width from which facts stand side by side."""
BARS = "▁▂▃▄▅▆▇█"
MEGABYTE = 1e6


class Screen:
    """Draws the facts as they are when it is printed."""

    def __init__(self, facts: LiveFacts) -> None:
        self._facts = facts

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for line in lines(self._facts, options.max_width, ascii_only=options.ascii_only):
            # a line that wraps would move the cursor further than rich takes back at the next drawing
            line.truncate(options.max_width)
            line.no_wrap = True
            yield line


def lines(facts: LiveFacts, width: int, *, ascii_only: bool = False) -> list[Text]:
    """Return the lines of the view, each at most `width` wide."""
    # the head and the phases stand from the first moment; the bar needs the number of steps, which the ranks log
    drawn = [_head(facts, width), *_phases(facts, width)]
    if facts.progress.num_steps:
        drawn.append(_bar(facts, width, ascii_only=ascii_only))
    rows = []
    for label, parts in _rows(facts, ascii_only=ascii_only):
        if known := [part for part in parts if part]:
            rows.append((label, known))
    if width < TWO_COLUMNS:
        return [*drawn, *(_row(label, parts, width) for label, parts in rows)]
    half = (width - 2) // 2
    # with an odd number of rows the last one has no right neighbour, which None stands for
    for left, right in zip(rows[::2], [*rows[1::2], None], strict=False):
        line = _row(*left, half)
        if right:
            # cells, not characters: a bar of a sparkline or a Chinese name may be wider than one cell
            line.pad_right(half + 2 - line.cell_len)
            line.append_text(_row(*right, half))
        drawn.append(line)
    return drawn


def sentence(facts: LiveFacts) -> str:
    """Return the state of the run in one line, without what changes by itself, such as the time that has passed."""
    progress = facts.progress
    again = f"attempt {facts.attempt}: " if facts.attempt > 1 and facts.phase == "train" else ""
    if _is_busy_otherwise(facts):
        how_far = f", {facts.phase_note}" if facts.phase_note else ""
        return f"{again}{NAMES.get(facts.phase, facts.phase)}: {MEANING[facts.phase]}{how_far}"
    parts = [
        f"{again}step {progress.step}/{progress.num_steps}",
        f"epoch {facts.epoch:.2f}/{facts.epochs:.4g}" if facts.epochs else "",
        _known("loss {:.4g}", progress.newest("loss")),
        *_speed(facts),
        *_compute(facts),
        _known("data wait {:.0%}", progress.newest("data_wait")),
        _time_left(facts),
    ]
    # what is not known yet is an empty text
    text = ", ".join(filter(None, parts))
    if evaluations := facts.history.evaluations:
        values = ", ".join(f"{name} {value}" for name, value in _evaluated(facts))
        text += f"; evaluation of step {evaluations[-1].step}: {values}"
    checkpoints = facts.history.checkpoints
    return f"{text}; checkpoint of step {checkpoints[-1].step}" if checkpoints else text


def clock(seconds: float) -> str:
    """Return a time such as `1:39`, `2:05:00` or `3 d 02:05:00`."""
    minutes, rest = divmod(round(max(0.0, seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days} d {hours:02d}:{minutes:02d}:{rest:02d}"
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def amount(value: float) -> str:
    """Return a number with three or four digits, such as `221.5`, `12.3k` or `4.1M`."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        # 1e4 in place of 1e3, because four digits are still read at a glance
        if abs(value) >= size:
            return f"{value / (1e3 if unit == 'k' else size):.3g}{unit}"
    return f"{value:.4g}"


def fitted(parts: Iterable[str], width: int, between: str = "  ") -> str:
    """Return as many of the parts, from the first on, as fit into the width; the first one is there in any case."""
    shown = ""
    for part in parts:
        longer = f"{shown}{between}{part}" if shown else part
        # the first part stays even if it is too long: an empty row would look like a fault
        if shown and len(longer) > width:
            break
        shown = longer
    return shown


def _head(facts: LiveFacts, width: int) -> Text:
    phase = facts.phase
    meaning = [MEANING[phase]] if _is_busy_otherwise(facts) else []
    again = f"attempt {facts.attempt}, " if facts.attempt > 1 and phase == "train" else ""
    total = clock(sum(seconds for _, seconds in facts.elapsed_s()))
    name = facts.name or "onward"
    line = Text().append(name, style="bold")
    rest = fitted([f"{again}{NAMES.get(phase, phase)}", *meaning], width - len(name) - len(total) - 3, ": ")
    line.append(f"  {rest}", style="cyan")
    # a long name is cut, so that the time at the right end stays in its place
    line.truncate(width - len(total) - 1)
    line.pad_right(width - len(total) - line.cell_len)
    return line.append(total)


def _phases(facts: LiveFacts, width: int) -> list[Text]:
    """Return one line or two with every phase: those before with their time, the present one, and those to come."""
    begun = []
    for phase, seconds in facts.elapsed_s():
        # every run goes through this one, and most without a question
        is_passed = phase == "approval" and seconds < 1
        if not is_passed or phase == facts.phase:
            begun.append((phase, seconds))
    known = {phase for phase, _ in begun}
    # approval and end stand in no fixed place of the order, so they decide nothing about what is to come
    last = max((SHOWN.index(phase) for phase in known if phase in SHOWN), default=0)
    parts = [(f"{NAMES.get(phase, phase)} {clock(seconds)}", "") for phase, seconds in begun]
    if parts:
        parts[-1] = (parts[-1][0], "bold cyan")
    # a run that failed in an early phase has no later ones to come
    upcoming = () if facts.phase == "end" else SHOWN[last + 1 :]
    parts += [(phase, "dim") for phase in upcoming if phase not in known]
    drawn = [Text()]
    for text, style in parts:
        # a phase that does not fit begins a new line, and is never broken in two
        if drawn[-1] and drawn[-1].cell_len + 2 + len(text) > width:
            drawn.append(Text())
        drawn[-1].append("  " if drawn[-1] else "").append(text, style=style)
    return drawn


def _bar(facts: LiveFacts, width: int, *, ascii_only: bool) -> Text:
    progress = facts.progress
    counts = [f"{progress.step}/{progress.num_steps}", f"{progress.percent:.0f}%", _time_left(facts)]
    numbers = fitted(filter(None, counts), width - 12)
    # a bar of fewer than 8 cells shows no progress
    size = max(8, width - len(numbers) - 2)
    # rounded down: a full bar means that the last step is made
    done = min(size, int(size * progress.percent / 100))
    full, empty = ("#", "-") if ascii_only else ("━", "─")
    return (
        Text()
        .append(full * done, style="green")
        .append(empty * (size - done), style="dim")
        .append(f"  {numbers}", style="")
    )


def _row(label: str, parts: list[str], width: int) -> Text:
    return Text().append(label.ljust(LABEL), style="dim").append(fitted(parts, width - LABEL))


def _rows(facts: LiveFacts, *, ascii_only: bool) -> list[tuple[str, list[str]]]:
    """Return each fact: its name, and its parts, the most important one first."""
    history = facts.history
    progress = facts.progress
    evaluated = [f"step {event.step}" for event in history.evaluations[-1:]]
    saved = [
        f"step {event.step}, saved {clock(facts.now_s() - event.at_ms / 1e3)} ago" for event in history.checkpoints[-1:]
    ]
    if not saved and progress.num_steps:
        saved = ["none yet"]
    unit = "updates"
    epoch = ""
    if facts.epochs:
        unit = "epoch"
        epoch = f"{facts.epoch:.2f} of {facts.epochs:.4g}"
    return [
        ("loss", _loss(facts, ascii_only=ascii_only)),
        ("evaluation", [*evaluated, *map(" ".join, _evaluated(facts))]),
        (
            unit,
            [
                epoch,
                _known("learning rate {:.3g}", progress.newest("learning_rate")),
                _known("gradient norm {:.3g}", progress.newest("gradient_norm")),
            ],
        ),
        ("speed", _speed(facts)),
        ("compute", _compute(facts)),
        ("data wait", [_known("{:.1%} of the time", progress.newest("data_wait"))]),
        ("memory", _memory(facts)),
        ("checkpoint", saved),
        ("now", [facts.note or facts.phase_note]),
        ("problem", [facts.problem]),
    ]


def _known(text: str, value: float) -> str:
    """Return a text with the value in it; "" for NaN."""
    return "" if math.isnan(value) else text.format(value)


def _loss(facts: LiveFacts, *, ascii_only: bool) -> list[str]:
    loss = facts.progress.newest("loss")
    if math.isnan(loss):
        return []
    change = facts.change()
    levels = curve(facts.losses, 16)
    # the bars show the course between the least and the greatest loss, because the absolute value says nothing
    low = min(levels, default=0.0)
    high = max(levels, default=0.0)
    drawn = "".join(BARS[round((level - low) / (high - low) * (len(BARS) - 1))] for level in levels if high > low)
    trend = "" if change is None else f"{change.ratio:+.1%} in {change.steps} steps"
    return [f"{loss:.4g}", "" if ascii_only else drawn, trend]


def _evaluated(facts: LiveFacts) -> list[tuple[str, str]]:
    """Return name and value of each metric of the newest evaluation."""
    evaluations = facts.history.evaluations
    values = evaluations[-1].values if evaluations else {}
    return [(name.removeprefix("evaluation/").replace("_", " "), f"{value:.4g}") for name, value in values.items()]


def _speed(facts: LiveFacts) -> list[str]:
    speeds = {unit: facts.progress.newest(f"{unit}_per_s") for unit in ("samples", "tokens")}
    return [f"{amount(speed)} {unit}/s" for unit, speed in speeds.items() if math.isfinite(speed)]


def _compute(facts: LiveFacts) -> list[str]:
    shown = {"{:.3g} TFLOP/s": facts.progress.newest("tflops"), "MFU {:.1%}": facts.progress.newest("mfu")}
    return [text.format(value) for text, value in shown.items() if math.isfinite(value)]


def _time_left(facts: LiveFacts) -> str:
    """Return the time left of the training; "" as long as it is not known."""
    progress = facts.progress
    left = facts.remaining_s()
    runs = not _is_busy_otherwise(facts) and 0 < progress.step < progress.num_steps
    return f"{clock(left)} left" if runs and math.isfinite(left) else ""


def _is_busy_otherwise(facts: LiveFacts) -> bool:
    """Return whether no step is made now: in a phase before or behind the training, or as long as the ranks load."""
    return facts.phase != "train" or not facts.is_training


def _memory(facts: LiveFacts) -> list[str]:
    """Return what the ranks use, if the log has it, and the fullest node and GPU."""
    parts = []
    used = facts.progress.newest("memory_bytes")
    if not math.isnan(used):
        parts.append(f"{gib(used)} a rank")
    kinds = (("memory_usage", "GPU"), ("system_memory_usage", "node"))
    for key, what in kinds:
        fullest = max((found for node in facts.usage.values() for found in _shares(node, key)), default=None)
        # a node without GPUs has no such values
        if fullest:
            parts.append(f"{what} {gib(fullest[1] * MEGABYTE)} ({fullest[0]:.0f}%)")
    return parts


def _shares(values: Mapping[str, float], key: str) -> list[tuple[float, float]]:
    """Return (percentage, megabytes) of the node's memory, or of the memory of each of its GPUs."""
    names = [name for name in values if name.endswith(f"{key}_percentage")]
    # "memory_usage" ends the names of the node's values and of those of its GPUs
    of_node = key.startswith("system")
    names = [name for name in names if name.startswith("system") == of_node]
    return [(values[name], values.get(name.replace("percentage", "megabytes"), 0.0)) for name in names]
