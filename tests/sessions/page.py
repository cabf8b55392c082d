"""docs/reference/terminal-sessions.md: write it, read it, and compare what is on it with what a command shows now."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from tests.sessions.recording import Recorded
from tests.sessions.script import SESSIONS, Session
from tests.support.ranks import ROOT

PAGE = ROOT / "docs" / "reference" / "terminal-sessions.md"
HEAD = """# Terminal sessions

What each command prints, in a terminal of 80 columns. Every block was recorded from a real terminal by
`python -m tests.sessions`, one after the other in one directory; before a release a test types all commands again and
compares, with ids, times, rates, measured values, ports and versions left out. Lines that are longer than the terminal
is wide are not wrapped here.
"""
VARYING = (
    (r"\blayout +id$", "layout"),  # the last column of `onward runs` fits or not, as times are long or short
    (r"(\dx\dx\d) +[0-9a-f]{8}$", r"\1"),
    # MLflow measures the node's memory first after some seconds, and the training may be over by then
    (r"  node \d.*$", ""),
    (r"[━─]+", "BAR"),
    (r"[▁▂▃▄▅▆▇█]+", "CURVE"),
    (r"\b[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}\b", "ID"),
    (r"(?<![.\w])(\d{8}|(?=\w*\d)(?=\w*[a-f])[0-9a-f]{7,64})\b", "ID"),
    (r"^promotion .*$", "promotion"),  # whether a run that the clock has stopped is better depends on the machine
    (r"^  next run  .*$", ""),  # Prefect creates the next run some seconds after its schedule
    (r"\b\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d[.,\d]*(\+00:00|Z)?", "TIME"),
    (r"\b\d+(\.\d+)? (s|min|h|d)( \d+ (s|min|h|d))?( ago)?\b|\bjust now\b", "DURATION"),
    (r"[-+]?\d[\d,]*(\.\d+)?(e[-+]?\d+)?", "#"),
    (r"# ?([kMG]i?B?|B|bytes|ms|us)\b", "#"),
    (r"^(?:stays: ID: .*\n)+", "stays\n"),  # how many runs there are by then depends on the worker, their order on ids
    (r"\s+", " "),
)
"""Pattern -> what stands in its place for the comparison."""


def written(recorded: Mapping[str, Recorded], former: Mapping[str, Sequence[str]]) -> str:
    """Return the page. former: command -> blocks of the page before, for sessions that were not recorded."""
    parts = [HEAD]
    for session in SESSIONS:
        found = recorded.get(session.command)
        blocks = list(former.get(session.command, ())) if found is None else blocks_of(session, found)
        parts.append(f"## `{session.command}`\n\n{session.about}\n")
        if len(blocks) == 2:
            parts.append(f"While it trains:\n\n```text\n{blocks[0]}\n```\n\nAt the end:\n")
        parts += [f"```text\n{block}\n```\n" for block in blocks[-1:]]
    return "\n".join(parts)


def blocks_of(session: Session, recorded: Recorded) -> list[str]:
    """Return the blocks of a session: its view, if it has one, and what stays on the terminal."""
    text = f"$ {session.command}\n{shortened(recorded.text, session.most_lines)}"
    return [recorded.view, text] if recorded.view else [text]


def shortened(text: str, most: int) -> str:
    lines = text.splitlines()
    return text if len(lines) <= most else "\n".join([*lines[:most], f"... {len(lines) - most} more lines"])


def shown(page: str) -> dict[str, list[str]]:
    """Return command -> the blocks under its heading."""
    found: dict[str, list[str]] = {}
    for section in re.split(r"^## ", page, flags=re.M)[1:]:
        command = section.splitlines()[0].strip("`")
        found[command] = re.findall(r"^```text\n(.*?)\n```$", section, re.S | re.M)
    return found


def without_what_varies(text: str) -> str:
    """Return the text with placeholders for ids, times, rates, measured values and versions, and with single spaces.

    The lines of a rank's log are sorted without their times: a checkpoint is written beside the next steps.
    """
    logged = [line for line in text.splitlines() if line.startswith("rank 0: ")]
    others = [line for line in text.splitlines() if not line.startswith("rank 0: ")]
    text = "\n".join([*others, *sorted(logged, key=lambda line: line.split(" INFO ")[-1])])
    for pattern, placeholder in VARYING:
        text = re.sub(pattern, placeholder, text, flags=re.M)
    return text.strip()


def difference(session: Session, blocks: list[str], recorded: Recorded) -> str:
    """Return what the page has and what the command shows now, without what varies, if they differ; else ""."""
    now = blocks_of(session, recorded)
    pairs = list(zip(map(without_what_varies, blocks), map(without_what_varies, now), strict=False))
    different = [f"  the page: {old}\n  now:      {new}" for old, new in pairs if old != new]
    if len(blocks) != len(now):
        different.append(f"  the page has {len(blocks)} blocks, and now there are {len(now)}")
    return "\n".join([f"`{session.command}`:", *different]) if different else ""
