"""Commands that train, show and verify runs, and clean up after them: run, resume, status, stop, logs, runs ..."""

from __future__ import annotations

import shutil
import sys
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Exit, Option

from onward.flows import api
from onward.flows.commands.common import (
    ConfigFile,
    Days,
    Json,
    Overrides,
    Profile,
    RunName,
    StopOverrides,
    as_text,
    layers_of,
    print_facts,
    print_json,
)
from onward.flows.running import verify_run
from onward.trainer.errors import CheckpointError, ConfigError, say

if TYPE_CHECKING:
    from onward.flows.run_state.run_status import RunOutcome


def run(
    config: ConfigFile,
    overrides: Overrides = None,
    profile: Profile = "",
    name: Annotated[str, Option(metavar="NAME", help="Of the run, in place of the configuration's and a number.")] = "",
    continue_run: Annotated[
        bool,
        Option("--continue", help="If there is a run of that --name, resume it; end with status 0 if it is finished."),
    ] = False,
    as_json: Json = False,
) -> None:
    """Train a model and export it.

    Checks the configuration, the model and the data first and lists everything that is wrong. Then runs the flow in
    this process, on the ranks that the launcher starts, and prints the result. Ctrl-C saves a checkpoint and stops.
    With --name and --continue the same command begins a run, goes on with it and finds it finished, as a job needs it
    that a scheduler starts again.
    """
    files, changes = layers_of(config, overrides)
    outcome = api.run(files, changes, profile=profile, run_name=name, continue_run=continue_run)
    _show(outcome, as_json=as_json)


def resume(
    run: RunName,
    overrides: StopOverrides = None,
    from_start: Annotated[
        bool, Option("--from-start", help="Begin again at step 0, if all checkpoints are damaged; they are kept.")
    ] = False,
    accept_config: Annotated[
        bool, Option("--accept-config", help="Go on with a config.json that was edited; the report says so.")
    ] = False,
    allow_code: Annotated[
        bool, Option("--allow-code", help="Execute Python files of STORE/RUN that are not on this machine.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Continue a run from its newest complete checkpoint.

    For a run that was killed, stopped or failed. It continues with its saved configuration, in the same run directory
    and the same MLflow run. A run that a limit of the table stop has ended early goes on if that is raised. If
    somebody has edited the config.json in its directory, it is refused, unless --accept-config is given.
    """
    outcome = api.resume(
        run, overrides or (), from_start=from_start, accept_config=accept_config, allow_code=allow_code
    )
    _show(outcome, as_json=as_json)


def verify(
    source: Annotated[
        str, Argument(metavar="RUN_OR_CHECKPOINT", help="A run as in `onward status`, or a checkpoint directory.")
    ] = "last",
    replay: Annotated[
        bool, Option("--replay", help="Also train from one kept checkpoint to the next, and compare every bit.")
    ] = False,
    from_step: Annotated[
        int | None,
        Option(
            "--from",
            min=0,
            max=2**31 - 1,
            help="With --replay: the checkpoint to begin at; 0 = the ONNX file. Default: the last but one.",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Read checkpoints, shards and the data again and compare every byte with its digest.

    With `--replay` a part of the run is trained again in a scratch directory, in the same layout; it must reach the
    same bits.
    """
    from onward.flows.shown.terminal_tables import table
    from onward.trainer.checkpoint.verification import CheckedRun

    checked = verify_run.verify(source)
    problems = list(checked.problems)
    facts = checked.model_dump(mode="json")
    if not as_json:
        checkpoints = checked.checkpoints if isinstance(checked, CheckedRun) else (checked,)
        rows = [(checkpoint.name, "differs" if checkpoint.problems else "as saved") for checkpoint in checkpoints]
        rows += [(each.name, each.result) for each in (checked.data if isinstance(checked, CheckedRun) else ())]
        table(rows, heads=("checkpoint", "result"))
    if replay and not problems:
        replayed = verify_run.replay(source, from_step=from_step)
        problems += replayed.differences
        facts |= {"replay": replayed.model_dump(mode="json"), "problems": problems}
        if not as_json:
            start = f"step {replayed.from_step}" if replayed.from_step else "the ONNX file"
            result = "other bits" if replayed.differences else "the same bits"
            print_facts({"replayed": f"from {start} to step {replayed.to_step}", "result": result}, as_json=False)
    if as_json:
        print_json(facts)
    for problem in problems:
        print(f"  - {problem}", file=sys.stderr)
    if problems:
        raise Exit(CheckpointError.exit_code)


def status(
    run: RunName = "last",
    follow: Annotated[
        bool, Option("--follow", "-f", help="Show its progress until it ends, wherever it was started.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Show the state of a run; of one without a result why, of which class that is, and what to do.

    With `--follow` the run is shown until it ends, and then its state: a live view in a terminal, else a line whenever
    there is something new, at most every 10 s. Ctrl-C ends the command, and not the run.
    """
    from onward.flows.shown.terminal_tables import table

    if follow:
        from onward.flows.live_view.view import follow as follow_run
        from onward.flows.run_state.runs import find_run

        found = find_run(run)
        follow_run(found)
        run = found.root.name
    facts = api.status(run).model_dump(mode="json")
    if as_json:
        print_json(facts)
        return
    # metrics stand at the end, under their own names
    values = facts.pop("values")
    facts["worst_classes"], facts["remarks"] = ("; ".join(facts[key]) for key in ("worst_classes", "remarks"))
    facts["cause"], facts["class"] = facts.pop("error"), facts.pop("kind")
    # what a person looks for first, in this order
    first = {key: facts.pop(key) for key in ("name", "state", "cause", "class", "to_do", "remarks")}
    known = {key: value for key, value in (first | facts).items() if value not in ("", 0, None)}
    shown = [(key.replace("_", " "), as_text(value)) for key, value in known.items()]
    table([*shown, *((key, f"{value:.6g}") for key, value in values.items())])


def stop(run: RunName = "last", as_json: Json = False) -> None:
    """Save a checkpoint of a running run and stop it.

    Asks the flow of the run, which was started anywhere on this machine: in a terminal, in the background, or by the
    worker of a deployment. Waits for its end and prints how it ended. A run that does not run is refused.
    """
    from onward.flows.running.stop import stop as stop_run

    ended = stop_run(run)
    cause = ended.error or ended.ending
    facts = {"name": ended.name, "state": ended.state, "step": ended.step, "cause": cause, "to_do": ended.to_do}
    print_facts(facts, as_json=as_json)


def logs(
    run: RunName = "last",
    rank: Annotated[int | None, Option(min=0, max=1_000_000, help="Only what this rank wrote.")] = None,
    follow: Annotated[bool, Option("--follow", "-f", help="Also print what comes, until the run ends.")] = False,
) -> None:
    """Print the logs of a run: of its flow and of the ranks of its newest attempt.

    With `--rank` what that rank printed, and its traceback and stack if it has left one.
    """
    from onward.flows.run_state.run_logs import show_logs

    show_logs(run, rank=rank, follow=follow)


def runs(
    state: Annotated[str, Option(help="Only runs in these states: a,b.")] = "",
    name: Annotated[str, Option(help="Only runs of this configuration.")] = "",
    last: Annotated[int, Option(min=0, max=1_000_000_000, help="Only so many of the newest ones; 0 = all.")] = 20,
    everything: Annotated[bool, Option("--all", help="All of them, as --last 0.")] = False,
    as_json: Json = False,
) -> None:
    """List the newest runs, newest first.

    Columns that do not fit into the terminal are left out, the least important first; `--json` has everything of the
    runs that are listed, and how many there are.
    """
    from typing import get_args

    from onward.flows.run_state.run_index import State, listed_runs
    from onward.flows.run_state.run_table import rows_of
    from onward.flows.shown.printed_table import table

    states = [each.strip() for each in state.split(",") if each.strip()]
    if unknown := set(states) - {*get_args(State)}:
        known = ", ".join(get_args(State))
        raise ConfigError(f"--state: there is no state {', '.join(sorted(unknown))}; choose from {known}")
    selected = [status for _, status in listed_runs()]
    if states:
        selected = [status for status in selected if status["state"] in states]
    if name:
        selected = [status for status in selected if name in (status["name"], status["config_name"])]
    shown = selected if everything else selected[: last or None]
    if as_json:
        print_json({"runs": shown, "total": len(selected)})
        return
    # a pipe has no width, and gets all columns
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 10_000
    heads, rows = rows_of(shown, width)
    table(rows, heads=heads)
    if len(shown) < len(selected):
        say(f"the newest {len(shown)} of {len(selected)}; --all shows all")
    for each in shown:
        if each["state"] == "damaged":
            print(f"{each['name'] or each['run_id']} is damaged: {each['error']}", file=sys.stderr)


def clean(days: Days = 30.0, as_json: Json = False) -> None:
    """Delete local copies of remote files that were not used for some days.

    They are under ONWARD_HOME/downloads, and shard files of servers under ONWARD_HOME/streamed. Copies of a run that
    has not exported its model stay: `onward resume` reads them. What is deleted and needed again is downloaded again.
    """
    from onward.flows.run_state.runs import clean_downloads

    print_facts(vars(clean_downloads(days)), as_json=as_json)


def _show(outcome: RunOutcome, *, as_json: bool) -> None:
    """Print how a run ended."""
    if as_json:
        print_json(outcome.model_dump(mode="json"))
    else:
        from onward.flows.shown.terminal_tables import outcome as outcome_rows
        from onward.flows.shown.terminal_tables import table, variant_rows

        table([*outcome_rows(outcome.model_dump(mode="json")), *variant_rows(outcome)])
