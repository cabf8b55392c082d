"""Record what every command prints, and write docs/reference/terminal-sessions.md: `python -m tests.sessions`.

Takes some minutes. With --keep DIRECTORY the home and the files stay there.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

from tests.sessions import page
from tests.sessions.recording import Recorded, Terminal
from tests.sessions.script import SESSIONS


def main() -> None:
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
            recorded[session.command] = terminal.record(session)
            print(f"{time.monotonic() - began:6.1f} s  {session.command}", flush=True)
    finally:
        terminal.close()
    page.PAGE.write_text(page.written(recorded), encoding="utf-8")
    print(f"written: {page.PAGE}")


if __name__ == "__main__":
    main()
