"""Run one process of the trainer: a rank of the training job, an export, a plan, a rehearsal.

    mpirun -n 2 python -m onward.trainer preflight RUN_DIR     report host, device and versions; test one all-reduce
    mpirun -n 2 python -m onward.trainer train RUN_DIR         train, or resume from the newest complete checkpoint
    python -m onward.trainer export RUN_DIR CHECKPOINT         write the trained ONNX file and verify it
    python -m onward.trainer training RUN_DIR CHECKPOINT       write ONNX graphs that continue training without torch
    python -m onward.trainer variant RUN_DIR KIND              write one variant of the exported file
    python -m onward.trainer compare RUN_DIR SERVED.onnx       evaluate the served file beside the exported one
    python -m onward.trainer plan FOLDER                       estimate the layout: plan.json, or refused.json
    python -m onward.trainer quantize FOLDER                   insert QuantizeLinear: quantized/, or refused.json
    python -m onward.trainer rehearse FOLDER                   run a few rows: rehearsal.json, or refused.json
    python -m onward.trainer try-import FOLDER                 run converters, look for cuts: imported.json

All settings are in RUN_DIR/config.json. Exit status: 0 done, 75 stopped after saving a checkpoint, 70 failed
(RUN_DIR/errors has the reason), 72 a newer attempt has taken over RUN_DIR, 78 refused: a retry would fail again.
"""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path

from onward.trainer.distributed.launched import die_with_parent, launched_rank
from onward.trainer.run.machine.quick_imports import quick_imports
from onward.trainer.run.machine.this_machine import ignore_lower_precision, spin_briefly_if_busy

# Before the imports below, which take seconds: a rank whose launcher is killed meanwhile would be left behind.
if launched_rank() is not None:
    die_with_parent()

# before torch is imported, whose OpenMP and oneDNN read the environment
spin_briefly_if_busy()
ignore_lower_precision()

with quick_imports():
    from onward.trainer.distributed.preflight import run_preflight
    from onward.trainer.run.allowed_code import allow_code_of
    from onward.trainer.run.directory import RunDir
    from onward.trainer.train_rank import train_rank


EXPORTS = ("export", "training", "variant", "compare")


def main() -> int:
    """Parse the command line and run the command."""
    parser = argparse.ArgumentParser(
        "python -m onward.trainer", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    alone = ("preflight", "plan", "quantize", "rehearse", "try-import")
    for name in ("train", *EXPORTS, *alone):
        command = commands.add_parser(name)
        command.add_argument("run", type=lambda path: RunDir(Path(path).resolve()))
        if name == "train":
            command.add_argument("--until", type=int, default=0, help="stop after this step; 0 = train to the end")
        if name in EXPORTS:
            command.add_argument("what", help="directory of the checkpoint, kind of variant, or the served file")
            command.add_argument("--folder", type=Path, help="directory of the exported file; default: RUN_DIR/export")
    arguments = parser.parse_args()
    # a rank signs its lines, because all ranks write into one log (`onward logs --rank`)
    signed = f"rank {launched_rank() or 0}: " if arguments.command == "train" else ""
    line = f"{signed}%(asctime)s %(levelname)s %(name)s: %(message)s"
    logging.basicConfig(level=logging.INFO, format=line, stream=sys.stderr)
    # before any command: converters and loss files are executed by most of them
    allow_code_of(arguments.run)
    return run_command(arguments, arguments.run)


def run_command(arguments: argparse.Namespace, run: RunDir) -> int:
    """Run one command; return its exit status. Each imports what it needs itself: these imports take seconds."""
    command = arguments.command
    if command == "train":
        return train_rank(run, until=arguments.until)
    if command == "preflight":
        run_preflight(run)
    elif command == "plan":
        with quick_imports():
            from onward.trainer.rehearsal.layout_plan import make_plan
        make_plan(run)
    elif command == "rehearse":
        from onward.trainer.rehearsal.rehearse import rehearse

        rehearse(run)
    elif command == "try-import":
        from onward.trainer.rehearsal.try_import import try_import

        try_import(run)
    else:
        run_export(arguments, run)
    return 0


def run_export(arguments: argparse.Namespace, run: RunDir) -> None:
    """Run one of the commands of an export."""
    from onward.trainer.export import export_commands

    command = arguments.command
    if command == "quantize":
        export_commands.make_quantized(run)
        return
    what, folder = arguments.what, arguments.folder or run.export
    if command == "variant":
        export_commands.make_variant(run, what, folder=folder)
    elif command == "compare":
        export_commands.compare_with_served(run, Path(what), folder=folder)
    else:
        export_commands.export_file(run, Path(what), folder=folder, training=command == "training")


if __name__ == "__main__":
    sys.exit(main())
