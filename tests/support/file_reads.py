"""Run the trainer, and write down how often which function of it has read which file.

python -m tests.support.file_reads OUT.json onward.trainer {train,export} RUN_DIR ...

Files that onnx.checker reads are counted under its name. What onnxruntime reads is not seen.
"""

from __future__ import annotations

import atexit
import json
import os
import runpy
import sys
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import onnx

READERS = ("opened", "read_bounded")
"""Functions that open files for others."""


class FileReads:
    """Counts the ONNX and JSON files that this process opens for reading: `path: function` -> how often."""

    def __init__(self) -> None:
        self.counted: Counter[str] = Counter()

    def audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Count a file under the innermost function of the trainer: a hook for `sys.addaudithook`."""
        if event != "open" or not isinstance(arguments[0], str | bytes):
            return
        path, _, flags = arguments
        name = os.fsdecode(path)
        if name.endswith((".onnx", ".json")) and flags & os.O_ACCMODE == os.O_RDONLY:
            self.counted[f"{name}: {_caller(sys._getframe(1))}"] += 1

    def check_model(self, model: Any, *arguments: Any, **options: Any) -> None:
        """Count a file that onnx.checker reads; then check it."""
        if isinstance(model, str):
            self.counted[f"{model}: onnx.checker"] += 1
        CHECK(model, *arguments, **options)


CHECK = onnx.checker.check_model


def _caller(frame: FrameType | None) -> str:
    while frame is not None:
        module, function = frame.f_globals.get("__name__", ""), frame.f_code.co_qualname
        if module.startswith("onward.trainer.") and function not in READERS:
            return function
        frame = frame.f_back
    return ""


def main(out: str, module: str, *arguments: str) -> None:
    """Run a module as `python -m` does; leave the counts when the process ends."""
    reads = FileReads()
    atexit.register(lambda: Path(out).write_text(json.dumps(reads.counted)))
    onnx.checker.check_model = reads.check_model
    sys.addaudithook(reads.audit)
    sys.argv[1:] = arguments
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
