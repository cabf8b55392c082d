"""Format what the commands print: tables, the configuration as TOML, the comparison with gzip and xz."""

from __future__ import annotations

import json
import math
import textwrap
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from onward.flows.shown.printed_table import table as table
from onward.trainer.config.losses import LossConfig
from onward.trainer.config.run_config import RunConfig
from onward.trainer.config.section import Section, table_type
from onward.trainer.config.sections.metrics import MetricConfig
from onward.trainer.run.records import ExportedModel

if TYPE_CHECKING:
    from onward.flows.run_state.run_status import RunOutcome


def wrapped(text: str, mark: str) -> str:
    """Return a text in lines of at most 116 characters, the first one behind `mark` and the others below it."""
    deeper = " " * len(mark)
    return textwrap.fill(
        text,
        116,
        initial_indent=mark,
        subsequent_indent=deeper,
        break_long_words=False,
        break_on_hyphens=False,
    )


def print_item(text: str) -> None:
    """Print an entry of a list."""
    print(wrapped(text, "  - "))


def outcome(facts: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the rows of the table at the end of `onward run`, from the facts that it prints as JSON."""
    before = facts["before"]
    after = facts["after"]
    rows = [
        (name.removeprefix("evaluation/"), f"{before[name]:.4f} -> {after[name]:.4f}")
        for name in sorted(after)
        if name in before
    ]
    if bits := facts["bits_per_byte"]:
        rows.append(("bits per byte", "  ".join(f"{name} {value:.3f}" for name, value in bits.items())))
    rows += [("" if number else "worst classes", each) for number, each in enumerate(facts["worst_classes"])]
    rows += [(key.replace("_", " "), facts[key]) for key in ("exported", "ended_early", "to_go_on") if facts[key]]
    rows += [(name.replace("/", " "), f"{value:.4f}") for name, value in sorted(facts["test"].items())]
    rounding = f", its kernels round by {facts['rounding']:.2g}" if facts["rounding"] else ""
    registered = f", {facts['registered']}" if facts["registered"] else ""

    def optional(name: str) -> list[tuple[str, str]]:
        return [(name, facts[name])] if facts[name] else []

    return [
        *rows,
        ("onnxruntime parity", f"{facts['parity']:.2g} of the largest output{rounding}"),
        *optional("data"),
        ("trained model", str(facts["model"])),
        ("run directory", str(facts["directory"])),
        *optional("report"),
        ("MLflow", f"run {facts['mlflow_run_id']}{registered}"),
        *optional("promotion"),
        ("Prefect", str(facts["prefect_url"])),
        ("steps", f"{facts['step']} in {facts['elapsed_s']:.1f} s, {facts['attempts']} attempt(s)"),
        *optional("throughput"),
        ("to look at it", "onward ui"),
    ]


def variant_rows(exported: ExportedModel | RunOutcome) -> list[tuple[str, str]]:
    """Return one row per variant: its size, time and accuracy beside the exported file, or why it was refused."""
    rows = []
    for variant in exported.variants:
        # accuracy, where there is one, is easier to judge than a loss
        name = next((name for name in ("evaluation/accuracy", "evaluation/loss") if name in variant.metrics), "")
        known = not math.isnan(variant.latency_ratio)
        time = f"{variant.latency_ratio:.0%} of the time" if known else "its time was too unsteady to tell"
        gained = f"{variant.size_ratio:.0%} of the size, {time}"
        kept = f"{name.removeprefix('evaluation/')} {exported.after.get(name, math.nan):.4f} -> " if name else ""
        row = f"{kept}{variant.metrics[name]:.4f}, {gained}: {variant.path}" if name else f"{gained}: {variant.path}"
        rows.append((variant.kind, f"refused: {variant.refused}" if variant.refused else row))
    return rows


def config_lines(config: RunConfig, origins: Mapping[str, str] = MappingProxyType({})) -> Iterable[str]:
    """Yield a resolved configuration as TOML that can be loaded again, with the meaning above each setting, and behind
    it where its value came from."""
    yield f"name = {as_toml(config.name)}{_origin('name', origins)}"
    entries = [each.model_dump(mode="json", exclude_defaults=True) for each in config.metrics]
    yield from (f"# {line}" for line in (RunConfig.model_fields["metrics"].description or "").splitlines())
    yield f"metrics = {as_toml(entries)}{_origin('metrics', origins)}"
    yield from ([] if config.loss else ["# The short form in [model] and [data] says which loss.", "loss = []"])
    for name, section in config:
        if isinstance(section, Section):
            yield from _table_lines(name, f"[{name}]", section, origins)
        elif name == "loss":
            for place, entry in enumerate(section):
                yield from _table_lines(name if len(section) == 1 else f"{name}.{place}", "[[loss]]", entry, origins)


def changed_lines(changed: Mapping[str, Any], origins: Mapping[str, str]) -> Iterable[str]:
    """Yield `changed_settings`, one line each, with their origin."""
    lines = {key: f"{key} = {as_toml(value)}" for key, value in changed.items() if value is not None}
    # one long value must not move the origins of all others off the screen
    width = min(60, max(map(len, lines.values()), default=0))
    yield from (f"{line.ljust(width)}{_origin(key, origins)}" for key, line in lines.items())


def _origin(key: str, origins: Mapping[str, str]) -> str:
    return f"  # {origins[key]}" if key in origins else ""


def _table_lines(name: str, title: str, section: Section, origins: Mapping[str, str]) -> Iterable[str]:
    """Yield the lines of one table, and behind them those of the tables in it."""
    yield from ("", f"# {(type(section).__doc__ or '').splitlines()[0]}", title)
    # TOML has no null.
    values = section.model_dump(mode="json", exclude_none=True)
    # TOML wants the keys of a table before the tables in it
    inner = {key: value for key, value in section if isinstance(value, Section)}
    for key, field in type(section).model_fields.items():
        if key not in inner:
            yield from (f"# {line}" for line in (field.description or "").splitlines())
            where = _origin(f"{name}.{key}", origins)
            yield f"{key} = {as_toml(values[key])}{where}" if key in values else f"# {key} is not set"
    for key, each in inner.items():
        yield from _table_lines(f"{name}.{key}", f"[{name}.{key}]", each, origins)


def meanings() -> dict[str, str]:
    """Return `section.key` -> its meaning; `section.table.key` of the settings of a table in a section."""
    return _meanings(RunConfig, "") | _meanings(LossConfig, "loss") | _meanings(MetricConfig, "metrics")


def _meanings(section: type[Section], name: str) -> dict[str, str]:
    found = {}
    for key, field in section.model_fields.items():
        if name:
            found[f"{name}.{key}"] = " ".join((field.description or "").split())
        if table := table_type(field.annotation):
            found |= _meanings(table, f"{name}.{key}".lstrip("."))
    return found


def as_toml(value: Any) -> str:
    # JSON's strings, numbers and booleans are valid TOML; only tables and arrays are written differently.
    if isinstance(value, dict):
        known = {key: item for key, item in value.items() if item is not None}  # TOML has no null
        return "{ " + ", ".join(f"{json.dumps(key)} = {as_toml(item)}" for key, item in known.items()) + " }"
    if isinstance(value, list):
        return "[" + ", ".join(map(as_toml, value)) + "]"
    return json.dumps(value, ensure_ascii=False)
