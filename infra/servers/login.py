"""The login of Onward's own servers: one line `onward:PASSWORD`, in a file that only its owner can read.

Whoever may start a run in Prefect runs programs with the rights of the server's user, and 127.0.0.1 is open to every
account of the machine. Prefect's clients and servers read the login from their environment, MLflow's server from the
file; it is in no command line, log or record.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
import tempfile
from pathlib import Path

from onward.infra.servers.port_owner import refuse_others

USER = "onward"


def named_home() -> Path:
    """Return the home that ONWARD_HOME names, as the commands have set it."""
    return Path(os.environ.get("ONWARD_HOME") or "~/.onward").expanduser()


def login_file(home: Path) -> Path:
    return home / "login"


def login(home: Path) -> str:
    """Return the login `onward:PASSWORD`; the first call under a home directory generates it.

    Raises PermissionError for a file that belongs to someone else, who would then know the login.
    """
    path = login_file(home)
    # made by the first command; from then on servers and clients read the same file
    if not path.exists():
        _generate(path)
    found = path.stat()
    if found.st_uid != os.getuid():
        raise PermissionError(0, f"it belongs to user id {found.st_uid} and not to you; delete it", str(path))
    if stat.S_IMODE(found.st_mode) & 0o077:
        path.chmod(0o600)
    line = path.read_text().strip()
    if not line.startswith(f"{USER}:") or len(line.split()) != 1:
        raise PermissionError(0, f"it is not one line `{USER}:PASSWORD`; delete it, and another one is made", str(path))
    return line


def _generate(path: Path) -> None:
    """Write a new login. Of several processes that do so at once the first one wins, and none reads half a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, partial = tempfile.mkstemp(dir=path.parent, prefix=".login-")  # mode 0600 from the beginning
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(f"{USER}:{secrets.token_urlsafe(24)}\n")
            file.flush()
            os.fsync(file.fileno())
        # a link and not a rename, which would replace the login that another process has begun to use
        with contextlib.suppress(FileExistsError):
            os.link(partial, path)
    finally:
        Path(partial).unlink()


def keep_from_others(url: str, credentials: str) -> bool:
    """Let this process speak to a server with the login alone if a program of its own user holds the port.

    Call before the first request. credentials: `user:password` for the server; other ones than the login of the home
    that ONWARD_HOME names are the user's own matter. Returns whether it is the login.
    """
    home = named_home()
    # credentials of the user's own server are none of Onward's
    if not credentials or not login_file(home).exists() or credentials != login(home):
        return False
    refuse_others(url)
    return True
