"""Whatever dies in the middle of saving - a process, a rank, the disk's room, the power - what was whole stays whole.

This file is also the program that dies: `python -m tests.equivalence.test_checkpoint_faults ROLE FOLDER`.
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import itertools
import logging
import os
import resource
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from onward.tasks.checkpoint import CheckpointRetention
from onward.trainer.checkpoint.load import load
from onward.trainer.checkpoint.retention import announced, list_checkpoints
from onward.trainer.checkpoint.save import save
from onward.trainer.checkpoint.train_state import TrainState
from onward.trainer.checkpoint.verification import newest_complete, verify
from onward.trainer.config.sections.results import CheckpointConfig
from onward.trainer.distributed.processes import MPIContext
from onward.trainer.errors import StorageUnavailable
from onward.trainer.run.directory import RunDir
from tests.support.checkpoint_parts import held
from tests.support.ranks import ROOT, run_ranks

ALONE = MPIContext(0, 1, 0, 1, "here", torch.device("cpu"))
LOSSES = {1: 0.9, 2: 0.1, 3: 0.5, 4: 0.4}


def new_run(root: Path) -> RunDir:
    root.mkdir()
    run = RunDir(root)
    run.begin_attempt()
    return run


def tensors(step: int, size: int = 1000) -> dict[str, torch.Tensor]:
    """Tensors of `size` numbers in all, other ones at each step."""
    return {f"model/{part}": torch.full((size // 4,), 10.0 * step + part) for part in range(4)}


def saved(run: RunDir, step: int, *, size: int = 1000, **options: Any) -> Path:
    metrics = {"evaluation/loss": LOSSES.get(step, 1.0)}
    state = TrainState(step=step, samples_seen=0, scaler={}, metrics=metrics, evaluated_at=step)
    options = {"attempt": run.current_attempt, "mpi": ALONE, **options}
    parts = held(tensors(step, size), options["mpi"])
    return save(run, state=state, parts=parts, **options)


def damage(path: Path) -> None:
    with (path / "rank-00000.safetensors").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\xff")


def names(run: RunDir) -> list[str]:
    return sorted(path.name for path in run.checkpoints.glob("step-*"))


def newest_step(run: RunDir) -> int:
    """The step a training would go on from, which must have that step's tensors."""
    newest = newest_complete(run)
    assert newest is not None, names(run)
    state, loaded = load(newest)
    expected = tensors(state.step)
    assert all(torch.equal(loaded.pop(name), expected[name]) for name in expected)
    assert not loaded
    return state.step


# -- dying before each single call that touches a file

EACH = "ONWARD_TEST_EACH"
"""Environment: before every call, every second one ..."""


def before_call(number: int, act: Callable[[], object]) -> None:
    """Have this process do something before its `number`th call into the operating system's files."""
    calls = itertools.count()

    def watch(frame: object, event: str, function: Any) -> None:
        on_files = isinstance(getattr(function, "__self__", None), io.IOBase) or (
            getattr(function, "__module__", "") in ("posix", "io", "_io")
        )
        if event == "c_call" and on_files and next(calls) == number:
            act()

    sys.setprofile(watch)


def dies(run: RunDir, act: Callable[[RunDir], object], ending: Callable[[], object]) -> bool:
    """Fork a process that acts; True when its ending came before it had finished."""
    child = os.fork()
    if child == 0:
        before_call(int(run.root.name), ending)
        act(run)
        os._exit(0)
    return os.waitpid(child, 0)[1] != 0


def kill_myself() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def at_every_call(folder: Path, prepare: Callable[[RunDir], object], act: Callable[[RunDir], object]) -> Any:
    """Yield (run, finished) for each call before which the act was killed; at last with an act that finished."""
    prepare(new_run(folder / "prepared"))
    for number in itertools.count(step=int(os.environ.get(EACH, "1"))):
        run = RunDir(Path(shutil.copytree(folder / "prepared", folder / str(number))))
        died = dies(run, act, kill_myself)
        yield run, not died
        shutil.rmtree(run.root)
        if not died:
            assert number > 20, f"only {number} calls were seen"
            return


def die_saving(folder: Path) -> None:
    """A save dies before each call: the old or the new checkpoint is the newest, and every one is whole."""
    for run, finished in at_every_call(folder, lambda run: saved(run, 1), lambda run: saved(run, 2)):
        assert newest_step(run) == 2 if finished else newest_step(run) in (1, 2)
        assert all(verify(path) for path in list_checkpoints(run)), names(run)
        run.begin_attempt()
        saved(run, 2)
        assert names(run) == ["step-000000001", "step-000000002"]


def die_replacing(folder: Path) -> None:
    """A save in the place of a damaged checkpoint dies: the damaged one is never taken."""

    def prepare(run: RunDir) -> None:
        saved(run, 1)
        damage(saved(run, 2))

    for run, finished in at_every_call(folder, prepare, lambda run: saved(run, 2)):
        assert newest_step(run) == 2 if finished else newest_step(run) in (1, 2)
        run.begin_attempt()
        saved(run, 2)
        assert newest_step(run) == 2


def look(run: RunDir) -> None:
    CheckpointRetention(run, CheckpointConfig(keep_newest=1), logging.getLogger(__name__)).update()


def die_keeping(folder: Path) -> None:
    """The checkpoint task dies: the best and the newest whole one are there, and the next one does the rest."""

    def prepare(run: RunDir) -> None:
        for step in LOSSES:
            saved(run, step)
        damage(saved(run, 5))

    for run, _ in at_every_call(folder, prepare, look):
        assert newest_step(run) == 4
        assert verify(run.checkpoint(2))
        look(run)
        assert names(run) == ["step-000000002", "step-000000004", "step-000000005.damaged"]
        assert [(info.step, info.best) for info in announced(run)] == [(2, True), (4, False)]


# -- a disk that is full, a file that cannot grow, a rank that dies


def refusal(run: RunDir, mpi: MPIContext, step: int, **options: Any) -> str:
    with pytest.raises(StorageUnavailable) as refused:
        saved(run, step, attempt=1, mpi=mpi, **options)
    return str(refused.value)


def fill_the_disk(mpi: MPIContext, root: str) -> list[str]:
    """On every rank: a save finds too little room, then another loses its room while it writes."""
    run = RunDir(Path(root))
    filler = run.root / "filler"
    saved(run, 1, attempt=1, mpi=mpi)

    def fill() -> None:
        if mpi.rank == 1:
            with contextlib.suppress(OSError), filler.open("ab", buffering=0) as file:
                while file.write(bytes(4096)):
                    pass

    too_little = refusal(run, mpi, 2, size=4 << 20)
    lost = refusal(run, mpi, 2, size=1 << 18, beat=fill)
    torch.distributed.barrier()  # rank 0 sweeps after it has told the others
    assert names(run) == ["step-000000001"]
    torch.distributed.barrier()
    filler.unlink(missing_ok=True)
    torch.distributed.barrier()
    saved(run, 2, attempt=1, mpi=mpi)
    return [too_little, lost]


def run_out_of_room(folder: Path) -> None:
    """Runs in a mount namespace of its own, on a disk of 4 MB."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "none", str(folder)], check=True)
    run = new_run(folder / "run")
    first, second = run_ranks(2, f"{PROGRAM}:fill_the_disk", str(run.root))
    assert first == second, "all ranks say the same"
    too_little, lost = first
    assert "No space left on device" in too_little
    assert "of the 16,777,216 that are needed; make room" in too_little
    assert "has 0 bytes free of the 1,048,576 that are needed; make room" in lost, lost
    assert "earlier checkpoints are unchanged" in lost
    assert newest_step(run) == 2


def limit_file_size(mpi: MPIContext, root: str) -> str:
    """Rank 1 cannot write files beyond 10 kB: what it says is what both say."""
    if mpi.rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, resource.RLIM_INFINITY))
    text = refusal(RunDir(Path(root)), mpi, 2, size=8000)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    return text


def lose_rank_1(mpi: MPIContext, root: str) -> None:
    saved(RunDir(Path(root)), 2, attempt=1, mpi=mpi, beat=kill_myself if mpi.rank == 1 else lambda: None)


# -- the power


EXT4_IOC_SHUTDOWN = 0x8004587D  # linux/fs/ext4/ext4.h: _IOR('X', 125, __u32)
NO_LOG_FLUSH = 2


def cut_power(folder: Path) -> None:
    """Saves on a real ext4 whose power is cut before each call, and after the last one; then mounts it again."""
    image, disk = folder / "image", folder / "disk"
    disk.mkdir()
    subprocess.run(["truncate", "-s", "32M", str(image)], check=True)
    subprocess.run(["mkfs.ext4", "-q", str(image)], check=True)

    def mount() -> None:
        subprocess.run(["mount", "-o", "loop,commit=300", str(image), str(disk)], check=True)

    def cut() -> None:
        at = os.open(disk, os.O_RDONLY)
        fcntl.ioctl(at, EXT4_IOC_SHUTDOWN, struct.pack("I", NO_LOG_FLUSH))
        os._exit(1)

    told = folder / "told"  # on a disk that keeps its power

    def save_and_tell(run: RunDir) -> None:
        saved(run, 2)
        sys.setprofile(None)
        told.touch()
        cut()

    for number in itertools.count():
        mount()
        run = new_run(disk / str(number))
        saved(run, 1)
        assert dies(run, save_and_tell, cut)
        subprocess.run(["umount", str(disk)], check=True)
        mount()
        assert newest_step(run) == 2 if told.exists() else newest_step(run) in (1, 2)
        run.begin_attempt()
        saved(run, 2)
        assert newest_step(run) == 2
        shutil.rmtree(run.root)
        subprocess.run(["umount", str(disk)], check=True)
        if told.exists():
            assert number > 20, f"only {number} calls were seen"
            return


# -- the tests


PROGRAM = "tests.equivalence.test_checkpoint_faults"
ROLES = {role.__name__: role for role in (die_saving, die_replacing, die_keeping, run_out_of_room, cut_power)}


def play(role: Callable[[Path], None], folder: Path, *before: str, each: int = 1) -> None:
    """Run a role in a process of its own; its assertions are ours. each: 12 = before every twelfth call."""
    command = [*before, sys.executable, "-m", PROGRAM, role.__name__, str(folder)]
    played = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1", EACH: str(each)}, capture_output=True, text=True
    )
    assert played.returncode == 0, played.stderr[-4000:]


def may_mount() -> bool:
    probe = subprocess.run(["unshare", "--mount", "mount", "-t", "tmpfs", "none", "/mnt"], capture_output=True)
    return probe.returncode == 0


@pytest.mark.parametrize("each", [pytest.param(1, marks=pytest.mark.slow), 12])
@pytest.mark.parametrize("role", [die_saving, die_replacing, die_keeping])
def test_killed_before_any_call_the_old_or_the_new_checkpoint_is_whole(role: Callable[[Path], None], each: int) -> None:
    memory = "/dev/shm" if Path("/dev/shm").is_dir() else None  # a process may die anywhere; disks are slower
    with tempfile.TemporaryDirectory(dir=memory) as folder:
        play(role, Path(folder), each=each)


@pytest.mark.mpi
@pytest.mark.slow
def test_without_room_on_the_disk_all_ranks_say_so_and_the_old_checkpoint_stays(tmp_path: Path) -> None:
    if not may_mount():
        pytest.skip("a small disk of its own needs the right to mount")
    play(run_out_of_room, tmp_path, "unshare", "--mount")


@pytest.mark.mpi
def test_a_write_that_fails_on_one_rank_fails_the_save_on_all_with_the_same_words(tmp_path: Path) -> None:
    run = new_run(tmp_path / "run")
    saved(run, 1)
    first, second = run_ranks(2, f"{PROGRAM}:limit_file_size", str(run.root))
    assert first == second
    assert "step 2 could not be saved: File too large" in first
    assert names(run) == ["step-000000001"]


@pytest.mark.slow
@pytest.mark.mpi
def test_a_rank_that_dies_while_saving_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    run = new_run(tmp_path / "run")
    saved(run, 1)
    with pytest.raises(AssertionError, match="rank"):
        run_ranks(2, f"{PROGRAM}:lose_rank_1", str(run.root))
    assert newest_step(run) == 1
    run.begin_attempt()
    saved(run, 2)
    assert names(run) == ["step-000000001", "step-000000002"]


@pytest.mark.slow
def test_after_a_power_cut_a_checkpoint_that_was_saved_is_there(tmp_path: Path) -> None:
    if not may_mount() or not shutil.which("mkfs.ext4"):
        pytest.skip("a disk whose power can be cut needs mkfs.ext4 and the right to mount")
    play(cut_power, tmp_path, "unshare", "--mount")


if __name__ == "__main__":
    ROLES[sys.argv[1]](Path(sys.argv[2]))
