"""Run the trainer, but let rank 0 wait behind one event: whoever kills the job at this event is never too late.

python -m tests.support.paused KIND STEP onward.trainer train RUN_DIR
"""

from __future__ import annotations

import runpy
import sys
import time

from onward.trainer.events import Event, EventWriter

PAUSE_S = 60.0

if __name__ == "__main__":
    kind, step, module, *arguments = sys.argv[1:]
    emit = EventWriter.emit

    def emit_and_wait(writer: EventWriter, event: Event) -> None:
        emit(writer, event)
        if writer._file is not None and (event.kind, event.step) == (kind, int(step)):
            time.sleep(PAUSE_S)

    EventWriter.emit = emit_and_wait  # type: ignore[method-assign]
    sys.argv[1:] = arguments
    runpy.run_module(module, run_name="__main__", alter_sys=True)
