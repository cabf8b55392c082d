"""The commands of the recorded sessions, in their order: one after the other in one directory, with one home."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Session:
    """One command, and what a reader should know about it."""

    command: str
    """As it is typed."""
    about: str
    """One sentence above it."""
    status: int = 0
    """The exit status."""
    beside: str = ""
    """A command that is started before this one, whose training has begun when this one is typed; it must end then."""
    shows_view: bool = False
    """Whether the live view is shown, too, as it stood when half of the steps were made."""
    most_lines: int = 60
    """Lines that are shown; behind them stands how many more there are."""


LONG = "onward run table/table.toml train.num_epochs=400 checkpoint.period=500"

SESSIONS = (
    Session("onward example", "The examples that can be made here."),
    Session("onward example table", "Makes one: a model, data, and a configuration."),
    Session("onward doctor table/model.onnx", "What is trained of a file, and how it is imported."),
    Session(
        "onward config table/table.toml --changed", "Settings that differ from the defaults, and where they are from."
    ),
    Session("onward plan table/table.toml", "Ranks, memory and messages, before anything is started."),
    Session(
        "onward init table/model.onnx table/table.parquet data.label=price -o proposed.toml",
        "Proposes a configuration for a model and data.",
    ),
    Session("onward up", "Starts the servers and a worker."),
    Session(
        "onward run table/table.toml train.num_epochs=4 checkpoint.period=50",
        "Trains. The lines stay; the view below them is removed at the end, when the result takes its place.",
        shows_view=True,
    ),
    Session(
        "onward run table/table.toml data.label=prize",
        "What is wrong is said under a heading, all of it at once, and nothing is started.",
        status=2,
    ),
    Session(
        "onward submit table/table.toml --name nightly --sbatch time=0:30:00 --dry-run",
        "Prints the script of a job of Slurm; without --dry-run it is sent, and requeued until the run is finished.",
    ),
    Session("onward status table", "The state of a run."),
    Session("onward stop table", "Stops a run that was started in another terminal.", beside=LONG),
    Session("onward runs", "All runs. Columns that do not fit into the terminal are left out."),
    Session(
        "onward resume table-2 stop.max_hours=0.001",
        "Goes on from the checkpoint, here with a limit that soon ends it.",
    ),
    Session("onward logs table-1 --rank 0", "What one rank wrote."),
    Session("onward verify table-1", "Reads the checkpoints again."),
    Session("onward report table-1 table-2 -o both.html", "Compares runs in one HTML file."),
    Session("onward export table-1 -o trained.onnx", "Writes a checkpoint as an ONNX file, and verifies it."),
    Session(
        "onward predict table-1 table/table.parquet -o predicted.csv", "Predicts each row of a table, by raw columns."
    ),
    Session("onward evaluate table-1 table/table.parquet", "Measures a file on labelled rows. Nothing is trained."),
    Session(
        "onward diff table/model.onnx trained.onnx", "What distinguishes two files; the exit status is 1.", status=1
    ),
    Session("onward bundle table-1 table.bundle", "Writes a checkpoint with all that its export needs into one file."),
    Session("onward promote table 1", "Lets the alias name another version."),
    Session(
        "onward sweep table/table.toml optimizer.learning_rate=1e-3,3e-3 train.num_epochs=1",
        "Makes a run for each value, and exports the best.",
    ),
    Session("onward deploy table/table.toml --name nightly --cron '0 2 * * *'", "Makes a deployment."),
    Session("onward deployments list", "Lists them."),
    Session("onward deployments pause nightly", "Stops its schedule."),
    Session("onward deployments resume nightly", "Starts it again."),
    Session("onward deployments run nightly", "Starts a run now."),
    Session("onward deployments delete nightly", "Deletes a deployment."),
    Session("onward ui", "The addresses of the servers."),
    Session("onward down", "Stops the servers; a deployed run saves a checkpoint first."),
    Session("onward gc", "What nobody needs any more; --yes removes it."),
    Session("onward clean", "Deletes local copies of remote files."),
    Session(
        "onward reference squeezenet --num-classes 10 --image-size 32 -o squeezenet.onnx", "Writes a reference model."
    ),
    Session(
        "onward reference gpt2 --vocab-size 256 --num-layers 2 --num-heads 2 --width 32 -o gpt2.onnx",
        "Writes another one.",
    ),
)


def commands() -> list[str]:
    """The command of each session, such as `deployments list`: the words behind `onward` that name it."""
    groups = ("deployments", "reference")
    words = [each.command.split()[1:] for each in SESSIONS]
    return [" ".join(each[: 2 if each[0] in groups else 1]) for each in words]
