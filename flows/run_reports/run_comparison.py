"""Make the page that compares several runs: what differs in their settings, their curves over each other, results."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from markupsafe import Markup

from onward.flows.run_reports.curves import COLOURS, Line, draw
from onward.flows.run_reports.page import MOST_EVALUATED, TIME_COLOURS, Drawing, median, render
from onward.flows.run_reports.reported_run import EVALUATION, RunFacts, settings_as_text
from onward.flows.run_reports.summary import short_number
from onward.trainer.config.flat_settings import flat_settings
from onward.trainer.config.metric_names import is_greatest
from onward.trainer.quantities import duration
from onward.trainer.run.timing.time_account import PARTS

TITLES = {
    "loss": "Training loss",
    "learning_rate": "Learning rate",
    "gradient_norm": "Gradient norm",
    "samples_per_s": "Samples per second",
    "tokens_per_s": "Tokens per second",
    "mfu": "MFU (share of the peak)",
}
FACTS = (
    *("state", "steps", "attempts", "samples/s", "MFU", "ranks", "parity", "registered", "promotion"),
    *("git commit", "data", "original model"),
)
"""What is said of each run in one line, in the order of the rows."""
Row = tuple[str, list[str], int | None]
"""What it is, the value of each run, and which run has the best one."""


def page_of_several(runs: Sequence[RunFacts]) -> str:
    """Return one page for several runs as HTML."""
    colours = [COLOURS[place % len(COLOURS)] for place in range(len(runs))]
    return render(
        "comparison.html",
        runs=list(zip(runs, colours, strict=True)),
        results=list(result_rows(runs)),
        facts=list(fact_rows(runs)),
        settings=differing_settings(runs),
        drawings=overlaid(runs, colours),
        times=list(time_rows(runs)),
        time_colours=TIME_COLOURS,
    )


def result_rows(runs: Sequence[RunFacts]) -> Iterable[Row]:
    """Yield each metric with the value of each run, of the exported file or else of the last evaluation."""
    values = [_results(facts) for facts in runs]
    for name in dict.fromkeys(name for own in values for name in own):
        known = {place: own[name] for place, own in enumerate(values) if name in own}
        greatest = is_greatest(name)
        best = None
        # none is best where all are equal, or where nobody knows which direction is better
        if greatest is not None and len(set(known.values())) > 1:
            best = (max if greatest else min)(known, key=known.__getitem__)
        yield name.removeprefix(EVALUATION), [short_number(own.get(name)) for own in values], best


def _results(facts: RunFacts) -> dict[str, float]:
    if facts.exported:
        return {**facts.exported.after, **facts.exported.test}
    return {name: series.values[-1] for name, series in facts.evaluations.items()}


def fact_rows(runs: Sequence[RunFacts]) -> Iterable[Row]:
    """Yield what else is said of each run in one line."""
    texts = [_texts_of(facts) for facts in runs]
    for name in FACTS:
        yield name, [known.get(name, "") for known in texts], None


def _texts_of(facts: RunFacts) -> dict[str, str]:
    """Return those of `FACTS` that are known of a run."""
    texts = {
        "state": facts.state,
        "steps": f"{facts.history.last_step:,} of {facts.history.num_steps:,}",
        "attempts": str(len(facts.attempts) or len(facts.history.starts)),
    }
    if speed := facts.curve("samples_per_s"):
        texts["samples/s"] = f"{median(speed):.4g}"
    if mfu := facts.curve("mfu"):
        texts["MFU"] = f"{median(mfu):.1%}"
    if facts.config:
        texts["ranks"] = str(facts.config.world_size)
    if exported := facts.exported:
        texts["parity"] = short_number(exported.parity)
        texts["registered"] = f"{exported.registered_as} {exported.version}"
        if exported.promotion:
            texts["promotion"] = exported.promotion.status
    if facts.identity:
        texts["git commit"] = facts.identity.git_commit[:12]
        texts["original model"] = facts.identity.model_sha256[:12]
    if facts.manifest:
        texts["data"] = facts.manifest.key[:12]
    return texts


def differing_settings(runs: Sequence[RunFacts]) -> list[Row]:
    """Return the settings in which the runs differ, with the value of each."""
    flat = [settings_as_text(flat_settings(facts.config)) if facts.config else {} for facts in runs]
    # in the order of the configuration, whichever run has the setting
    names = dict.fromkeys(name for own in flat for name in own)
    rows: list[Row] = []
    for name in names:
        # None stands for a setting that a run does not have, such as one of a second loss
        if len({settings.get(name) for settings in flat}) > 1:
            rows.append((name, [settings.get(name, "") for settings in flat], None))
    return rows


def overlaid(runs: Sequence[RunFacts], colours: Sequence[str]) -> list[Drawing]:
    """Return each curve of the runs in one drawing, for those that at least one of them has."""
    evaluated = list(dict.fromkeys(name for facts in runs for name in facts.evaluations))
    curves = [(title, False, [facts.curve(what) for facts in runs]) for what, title in TITLES.items()]
    # the evaluations stand behind the training loss, with which they are compared
    curves[1:1] = [(name, True, [facts.curves.get(name) for facts in runs]) for name in evaluated[:MOST_EVALUATED]]
    found = []
    for title, dots, each in curves:
        lines = [Line(series, colour, dots) for series, colour in zip(each, colours, strict=True) if series]
        if lines and (svg := draw(lines)):
            found.append(Drawing(title, Markup(svg)))  # matplotlib's own output, in which no text of the run stands
    return found


def time_rows(runs: Sequence[RunFacts]) -> Iterable[Row]:
    """Yield each part of the time with that of each run, and their sum."""
    yield "in all", [duration(facts.account.wall_s) if facts.account else "" for facts in runs], None
    for name in PARTS:
        seconds = [facts.account.parts[name] if facts.account else 0.0 for facts in runs]
        if any(each >= 0.005 for each in seconds):
            yield name, [duration(each) for each in seconds], None
