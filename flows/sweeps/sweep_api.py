"""The functions behind `onward sweep`. Importing this module is quick, as that of flows/api.py."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from onward.flows.api import require_flow
from onward.flows.configuration import Config, Given, Overrides
from onward.flows.running.stop_signals import exit_on_sigterm
from onward.trainer.errors import ConfigError, say

if TYPE_CHECKING:
    from onward.flows.sweeps.outcome import SweepOutcome
    from onward.trainer.run.recorded.sweep_records import SweepDir


def sweep(
    config: Config,
    space: Mapping[str, Any] | Iterable[str],
    overrides: Overrides = (),
    /,
    *,
    profile: str = "",
    trials: int = 0,
    prune: bool = False,
    seed: int = 0,
) -> SweepOutcome:
    """Train a model with several settings, one after the other; export and register the best one; return all results.

        onward.sweep("config.toml", {"optimizer.learning_rate": [1e-4, 3e-4, 1e-3]})
        onward.sweep("config.toml", {"optimizer.learning_rate": "log(1e-5, 1e-2)"}, trials=20, prune=True)

    `space`: setting -> a list of values, or a range "log(a, b)", "uniform(a, b)" or "int(a, b)"; or lines as on the
    command line. Without a range, all combinations are tried. `overrides`: the same for all trials. `trials`: how many,
    where there is a range. `prune`: end trials that are worse than the median of those before. `seed`: of the choice of
    values in ranges. Raises as `onward.run`, and from the main thread like it; a trial that fails is a result, and
    TrainingFailed says that all have failed.
    """
    require_flow("onward.sweep")
    from onward.flows.sweeps.making import make_sweep
    from onward.flows.sweeps.settings import read_space
    from onward.tasks.checks.machine_check import machine_problems

    given = Given.of(config, overrides, {}, profile=profile)
    wanted = read_space(space)
    folder = make_sweep(
        given.source,
        given.changes,
        wanted,
        profile=profile,
        trials=trials,
        prune=prune,
        seed=seed,
        check=lambda sections: [*given.check(sections), *machine_problems(sections)],
    )
    return _run_sweep(folder)


def resume_sweep(sweep: str = "last", *, from_start: bool = False) -> SweepOutcome:
    """Continue a sweep that was killed or stopped: the trials that have not ended, each from its newest checkpoint.

    `sweep`: a name, the end of an id, or "last". A sweep that has ended is returned as it is. `from_start`: begin
    the trial that has not ended again at step 0, if all of its checkpoints are damaged. Raises ConfigError when there
    is no such sweep or it is running; else as `onward.sweep`, and from the main thread like it.
    """
    require_flow("onward.resume_sweep")
    from onward.flows.run_state.runs import discard_damaged, is_running
    from onward.flows.sweeps.outcome import find_sweep, outcome_of
    from onward.trainer.run.directory import RunDir

    folder = find_sweep(sweep)
    # two processes would train the same trial
    if is_running(RunDir(folder.root)):
        raise ConfigError(f"the sweep {folder.root.name} is running already; wait for its end, or stop it first")
    if from_start:
        unended = [trial for trial in folder.trials() if trial.status == "running"]
        if not unended:
            raise ConfigError(
                f"the sweep {folder.root.name} has no trial that has begun and not ended; omit --from-start"
            )
        for trial in unended:
            discard_damaged(trial.run)
    return outcome_of(folder) if folder.result.exists() else _run_sweep(folder)


def sweeps() -> list[SweepOutcome]:
    """Return every sweep under ONWARD_HOME with its trials, the newest first."""
    from onward.flows.sweeps.outcome import outcome_of
    from onward.trainer.run.recorded.sweep_records import all_sweeps

    return [outcome_of(folder) for folder in all_sweeps()]


def _run_sweep(folder: SweepDir) -> SweepOutcome:
    from onward.flows.running.local_run import prefect_server
    from onward.flows.sweeps.outcome import outcome_of

    with exit_on_sigterm(), prefect_server():
        say(f"sweep {folder.root}")
        from onward.flows.sweep import run_sweep  # imports Prefect, which reads the environment of the server

        try:
            run_sweep(folder)
        except BaseException:
            if not folder.result.exists():
                say(f"to continue the sweep: onward sweep --resume {folder.root.name}")
            raise
    return outcome_of(folder)
