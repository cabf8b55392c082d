"""Choose the settings of a trial: all combinations of values, or by Optuna in ranges.

    trial 1, 2, ... of a grid      the n-th combination; the last setting changes fastest
    trial n of a search space      Optuna's TPE sampler, seeded with the seed and n, and the results before

Both depend on records alone. Optuna's own storage is not used: it would be a second state beside the records, and
Optuna does not keep the state of its sampler in it.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from onward.trainer.run.recorded.sweep_records import Sweep, Trial

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution


def combination(choices: Mapping[str, Sequence[Any]], number: int) -> dict[str, Any]:
    """Return the settings of one combination of a grid, counted from 1."""
    # the last setting varies fastest; a trial is found by its number, so nothing has to be stored
    combinations = itertools.product(*choices.values())
    return dict(zip(choices, next(itertools.islice(combinations, number - 1, None)), strict=True))


def choose_settings(
    sweep: Sweep, number: int, before: Sequence[Trial], history: Callable[[Trial], Mapping[int, float]]
) -> dict[str, Any]:
    """Return the settings of a new trial. before: the trials with a smaller number, all of which have ended.

    history: trial -> step -> value of the metric, of a pruned one.
    """
    if not sweep.ranges:
        return combination(sweep.choices, number)
    import optuna
    from optuna.trial import TrialState

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    states = {"complete": TrialState.COMPLETE, "pruned": TrialState.PRUNED, "failed": TrialState.FAIL}
    space = _distributions(sweep)
    # made anew from the records of the trials, so that a resumed sweep chooses as if it had never stopped
    study = optuna.create_study(
        direction="maximize" if sweep.greatest else "minimize",
        sampler=optuna.samplers.TPESampler(seed=zlib.crc32(f"{sweep.seed} {number}".encode())),
    )
    for trial in before:
        # a choice is stored by its place: Optuna's categories can be numbers and texts, but not lists
        places = {key: values.index(trial.settings[key]) for key, values in sweep.choices.items()}
        study.add_trial(
            optuna.trial.create_trial(
                state=states[trial.status],
                value=trial.value,
                params={key: trial.settings[key] for key in sweep.ranges} | places,
                distributions=space,
                intermediate_values=dict(history(trial)) if trial.status == "pruned" else {},
            )
        )
    # a seed of its own for each number: the choice does not depend on how many processes have asked before
    chosen = study.ask(space).params
    return {key: values[chosen[key]] for key, values in sweep.choices.items()} | {
        key: chosen[key] for key in sweep.ranges
    }


def _distributions(sweep: Sweep) -> dict[str, BaseDistribution]:
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    found: dict[str, BaseDistribution] = {
        key: CategoricalDistribution(range(len(values))) for key, values in sweep.choices.items()
    }
    for key, bounds in sweep.ranges.items():
        if bounds.kind == "int":
            found[key] = IntDistribution(int(bounds.low), int(bounds.high))
        else:
            found[key] = FloatDistribution(bounds.low, bounds.high, log=bounds.kind == "log")
    return found
