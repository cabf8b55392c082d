"""The table of `onward runs`: which columns there is room for, and what each of them shows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from onward.trainer.quantities import duration

COLUMNS: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "name": lambda run: run["name"],
    "state": lambda run: run["state"],
    "metric": lambda run: f"{run['metric'].partition('/')[2]} {run['value']:.4g}" if run["value"] is not None else "",
    "when": lambda run: ago(run["created_at"]),
    "duration": lambda run: duration(round(run["elapsed_s"])) if run["elapsed_s"] else "",
    "step": lambda run: f"{run['step']}/{run['num_steps']}",
    "layout": lambda run: run["layout"],
    "id": lambda run: run["run_id"][-8:],
}
"""Head -> the cell of a run, the most important column first: where the terminal is narrow, the last are left out."""


def rows_of(runs: Sequence[Mapping[str, Any]], width: int) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Return the heads and the rows of as many columns as fit into `width` characters; at least names and states.

    runs: each a RunStatus as JSON (run_index.py).
    """
    cells = {head: [cell(run) for run in runs] for head, cell in COLUMNS.items()}
    heads: list[str] = []
    used = 0
    for head, column in cells.items():
        size = max(len(head), *map(len, column), 0) + 2 * bool(heads)
        if heads[1:] and used + size > width:
            break
        heads.append(head)
        used += size
    return tuple(heads), list(zip(*(cells[head] for head in heads), strict=True))


def ago(created_at: str, now: datetime | None = None) -> str:
    """Return how long ago a time was (ISO 8601), in its largest unit, such as `3 h ago`; "" for no time."""
    try:
        then = datetime.fromisoformat(created_at)
    except ValueError:
        return ""
    seconds = ((now or datetime.now(UTC)) - (then if then.tzinfo else then.replace(tzinfo=UTC))).total_seconds()
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds // size:.0f} {unit} ago"
    return "just now"
