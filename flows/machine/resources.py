"""Memory, cores, shared memory, open files and GPUs of this machine, and the limits of its container."""

from __future__ import annotations

import os
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path

import psutil

from onward.flows.machine.machine_findings import Finding, Level, gib
from onward.trainer.run.machine.this_machine import (
    core_limit,
    free_host_memory,
    memory_limit,
    missing_compiler,
    most_gpus,
)

LEAST_MEMORY = 1 << 30
LITTLE_MEMORY = 4 << 30
LITTLE_SHARED = 256 << 20
LEAST_FILES = 256
FEW_FILES = 1024
SHARED = Path("/dev/shm")


def memory() -> Iterator[Finding]:
    """Report the memory that is free, and the least of the limits of host and container."""
    total = psutil.virtual_memory().total
    free = free_host_memory()
    limit = memory_limit()
    level: Level = "problem" if free < LEAST_MEMORY else "note" if free < LITTLE_MEMORY else "ok"
    what = f"{gib(free)} of {gib(min(total, limit or total))} are free"
    what += f"; the container's limit is {gib(limit)}, the host has {gib(total)}" if limit and limit < total else ""
    fix = "each rank takes about 0.5 GiB before the model: end other programs, or raise the container's limit"
    yield Finding(check="memory", level=level, what=what, fix="" if level == "ok" else fix)


def cores() -> Iterator[Finding]:
    """Compare the cores that this process may use with the share of time that its container gets."""
    usable = len(os.sched_getaffinity(0))
    all_cores = os.cpu_count() or 1
    quota = core_limit()
    what = f"{usable} of {all_cores} cores may be used"
    if quota and quota < usable:
        what += f", but the container gets the time of {quota:g}"
        together = max(1, int(quota))
        fix = "leave launch.threads_per_rank at 0, which counts on it, or set it so that all ranks together have "
        fix += f"{together} thread{'s' * (together > 1)}"
        yield Finding.note("cores", what, fix)
    else:
        yield Finding.ok("cores", what)


def shared_memory() -> Iterator[Finding]:
    """Report the room of /dev/shm, through which NCCL sends tensors between the ranks of a host."""
    fix = "NCCL sends tensors through it: start the container with --shm-size=1g or --ipc=host"
    if not SHARED.is_dir():
        yield Finding.note("/dev/shm", "there is no /dev/shm", fix)
        return
    found = os.statvfs(SHARED)
    free = found.f_bavail * found.f_frsize
    size = found.f_blocks * found.f_frsize
    is_small = free < LITTLE_SHARED
    what = f"{free / 2**20:,.0f} of {size / 2**20:,.0f} MiB are free"
    yield Finding(check="/dev/shm", level="note" if is_small else "ok", what=what, fix=fix * is_small)


def open_files() -> Iterator[Finding]:
    """Report how many files and connections a process may have open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = "no limit" if soft == resource.RLIM_INFINITY else f"{soft:,}"
    if soft != resource.RLIM_INFINITY and soft < FEW_FILES:
        highest = "unlimited" if hard == resource.RLIM_INFINITY else f"{hard}"
        fix = f"`ulimit -n {highest if hard != soft else FEW_FILES}` before `onward`; shards, servers and the "
        fix += "connections between ranks are open files"
        level: Level = "problem" if soft < LEAST_FILES else "note"
    else:
        fix = ""
        level = "ok"
    what = f"a process may have {most} open files"
    yield Finding(check="open files", level=level, what=what, fix=fix)


def compiler() -> Iterator[Finding]:
    """Report a C++ compiler that graph.compile would lack."""
    what, _, fix = missing_compiler().partition("; ")
    if what:
        yield Finding.note("C++ compiler", what, fix)
    else:
        yield Finding.ok("C++ compiler", "there is one for graph.compile")


def gpus() -> Iterator[Finding]:
    """Report how many GPUs torch can have here, and GPUs of the machine that this torch cannot use."""
    number, why = most_gpus()
    if number:
        what = f"torch may use {number} GPU{'s' * (number > 1)}: {why}; the ranks of the MPI check report theirs"
        yield Finding.ok("GPUs", what)
        return
    present = shutil.which("nvidia-smi") or any(Path("/dev").glob("nvidia[0-9]*")) or Path("/dev/kfd").exists()
    if number == 0 and present:
        what = f"this machine seems to have GPUs, but torch finds none: {why}"
        fix = "install a torch that is built for them, or give the container access to them; ranks compute on the CPU"
        yield Finding.note("GPUs", what, fix)
        return
    what = f"none, ranks compute on the CPU: {why}" if number == 0 else "not known before torch is asked"
    yield Finding.ok("GPUs", what)
