"""Decide which runs `onward gc` may remove: a run stays as long as one reason to keep it is found.

is it running?  is it of another state than those asked for, too young, or among the newest?  can `onward resume` go on?
does a sweep, a registered model, another run or a deployment need it?  does it hold files that Onward did not write?
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from onward.flows.run_state.run_index import State, listed_runs
from onward.flows.run_state.run_status import state_of
from onward.flows.run_state.runs import is_running
from onward.infra.job.job import running_job
from onward.infra.job.job_guard import living_tags
from onward.infra.mlflow.mlflow_store import TrackingError
from onward.infra.mlflow.registry import Registry
from onward.trainer.checkpoint.retention import list_checkpoints
from onward.trainer.errors import OnwardError
from onward.trainer.run.directory import PathInside, RunDir, onward_home
from onward.trainer.run.recorded.sweep_records import SweepDir, SweepResult, membership
from onward.trainer.run.records import ExportedModel, RunIdentity, read_record, record_if_written

DAY_S = 86400.0
OTHER_FILES = {"preflight", "job.json"}
"""Files of a run directory that are no attributes of RunDir."""
VALUES = [getattr(RunDir(Path("run")), name) for name, value in vars(RunDir).items() if isinstance(value, PathInside)]
FILES = {value.name for value in VALUES} | {*OTHER_FILES, "flow.log"}
"""Names of what Onward writes into a run directory."""


@dataclass(frozen=True)
class Rules:
    """Which runs may go."""

    days: float = 30.0
    """Least age since the last change."""
    keep: int = 10
    """Newest runs that stay in any case."""
    states: tuple[State, ...] = ("exported", "failed")
    resumable: bool = False
    """Whether runs go that `onward resume` could continue."""


@dataclass(frozen=True)
class Facts:
    """What is known of all runs of a home."""

    states: Mapping[RunDir, State]
    newest: frozenset[RunDir]
    named_by: Mapping[str, frozenset[str]]
    """Name of a run directory -> the runs, sweeps and deployments whose configuration names a file in it."""
    stores: frozenset[str]
    """The MLflow stores in which the runs are recorded."""
    working: frozenset[str]
    """Tags of the jobs of which a process runs on this host."""
    in_use: dict[tuple[str, str], frozenset[str]] = field(default_factory=dict)
    """(MLflow store, model) -> its versions in use, once a rule has asked for them."""


def gather(rules: Rules, deployments: Mapping[str, str]) -> Facts:
    """Read what the rules need. deployments: name -> configuration."""
    listed = listed_runs()
    runs = onward_home() / "runs"
    texts = {name: _text(runs / name / "config.json") for name, _ in listed}
    # a sweep names models and data for trials that have not begun
    texts |= {path.parent.name: _text(path) for path in (onward_home() / "sweeps").glob("*/sweep.json")}
    states = {RunDir(runs / name): _state(RunDir(runs / name), status["state"]) for name, status in listed}
    return Facts(
        states=states,
        newest=frozenset(RunDir(runs / name) for name, _ in listed[: rules.keep]),
        named_by=_named_by({**texts, **deployments}),
        stores=frozenset(filter(None, (status["tracking_uri"] for _, status in listed))),
        working=frozenset(living_tags()),
    )


def _named_by(texts: Mapping[str, str]) -> dict[str, frozenset[str]]:
    """Return which of some configurations name a file in which run directory: each text is searched once."""
    runs = re.compile(re.escape(f"{onward_home() / 'runs'}/") + r"([^/\"'\\]+)")
    found: dict[str, set[str]] = {}
    for name, text in texts.items():
        # each run names files of its own directory
        for run in set(runs.findall(text)) - {name}:
            found.setdefault(run, set()).add(name)
    return {run: frozenset(names) for run, names in found.items()}


def reason_to_keep(run: RunDir, rules: Rules, facts: Facts, *, is_ours: bool = False) -> str:
    """Return why a run stays; "" if it may go. is_ours: whether this process holds its lock."""
    state = facts.states.get(run)
    # while this process holds the lock no job can begin, so that it is looked for once more
    tags = None if is_ours else facts.working
    is_locked = not is_ours and is_running(run)
    if is_locked or running_job(run.root, among=tags):
        return "it is running"
    if state is None:
        return "it has neither identity.json nor config.json, so it is not known to be a run"
    names = {entry.name for entry in os.scandir(run.root) if entry.name[0] != "."}
    if unknown := sorted(names - FILES):
        return f"Onward did not write {', '.join(unknown[:3])}"
    if state not in rules.states:
        return f"its state is {state}"
    if run in facts.newest:
        return f"it is among the {rules.keep} newest"
    if (age := age_days(run.root)) < rules.days:
        return f"it was changed {age:.1f} days ago"
    # it would export what is trained, or train from a checkpoint
    can_go_on = state == "trained" or (state != "exported" and list_checkpoints(run))
    if can_go_on and not rules.resumable:
        return "`onward resume` can continue it (--resumable)"
    if is_ours:  # what the registry said when the list was made may be no longer true
        facts.in_use.clear()
    return _sweep_needs(run) or _registry_needs(run, facts) or _others_need(run, facts)


def _state(run: RunDir, listed: State) -> State:
    """Return the state of a run, also where a list shows nothing of it but that a file of it cannot be read."""
    if listed != "damaged":
        return listed
    try:
        read_record(run.identity, RunIdentity)
        return state_of(run)
    except (OnwardError, OSError):
        return "damaged"


def age_days(folder: Path) -> float:
    """Return the days since something in a directory was changed, with what is directly below its own directories."""
    newest = folder.lstat().st_mtime
    for entry in os.scandir(folder):
        if entry.name != "lock":  # it is opened by whoever looks whether the run is running
            newest = max(newest, entry.stat(follow_symlinks=False).st_mtime)
        # a change deep inside, such as of a checkpoint, changes only the directory that holds it
        if entry.is_dir(follow_symlinks=False):
            below = (each.stat(follow_symlinks=False).st_mtime for each in os.scandir(entry))
            newest = max(newest, *below, 0.0)
    return (time.time() - newest) / DAY_S


def _sweep_needs(run: RunDir) -> str:
    """Return why a sweep needs this run: it has not ended, or this is its best trial; "" if none does."""
    try:
        trial = membership(run)
        if trial is None or not (folder := SweepDir.of(trial.sweep_id)).root.exists():
            return ""
        # the sweep may still export this trial, if it turns out to be the best
        if not folder.result.exists():
            return f"the sweep {trial.sweep_id} has not ended"
        best = read_record(folder.result, SweepResult).best == trial.number
    except OnwardError as error:
        return f"its sweep cannot be read: {error}"
    return f"it is the best trial of the sweep {trial.sweep_id}" if best else ""


def _registry_needs(run: RunDir, facts: Facts) -> str:
    """Return which registered model in use came from this run: one with an alias, or the newest version; else ""."""
    try:
        exported = record_if_written(run.exported, ExportedModel)
        if exported is None or not exported.registered_as:
            return ""
        model = read_record(run.identity, RunIdentity).tracking_uri, exported.registered_as
        # asked once for each model and not for each run: MLflow may be on another machine
        if model not in facts.in_use:
            facts.in_use[model] = Registry(model[0]).in_use(model[1])
        if exported.version not in facts.in_use[model]:
            return ""  # the registry has a copy of the file
    except TrackingError as error:
        return f"MLflow cannot say whether its model is in use: {error}"
    except OnwardError as error:
        return f"its exported model cannot be read: {error}"
    return f"its model is {exported.registered_as} version {exported.version} in the registry"


def _others_need(run: RunDir, facts: Facts) -> str:
    others = sorted(facts.named_by.get(run.root.name, ()))
    return f"the configuration of {others[0]} names a file in it" if others else ""


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def linked_shards(runs: Iterable[RunDir]) -> set[str]:
    """Return the names of the shards of some runs."""
    # the link leads to a directory of the cache, which is named after its content
    return {run.shards.readlink().name for run in runs if run.shards.is_symlink()}
