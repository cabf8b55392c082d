"""Remove what `find` has listed; each thing is checked once more, with the lock of its run."""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from onward.flows.collection.flow_runs import deployments, old_flow_runs, own_prefect
from onward.flows.collection.found import (
    KINDS,
    Found,
    Item,
    Kept,
    Kind,
    find,
    lost_records,
    runs_of_home,
)
from onward.flows.collection.rules import Facts, Rules, gather, linked_shards, reason_to_keep
from onward.flows.run_state.runs import locked
from onward.infra.job.job import running_job
from onward.infra.job.temporary_folders import remove_if_abandoned
from onward.infra.mlflow.mlflow_store import TrackingError
from onward.trainer.errors import ConfigError
from onward.trainer.run.directory import RunDir

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient


def collect(rules: Rules, kinds: tuple[Kind, ...] = KINDS) -> Found:
    """Remove what the rules allow; return what was removed, and what stays."""
    with own_prefect(kinds) as prefect:
        return _collected(rules, gather(rules, deployments(prefect)), find(rules, kinds), prefect)


def _collected(rules: Rules, facts: Facts, found: Found, prefect: SyncPrefectClient | None) -> Found:
    removed = []
    kept = list(found.kept)
    # runs that go: records of them may go as well
    doomed = {Path(item.name).name for item in found.items if item.kind == "run"}
    for item in found.items:
        try:
            # time has passed since the list was made, so each thing is looked at again
            why, size = _remove(item, rules, facts, doomed, prefect)
        except (OSError, TrackingError, ConfigError) as error:
            why = str(error).splitlines()[0]
            size = 0
        if why:
            kept.append(Kept(name=item.name, why=why))
            doomed.discard(Path(item.name).name)
        else:
            removed.append(item.model_copy(update={"bytes": size}))
    return Found(items=tuple(removed), kept=tuple(kept), bytes=sum(each.bytes for each in removed), removed=True)


def _remove(
    item: Item, rules: Rules, facts: Facts, doomed: set[str], prefect: SyncPrefectClient | None
) -> tuple[str, int]:
    """Remove one thing; return ("", bytes), or why it stays."""
    path = Path(item.name)
    if item.kind == "run":
        return (_remove_run(RunDir(path), rules, facts) if path.name[0] != "." else _delete(path)), item.bytes
    if item.kind == "shards":
        return _remove_shards(path), item.bytes
    if item.kind == "checkpoint":
        run = RunDir(path.parents[1])
        with locked(run, timeout_s=0.0):
            return ("it is running" if running_job(run.root) else _delete(path)), item.bytes
    if item.kind == "temporary":
        return ("" if remove_if_abandoned(path) else "it is in use"), item.bytes
    if item.kind == "mlflow":
        records, lost = lost_records(item.name, doomed)
        records.delete(lost)
        return "", 0
    assert prefect is not None
    for flow_run in old_flow_runs(prefect, rules.days, doomed):
        prefect.delete_flow_run(flow_run)
    return "", 0


def _remove_run(run: RunDir, rules: Rules, facts: Facts) -> str:
    """Remove a run with its lock held, unless it is needed meanwhile; return why it stays."""
    with locked(run, timeout_s=0.0):
        if why := reason_to_keep(run, rules, facts, is_ours=True):
            return why
        # renamed first, so that a half deleted run is never taken for one
        aside = run.root.with_name(f".removed-{run.root.name}")
        run.root.rename(aside)
    return _delete(aside)


def _remove_shards(path: Path) -> str:
    """Remove shards, unless a run has found them meanwhile; return why they stay."""
    aside = path.with_name(f".{path.name}.gc.partial")  # the name of an unfinished one, which is deleted later
    # after the rename no new run finds them; one that found them before has a link, which is looked for now
    path.rename(aside)
    if path.name in linked_shards(runs_of_home()):
        with contextlib.suppress(OSError):  # it has made them again
            aside.rename(path)
        return "a run uses it now"
    return _delete(aside)


def _delete(path: Path) -> str:
    shutil.rmtree(path)
    return ""
