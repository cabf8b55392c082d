"""A substitute for `python -m onward.trainer` in the tests of the export task: every way such a process can end.

python -m tests.support.exporting {export,refuse,crash} {export,variant} RUN_DIR {CHECKPOINT,KIND} --folder FOLDER
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import numpy as np

from onward.trainer.run.directory import RunDir
from onward.trainer.run.durable_files import sha256
from onward.trainer.run.export_folder import example_in
from onward.trainer.run.outcomes.refusals import Refusal, refusal_in
from onward.trainer.run.records import ExportedModel, write_record
from tests.support.graphs import tiny_mlp

PARITY = 2.5e-7


def export(run: RunDir, checkpoint: Path, folder: Path) -> int:
    """Leave a proven file."""
    path = folder / "model.onnx"
    path.write_bytes(tiny_mlp(seed=len(run.root.parts)).SerializeToString())
    with example_in(folder).open("wb") as file:
        np.savez(file, features=np.ones((1, 4), np.float32))
    exported = ExportedModel(
        path=path,
        sha256=sha256(path),
        step=int(checkpoint.name.removeprefix("step-")),
        parity=PARITY,
        before={"evaluation/loss": 2.0},
        after={"evaluation/loss": 0.5},
        changed=4,
    )
    write_record(folder / "model.json", exported)
    return 0


def refuse(run: RunDir, checkpoint: Path, folder: Path) -> int:
    """Leave a refusal."""
    write_record(refusal_in(folder), Refusal(kind="ExportRefused", problems=("this is wrong", "and that")))
    return 5


def crash(run: RunDir, checkpoint: Path, folder: Path) -> int:
    """Die as onnxruntime may, with a last word."""
    print("the last word", flush=True)
    os.kill(os.getpid(), signal.SIGSEGV)
    return 0


if __name__ == "__main__":
    what, command, root, checkpoint, _, folder = sys.argv[1:]
    act = {"export": export, "refuse": refuse, "crash": crash}[what if command == "export" else "crash"]
    sys.exit(act(RunDir(Path(root)), Path(checkpoint), Path(folder)))
