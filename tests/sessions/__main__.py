"""Record what every command prints, and write docs/reference/terminal-sessions.md: `python -m tests.sessions`.

Takes some minutes. With --keep DIRECTORY the home and the files stay there. A command that ends with another status
than it should keeps its former session on the page, and the exit status is 1.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

from tests.sessions import page
from tests.sessions.recording import Recorded, Terminal
from tests.sessions.script import SESSIONS


def main() -> int:
    """Record all sessions."""
    parser = argparse.ArgumentParser(prog="python -m tests.sessions", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--keep", type=Path, help="a new directory for the home and the files")
    chosen = parser.parse_args()
    root = chosen.keep or Path(tempfile.mkdtemp(prefix="onward-sessions-"))
    root.mkdir(parents=True, exist_ok=True)
    terminal, recorded = Terminal(root), dict[str, Recorded]()
    try:
        for session in SESSIONS:
            began = time.monotonic()
            try:
                recorded[session.command] = terminal.record(session)
                said = session.command
            except AssertionError as error:
                said = str(error)
            print(f"{time.monotonic() - began:6.1f} s  {said}", flush=True)
    finally:
        terminal.close()
    former = page.shown(page.PAGE.read_text(encoding="utf-8")) if page.PAGE.exists() else {}
    page.PAGE.write_text(page.written(recorded, former), encoding="utf-8")
    print(f"written: {page.PAGE}")
    return 0 if len(recorded) == len(SESSIONS) else 1


if __name__ == "__main__":
    sys.exit(main())
