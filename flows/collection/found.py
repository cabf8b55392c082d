"""List what `onward gc` would remove, and what stays and why. Nothing is changed here."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

from onward.flows.collection.flow_runs import database, deployments, old_flow_runs, own_prefect
from onward.flows.collection.rules import Facts, Rules, age_days, gather, linked_shards, reason_to_keep
from onward.flows.run_state.runs import is_running
from onward.infra.job.temporary_folders import abandoned
from onward.infra.mlflow.checkpoint_records import CheckpointRecord, CheckpointRecords
from onward.infra.mlflow.mlflow_store import TrackingError, database_of, local_store
from onward.trainer.run.directory import RunDir, onward_home
from onward.trainer.run.records import Record

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient

Kind = Literal["run", "shards", "checkpoint", "mlflow", "prefect", "temporary"]
KINDS: tuple[Kind, ...] = get_args(Kind)


class Item(Record):
    """One thing that can be removed."""

    kind: Kind
    name: str
    """A path; for MLflow and Prefect what of their records."""
    bytes: int
    why: str


class Kept(Record):
    """One thing that stays."""

    name: str
    why: str


class Found(Record):
    """What can be removed under a home, and what stays."""

    items: tuple[Item, ...]
    kept: tuple[Kept, ...]
    bytes: int
    removed: bool = False
    """Whether it was removed; else this is only the list."""


def find(rules: Rules, kinds: tuple[Kind, ...] = KINDS) -> Found:
    """Return what the rules allow to remove. Raises RuntimeUnavailable when Onward's Prefect server does not start."""
    with own_prefect(kinds) as prefect:
        return _found(rules, kinds, gather(rules, deployments(prefect)), prefect)


def _found(rules: Rules, kinds: tuple[Kind, ...], facts: Facts, prefect: SyncPrefectClient | None) -> Found:
    items = []
    kept = []
    doomed = set()
    if "run" in kinds:
        for run, why in _runs(rules, facts):
            if why:
                kept.append(Kept(name=run.root.name, why=why))
            else:
                items.append(_item("run", run.root, _history(run, facts)))
                doomed.add(run.root.name)
    # shards and checkpoints are needed by the runs that stay
    remaining = [run for run in runs_of_home() if run.root.name not in doomed]
    if "shards" in kinds:
        items += _shards(remaining, rules, kept)
    if "checkpoint" in kinds:
        items += _leftovers(remaining, rules)
    if "temporary" in kinds:
        items += [_item("temporary", path, "its process was killed") for path in abandoned()]
    if "mlflow" in kinds:
        items += _mlflow(facts, doomed, kept)
    if prefect and "prefect" in kinds:
        items += _prefect(prefect, rules, doomed)
    return Found(items=tuple(items), kept=tuple(kept), bytes=sum(item.bytes for item in items))


def runs_of_home() -> list[RunDir]:
    """Return all directories of runs, also those of which nothing is known."""
    return [RunDir(path) for path in sorted((onward_home() / "runs").glob("*")) if path.is_dir()]


def size_of(folder: Path) -> int:
    """Return the bytes of the files in a directory; links are not followed."""
    files = (path for path in folder.rglob("*") if path.is_file())
    # a link has the size of its path only, and what it leads to belongs to another directory
    return sum(path.lstat().st_size for path in files if not path.is_symlink())


def _item(kind: Kind, path: Path, why: str) -> Item:
    return Item(kind=kind, name=str(path), bytes=size_of(path), why=why)


def lost_records(store: str, doomed: set[str]) -> tuple[CheckpointRecords, list[CheckpointRecord]]:
    """Return the records of checkpoints of this home that are gone or go with their runs. Raises TrackingError."""
    runs = onward_home() / "runs"
    records = CheckpointRecords(store)

    def is_gone(path: Path) -> bool:
        return not path.exists() or path.relative_to(runs).parts[0] in doomed

    return records, records.lost(runs, is_gone=is_gone)


def _runs(rules: Rules, facts: Facts) -> Iterator[tuple[RunDir, str]]:
    for run in runs_of_home():
        if not run.root.name.startswith("."):
            yield run, reason_to_keep(run, rules, facts)


def _history(run: RunDir, facts: Facts) -> str:
    model = next(iter(run.export.glob("*.onnx")), None)
    with_model = f"; {model.name} goes with it" if model else ""
    return f"{facts.states[run]}, last changed {age_days(run.root):.0f} days ago{with_model}"


def _shards(remaining: list[RunDir], rules: Rules, kept: list[Kept]) -> Iterator[Item]:
    """Yield the shards to which no run links that stays."""
    folder = onward_home() / "shards"
    # a run links its shards only when they are complete, and until then no link protects them
    running = (run for run in remaining if is_running(run))
    if waiting := [run.root.name for run in running if not run.shards.is_symlink()]:
        kept.append(Kept(name=str(folder), why=f"the run {waiting[0]} is just about to use some"))
        return
    needed = linked_shards(remaining)
    if folder.is_dir():
        for path in sorted(folder.glob("*")):
            if path.name in needed or path.name.startswith("."):
                continue
            if not (path / "manifest.json").is_file():
                kept.append(Kept(name=str(path), why="it has no manifest.json, so it is not known to be shards"))
            elif (age := age_days(path)) >= max(rules.days, 1 / 24):  # a run that has just begun may have found them
                yield _item("shards", path, f"of no run, {age:.0f} days old")


def _leftovers(remaining: list[RunDir], rules: Rules) -> Iterator[Item]:
    """Yield damaged checkpoints, and runs that a crash has left half deleted."""
    for run in remaining:
        if run.root.name.startswith(".removed-"):
            yield _item("run", run.root, "half deleted")
        elif not is_running(run):
            # discarded: a damaged one of a run that was begun again with `onward resume --from-start`
            for path in sorted((*run.checkpoints.glob("step-*.damaged"), *run.checkpoints.glob("step-*.discarded"))):
                if (age := age_days(path)) >= rules.days:
                    yield _item("checkpoint", path, f"{path.suffix[1:]}, set aside {age:.0f} days ago")


def _mlflow(facts: Facts, doomed: set[str], kept: list[Kept]) -> Iterator[Item]:
    """Yield the records of checkpoints that were deleted, for each store."""
    for store in sorted({local_store(onward_home()), *facts.stores}):
        database = database_of(store)
        # connecting would create it
        if database and not database.exists():
            continue
        try:
            _, lost = lost_records(store, doomed)
        except TrackingError as error:
            kept.append(Kept(name=store, why=str(error).splitlines()[0]))
            continue
        if lost:
            yield Item(kind="mlflow", name=store, bytes=0, why=f"{len(lost)} records of checkpoints that are deleted")


def _prefect(prefect: SyncPrefectClient, rules: Rules, doomed: set[str]) -> Iterator[Item]:
    """Yield the flow runs of Onward's own Prefect server."""
    if old := old_flow_runs(prefect, rules.days, doomed):
        yield Item(kind="prefect", name=str(database()), bytes=0, why=f"{len(old)} flow runs")
