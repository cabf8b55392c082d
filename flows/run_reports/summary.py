"""The verdict on a run in a few sentences, and its results as rows: the head of a report, and what Prefect shows."""

from __future__ import annotations

from collections.abc import Iterator

from onward.flows.run_reports.reported_run import EVALUATION, RunFacts
from onward.trainer.config.metric_names import is_greatest
from onward.trainer.run.records import ExportedModel

HEADINGS = {
    "running": "The run is running.",
    "exported": "The run is done, and its trained file passed all checks.",
    "trained": "The model is trained; its file is not exported.",
    "stopped": "The run was stopped before its end.",
    "failed": "The run failed.",
    "interrupted": "The run was interrupted: its process was killed.",
    "damaged": "A record of the run is damaged.",
}
"""State -> the verdict in one sentence."""


def verdict(facts: RunFacts) -> list[str]:
    """Return what became of the run, a sentence each."""
    heading = HEADINGS[facts.state]
    # the training went well, which "the run failed" would hide
    if facts.state == "failed" and facts.refusal:
        heading = "The trained file was refused by its checks, and not exported."
    exported = _exported(facts.exported) if facts.exported else ()
    return [heading, *_trained(facts), *_why(facts), *exported, *(f"{remark}." for remark in facts.remarks)]


def _trained(facts: RunFacts) -> Iterator[str]:
    config = facts.config
    start = facts.history.start
    if config is None:
        return
    what = f"{config.model.path.name} on {config.data.source}"
    # without a start no rank has begun a step
    if start is None or not start.num_steps:
        yield f"It was to train {what}; no step was made."
        return
    ranks = f"{config.world_size} rank{'s' * (config.world_size > 1)}"
    weights = f"{start.num_parameters:,} trained parameters" if start.num_parameters else "its weights"
    yield f"{what}: {weights}, step {facts.history.last_step:,} of {start.num_steps:,}, on {ranks}."


def _why(facts: RunFacts) -> Iterator[str]:
    if facts.trained and facts.trained.ended_early and facts.state != "running":
        yield f"It ended early: {facts.trained.ended_early}."
    if facts.ending and facts.ending.status != "completed":
        yield from facts.ending.problems
    # a killed flow has written no ending, so the last attempt says the most
    elif facts.ending is None and facts.state != "running" and facts.attempts:
        yield f"{facts.attempts[-1]}."
    # of a run that has failed, the reason is in the sentences above
    died = [each for each in facts.attempts if each.kind not in ("done", "stopped")]
    if died and facts.state not in ("failed", "interrupted"):
        times = "attempt" if len(died) == 1 else "attempts"
        yield f"{len(died)} {times} before had failed, and the run went on: the last time because {died[-1].sentence}."


def _exported(exported: ExportedModel) -> Iterator[str]:
    rounding = f"; its kernels round by {exported.rounding:.2g}" if exported.rounding else ""
    yield (
        f"{exported.path.name} of step {exported.step:,}: {exported.judged_by} differs from the trained module by "
        f"{exported.parity:.2g} of the largest output{rounding}."
    )
    if exported.file_not_measured:
        yield f"`map` is that of the raw outputs, and not that of the whole file: {exported.file_not_measured}."
    if exported.registered_as:
        yield f"It is registered as {exported.registered_as}, version {exported.version}."
    if exported.promotion:
        known = {
            "served": "takes the alias",
            "candidate": "stays a candidate for",
            "waiting": "waits for an answer about",
        }
        promotion = exported.promotion
        yield f"It {known[promotion.status]} {promotion.alias}: {promotion.reason}."
    for variant in exported.variants:
        if variant.refused:
            yield f"Its variant {variant.kind} was refused: {variant.refused}."


def results(facts: RunFacts) -> list[tuple[str, str, str, str]]:
    """Return (metric, before, after, whether it is `better`, `worse` or "") of the evaluation data and the test data.

    Of the exported file, else of the first and the last evaluation during the training.
    """
    exported = facts.exported
    metrics = facts.metrics
    before = {}
    after = {}
    if exported:
        before, after = exported.before, exported.after
    elif metrics:
        before, after = metrics.first, metrics.last
    if not after:  # it has not ended, or has no record of it
        before, after = ({name: each.values[place] for name, each in facts.evaluations.items()} for place in (0, -1))
    if not exported:
        after = {name: value for name, value in after.items() if name.startswith(EVALUATION)}
    rows = [
        (
            name.removeprefix(EVALUATION),
            short_number(before.get(name)),
            short_number(value),
            _trend(name, before.get(name), value),
        )
        for name, value in sorted(after.items(), key=lambda item: (not item[0].endswith("/loss"), item[0]))
    ]
    tested = exported.test if exported else {}
    return [*rows, *((name.replace("/", ": "), "", short_number(value), "") for name, value in sorted(tested.items()))]


def short_number(value: float | None) -> str:
    """Return a number with five digits; "" for None."""
    return "" if value is None else f"{value:.5g}"


def _trend(name: str, before: float | None, after: float) -> str:
    greatest = is_greatest(name)
    # a metric of unknown direction has a trend, but no better and worse
    if before is None or greatest is None or before == after:
        return ""
    return "better" if (after > before) == greatest else "worse"


def markdown(facts: RunFacts) -> str:
    """Return verdict and results as Markdown."""
    table = [
        "| | before | after |",
        "| --- | --- | --- |",
        *(f"| {_cell(name)} | {before} | {after} |" for name, before, after, _ in results(facts)),
    ]
    lines = [*(f"{_cell(sentence)}\n" for sentence in verdict(facts)), *(table if len(table) > 2 else ()), ""]
    if facts.account:
        largest = sorted(facts.account.parts.items(), key=lambda part: -part[1])[:4]
        went = ", ".join(f"{name} {seconds:.0f} s" for name, seconds in largest if seconds >= 0.5)
        lines.append(f"{facts.account.wall_s:.0f} s: {went}\n")
    return "\n".join(lines)


def _cell(text: str) -> str:
    """Return text without what Markdown would read: pipes, tags, line breaks."""
    return text.translate({ord("&"): "&amp;", ord("<"): "&lt;", ord("|"): "&#124;", ord("\n"): " "})
