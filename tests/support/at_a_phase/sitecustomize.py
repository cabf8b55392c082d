"""Do something once a process of a run reaches a phase. Python imports this file when it starts.

A test puts this folder first in PYTHONPATH, and a description into ONWARD_TEST_PHASE:

    {"phase": "open .*/train.log", "action": "SIGKILL", "once": "/tmp/.../reached", "home": "/tmp/.../home"}

phase: a pattern over what processes do: "open PATH" for writing, "os.rename FROM TO", "sqlite3.connect PATH",
"subprocess.Popen PROGRAM WORDS", "event KIND STEP" of the event log, "phase NAME 0" of the flow's phases. action: a
signal to the flow, "wait" until the file `once`.go exists, "raise MODULE:CLASS TEXT" in the process itself, or what
happens to the disk `home`: "fill" it, "inodes" to take all of them, "read-only", or "EIO" for errors of the device
from then on. once: "" = each time. The flow is the first process with this variable.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import sys
import time
from typing import Any

WATCHED = ("open", "os.rename", "sqlite3.connect", "subprocess.Popen", "event", "phase")
_busy = False
_patched = False


def _text(event: str, arguments: tuple[Any, ...]) -> str:
    if event == "open":
        path, mode, flags = arguments
        writes = set(mode) & set("wax+") if isinstance(mode, str) else (flags or 0) & (os.O_WRONLY | os.O_RDWR)
        return f"open {path}" if writes else ""
    return " ".join([event, *map(str, arguments[:2])])


def _wait_shortly() -> None:
    """Let a retry wait 3 s for a disk, and not 10 minutes, and before it as long as the test says."""
    waiting = sys.modules.get("onward.tasks.attempts.wait_before_retry")
    if waiting is not None and hasattr(waiting, "STORAGE_WAIT_S"):
        waiting.STORAGE_WAIT_S = 3.0
    policy = sys.modules.get("onward.tasks.attempts.retry_policy")
    if SETTINGS.get("retry_delay_s") and policy is not None and hasattr(policy, "LONGEST_DELAY_S"):
        policy.FIRST_DELAY_S = policy.LONGEST_DELAY_S = SETTINGS["retry_delay_s"]


def _report_events() -> None:
    """Let the event log announce each of its lines."""
    global _patched
    events = sys.modules.get("onward.trainer.events")
    if _patched or events is None or not hasattr(events, "Heartbeat"):
        return
    _patched, emit = True, events.EventWriter.emit

    def emit_announced(writer: Any, event: Any) -> None:
        sys.audit("event" if writer._announces else "phase", event.kind, event.step)
        emit(writer, event)

    events.EventWriter.emit = emit_announced


def _hook(event: str, arguments: tuple[Any, ...]) -> None:
    global _busy
    if _busy or event not in WATCHED:
        return
    _busy = True
    try:
        _wait_shortly()
        _report_events()
        if re.search(SETTINGS["phase"], _text(event, arguments)):
            if SETTINGS["once"]:
                try:
                    os.close(os.open(SETTINGS["once"], os.O_CREAT | os.O_EXCL))
                except FileExistsError:
                    return
            _act()
    finally:
        _busy = False


def _act() -> None:
    if SETTINGS["action"].startswith("raise "):
        _, kind, text = SETTINGS["action"].split(" ", 2)
        module, _, name = kind.partition(":")
        raise getattr(sys.modules[module], name)(text)
    if SETTINGS["action"] == "wait":
        deadline = time.monotonic() + 60
        while not os.path.exists(f"{SETTINGS['once']}.go") and time.monotonic() < deadline:  # noqa: PTH110
            time.sleep(0.05)
        return
    if SETTINGS["action"] in ("inodes", "read-only", "EIO"):
        from tests.support import full_disk

        {"inodes": full_disk.fill_inodes, "read-only": full_disk.make_read_only, "EIO": full_disk.shut_down}[
            SETTINGS["action"]
        ](SETTINGS["home"])
        return
    if SETTINGS["action"] != "fill":
        os.kill(int(os.environ["ONWARD_TEST_FLOW"]), signal.Signals[SETTINGS["action"]])
        return
    ballast = os.open(os.path.join(SETTINGS["home"], "ballast"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)  # noqa: PTH118
    for size in (1 << 20, 1 << 12, 1):
        with contextlib.suppress(OSError):
            while os.write(ballast, bytes(size)):
                pass
    os.close(ballast)


if "ONWARD_TEST_PHASE" in os.environ:
    SETTINGS = json.loads(os.environ["ONWARD_TEST_PHASE"])
    os.environ.setdefault("ONWARD_TEST_FLOW", str(os.getpid()))
    sys.addaudithook(_hook)
