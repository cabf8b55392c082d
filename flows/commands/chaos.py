"""The command that injects faults into a run and accounts for them: chaos."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from onward.flows.commands.common import MAX_SEED, ConfigFile, Json, Overrides, print_json

if TYPE_CHECKING:
    from onward.flows.chaos.account import Account, Times


def chaos(
    config: ConfigFile,
    overrides: Overrides = None,
    mtbf: Annotated[str, typer.Option(help="Mean time of work between two faults, such as 500ms, 20s or 5m.")] = "20s",
    kinds: Annotated[
        str,
        typer.Option(help="The kinds, separated by commas; all = all that need no file system of their own."),
    ] = "all",
    seed: Annotated[
        int, typer.Option(min=0, max=MAX_SEED, help="Draws which fault comes when, and which rank or bit it hits.")
    ] = 0,
    faults: Annotated[int, typer.Option(min=0, max=10_000, help="How many; 0 = each kind once.")] = 0,
    home: Annotated[
        Path | None,
        typer.Option(help="The directory for runs, servers and the account; new or empty.", show_default=False),
    ] = None,
    as_json: Json = False,
) -> None:
    """Inject faults into a run, and account for what was lost.

    Runs the configuration undisturbed, then with faults, in a home of its own with its own servers; resumes it when a
    fault has ended it, and compares weights, exported file, metrics and states. Nothing outside is touched. The kinds
    of faults are listed in docs/how-to/test-a-machine-with-faults.md.
    """
    from onward.flows.chaos.chaos import chaos as soak
    from onward.flows.chaos.plan import seconds

    names = [] if kinds == "all" else [name.strip() for name in kinds.split(",") if name.strip()]
    account = soak(config, overrides or (), mtbf_s=seconds(mtbf), kinds=names, seed=seed, faults=faults, home=home)
    if as_json:
        print_json(account.model_dump(mode="json"))
    else:
        _show(account)
    for problem in account.problems:
        print(f"  - {problem}", file=sys.stderr)
    sys.exit(1 if account.problems else 0)


def _show(account: Account) -> None:
    """Print the account as tables."""
    from onward.flows.report import table

    faults = []
    for fault in account.faults:
        seconds = (_seconds(fault.detected_s), _seconds(fault.recovered_s))
        where = f"{fault.round}/{fault.step}"
        faults.append((str(fault.number), fault.kind, where, fault.ended, fault.said, *seconds, str(fault.lost)))
    table(faults, heads=("fault", "kind", "run/step", "ended", "class said", "detected", "works again", "steps again"))
    print()
    confusion = [
        (right, said, str(number)) for right, found in account.confusion.items() for said, number in found.items()
    ]
    table(confusion, heads=("class injected", "class said", "faults"))
    print()
    identical = [
        result
        for result in account.rounds
        if (result.weights, result.model) == (account.undisturbed.weights, account.undisturbed.model)
    ]
    table(
        [
            ("faults", str(len(account.faults))),
            ("runs with the undisturbed bits", f"{len(identical)} of {len(account.rounds)}"),
            ("detected", _times(account.detection)),
            ("works again", _times(account.recovery)),
            ("steps made again", str(account.lost)),
            ("processes left", str(account.orphans)),
            ("points lost, doubled", f"{_sum(account, 'points_lost')}, {_sum(account, 'points_doubled')}"),
            ("not right", str(len(account.problems))),
        ]
    )


def _sum(account: Account, what: str) -> int:
    return sum(int(getattr(result, what)) for result in account.rounds)


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{value:.1f} s"


def _times(found: Times | None) -> str:
    return f"median {found.median:.1f} s, 95 % within {found.p95:.1f} s ({found.number} faults)" if found else ""
