"""Check a configuration, run it undisturbed and with faults, compare, and make the account."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path

from onward.flows.api import checked_config
from onward.flows.running.stop_signals import exit_on_sigterm
from onward.trainer.config.run_config import RunConfig
from onward.trainer.config.urls import url_of
from onward.trainer.errors import ConfigError, TrainingFailed
from onward.trainer.run.directory import RunDir
from onward.trainer.run.records import write_record
from tests.soak import results
from tests.soak.account import Account, Command, Result, make_account
from tests.soak.kinds import KINDS, without_target
from tests.soak.plan import PlannedFault, make_plan
from tests.soak.scene import TAG, Scene, described, until_gone
from tests.soak.soak import ORPHAN_S, GaveUp, Soak

SPARED = ("disk-full",)
"""Kinds that are injected only if they are named."""
OVERRIDES = ('monitor.tracking_uri=""', 'export.path=""')
"""What keeps a run from writing outside of its home."""


def run_soak(
    config: str,
    overrides: Sequence[str],
    home: Path,
    *,
    mtbf_s: float,
    kinds: Sequence[str] = (),
    seed: int = 0,
    faults: int = 0,
) -> Account:
    """Run a configuration once undisturbed and then with faults, and return the account, which `home` keeps.

    kinds: names of KINDS; () = all but those that need a file system of their own. faults: how many; 0 = each kind
    once. home: a directory that does not exist yet or is empty. Runs are started until all faults were injected.
    Raises ConfigError for what cannot be repeated or restored, before anything is run.
    """
    chosen = tuple(kinds) or tuple(name for name in KINDS if name not in SPARED)
    home = home.absolute()
    words = (str(Path(config).absolute()) if Path(config).is_file() else config, *overrides, *OVERRIDES)
    resolved = checked_config(config, [*overrides, *OVERRIDES])
    if problems := [*unrepeatable(resolved), *unusable(home)]:
        raise ConfigError(problems)
    home.mkdir(parents=True, exist_ok=True, mode=0o700)
    if problems := without_target(chosen, home):
        raise ConfigError(problems)
    plan = make_plan(chosen, faults=faults or len(chosen), mtbf_s=mtbf_s, seed=seed)
    scene, before = Scene(home, uuid.uuid4().hex), dict(os.environ)
    os.environ.update({"ONWARD_HOME": str(home), TAG: scene.tag})  # for the servers, which this process starts
    try:
        with exit_on_sigterm():
            soak = Soak(scene, words, [], say)
            with ends_early(soak):
                return _soak(soak, plan, config, mtbf_s, seed)
    finally:
        for name in ("ONWARD_HOME", TAG):
            os.environ.pop(name)
            os.environ.update({name: before[name]} if name in before else {})


@contextlib.contextmanager
def ends_early(soak: Soak) -> Iterator[None]:
    """Let the first Ctrl-C or SIGTERM end the injection, so that there is an account; the second one exits."""

    def handle(number: int, frame: object) -> None:
        if soak.ends_early:
            sys.exit(128 + number)
        soak.ends_early = True
        say("no more faults; the run goes on to its end, for the account (the same signal again ends it at once)")

    # Handlers also because a shell starts what runs in its background deaf to Ctrl-C, and so would the commands be.
    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _soak(soak: Soak, plan: Sequence[PlannedFault], config: str, mtbf_s: float, seed: int) -> Account:
    from onward.flows.running.local_run import prefect_server

    scene = soak.scene
    problems: list[str] = []
    rounds: list[Result] = []
    try:
        # the servers of the soak run on between its commands, as between those of several users
        with prefect_server():
            say("the undisturbed run begins")
            try:
                undisturbed = _measured(soak, {})
            except GaveUp:
                last = soak.commands[-1]
                raise TrainingFailed(
                    f"the undisturbed run ended with exit status {last.status}, before any fault; its output is in "
                    f"{last.log}"
                ) from None
            points = results.points_of(RunDir(scene.home / "runs" / undisturbed.run_id))
            say(f"{undisturbed.step} steps, {undisturbed.points} points, {undisturbed.elapsed_s:.1f} s")
            soak.pending, soak.rounds = list(plan), 0
            try:
                while soak.pending and not soak.ends_early:
                    before = len(soak.pending)
                    rounds.append(_measured(soak, points))
                    if len(soak.pending) == before and not soak.ends_early:
                        kinds = ", ".join(sorted({fault.kind for fault in soak.pending}))
                        raise GaveUp(f"a whole run passed before one of these faults came: {kinds}; lower --mtbf")
            except GaveUp as error:
                problems.append(str(error))
            states = _with_states(soak.commands)
    finally:
        for process in scene.processes() if sys.exc_info()[0] else ():
            process.kill()
    left = until_gone(scene.processes, ORPHAN_S)
    problems += soak.problems
    if soak.ends_early and soak.pending:
        problems.append(f"it was ended early: {len(soak.pending)} faults of the plan were not injected")
    problems += [f"left after the last command: {described(process)}" for process in left]
    account = make_account(
        config=config,
        seed=seed,
        mtbf_s=mtbf_s,
        undisturbed=undisturbed,
        rounds=rounds,
        faults=[*soak.faults, *([soak.open] if soak.open else [])],
        commands=states,
        problems=problems,
    )
    write_record(scene.home / "account.json", account)
    return account


def _measured(soak: Soak, undisturbed: results.Points) -> Result:
    """Run once more, and return what the run has left."""
    began = time.monotonic()
    run = soak.run_once()
    elapsed_s = round(time.monotonic() - began, 1)
    return results.result_of(run, undisturbed=undisturbed, steps_made=soak.scene.progress.steps, elapsed_s=elapsed_s)


def _with_states(commands: Sequence[Command]) -> list[Command]:
    """Return the commands with what Prefect shows of each: of the first flow run that was created while it ran.

    A fault that tries a command of its own may make a second one.
    """
    shown = results.flow_runs()
    found = []
    for command in commands:
        own = [
            run
            for run in shown
            if run.created and command.began <= run.created.timestamp() <= command.ended and run.state
        ]
        state = own[0].state.type.value if own and own[0].state else ""
        found.append(command.model_copy(update={"state": state}))
    return found


def unrepeatable(config: RunConfig) -> list[str]:
    """Return why a run of this configuration could not be repeated or resumed, one sentence each."""
    problems = []
    if config.launch.hostfile:
        problems.append("launch.hostfile: faults are injected on this host alone; leave it empty")
    if not config.checkpoint.period:
        problems.append("checkpoint.period is 0, so every fault would start the run again; set it to some steps")
    if config.stop.max_hours:
        problems.append("stop.max_hours ends a run by the clock, so two runs end with other weights; leave it out")
    if url_of(str(config.model.path)).startswith(("models:", "runs:")):
        problems.append(f"model.path = {str(config.model.path)!r} is in an MLflow store, which the soak does not use")
    return problems


def unusable(home: Path) -> list[str]:
    """Return why a directory cannot be the home of a soak."""
    if home.exists() and not home.is_dir():
        return [f"{home} is a file"]
    # a file system of its own has a directory `lost+found`
    if home.exists() and {path.name for path in home.iterdir()} - {"lost+found"}:
        return [f"{home} is not empty: a soak damages files in its home, so it needs a new one"]
    return []


def say(line: str) -> None:
    """Print a line of progress."""
    print(f"soak: {line}", file=sys.stderr, flush=True)
