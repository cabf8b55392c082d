"""An environment of its own for a package that Onward is compared with: what it needs else is that of the tests."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TRANSFORMERS = ("transformers>=5", "huggingface_hub", "tokenizers", "regex", "typer")


def with_packages(folder: Path, *packages: str) -> Path:
    """Make the environment, and return its Python. The packages are installed without what they depend on."""
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    python = folder / "bin" / "python"
    words = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps", *packages]
    subprocess.run(words, check=True)
    [site] = folder.glob("lib/python*/site-packages")
    own = next(Path(path) for path in sys.path if path.endswith("site-packages"))
    (site / "tests.pth").write_text(f"{own}\n")
    return python


@functools.cache
def _exported() -> tempfile.TemporaryDirectory[str]:
    folder = tempfile.TemporaryDirectory(prefix="onward-transformers-")
    run_script(with_packages(Path(folder.name) / "env", *TRANSFORMERS), "set_detectors.py", folder.name)
    return folder


def detectors_of_transformers() -> Path:
    """Return the folder that set_detectors.py has filled, once in this process, which leaves nothing behind."""
    return Path(_exported().name)


def run_script(python: Path, script: str, *words: str | Path) -> None:
    """Run a script of tests/support there."""
    # ultralytics writes its settings, and asks the network, unless it is told not to
    offline = {"YOLO_CONFIG_DIR": str(python.parents[1]), "YOLO_OFFLINE": "true", "YOLO_AUTOINSTALL": "false"}
    search = os.pathsep.join([str(ROOT / ".package"), str(ROOT)])
    command = [python, ROOT / "tests" / "support" / script, *words]
    subprocess.run(command, check=True, env={**os.environ, **offline, "PYTHONPATH": search})
