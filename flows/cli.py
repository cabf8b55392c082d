"""The command `onward`: its commands in groups, with examples and exit statuses, and what happens on an error.

The commands themselves are in `onward.flows.commands`. An error that Onward raises on purpose ends the process with
the error's exit status (onward.trainer.errors); Ctrl-C with 130; any other error with 1.
"""

from __future__ import annotations

import atexit
import gc
import inspect
import shlex
import sys
import tempfile
import traceback
from collections.abc import Callable
from typing import NoReturn

import typer

from onward.flows.commands import collection, inspection, models, proposal, reports, servers, submission, sweeps
from onward.flows.commands import deployment_commands as deployments
from onward.flows.commands import prediction_commands as predictions
from onward.flows.commands import training_commands as training
from onward.flows.commands.common import SettingsCommand, print_json
from onward.flows.shown.terminal import escaped_output
from onward.trainer.errors import OnwardError, printed
from onward.trainer.run.outcomes.ending_kinds import EXIT_STATUSES


def help_text(command: Callable[..., None]) -> str:
    """Return a command's docstring with each paragraph on one line, because the help texts keep line breaks."""
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in (command.__doc__ or "").split("\n\n"))


def notes(*examples: str, exits: tuple[int, ...]) -> str:
    """Return the end of a help text: example lines, and the exit statuses that a command can end with."""
    shown = [f"  {example}" for example in examples]
    statuses = [f"  {status:>3}  {EXIT_STATUSES[status].meaning}" for status in exits]
    return "\n".join(["Examples:" if len(examples) > 1 else "Example:", *shown, "", "Exit status:", *statuses])


COMMANDS: dict[str, list[tuple[Callable[..., None], str]]] = {
    "Train": [
        (
            training.run,
            notes(
                "onward run squeezenet-digits",
                "onward run digits.toml train.num_epochs=2 launch.retries=3",
                exits=(0, 2, 3, 4, 5, 6, 7, 8, 70, 72, 75, 130, 143),
            ),
        ),
        (
            submission.submit,
            notes(
                "onward submit digits.toml parallel.data=16 --name d1 --nodes 2 --sbatch time=2:00:00",
                "onward submit digits.toml --name d1 --dry-run",
                "onward submit digits.toml --name d1 --on kubernetes --image registry/onward:1 launch.device=cuda",
                exits=(0, 2, 3),
            ),
        ),
        (training.resume, notes("onward resume last", exits=(0, 2, 3, 4, 5, 6, 7, 8, 70, 72, 75, 130, 143))),
        (
            proposal.init,
            notes(
                "onward init model.onnx train.csv",
                "onward init model.onnx photos -o photos.toml --range-test",
                "onward init model.onnx train.csv data.label=price",
                exits=(0, 2),
            ),
        ),
        (
            sweeps.sweep,
            notes(
                "onward sweep digits.toml optimizer.learning_rate=1e-4,3e-4,1e-3",
                "onward sweep digits.toml 'optimizer.learning_rate=log(1e-5, 1e-2)' --trials 20 --prune",
                "onward sweep --resume last",
                exits=(0, 2, 3, 5, 70, 75, 130, 143),
            ),
        ),
        (training.status, notes("onward status", "onward status digits-14 --follow", exits=(0, 2))),
        (training.stop, notes("onward stop digits-14", exits=(0, 2, 3))),
        (training.logs, notes("onward logs digits-14 -f", "onward logs digits-14 --rank 1", exits=(0, 2))),
        (training.runs, notes("onward runs", "onward runs --state failed,stopped --last 5", exits=(0, 2))),
        (reports.report, notes("onward report", "onward report digits-14 digits-15 -o both.html", exits=(0, 2, 3))),
        (
            training.verify,
            notes(
                "onward verify last", "onward verify last --replay --from 0", exits=(0, 2, 3, 4, 6, 7, 8, 70, 75, 130)
            ),
        ),
        (training.clean, notes("onward clean", "onward clean --days 7", exits=(0,))),
        (collection.gc, notes("onward gc", "onward gc --days 7 --keep 3 --yes", exits=(0, 2))),
    ],
    "Inspect": [
        (inspection.doctor, notes("onward doctor", "onward doctor model.onnx", exits=(0, 2, 3))),
        (inspection.config, notes("onward config digits.toml optimizer.learning_rate=3e-4", exits=(0, 2))),
        (
            inspection.plan,
            notes(
                "onward plan digits.toml parallel.tensor=2",
                "onward plan digits.toml --measure",
                exits=(0, 2, 3, 6, 7, 70, 75),
            ),
        ),
        (inspection.diff, notes("onward diff model.onnx trained.onnx", exits=(0, 1, 2))),
    ],
    "Models": [
        (models.example, notes("onward example", "onward example images", exits=(0, 2, 3))),
        (models.export, notes("onward export last -o digits.onnx --variant fp16", exits=(0, 2, 3, 4, 5))),
        (
            predictions.predict,
            notes(
                "onward predict last customers.csv -o predicted.csv",
                "onward predict digits.onnx photos --top 3",
                "onward predict models:/digits@champion new.parquet -o predicted.parquet",
                exits=(0, 2, 3),
            ),
        ),
        (
            predictions.evaluate,
            notes(
                "onward evaluate last new.csv",
                "onward evaluate resnet18.onnx photos data.image.mean=0.5",
                exits=(0, 2, 3),
            ),
        ),
        (models.bundle, notes("onward bundle last digits.bundle", exits=(0, 2, 3, 4))),
        (models.promote, notes("onward promote digits 3", exits=(0, 2, 3))),
    ],
    "Serve": [
        (servers.up, notes("onward up", exits=(0, 3))),
        (servers.deploy, notes("onward deploy digits.toml --name nightly --cron '0 2 * * *'", exits=(0, 2, 3))),
        (servers.ui, notes("onward ui", exits=(0, 3))),
        (servers.down, notes("onward down", exits=(0,))),
    ],
}
"""Group of `onward --help` -> its commands, each with the end of its help text."""

app = typer.Typer(
    help="Train an ONNX model on MPI ranks and get the same file back with trained weights.",
    epilog=notes("onward run squeezenet-digits", exits=tuple(EXIT_STATUSES))
    + "\n\nEvery command takes --debug, which prints the traceback of an error.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
# Registered here and not by decorators, so that the order and the groups of the help are in one place.
for group, commands in COMMANDS.items():
    for command, end in commands:
        kind = SettingsCommand if "overrides" in inspect.signature(command).parameters else None
        app.command(cls=kind, rich_help_panel=group, help=help_text(command), epilog=end)(command)

reference = typer.Typer(help="Write an untrained reference model as an ONNX file.", no_args_is_help=True)
app.add_typer(reference, name="reference", rich_help_panel="Models")
reference.command(epilog=notes("onward reference squeezenet --num-classes 10 -o squeezenet.onnx", exits=(0, 2, 3)))(
    models.squeezenet
)
reference.command(epilog=notes("onward reference gpt2 --vocab-size 256 -o gpt2.onnx", exits=(0, 2, 3)))(models.gpt2)

deployed = typer.Typer(help="List, pause, resume, delete and start deployments.", no_args_is_help=True)
app.add_typer(deployed, name="deployments", rich_help_panel="Serve")
DEPLOYMENTS: dict[str, Callable[..., None]] = {
    "list": deployments.listed,
    "pause": deployments.pause,
    "resume": deployments.resume,
    "delete": deployments.delete,
    "run": deployments.run,
}
for name, each in DEPLOYMENTS.items():
    example = f"onward deployments {name}{'' if name == 'list' else ' nightly'}"
    deployed.command(name, help=help_text(each), epilog=notes(example, exits=(0, 2, 3)))(each)


def main() -> None:
    """Run a command, whose output is escaped (terminal.py).

    Print an error on stderr: a heading, a line for each problem, what to do; exit with its status.

    The traceback of an error that nobody has foreseen goes into a file: it would hide the line that explains the error.
    With --debug, which every command takes, the traceback of any error is printed.
    """
    # Python would search all that was imported for garbage once more, a second for `onward run`
    atexit.register(gc.freeze)
    debug = "--debug" in sys.argv
    sys.argv = [word for word in sys.argv if word != "--debug"]
    with escaped_output():
        try:
            app()
        except KeyboardInterrupt:
            sys.exit(130)
        except Exception as error:
            if debug:
                traceback.print_exc()
            _exit_with(_own_error(error))


def _own_error(error: Exception) -> OnwardError:
    """Return Onward's error for one that ended a command; of an unexpected one it names the file to report."""
    from onward.trainer.run.outcomes.refusals import known_error, unexpected

    if known := known_error(error):
        return known
    # in the directory for temporary files: ONWARD_HOME may be what cannot be written
    try:
        with tempfile.NamedTemporaryFile(
            "w",
            prefix="onward-error-",
            suffix=".log",
            delete=False,
            errors="backslashreplace",  # an argument may be a file name that is not UTF-8
        ) as file:
            file.write(f"onward {shlex.join(sys.argv[1:])}\n{traceback.format_exc()}")
    except OSError:
        traceback.print_exc()
        return unexpected(error, "above")
    return unexpected(error, f"in {file.name}")


def _exit_with(error: OnwardError) -> NoReturn:
    problems = printed(error.problems)
    command = next((word for word in sys.argv[1:] if not word.startswith("-")), "")
    status = EXIT_STATUSES[error.exit_code]
    print(f"onward {command}: {status.meaning.partition(';')[0]}", file=sys.stderr)
    for problem in problems:
        print(f"  - {problem}", file=sys.stderr)
    print("; ".join((f"To do: {status.to_do}", *getattr(error, "__notes__", ()))), file=sys.stderr)
    # the arguments themselves, because the error may come from before the command has read its options
    if "--json" in sys.argv:
        print_json({"error": type(error).__name__, "problems": problems, "exit_code": error.exit_code})
    sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
