"""Keep Onward's home directory to its owner: data, weights and the login of the servers are in it."""

from __future__ import annotations

import contextlib
import os
import stat
import sys
from pathlib import Path


def make_private(home: Path) -> None:
    """Create the home directory with mode 0700, or take the access of others away from an existing one, with a note.

    A directory that Onward does not recognise as its home, or that belongs to someone else, is left as it is, with a
    warning: ONWARD_HOME may name one that has other uses.
    """
    with contextlib.suppress(FileExistsError):
        home.mkdir(mode=0o700, parents=True)
    found = home.stat()
    mode = stat.S_IMODE(found.st_mode)
    if not mode & 0o077 or not home.is_dir():
        return
    # an empty directory was made for this, and a home has one of these
    recognised = any((home / name).is_dir() for name in ("services", "runs")) or not any(home.iterdir())
    if found.st_uid == os.getuid() and recognised and not mode & stat.S_ISVTX:
        home.chmod(0o700)
        print(f"onward: the mode of {home} was {mode:04o} and is now 0700: it is for its owner alone", file=sys.stderr)
    else:
        print(
            f"onward: warning: other users can enter {home} (mode {mode:04o}); keep them out with `chmod 700`, or set "
            "ONWARD_HOME to a directory of its own",
            file=sys.stderr,
        )
