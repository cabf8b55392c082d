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
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from onward.trainer.events import Event, EventWriter, Int64, read_events
from onward.trainer.run.directory import RunDir

Phase: TypeAlias = Literal["start", "configure", "preflight", "data", "train", "export", "approval", "end"]
"""`start`: the command looks for its servers, or starts them, and then the flow. `approval`: somebody is asked."""


class PhaseLine(Event):
    """The line of a phase that begins."""

    kind: Phase
    pid: int
    """The process of the flow."""
    began_ms: Int64 | None = None
    """Milliseconds since 1970, of a phase that began before its line was written."""

    @property
    def start(self) -> PhaseStart:
        return PhaseStart(self.at_ms if self.began_ms is None else self.began_ms, self.kind, self.pid)


class Note(Event):
    """A line that begins no phase."""

    kind: Literal["note"] = "note"
    pid: int
    text: str = ""
    """How far the present phase is."""


RECORDS: Mapping[str, type[Event]] = {**dict.fromkeys(get_args(Phase), PhaseLine), "note": Note}


@dataclass(frozen=True)
class PhaseStart:
    """The beginning of a phase, in milliseconds since 1970."""

    at_ms: int
    phase: Phase
    pid: int


def enter_phase(run: RunDir, phase: Phase, *, at_ms: int | None = None) -> None:
    """Record that a phase begins. at_ms: when it has begun; None = now. A full disk is no error."""
    with contextlib.suppress(OSError):
        writer = EventWriter(run.phases, attempt=0, rank=0, announces=False)
        earlier = {} if at_ms is None else {"began_ms": at_ms}
        writer.emit(PhaseLine(step=0, kind=phase, pid=os.getpid(), **earlier))
        writer.close()


def note_in_phase(run: RunDir, text: str) -> None:
    """Record how far the present phase is, for who follows the run. A full disk is no error."""
    with contextlib.suppress(OSError):
        writer = EventWriter(run.phases, attempt=0, rank=0, announces=False)
        writer.emit(Note(step=0, pid=os.getpid(), text=text))
        writer.close()


def phases(run: RunDir) -> list[PhaseStart]:
    """Return all phases of a run in their order; [] if it was trained without a flow, or by an earlier version."""
    return [event.start for event, _ in read_events(run.phases, records=RECORDS) if isinstance(event, PhaseLine)]
