"""What this machine has that a run needs: GPUs, a C++ compiler, memory. Found without importing torch."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.util
import math
import os
import platform
import re
import shutil
import socket
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil

BUSY = 1.5
"""Processes that compute, for each core, from which on a machine is shared."""
BRIEF_SPINS = "1000"
"""The number that GNU's OpenMP has where a program has more threads than there are cores."""


MEMORY_SHARE = 0.5
"""Files that take more of the free memory would push each other out of it."""


def free_host_memory(group: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the bytes of memory that are free: the least of those of the host and of its container."""
    # inside of a container psutil shows the memory of the host
    free = [psutil.virtual_memory().available]
    for limit, used, statistics, cached in (
        ("memory.max", "memory.current", "memory.stat", "inactive_file"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat", "total_inactive_file"),
    ):
        with contextlib.suppress(OSError, ValueError):  # "max" is not a number: no limit
            free.append(int((group / limit).read_text()) - int((group / used).read_text()))
            # files that were read count as used, and the kernel drops them when memory is needed
            numbers = dict(line.split() for line in (group / statistics).read_text().splitlines())
            free[-1] += int(numbers.get(cached, 0))
    return max(0, min(free))


def fits_in_memory(size_bytes: int) -> bool:
    """Return whether files stay in the memory of this host once they were read."""
    return size_bytes <= MEMORY_SHARE * free_host_memory()


def release_free_memory() -> None:
    """Return free memory to the system: the C library keeps it for the thread that had it, and others get more."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # of glibc alone
    if trim is not None:
        trim(0)


def memory_limit(group: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Return the bytes that the container of this process may use; None without a limit."""
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        with contextlib.suppress(OSError, ValueError):  # "max" is not a number
            return int((group / name).read_text())
    return None


def core_limit(group: Path = Path("/sys/fs/cgroup")) -> float | None:
    """Return the cores whose time the container of this process gets, such as 1.5; None without a limit."""
    with contextlib.suppress(OSError, ValueError):  # "max" is not a number
        # version 2 of control groups; below, version 1
        quota, period = (group / "cpu.max").read_text().split()
        return int(quota) / int(period)
    with contextlib.suppress(OSError, ValueError):
        quota_us = int((group / "cpu/cpu.cfs_quota_us").read_text())
        return quota_us / int((group / "cpu/cpu.cfs_period_us").read_text()) if quota_us > 0 else None
    return None


def physical_cores(topology: Path = Path("/sys/devices/system/cpu")) -> int:
    """Return the cores that this process may use. The hyperthreads of a core share its arithmetic units: they are one.

    topology: what Linux says of the processors. One of which it says nothing counts as a core.
    """
    cores = set()
    for processor in os.sched_getaffinity(0):
        try:
            # the hyperthreads of a core have the same text here
            cores.add((topology / f"cpu{processor}" / "topology" / "thread_siblings_list").read_text().strip())
        except OSError:
            cores.add(str(processor))
    return len(cores)


def usable_cores() -> int:
    """Return how many cores this process may use, of those that it may run on: as many as its container's quota."""
    return max(1, int(min(len(os.sched_getaffinity(0)), core_limit() or math.inf)))


def ignore_lower_precision() -> None:
    """Let no variable of the environment give oneDNN a lower precision than fp32: `precision.compute` decides.

    To be called before torch is imported, because oneDNN reads the variable when it is loaded. On CPUs with bf16 no
    switch of torch changes it afterwards for convolutions (torch 2.11).
    """
    os.environ.pop("ONEDNN_DEFAULT_FPMATH_MODE", None)


def spin_briefly_if_busy() -> None:
    """Let the threads of an operator wait for each other asleep, if other programs compute on this machine, too.

    GNU's OpenMP, which torch has for Linux, lets a thread that waits try again 300,000 times before it sleeps. On cores
    of its own this is the fastest. On shared ones it takes the time for which the other thread waits: a step of two
    threads took ten times as long on two cores under a load of 25 (tests/bench/threads.py). No bit depends on it.
    To be called before torch is imported. OMP_WAIT_POLICY and GOMP_SPINCOUNT, if they are set, decide.
    """
    is_set = any(name in os.environ for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT"))
    # an attempt before this one has left a load of about one for each core
    if not is_set and os.getloadavg()[0] > BUSY * (os.cpu_count() or 1):
        os.environ["GOMP_SPINCOUNT"] = BRIEF_SPINS


def most_gpus(environment: Mapping[str, str] = os.environ, devices: Path = Path("/dev")) -> tuple[int | None, str]:
    """Return how many GPUs torch can find here at most, and why, as a clause; None = not known without torch.

    Only a number that is certain is returned: of torch without CUDA, of CUDA_VISIBLE_DEVICES, or of NVIDIA's device
    files. A GPU of another kind has other files.
    """
    version = _torch_version()
    # read as a file, because importing torch takes seconds
    if version and not re.search(r"^(cuda|hip)\b.*= ['\"]", version, re.MULTILINE):
        return 0, f"the installed torch {torch_version()} is built for CPUs only"
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        # torch takes those before the first invalid one
        shown = visible.split(",")
        ends = next((at for at, each in enumerate(shown) if each.strip() in ("", "-1")), len(shown))
        return ends, f"CUDA_VISIBLE_DEVICES is {visible!r}"
    if any((devices / name).exists() for name in ("kfd", "dxg")):  # AMD, and Windows' subsystem for Linux
        return None, ""
    number = sum(re.fullmatch(r"nvidia\d+", each.name) is not None for each in devices.glob("nvidia*"))
    return number, f"there {'is' if number == 1 else 'are'} {number or 'no'} {devices}/nvidia*"


def torch_version() -> str:
    """Return the version that torch gives itself, without importing it, which takes seconds; "" if it is not known."""
    found = re.search(r"^__version__\s*=\s*['\"]([^'\"]+)", _torch_version(), re.MULTILINE)
    return found[1] if found else ""


def _torch_version() -> str:
    """Return the text of torch/version.py, which says what torch was built for; "" where it is not installed."""
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        return ""
    try:
        return Path(found.origin).with_name("version.py").read_text()
    except OSError:
        return ""


def machine_text() -> str:
    """Return what decides how fast this machine computes: its name, processor, usable cores, GPUs, and torch."""
    found = None
    with contextlib.suppress(OSError):
        found = re.search(r"^model name\s*:\s*(.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    # the affinity counts whole cores, and the quota of a container their time
    cores = min(len(os.sched_getaffinity(0)), core_limit() or math.inf)
    cards = sorted(_gpu_names())
    parts = [socket.gethostname(), found[1] if found else platform.machine(), f"{cores:g} cores", *cards]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    parts += [f"CUDA_VISIBLE_DEVICES={visible}"] if visible is not None else []
    return ", ".join([*parts, f"torch {torch_version() or 'unknown'}"])


def _gpu_names(cards: Path = Path("/proc/driver/nvidia/gpus")) -> Iterator[str]:
    for path in cards.glob("*/information"):
        with contextlib.suppress(OSError):
            if found := re.search(r"^Model:\s*(.*)$", path.read_text(), re.MULTILINE):
                yield found[1]


@functools.cache
def missing_compiler() -> str:
    """Return a sentence if torch.compile has no working C++ compiler here, else an empty string."""
    named = os.environ.get("CXX", "")
    for compiler in (named,) if named else ("g++", "clang++"):
        # a compiler may be in PATH and lack its libraries
        if shutil.which(compiler) and _runs(compiler):
            return ""
    tried = f"CXX={named}" if named else "neither g++ nor clang++"
    return (
        f"graph.compile needs a C++ compiler, and there is {'none at ' if named else ''}{tried} on this machine; "
        "install one (apt-get install g++), name it in CXX, or set graph.compile to false"
    )


def _runs(compiler: str) -> bool:
    command: list[Any] = [compiler, "--version"]
    try:
        return subprocess.run(command, capture_output=True, timeout=30).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False
