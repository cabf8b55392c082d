"""The command that removes what is no longer needed: gc."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, get_args

from typer import Option

from onward.flows.commands.common import Days, Json, print_json
from onward.trainer.errors import ConfigError

if TYPE_CHECKING:
    from onward.flows.collection.found import Found


def gc(
    days: Days = 30.0,
    keep: Annotated[int, Option(min=0, max=1_000_000, help="Keep this many of the newest runs in any case.")] = 10,
    states: Annotated[
        str, Option(help="Runs of which states may go: exported, trained, stopped, failed, interrupted, damaged.")
    ] = "exported,failed",
    resumable: Annotated[
        bool, Option("--resumable", help="Also runs of these states that `onward resume` could continue.")
    ] = False,
    what: Annotated[
        str, Option(help="Kinds to remove: run, shards, checkpoint (a damaged one), mlflow, prefect, temporary.")
    ] = "run,shards,checkpoint,mlflow,prefect,temporary",
    yes: Annotated[bool, Option("--yes", help="Remove; without it, only list what would be removed.")] = False,
    as_json: Json = False,
) -> None:
    """Show old runs, shards and records that nothing needs any more, and remove them with --yes.

    What is running, what a sweep, a registered model, a deployment or another run needs, and what Onward did not write
    stays, and the list says why. MLflow's records of deleted checkpoints go, and old flow runs in Onward's own Prefect
    server, which is started if it does not run; and the temporary directories of processes that were killed.
    """
    from onward.flows.collection.found import KINDS, find
    from onward.flows.collection.removal import collect
    from onward.flows.collection.rules import Rules
    from onward.flows.run_state.run_status import State

    chosen = _words("--states", states, set(get_args(State)) - {"running"})
    kinds = _words("--what", what, set(KINDS))
    rules = Rules(days, keep, chosen, resumable)
    _show((collect if yes else find)(rules, kinds), as_json=as_json)


def _words(option: str, text: str, known: set[str]) -> Any:
    """Return the words of an option. Raises ConfigError for unknown ones."""
    words = tuple(word.strip() for word in text.split(",") if word.strip())
    if unknown := set(words) - known:
        raise ConfigError(f"{option}: unknown {', '.join(sorted(unknown))}; choose from {', '.join(sorted(known))}")
    return words


def _show(found: Found, *, as_json: bool) -> None:
    """Print what was, or would be, removed, and what stays."""
    from onward.flows.shown.terminal_tables import table

    if as_json:
        print_json(found.model_dump(mode="json"))
        return
    for each in found.kept:
        print(f"stays: {each.name}: {each.why}")
    if found.items:
        rows = [(each.kind, f"{each.bytes / 1e6:.1f} MB", each.why, each.name) for each in found.items]
        table(rows, heads=("kind", "size", "why", "name"))
    total = f"{len(found.items)} {'removed' if found.removed else 'would be removed'}, {found.bytes / 1e6:.1f} MB"
    print(total if found.removed or not found.items else f"{total}; nothing is removed without --yes")
