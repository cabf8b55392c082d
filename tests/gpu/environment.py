"""Install the wheels of a folder for the examination, without a network and without touching the machine's packages.

build/gpu/venv --- its own site-packages: the wheels of the folder
             +---- machine.pth: behind them, the packages of the interpreter that made it (its torch)
"""

from __future__ import annotations

import os
import site
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from tests.gpu.results import ROOT


def continue_with(wheels: Path, arguments: Sequence[str]) -> NoReturn:
    """Replace this process by one of an environment that has the wheels."""
    python = install(wheels, ROOT / "build" / "gpu" / "venv")
    os.execv(python, [str(python), *arguments])


def install(wheels: Path, folder: Path) -> Path:
    """Make an environment with all wheels of a folder and the packages of this interpreter; return its interpreter.

    Ends the program with the reason when the folder has no wheel or one does not fit this Python.
    """
    files = sorted(str(path.resolve()) for path in wheels.glob("*.whl"))
    if not files:
        sys.exit(f"{wheels} has no wheel (*.whl)")
    python = folder / "bin" / "python"
    # without pip: the machine's own pip can install into it, and some machines have no ensurepip
    _run(sys.executable, "-m", "venv", "--clear", "--without-pip", str(folder))
    options = ["--quiet", "--no-index", "--no-deps", "--disable-pip-version-check"]
    _run(sys.executable, "-m", "pip", "--python", str(python), "install", *options, *files)
    own = next(folder.glob("lib/python*/site-packages"))
    behind = [path for path in (*site.getsitepackages(), site.getusersitepackages()) if Path(path).is_dir()]
    # addsitedir reads the .pth files there, too
    (own / "machine.pth").write_text("".join(f"import site; site.addsitedir({path!r})\n" for path in behind))
    return python


def _run(*words: str) -> None:
    ended = subprocess.run(words, capture_output=True, text=True)
    if ended.returncode:
        sys.exit(f"{' '.join(words[:6])} ... failed:\n{ended.stdout}{ended.stderr}")
