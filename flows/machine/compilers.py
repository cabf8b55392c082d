"""Whether torch.compile would find what it calls: a C++ compiler with OpenMP and Python's headers, and a C compiler."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sysconfig
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from onward.flows.machine.findings import Finding

COMPILE_S = 30.0
NEEDED = "graph.compile needs it; without graph.compile nothing does"
CXX_PROGRAM = '#include <omp.h>\n#include <Python.h>\nextern "C" int threads() { return omp_get_max_threads(); }\n'
C_PROGRAM = "#include <Python.h>\nint one(void) { return 1; }\n"


def compilers() -> Iterator[Finding]:
    """Compile a shared library with each compiler, as torch.compile does on a CPU, and Triton on a GPU."""
    yield _compiler("C++ compiler", "CXX", ("g++", "clang++"), "c++", CXX_PROGRAM, ["-fopenmp"], "g++")
    yield _compiler("C compiler", "CC", ("gcc", "clang", "cc"), "c", C_PROGRAM, [], "gcc")


def _compiler(
    check: str, variable: str, names: Sequence[str], language: str, program: str, flags: list[str], package: str
) -> Finding:
    named = os.environ.get(variable, "")
    command = shlex.split(named) if named else next(([each] for each in names if shutil.which(each)), [])
    if not command or not shutil.which(command[0]):
        tried = f"{variable}={named}" if named else " nor ".join(names)
        fix = f"{NEEDED}; install one (apt-get install {package}), or name it in {variable}"
        return Finding(check=check, level="note", what=f"there is no {check}: neither {tried}", fix=fix)
    include = sysconfig.get_paths()["include"]
    with tempfile.TemporaryDirectory(prefix="onward-doctor-") as folder:
        target = str(Path(folder) / "try.so")
        words = [*command, "-x", language, "-shared", "-fPIC", *flags, f"-I{include}", "-", "-o", target]
        try:
            ended = subprocess.run(words, input=program, capture_output=True, text=True, timeout=COMPILE_S)
        except subprocess.TimeoutExpired:
            what = f"{command[0]} did not compile 3 lines in {COMPILE_S:g} s"
            return Finding(check=check, level="note", what=what, fix=NEEDED)
        except OSError as error:
            what = f"{command[0]} cannot be started: {error.strerror}"
            return Finding(check=check, level="note", what=what, fix=NEEDED)
    if ended.returncode == 0:
        return Finding(check=check, level="ok", what=f"{shutil.which(command[0])} compiles")
    said = next((line for line in ended.stderr.splitlines() if "error" in line), ended.stderr.strip()[-200:])
    headers = "Python's headers are missing: install python3-dev, or " if "Python.h" in said else ""
    what = f"{command[0]} does not compile (status {ended.returncode}): {said}"
    return Finding(check=check, level="note", what=what, fix=f"{NEEDED}; {headers}repair the compiler")
