"""What identifies a process among all that this machine ever runs, and whether it still lives."""

from __future__ import annotations

import functools
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil


def this_process() -> dict[str, Any]:
    """Return what identifies this process."""
    me = psutil.Process()
    return {"host": socket.gethostname(), "boot": boot_id(), "pid": me.pid, "started": me.create_time()}


def is_gone(process: Mapping[str, Any] | None) -> bool:
    """Return whether a process of `this_process` has ended; False for an unknown one and one of another machine."""
    if not process or process.get("host") != socket.gethostname():
        return False
    if process.get("boot") != boot_id():
        return True
    try:
        # process ids are given again; the time of the start tells the processes apart
        return bool(psutil.Process(process["pid"]).create_time() != process["started"])
    except psutil.NoSuchProcess:
        return True


@functools.cache
def boot_id() -> str:
    """Return an id that is new at every start of this machine."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
