"""Programs that tests/infra/test_forks.py starts as forks, and a fork server that imports no torch."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from pathlib import Path
from tempfile import gettempdir

from onward.trainer.fork_server import serve


def main(command: str, *words: str) -> int:
    if command == "serve":
        listener, alive, folder = words
        serve(socket.socket(fileno=int(listener)), int(alive), folder)
    elif command == "say":
        facts = {
            "words": words,
            "env": os.environ.get("SAID"),
            "cwd": str(Path.cwd()),
            "name": __name__,
            "tmp": gettempdir(),
            "pid": os.getpid(),
            "parent": os.getppid(),
        }
        print(json.dumps(facts))
        print("and an error", file=sys.stderr)
        return int(words[0])
    elif command == "raise":
        raise ValueError("as ever")
    elif command == "abort":
        os.abort()
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


def parent(place: Path) -> None:
    """Start a fork as the flow does, and wait."""
    from onward.infra import forks
    from onward.tasks.subprocesses import run_module

    forks.SERVER = SERVER
    with forks.fork_server():
        place.with_suffix(".server").write_text(str(forks._running[0].process.pid))
        run_module(MODULE, "wait", str(place), folder=place.parent, log=place.with_suffix(".log"))


MODULE = "tests.support.fork_programs"
SERVER = (MODULE, "serve")


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
