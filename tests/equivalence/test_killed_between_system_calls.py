"""Killed, or without power, between any two system calls: checkpoint, shards and exported file are the old or the new.

The calls of native libraries count as well: tests/support/dies_between_calls.c is preloaded into this program,
`python -m tests.equivalence.test_killed_between_system_calls ROLE FOLDER`, which forks a process for each call.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import itertools
import os
import shutil
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch

from onward.tasks import export as export_task
from onward.trainer.checkpoint.load import load
from onward.trainer.checkpoint.retention import list_checkpoints
from onward.trainer.checkpoint.save import save
from onward.trainer.checkpoint.train_state import TrainState
from onward.trainer.checkpoint.verification import newest_complete, verify
from onward.trainer.data.schema.signature import model_digest
from onward.trainer.data.storage.opened_shards import damaged_files
from onward.trainer.data.storage.sharding import make_training_shards
from onward.trainer.data.storage.shards import ShardManifest
from onward.trainer.distributed.processes import MPIContext
from onward.trainer.export.export_commands import export_file
from onward.trainer.run.directory import RunDir, read_config
from onward.trainer.run.export_folder import example_in
from onward.trainer.run.records import ExportedModel, RunIdentity, read_record, write_record
from tests.support.checkpoint_parts import held
from tests.support.exported_runs import exported_run
from tests.support.graphs import tiny_mlp
from tests.support.ranks import ROOT

ALONE = MPIContext(0, 1, 0, 1, "here", torch.device("cpu"))
PROGRAM = "tests.equivalence.test_killed_between_system_calls"
SOURCE = ROOT / "tests" / "support" / "dies_between_calls.c"
EXT4_IOC_SHUTDOWN, NO_LOG_FLUSH = 0x8004587D, 2  # linux/fs/ext4/ext4.h: _IOR('X', 125, __u32)


@dataclass(frozen=True)
class Work:
    """Something that changes files in a directory."""

    prepare: Callable[[Path], None]
    """Make the state before it. The directory `shared` beside it is read by all copies."""
    act: Callable[[Path], None]
    check: Callable[[Path, bool], None]
    """Look at the directory after a kill, or after the work was done (True)."""
    at_least: int
    """Calls that it makes."""
    repeated: int = 1
    """After each kill whose number this divides the work is done again, to its end."""


# -- a checkpoint


def weights(step: int) -> dict[str, torch.Tensor]:
    found = {each.name: onnx.numpy_helper.to_array(each) for each in tiny_mlp(seed=step).graph.initializer}
    return {f"model/{name}": torch.from_numpy(np.array(value)) for name, value in found.items()}


def saved(run: RunDir, step: int) -> Path:
    state = TrainState(step=step, samples_seen=0, scaler={}, metrics={"evaluation/loss": 1.0}, evaluated_at=step)
    return save(run, attempt=run.current_attempt, state=state, parts=held(weights(step), ALONE), mpi=ALONE)


def one_checkpoint(folder: Path) -> None:
    run = RunDir(folder)
    run.begin_attempt()
    saved(run, 1)


def old_or_new_checkpoint(folder: Path, done: bool) -> None:
    run = RunDir(folder)
    newest = newest_complete(run)
    assert newest is not None
    state, tensors = load(newest)
    assert state.step in ((2,) if done else (1, 2))
    assert all(torch.equal(tensors[name], wanted) for name, wanted in weights(state.step).items())
    assert all(verify(path) for path in list_checkpoints(run))


# -- shards


def config_of(folder: Path) -> RunDir:
    return RunDir(folder.parent / "shared" / "run")


def no_shards(folder: Path) -> None:
    (folder / "cache").mkdir()


def damaged_shards(folder: Path) -> None:
    shard(folder)
    path = next((folder / "cache").glob("*/*.arrow"))
    path.write_bytes(path.read_bytes()[:-1] + b"\xff")


def shard(folder: Path) -> None:
    make_training_shards(read_config(config_of(folder)), folder / "cache")


def no_shards_or_whole_ones(folder: Path, done: bool) -> None:
    found = [path for path in (folder / "cache").iterdir() if not path.name.startswith(".")]
    assert len(found) <= 1
    assert found or not done
    wanted = config_of(folder).shards.resolve()
    for path in found:
        problems = damaged_files(path, read_record(path / "manifest.json", ShardManifest))
        assert not problems, problems
        names = sorted(file.name for file in wanted.iterdir())
        assert sorted(file.name for file in path.iterdir()) == names
        assert all((path / name).read_bytes() == (wanted / name).read_bytes() for name in names)


def damaged_shards_or_whole_ones(folder: Path, done: bool) -> None:
    """As before, but the damaged ones may still be there: they are found out before each run."""
    (path,) = [path for path in (folder / "cache").iterdir() if not path.name.startswith(".")] or [None]
    if path is None or (not done and damaged_files(path, read_record(path / "manifest.json", ShardManifest))):
        assert not done
        return
    no_shards_or_whole_ones(folder, done)


# -- an exported file


def two_checkpoints_and_a_file(folder: Path) -> None:
    shutil.copytree(config_of(folder).root, folder, symlinks=True, dirs_exist_ok=True)
    run = RunDir(folder)
    run.begin_attempt()
    saved(run, 1), saved(run, 2)
    export_step(folder, 1)
    (folder / "delivered").mkdir()
    deliver(folder)


def export_step(folder: Path, step: int) -> ExportedModel:
    # in this process, which counts its calls, in place of one of its own
    def run_trainer(command: str, run: RunDir, what: str, place: Path) -> str:
        return str(export_file(run, Path(what), folder=place) or "")

    export_task._run_trainer = run_trainer
    return export_task.export_file(RunDir(folder), RunDir(folder).checkpoint(step))


def deliver(folder: Path) -> None:
    exported = read_record(RunDir(folder).exported, ExportedModel)
    export_task.copy_to(folder / "delivered" / "file.onnx", exported, source=Path("/elsewhere.onnx"))


def export_the_second(folder: Path) -> None:
    export_step(folder, 2)
    deliver(folder)


def step_of(path: Path) -> int:
    """The step whose weights a file has, all of them."""
    found = {each.name: onnx.numpy_helper.to_array(each) for each in onnx.load_model(path).graph.initializer}
    for step in (1, 2):
        wanted = {name.removeprefix("model/"): value.numpy() for name, value in weights(step).items()}
        if found.keys() == wanted.keys() and all(np.array_equal(found[name], wanted[name]) for name in wanted):
            return step
    raise AssertionError(f"{path} is neither the old file nor the new one")


def old_or_new_file(folder: Path, done: bool) -> None:
    run = RunDir(folder)
    steps = [step_of(run.export / "model.onnx"), step_of(folder / "delivered" / "file.onnx")]
    assert steps == [2, 2] if done else steps in ([1, 1], [2, 1], [2, 2])
    if run.exported.exists():
        exported = read_record(run.exported, ExportedModel)
        assert exported.sha256 == model_digest(exported.path)
        assert exported.step == steps[0]
        assert np.load(example_in(run.export))
    assert run.exported.exists() or not done
    if done:
        left = [path.name for place in (run.export, folder / "delivered") for path in place.iterdir()]
        assert not [name for name in left if name.startswith(".")], left


WORK = {
    "save": Work(one_checkpoint, lambda folder: print(saved(RunDir(folder), 2)), old_or_new_checkpoint, 10),
    "shard": Work(no_shards, shard, no_shards_or_whole_ones, 15),
    "shard-again": Work(damaged_shards, shard, damaged_shards_or_whole_ones, 15),
    "export": Work(two_checkpoints_and_a_file, export_the_second, old_or_new_file, 30, repeated=6),
}


# -- the program that dies


def prepare(folder: Path) -> None:
    """Write the run of which `shared` holds configuration, identity and shards."""
    folder.mkdir()
    random = np.random.default_rng(0)
    features = random.normal(size=(40, 4)).astype(np.float32)
    np.savez(folder / "data.npz", features=features, label=features.sum(1, keepdims=True))
    data = {"source": str(folder / "data.npz"), "evaluation_fraction": 0.2}
    run = exported_run(folder, tiny_mlp(), data=data, loss={"name": "mse"})
    digest = model_digest(folder / "model.onnx")
    write_record(run.identity, RunIdentity(run_id="run", name="test", created_at="2026-01-01", model_sha256=digest))


def forked(act: Callable[[], object]) -> bool:
    """Return whether a process that acts has come to its end."""
    child = os.fork()
    if child == 0:
        try:
            act()
        except BaseException:
            sys.excepthook(*sys.exc_info())
            os._exit(1)
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    assert not os.WIFEXITED(status) or os.WEXITSTATUS(status) in (0, 99), "an error, not an ending"
    return status == 0


ENDING = ctypes.CFUNCTYPE(None)


def dies(work: Work, folder: Path, number: int, ending: object = None) -> bool:
    def act() -> None:
        ctypes.CDLL(None).arm(ctypes.c_long(number), str(folder).encode(), ending)
        work.act(folder)

    return not forked(act)


def prepare_work(work: Work, folder: Path, kept: Path) -> None:
    """Make the state before the work where the work will be done, since exports are remembered by their path."""
    os.environ["ONWARD_HOME"] = str(folder / "home")
    folder.mkdir()
    assert forked(lambda: work.prepare(folder))
    shutil.move(folder, kept)


def kill_at_every_call(name: str, root: Path) -> None:
    work = WORK[name]
    prepare(root / "shared")
    prepare_work(work, root / "now", root / "before")
    for number in itertools.count():
        print(f"call {number}", file=sys.stderr)
        folder = Path(shutil.copytree(root / "before", root / "now", symlinks=True))
        died = dies(work, folder, number)
        work.check(folder, not died)
        if died and number % work.repeated == 0:
            RunDir(folder).begin_attempt()
            assert forked(lambda folder=folder: work.act(folder))  # the next one does it all
            work.check(folder, True)
        shutil.rmtree(folder)
        if not died:
            assert number >= work.at_least, f"only {number} calls were seen"
            print(f"{number} calls")
            return


def cut_power_at_every_call(name: str, root: Path) -> None:
    """The same on an ext4 whose power is cut, after which only what was flushed is there."""
    work = WORK[name]
    prepare(root / "shared")
    image, disk = root / "image", root / "disk"
    disk.mkdir()
    subprocess.run(["truncate", "-s", "64M", str(image)], check=True)
    subprocess.run(["mkfs.ext4", "-q", str(image)], check=True)

    @contextlib.contextmanager
    def mounted() -> Iterator[None]:
        subprocess.run(["mount", "-o", "loop,commit=300", str(image), str(disk)], check=True)
        yield
        subprocess.run(["umount", str(disk)], check=True)

    def cut() -> None:
        at = os.open(disk, os.O_RDONLY)
        fcntl.ioctl(at, EXT4_IOC_SHUTDOWN, struct.pack("I", NO_LOG_FLUSH))
        os._exit(99)

    ending = ENDING(cut)
    (disk / "shared").symlink_to(root / "shared")
    prepare_work(work, disk / "now", root / "before")
    for number in itertools.count():
        print(f"call {number}", file=sys.stderr)
        with mounted():
            (disk / "shared").exists() or (disk / "shared").symlink_to(root / "shared")
            folder = Path(shutil.copytree(root / "before", disk / "now", symlinks=True))
            os.sync()
            done = forked(lambda folder=folder, number=number: acts_and_loses_power(work, folder, number, ending, cut))
            assert not done
        finished = (root / "done").exists()
        with mounted():
            work.check(folder, finished)
            shutil.rmtree(folder)
        if finished:
            assert number >= work.at_least, f"only {number} calls were seen"
            print(f"{number} calls")
            return


def acts_and_loses_power(work: Work, folder: Path, number: int, ending: object, cut: Callable[[], None]) -> None:
    ctypes.CDLL(None).arm(ctypes.c_long(number), str(folder).encode(), ending)
    work.act(folder)
    ctypes.CDLL(None).arm(ctypes.c_long(-1), b"/nowhere", None)
    (folder.parents[1] / "done").touch()  # on a disk that keeps its power
    cut()


# -- the tests


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not shutil.which("gcc"):
        pytest.skip("the library that counts system calls needs gcc")
    path = tmp_path_factory.mktemp("library") / "dies.so"
    subprocess.run(["gcc", "-shared", "-fPIC", "-O1", "-o", str(path), str(SOURCE), "-ldl"], check=True)
    return path


def play(library: Path, role: str, name: str, folder: Path, *before: str) -> None:
    settings = {"OMP_NUM_THREADS": "1", "LD_PRELOAD": str(library)}
    command = [*before, sys.executable, "-m", PROGRAM, role, name, str(folder)]
    played = subprocess.run(command, cwd=ROOT, env={**os.environ, **settings})  # pytest captures what it says
    assert played.returncode == 0


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", list(WORK))
def test_killed_before_any_system_call_the_files_are_the_old_or_the_new(library: Path, name: str) -> None:
    memory = "/dev/shm" if Path("/dev/shm").is_dir() else None  # a process may die anywhere; disks are slower
    with tempfile.TemporaryDirectory(dir=memory) as folder:
        play(library, "kill", name, Path(folder))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", list(WORK))
def test_without_power_before_any_system_call_the_files_are_the_old_or_the_new(
    library: Path, name: str, tmp_path: Path
) -> None:
    probe = subprocess.run(["unshare", "--mount", "mount", "-t", "tmpfs", "none", "/mnt"], capture_output=True)
    if probe.returncode or not shutil.which("mkfs.ext4"):
        pytest.skip("a disk whose power can be cut needs mkfs.ext4 and the right to mount")
    play(library, "cut", name, tmp_path, "unshare", "--mount")


if __name__ == "__main__":
    {"kill": kill_at_every_call, "cut": cut_power_at_every_call}[sys.argv[1]](sys.argv[2], Path(sys.argv[3]))
