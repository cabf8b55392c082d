"""The command that trains with several settings and keeps the best: sweep."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from onward.flows.commands.common import MAX_SEED, Json, Profile, layers_of, print_json
from onward.flows.sweeps import sweep_api as api

if TYPE_CHECKING:
    from onward.flows.sweeps.outcome import SweepOutcome


def sweep(
    config: Annotated[
        str, Argument(metavar="[CONFIG]", help="The TOML file of the runs, or the name of an example.")
    ] = "",
    settings: Annotated[
        list[str] | None,
        Argument(
            metavar="SECTION.KEY=VALUES",
            help="Settings to try: values with commas between them, or a range log(a, b), uniform(a, b) or int(a, b). "
            "One value is an override for all trials.",
        ),
    ] = None,
    profile: Profile = "",
    trials: Annotated[
        int, Option(min=0, max=100_000, help="How many trials to make, where a setting has a range.")
    ] = 0,
    prune: Annotated[
        bool, Option("--prune", help="End a trial whose evaluations are worse than the median of those before.")
    ] = False,
    seed: Annotated[int, Option(min=0, max=MAX_SEED, help="The seed of the choice of values in ranges.")] = 0,
    resume: Annotated[str, Option(metavar="SWEEP", help="Continue a sweep: last, its name or the end of its id.")] = "",
    from_start: Annotated[
        bool,
        Option(
            "--from-start",
            help="With --resume: begin the trial that has not ended again at step 0, if all of its checkpoints are "
            "damaged; they are kept.",
        ),
    ] = False,
    list_all: Annotated[bool, Option("--list", help="List all sweeps, newest first.")] = False,
    as_json: Json = False,
) -> None:
    """Train with several settings, compare the results, and export the best model.

    Several settings with several values make a grid, of which all combinations are trained, one after the other. In a
    range Optuna chooses the values. The configurations of all trials are checked first. Trials are compared by
    checkpoint.best_metric; only the best one is exported and registered. Ctrl-C saves a checkpoint of the running trial
    and stops; --resume goes on from there, and repeats no trial that has ended.
    """
    from onward.trainer.errors import ConfigError

    given = {"CONFIG": config, "--resume": resume, "--list": list_all}
    if len(chosen := [name for name, value in given.items() if value]) != 1:
        raise ConfigError(
            f"give one of CONFIG, --resume SWEEP and --list, not {' and '.join(chosen) or 'none of them'}"
        )
    has_search = bool(trials or prune or seed)
    if not config and (settings or has_search):
        raise ConfigError(f"{chosen[0]} takes no settings: a sweep goes on with those that it began with")
    if from_start and not resume:
        raise ConfigError("--from-start needs --resume SWEEP: a new sweep begins at step 0 anyway")
    if list_all:
        _list(api.sweeps(), as_json=as_json)
    elif resume:
        _show(api.resume_sweep(resume, from_start=from_start), as_json=as_json)
    else:
        files, space = layers_of(config, settings)
        _show(api.sweep(files, space, profile=profile, trials=trials, prune=prune, seed=seed), as_json=as_json)


def _list(found: list[SweepOutcome], *, as_json: bool) -> None:
    from onward.flows.shown.terminal_tables import table
    from onward.trainer.run.names import short_id

    if as_json:
        print_json({"sweeps": [each.model_dump(mode="json") for each in found]})
        return
    rows = []
    for each in found:
        ended = sum(trial.status != "running" for trial in each.trials)
        value = next((f"{trial.value:.6g}" for trial in each.trials if each.best == trial.number), "")
        rows.append(
            (short_id(each.sweep_id), each.name, each.state, f"{ended}/{each.num_trials}", value, each.created_at)
        )
    table(rows, heads=("sweep", "name", "state", "trials", "best", "created"))


def _show(found: SweepOutcome, *, as_json: bool) -> None:
    """Print the table of trials, and below it what became of the best one."""
    if as_json:
        print_json(found.model_dump(mode="json"))
        return
    from onward.flows.shown.terminal_tables import table
    from onward.flows.sweeps.outcome import table_of

    heads, rows = table_of(found.trials, found.metric, found.best)
    table(rows, heads=heads)
    print()
    table([(f"trial {each.number}", each.reason) for each in found.trials if each.reason])
    facts = [
        ("trained model", found.model),
        ("sweep directory", found.directory),
        ("MLflow", f"run {found.mlflow_run_id}" + (f", {found.registered}" if found.registered else "")),
        ("promotion", found.promotion),
        ("Prefect", found.prefect_url),
        ("to look at it", "onward ui"),
    ]
    table((name, value) for name, value in facts if value)
