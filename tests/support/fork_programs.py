"""Programs that tests/infra/job/test_forks.py starts as forks, and a fork server that imports no torch."""

from __future__ import annotations

import atexit
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import gettempdir
from typing import Any

from onward.trainer.fork_server import serve


def main(command: str, *words: str) -> int:
    if command == "serve":
        listener, alive, _ = words
        serve(socket.socket(fileno=int(listener)), int(alive))
    elif command == "say":
        facts = {
            "words": words,
            "env": os.environ.get("SAID"),
            "cwd": str(Path.cwd()),
            "name": __name__,
            "tmp": gettempdir(),
            "pid": os.getpid(),
            "session": os.getsid(0),
        }
        print(json.dumps(facts))
        print("and an error", file=sys.stderr)
        return int(words[0])
    elif command == "end":
        ENDINGS[words[0]]()
        return 0
    elif command == "wait":
        place = Path(words[0])
        signal.signal(signal.SIGUSR1, lambda number, frame: place.with_suffix(".asked").touch())
        place.write_text(str(os.getpid()))
        for number in range(10_000):
            place.with_suffix(".tick").write_text(str(number))
            time.sleep(0.02)
    elif command == "parent":
        parent(Path(words[0]))
    return 0


class Unspeakable(Exception):
    """An error without a text."""

    def __str__(self) -> str:
        raise RuntimeError("no text")


def leave(code: Any) -> None:
    raise SystemExit(code)


def fail(error: BaseException) -> None:
    raise error


def fail_with(hook: Callable[..., None]) -> None:
    sys.excepthook = hook
    raise ValueError("of the program")


def fail_in_a_thread() -> None:
    threading.Thread(target=fail, args=(ValueError("of a thread"),)).start()


def say_later() -> None:
    """Say something in a thread that goes on after the program, and something at the exit."""
    atexit.register(print, "at the exit")
    threading.Thread(target=lambda: time.sleep(0.3) or print("of a thread")).start()  # type: ignore[func-returns-value]


def fail_after(end: Callable[[], object]) -> None:
    end()
    raise ValueError("of the program")


def recurse() -> None:
    recurse()


ENDINGS: dict[str, Callable[[], object]] = {
    "returns": lambda: None,
    "exits without a status": lambda: leave(None),
    "exits with True": lambda: leave(True),
    "exits with 3": lambda: leave(3),
    "exits with 259": lambda: leave(259),
    "exits with -1": lambda: leave(-1),
    "exits with 2 to the power of 70": lambda: leave(1 << 70),
    "exits with a text": lambda: leave("a reason"),
    "exits with a list": lambda: leave(["a", "reason"]),
    "exits with an object that has no text": lambda: leave(Unspeakable()),
    "raises": lambda: fail(ValueError("as ever")),
    "raises what has no text": lambda: fail(Unspeakable()),
    "raises MemoryError": lambda: fail(MemoryError()),
    "raises KeyboardInterrupt": lambda: fail(KeyboardInterrupt()),
    "raises GeneratorExit": lambda: fail(GeneratorExit()),
    "recurses": recurse,
    "has a hook": lambda: fail_with(lambda kind, error, trace: print("hooked", kind, error)),
    "has a hook that ends it": lambda: fail_with(lambda kind, error, trace: os._exit(70)),
    "has a hook that raises": lambda: fail_with(lambda kind, error, trace: fail(KeyError("of the hook"))),
    "has a hook that exits": lambda: fail_with(lambda kind, error, trace: leave(5)),
    "has a hook that is interrupted": lambda: fail_with(lambda kind, error, trace: fail(KeyboardInterrupt())),
    "has no hook": lambda: fail_after(lambda: delattr(sys, "excepthook")),
    "raises in a thread": fail_in_a_thread,
    "goes on in a thread": say_later,
    "raises at the exit": lambda: atexit.register(fail, ValueError("at the exit")),
    "exits at the exit": lambda: atexit.register(leave, 4),
    "has closed stderr": lambda: fail_after(lambda: os.close(2)),
    "has closed stdout": lambda: fail_after(lambda: os.close(1)),
    "has closed sys.stderr": lambda: fail_after(sys.stderr.close),
    "has no sys.stderr": lambda: fail_after(lambda: setattr(sys, "stderr", None)),
    "exits without sys.stderr": lambda: (setattr(sys, "stderr", None), leave("a reason")),
    "returns without sys.stdout": lambda: setattr(sys, "stdout", None),
    "aborts": os.abort,
}
"""How a program may end. It ends as a fork as it ends by itself."""


def parent(place: Path) -> None:
    """Start a fork as the flow does, and wait."""
    from onward.infra.job import forks
    from onward.tasks.checks.subprocesses import run_module

    forks.SERVER = SERVER
    with forks.fork_server():
        server = forks._server.get()
        assert server is not None
        place.with_suffix(".server").write_text(str(server.process.pid))
        run_module(MODULE, "wait", str(place), folder=place.parent, log=place.with_suffix(".log"))


MODULE = "tests.support.fork_programs"
SERVER = (MODULE, "serve")


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
