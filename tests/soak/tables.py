"""Print the accounts of soaks as Markdown: a row for each soak, the confusion matrix, a row for each kind of fault."""

from __future__ import annotations

from collections import Counter, defaultdict

from tests.soak.account import Account, Times, times
from tests.soak.kinds import KINDS


def tables(found: dict[str, Account]) -> str:
    """Return the figures as Markdown: one row for each layout, the confusion matrix, and one row for each kind."""
    lines = [
        "| layout | faults of kinds | runs, same bits | detected: median, 95 % | works again: median, 95 % "
        "| steps again | processes left | points lost, doubled | not right |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, account in found.items():
        same = [(each.weights, each.model) == _bits(account) for each in account.rounds]
        kinds = len({fault.kind for fault in account.faults})
        points = [sum(getattr(each, what) for each in account.rounds) for what in ("points_lost", "points_doubled")]
        lines.append(
            f"| {name} | {len(account.faults)} of {kinds} | {sum(same)} of {len(same)} | {_times(account.detection)} "
            f"| {_times(account.recovery)} | {account.lost} | {account.orphans} | {points[0]}, {points[1]} "
            f"| {len(account.problems)} |"
        )
    confusion: dict[str, Counter[str]] = defaultdict(Counter)
    for account in found.values():
        for right, said in account.confusion.items():
            confusion[right].update(said)
    said = sorted({each for row in confusion.values() for each in row})
    lines += ["", f"| class injected | {' | '.join(said)} |", "|---|" + "---|" * len(said)]
    lines += [f"| {right} | {' | '.join(str(row[each]) for each in said)} |" for right, row in confusion.items()]
    lines += ["", "| kind | faults | detected: median, 95 % | works again: median, 95 % |", "|---|---|---|---|"]
    for kind in KINDS:
        faults = [fault for account in found.values() for fault in account.faults if fault.kind == kind]
        if faults:
            detected = times(each.detected_s for each in faults if KINDS[kind].ends != "nothing")
            recovered = times(each.recovered_s for each in faults)
            lines.append(f"| `{kind}` | {len(faults)} | {_times(detected)} | {_times(recovered)} |")
    return "\n".join(lines)


def _bits(account: Account) -> tuple[str, str]:
    return account.undisturbed.weights, account.undisturbed.model


def _times(found: Times | None) -> str:
    return f"{found.median:.1f} s, {found.p95:.1f} s" if found else ""
