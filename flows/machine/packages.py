"""Whether the installed packages are in the ranges that Onward declares, and torch and torchvision belong together.

A package that is newer than the newest one that was tried is allowed, and named.
"""

from __future__ import annotations

import platform
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from importlib import metadata

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from onward.flows.machine.machine_findings import Finding, Level

NEWEST_TRIED = {
    "torch": "2.15",
    "onnx": "1.23",
    "onnxruntime": "1.32",
    "prefect": "3.9",
    "mlflow": "3.17",
    "numpy": "2.4",
    "pandas": "3.1",
}
"""The newest minor releases that the tests ran on."""

LONGEST_IMPORT_S = 120.0
NEEDED_EXTRAS = ("", "flow", "mpi")
"""Of these a version outside of its range is a problem; of the others only some runs need the package."""


def packages() -> Iterator[Finding]:
    """Compare the versions that are installed with those in Onward's metadata."""
    try:
        declared = metadata.requires("onward") or []
        python = metadata.metadata("onward").json.get("requires_python", "")
    except metadata.PackageNotFoundError:
        what = "Onward was not installed by pip, so the ranges of its packages are not known"
        yield Finding.note("packages", what, "pip install -e . in the directory of its source")
        return
    yield from compared(declared, str(python), installed_version)


def installed_version(name: str) -> str | None:
    """Return the version of an installed package; None without it."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def compared(declared: Iterable[str], python: str, version: Callable[[str], str | None]) -> Iterator[Finding]:
    """Yield what does not fit. declared: requirements as in metadata. version: returns that of a package, or None."""
    here = platform.python_version()
    if python and here not in SpecifierSet(python, prereleases=True):
        what = f"Python is {here}, and Onward needs {python}"
        yield Finding.problem("packages", what, "make the environment anew with such a Python")
    fitting = 0
    lacking = list[str]()
    for line in declared:
        requirement = Requirement(line)
        extra = _extra(requirement)
        # what only developers need, or what belongs to another platform
        if extra == "dev" or (requirement.marker and not requirement.marker.evaluate({"extra": extra})):
            continue
        found = version(requirement.name)
        if found is None:
            # an extra that is not installed is not wanted
            lacking += [] if extra else [requirement.name]
        elif not requirement.specifier.contains(found, prereleases=True):
            level: Level = "problem" if extra in NEEDED_EXTRAS else "note"
            what = f"{requirement.name} {found} is installed, and Onward needs {requirement.specifier}"
            fix = f"pip install '{requirement.name}{requirement.specifier}'"
            yield Finding(check="packages", level=level, what=what, fix=fix)
        else:
            fitting += 1
            yield from _newer(requirement.name, found)
    if lacking:
        what = f"not installed: {', '.join(lacking)}"
        yield Finding.problem("packages", what, f"pip install {' '.join(lacking)}")
    yield from _pair(version)
    yield Finding.ok("packages", f"{fitting} are in their ranges")


def _newer(name: str, found: str) -> Iterator[Finding]:
    """Yield a note if a package is newer than those that were tried, and what is gone from such a torch."""
    tried = NEWEST_TRIED.get(name)
    if tried is None or Version(found).release[:2] <= Version(tried).release[:2]:
        return
    what = f"{name} {found} is newer than {tried}, the newest that was tried"
    fix = f"if something fails, pip install '{name}=={tried}.*'"
    yield Finding.note("packages", what, fix)
    if name != "torch":
        return
    for what in _lacking(found):
        yield Finding.problem("packages", what, fix)


def _lacking(found: str) -> list[str]:
    """Return what Onward needs and this torch does not have, by sentences."""
    # in a process of its own: importing torch takes seconds and hundreds of MB
    command = [sys.executable, "-m", "onward.trainer.torch_parts"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=LONGEST_IMPORT_S)
    if ended.returncode:
        *_, last = ["no output", *ended.stderr.strip().splitlines()]
        return [f"torch {found} cannot be imported: {last}"]
    return [f"torch {found} is without {line}" for line in ended.stdout.splitlines() if line]


def _extra(requirement: Requirement) -> str:
    """Return the extra that a requirement belongs to; "" for none."""
    text = str(requirement.marker or "")
    return text.partition("extra == ")[2].split('"')[1] if "extra == " in text else ""


def _pair(version: Callable[[str], str | None]) -> Iterator[Finding]:
    """Yield a problem if torchvision was built for another torch: its operators then fail when they are called."""
    torch = version("torch")
    vision = version("torchvision")
    if torch is None or vision is None:
        return
    try:
        lines = metadata.requires("torchvision") or []
        # each torchvision names the one torch whose binary interface it was built for
        pins = [each for each in map(Requirement, lines) if each.name == "torch"]
    except (metadata.PackageNotFoundError, InvalidRequirement):
        return
    if wrong := [pin for pin in pins if not pin.specifier.contains(torch, prereleases=True)]:
        what = f"torchvision {vision} was built for torch {wrong[0].specifier}, but torch is {torch}"
        yield Finding.problem("packages", what, "install both with one call of pip")
