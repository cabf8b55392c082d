"""Prune the trials of a sweep by Optuna's median rule, from their event logs.

step                  100    200    300
trial 1, complete    0.90   0.60   0.40
trial 2, complete    0.80   0.50   0.30
trial 3, complete    0.95   0.90   0.70
median               0.90   0.60   0.40
trial 4              0.85   0.80           pruned at step 200: its best value, 0.80, is worse than 0.60
"""

from __future__ import annotations

import logging
import math
import statistics
from collections.abc import Mapping, Sequence

from onward.infra.job.job import stop_running
from onward.trainer.events import Evaluated, Event
from onward.trainer.run.directory import RunDir
from onward.trainer.run.history import RunHistory
from onward.trainer.run.recorded.sweep_records import Pruned, Sweep, SweepDir, Trial, membership
from onward.trainer.run.records import read_record, write_record

log = logging.getLogger(__name__)

LEAST_COMPLETE = 3
"""Complete trials before one is pruned."""


class MedianRule:
    """Stops the job of a trial whose evaluations are worse than the median; does nothing for a run that is no trial.

    run_history: an event is added there before it is added here.
    """

    def __init__(self, run: RunDir, run_history: RunHistory) -> None:
        self._run = run
        self._history = run_history
        self._sweep: Sweep | None = None
        if trial := membership(run):
            folder = SweepDir.of(trial.sweep_id)
            sweep = read_record(folder.sweep, Sweep)
            if sweep.prune and not trial.exports:
                import optuna  # noqa: F401  now: a decision that waits for the import may come after the last step

                self._sweep = sweep
                # the trials before it have ended, so what they have logged does not change any more
                complete = [each for each in folder.trials() if each.status == "complete"]
                self._others = [history(each, sweep.metric) for each in complete]

    def add(self, event: Event) -> None:
        """Read an event; write `pruned.json` if the trial is to end."""
        if self._sweep is None or self._run.pruned.exists() or not isinstance(event, Evaluated):
            return
        # behind the last step there is nothing left to save
        is_complete = 0 < self._history.num_steps <= event.step
        if is_complete or self._sweep.metric not in event.values:
            return
        values = _after_start(self._history, self._sweep.metric)
        if reason := reason_to_prune(values, self._others, metric=self._sweep.metric, greatest=self._sweep.greatest):
            write_record(self._run.pruned, Pruned(step=event.step, reason=reason))
            log.info("%s", reason)
            self.poll()  # at once: the monitor may spend seconds on sending metrics before its next call

    def poll(self) -> None:
        """Let the job save and stop if the trial is pruned. Again at every call: the job may not have begun."""
        if self._sweep and self._run.pruned.exists():
            stop_running(self._run.root)


def reason_to_prune(
    values: Mapping[int, float], others: Sequence[Mapping[int, float]], *, metric: str, greatest: bool
) -> str:
    """Return why a trial is pruned, in one sentence; "" if it goes on.

    values: step -> value of its metric; others: the same of each complete trial.
    """
    if not values or len(others) < LEAST_COMPLETE:
        return ""
    step = max(values)
    # a trial without any number is decided here, because there is nothing to compare
    numbers = [value for value in values.values() if not math.isnan(value)]
    if not numbers:
        return f"pruned at step {step}: {metric} was never a number"
    import optuna
    from optuna.trial import TrialState, create_trial

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    # a study in memory, made anew at each decision: the records of the sweep are the only store
    study = optuna.create_study(direction="maximize" if greatest else "minimize")
    for other in others:
        study.add_trial(create_trial(state=TrialState.COMPLETE, value=0.0, intermediate_values=dict(other)))
    trial = create_trial(state=TrialState.RUNNING, intermediate_values=dict(values))
    if not optuna.pruners.MedianPruner(n_startup_trials=LEAST_COMPLETE).prune(study, trial):
        return ""
    best = (max if greatest else min)(numbers)
    there = [other[step] for other in others if not math.isnan(other.get(step, math.nan))]
    median = f"{statistics.median(there):.6g}" if there else "unknown"
    return (
        f"pruned at step {step}: the best {metric} so far is {best:.6g}, and the median of the {len(there)} complete "
        f"trials at this step is {median}"
    )


def history(trial: Trial, metric: str) -> dict[int, float]:
    """Return step -> value of the metric, of the evaluations after step 0 in a trial's event log."""
    return _after_start(RunHistory.of(trial.run.events, series=(metric,)), metric)


def _after_start(history: RunHistory, metric: str) -> dict[int, float]:
    """Return step -> value of a metric, without the evaluation of step 0, which is the same for all trials."""
    return {step: value for step, value in history.curve(metric).points() if step > 0}
