"""Run the trainer, but let it have hardly any more memory after one event of rank 0.

python -m tests.support.starved KIND STEP onward.trainer train RUN_DIR
"""

from __future__ import annotations

import resource
import runpy
import sys
from typing import Any

import psutil

from onward.trainer.events import EventWriter

MORE_BYTES = 96 << 20
"""Enough for Python and one activation of 64 MiB, and too little for two."""

if __name__ == "__main__":
    kind, step, module, *arguments = sys.argv[1:]
    emit = EventWriter.emit

    def emit_and_starve(writer: EventWriter, its_kind: str, its_step: int, **fields: Any) -> None:
        emit(writer, its_kind, its_step, **fields)
        if writer._file is not None and (its_kind, its_step) == (kind, int(step)):
            most = psutil.Process().memory_info().vms + MORE_BYTES
            resource.setrlimit(resource.RLIMIT_AS, (most, resource.RLIM_INFINITY))

    EventWriter.emit = emit_and_starve  # type: ignore[method-assign]
    sys.argv[1:] = arguments
    runpy.run_module(module, run_name="__main__", alter_sys=True)
