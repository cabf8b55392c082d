"""The phases of a run: when each began, as one JSON line in RUN_DIR/phases.jsonl, which has the form of the event log.

    {"at_ms": 1767225600000, "attempt": 0, "step": 0, "kind": "configure", "pid": 4711}

A phase lasts until the next line; lines of the kind `note`, whose `text` says how far it is, do not count. The lines of
one process up to its line `end` are one flow of the run; a resumed run has several flows. A flow that was killed has no
line `end`.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from typing import Literal, TypeAlias, get_args

from onward.trainer.events import Event, EventWriter, Int64, read_events
from onward.trainer.run.directory import RunDir

Phase: TypeAlias = Literal["start", "configure", "preflight", "data", "train", "export", "approval", "end"]
"""`start`: the command looks for its servers, or starts them, and then the flow. `approval`: somebody is asked."""


class PhaseStart(Event):
    """A phase begins."""

    kind: Phase
    pid: int
    """The process of the flow."""
    began_ms: Int64 = 0
    """Milliseconds since 1970, of a phase that began before its line was written; 0 = then."""

    @property
    def begin_ms(self) -> int:
        return self.began_ms or self.at_ms


class Note(Event):
    """A line that begins no phase."""

    kind: Literal["note"] = "note"
    pid: int
    text: str = ""
    """How far the present phase is."""


RECORDS: Mapping[str, type[Event]] = {**dict.fromkeys(get_args(Phase), PhaseStart), "note": Note}


def enter_phase(run: RunDir, phase: Phase, *, at_ms: int | None = None) -> None:
    """Record that a phase begins. at_ms: when it has begun; None = now. A full disk is no error."""
    line = PhaseStart(step=0, kind=phase, pid=os.getpid())
    _append(run, line if at_ms is None else line.model_copy(update={"began_ms": at_ms}))


def note_in_phase(run: RunDir, text: str) -> None:
    """Record how far the present phase is, for who follows the run. A full disk is no error."""
    _append(run, Note(step=0, pid=os.getpid(), text=text))


def _append(run: RunDir, line: Event) -> None:
    with contextlib.suppress(OSError):
        writer = EventWriter(run.phases, attempt=0, rank=0, announces=False)
        writer.emit(line)
        writer.close()


def phases(run: RunDir) -> list[PhaseStart]:
    """Return all phases of a run in their order; [] if it was trained without a flow, or by an earlier version."""
    return [event for event, _ in read_events(run.phases, records=RECORDS) if isinstance(event, PhaseStart)]
