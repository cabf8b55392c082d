"""A small disk that a test fills up: a tmpfs in a namespace of its own, which needs no right but that to make one.

python -m tests.support.full_disk MODULE:FUNCTION FOLDER 2m     calls the function with FOLDER, a disk of 2 MB
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import importlib
import itertools
import os
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil

from tests.support.ranks import ROOT

NAMESPACE = ("unshare", "--map-root-user", "--mount")


def may_mount() -> bool:
    """Return whether this user may mount a tmpfs in a namespace of its own."""
    return subprocess.run([*NAMESPACE, "mount", "-t", "tmpfs", "none", "/mnt"], capture_output=True).returncode == 0


def may_break() -> bool:
    """Return whether this user may mount an image of a disk, which then can be made to fail: root alone."""
    return os.geteuid() == 0 and Path("/dev/loop-control").exists() and shutil.which("mkfs.ext4") is not None


def on_a_small_disk(
    role: Callable[[Path], None], folder: Path, *, size: str = "2m", breaks: bool = False
) -> subprocess.CompletedProcess[str]:
    """Call a function of a module in a process of its own, with a disk of some size as its argument.

    size: of a tmpfs, with its options. breaks: an ext4 file system in place of it, for `shut_down`.
    """
    name = f"{role.__module__}:{role.__name__}"
    path = os.pathsep.join([str(ROOT), str(ROOT / ".package")])
    namespace = NAMESPACE
    if breaks:
        namespace, image = ("unshare", "--mount"), folder.with_name(f"{folder.name}.image")
        with image.open("wb") as file:
            file.truncate(96 << 20)
        subprocess.run(["mkfs.ext4", "-q", "-m", "0", str(image)], check=True)
        size = str(image)
    return subprocess.run(
        [*namespace, sys.executable, "-m", "tests.support.full_disk", name, str(folder), size],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )


def mount(folder: Path, size: str) -> None:
    """Mount a tmpfs of a size, or the image of a disk that is named in place of it."""
    what = ["-o", "loop", size] if size.startswith("/") else ["-t", "tmpfs", "-o", f"size={size}", "none"]
    subprocess.run(["mount", *what, str(folder)], check=True)
    if size.startswith("/"):
        with contextlib.suppress(OSError):  # it is gone when the image is mounted again
            (folder / "lost+found").rmdir()


def fill(folder: Path) -> Path:
    """Take all the room that is left, to the last byte; return the file that has it."""
    ballast = folder / "ballast"
    with ballast.open("ab", buffering=0) as file:
        for size in (1 << 20, 1 << 12, 1):
            with contextlib.suppress(OSError):
                while file.write(bytes(size)):
                    pass
    return ballast


def fill_inodes(folder: Path) -> Path:
    """Take all inodes that are left; return the directory of the files that have them."""
    ballast = Path(folder) / "ballast"
    with contextlib.suppress(OSError):
        ballast.mkdir()
        for number in itertools.count():
            os.close(os.open(ballast / str(number), os.O_WRONLY | os.O_CREAT))
    return ballast


def make_read_only(folder: Path) -> None:
    """Let nothing be written below a folder from now on, but by processes that have a file open there already."""
    libc = ctypes.CDLL(None, use_errno=True)
    path, bind, remount, read_only = os.fsencode(folder), 4096, 32, 1
    for flags in (bind, bind | remount | read_only):
        if libc.mount(path, path, None, flags, None):
            raise OSError(ctypes.get_errno(), "mount", str(folder))


def shut_down(folder: Path) -> None:
    """Let a mounted ext4 file system answer with an input/output error from now on. Needs the rights of root."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.ioctl(descriptor, 0x8004587D, struct.pack("I", 2))  # EXT4_IOC_SHUTDOWN without a flush of its journal
    finally:
        os.close(descriptor)


def mend(folder: Path, action: str) -> None:
    """Undo what a test has done to a disk: "fill", "inodes", "read-only" or "EIO"."""
    if action == "fill":
        (folder / "ballast").unlink()
    elif action == "inodes":
        shutil.rmtree(folder / "ballast")
    else:  # the disk that lies over the folder goes; a device that failed is mounted again, as after a restart
        _kill_the_others()
        subprocess.run(["umount", "--lazy", str(folder)], check=True)
        if action == "EIO":
            mount(folder, str(folder.with_name(f"{folder.name}.image")))


def _kill_the_others() -> None:
    """Kill the processes of this namespace, whose servers hold the disk."""
    own, others = Path("/proc/self/ns/mnt").readlink(), []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.pid != os.getpid() and Path(f"/proc/{process.pid}/ns/mnt").readlink() == own:
                process.kill()
                others.append(process)
    psutil.wait_procs(others, 30)


if __name__ == "__main__":
    module, _, function = sys.argv[1].partition(":")
    mount(Path(sys.argv[2]), sys.argv[3])
    getattr(importlib.import_module(module), function)(Path(sys.argv[2]))
