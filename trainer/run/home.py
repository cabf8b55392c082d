"""Where Onward's home is. Importing this module loads the standard library alone."""

from __future__ import annotations

import os
from pathlib import Path


def onward_home() -> Path:
    """Return the directory of runs, caches and local servers: ONWARD_HOME, else ~/.onward."""
    return Path(os.environ.get("ONWARD_HOME") or "~/.onward").expanduser().resolve()
