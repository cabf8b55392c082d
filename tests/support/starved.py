"""Run the trainer, but let it have hardly any more memory after one event of rank 0.

python -m tests.support.starved KIND STEP onward.trainer train RUN_DIR
"""

from __future__ import annotations

import resource
import runpy
import sys

import psutil

from onward.trainer.events import Event, EventWriter

MORE_BYTES = 96 << 20
"""Enough for Python and one activation of 64 MiB, and too little for two."""

if __name__ == "__main__":
    kind, step, module, *arguments = sys.argv[1:]
    emit = EventWriter.emit

    def emit_and_starve(writer: EventWriter, event: Event) -> None:
        emit(writer, event)
        if writer._file is not None and (event.kind, event.step) == (kind, int(step)):
            most = psutil.Process().memory_info().vms + MORE_BYTES
            resource.setrlimit(resource.RLIMIT_AS, (most, resource.RLIM_INFINITY))

    EventWriter.emit = emit_and_starve  # type: ignore[method-assign]
    sys.argv[1:] = arguments
    runpy.run_module(module, run_name="__main__", alter_sys=True)
