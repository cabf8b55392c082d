"""Checkpoints written while training goes on: what they hold, what fails, and when it is noticed."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

import pytest
import torch

from onward.trainer.checkpoint import background, rank_file
from onward.trainer.checkpoint.background import CheckpointWriter, background_refusal
from onward.trainer.checkpoint.load import load
from onward.trainer.checkpoint.train_state import TrainState
from onward.trainer.checkpoint.verification import newest_complete, verify
from onward.trainer.config.run_config import RunConfig
from onward.trainer.distributed.processes import MPIContext
from onward.trainer.errors import StorageUnavailable
from onward.trainer.events import EventWriter, read_events
from onward.trainer.run.directory import RunDir
from onward.trainer.run.durable_files import sync
from onward.trainer.run.machine.priority import NICENESS
from tests.support.checkpoint_parts import held
from tests.support.ranks import run_ranks

ALONE = MPIContext(0, 1, 0, 1, "here", torch.device("cpu"))


def config(background: bool | str = True, **parallel: Any) -> RunConfig:
    given = {"checkpoint": {"background": background}, "parallel": parallel, "train": {"num_steps": 1}}
    return RunConfig.model_validate({"model": {"path": "m.onnx"}, "data": {"source": "d.npz"}, **given})


def values(step: int) -> dict[str, torch.Tensor]:
    return {f"model/{part}": torch.full((1001 - part,), 10.0 * step + part) for part in range(4)}


def position(step: int) -> TrainState:
    return TrainState(step=step, samples_seen=0, scaler={}, metrics={})


def beat() -> None:
    """Nothing looks at it."""


@contextlib.contextmanager
def writer(run: RunDir, mpi: MPIContext) -> Iterator[CheckpointWriter]:
    events = EventWriter(run.events, attempt=1, rank=mpi.rank)
    try:
        given = config()
        limits = given.parallel.memory_gib, given.collective_timeout_s
        yield CheckpointWriter(run, given.checkpoint, *limits, attempt=run.current_attempt, mpi=mpi, events=events)
    finally:
        events.close()


class SlowDisk:
    """An fsync of rank files that returns only when it is told to."""

    def __init__(self, patched: pytest.MonkeyPatch) -> None:
        self.works = threading.Event()

        def slow_sync(file: IO[bytes]) -> None:
            assert self.works.wait(20)
            sync(file)

        patched.setattr(rank_file, "sync", slow_sync)


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path)
    run.begin_attempt()
    return run


def saved_while_changing(mpi: MPIContext, root: str) -> list[bool]:
    """Change the tensors in place as soon as `save` returns, as an optimizer does; twice, then stop at once."""
    run = RunDir(Path(root))
    tensors = values(1)
    parts = held(tensors, mpi)
    in_thread = []
    with writer(run, mpi) as checkpoints:
        for step in (1, 2, 3):
            checkpoints.save(position(step), parts, beat=beat, last=step == 3)
            in_thread.append(step < 3 and any(each.name == "checkpoint" for each in threading.enumerate()))
            for name, tensor in tensors.items():
                tensor.copy_(values(step + 1)[name])
        checkpoints.close(beat)
        return in_thread


@pytest.mark.mpi
def test_a_checkpoint_holds_the_values_of_its_step_though_training_changes_them_at_once(run: RunDir) -> None:
    run_ranks(2, f"{__name__}:saved_while_changing", str(run.root))
    for step in (1, 2, 3):
        state, loaded = load(verify(run.checkpoint(step)))
        assert state == position(step)
        assert all(torch.equal(loaded[name], tensor) for name, tensor in values(step).items())
    events = [(event.step, event.path) for event, _ in read_events(run.events)]
    assert events == [(step, f"step-{step:09d}") for step in (1, 2, 3)]


def test_save_returns_while_the_disk_is_slow_and_the_next_save_waits(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = SlowDisk(monkeypatch)
    with writer(run, ALONE) as checkpoints:
        checkpoints.save(position(1), held(values(1), ALONE), beat=beat)
        checkpoints.poll()
        assert newest_complete(run) is None, "not complete before its bytes are on the disk"
        assert not list(read_events(run.events))
        threading.Timer(0.3, disk.works.set).start()
        began = time.monotonic()
        checkpoints.save(position(2), held(values(2), ALONE), beat=beat)
        assert time.monotonic() - began > 0.25, "one checkpoint is in flight at a time"
        assert verify(run.checkpoint(1))
        checkpoints.close(beat)
        assert verify(run.checkpoint(2))


def test_the_thread_gives_way_to_training_and_the_main_thread_keeps_its_priority(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk, before = SlowDisk(monkeypatch), os.getpriority(os.PRIO_PROCESS, 0)
    with writer(run, ALONE) as checkpoints:
        checkpoints.save(position(1), held(values(1), ALONE), beat=beat)
        # a thread is listed before it has its identity
        while not any(each.name == "digest_0" and each.native_id for each in threading.enumerate()):
            time.sleep(0.01)
        nice = {each.name: os.getpriority(os.PRIO_PROCESS, each.native_id or 0) for each in threading.enumerate()}
        disk.works.set()
        checkpoints.close(beat)
    lower = min(19, before + NICENESS)
    assert nice["checkpoint"] == nice["digest_0"] == lower
    assert nice["MainThread"] == before
    assert os.getpriority(os.PRIO_PROCESS, 0) == before


def test_where_the_priority_may_not_be_changed_a_checkpoint_is_written_with_the_usual_one(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = list[int]()

    def refused(*arguments: int) -> None:
        asked.append(arguments[-1])
        raise PermissionError("a sandbox")

    monkeypatch.setattr(os, "setpriority", refused)
    with writer(run, ALONE) as checkpoints:
        checkpoints.save(position(1), held(values(1), ALONE), beat=beat)
        checkpoints.close(beat)
    assert asked
    assert verify(run.checkpoint(1))


def test_a_thread_that_makes_no_progress_stops_the_heartbeat(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = SlowDisk(monkeypatch)
    with writer(run, ALONE) as checkpoints:
        checkpoints.save(position(1), held(values(1), ALONE), beat=beat)
        time.sleep(0.2)
        beats: list[float] = []
        threading.Timer(1.0, disk.works.set).start()
        checkpoints.wait(lambda: beats.append(time.monotonic()))
        assert len(beats) <= 2, "the watchdog must see that the disk does not answer"


def test_rank_0_alone_says_by_its_clock_that_a_checkpoint_is_due(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1000.0]
    monkeypatch.setattr(background, "time", SimpleNamespace(monotonic=lambda: now[0]))
    run, other = RunDir(tmp_path / "run"), MPIContext(1, 2, 1, 2, "here", torch.device("cpu"))
    run.begin_attempt()
    with writer(run, ALONE) as checkpoints:
        now[0] += 599.0
        assert not checkpoints.is_due()
        now[0] += 1.0
        assert checkpoints.is_due(), "10 minutes after the attempt began"
        checkpoints.save(position(1), held(values(1), ALONE), beat=beat)
        assert not checkpoints.is_due()
        checkpoints.wait(beat)
        now[0] += 600.0
        assert checkpoints.is_due()
        monkeypatch.setattr(checkpoints, "_mpi", other)
        assert not checkpoints.is_due()


def fail_in_the_background(mpi: MPIContext, root: str) -> str:
    """Rank 1 cannot write files beyond 10 kB."""
    if mpi.rank == 1:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, resource.RLIM_INFINITY))
    with writer(RunDir(Path(root)), mpi) as checkpoints:
        large = {name: tensor.repeat(20) for name, tensor in values(2).items()}
        checkpoints.save(position(2), held(large, mpi), beat=beat)
        try:
            for _ in range(1000):
                checkpoints.poll()
                time.sleep(0.01)
        except StorageUnavailable as error:
            return str(error)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        return "no error"


@pytest.mark.mpi
def test_an_error_in_the_background_is_raised_on_all_ranks_in_a_later_step(run: RunDir) -> None:
    first, second = run_ranks(2, f"{__name__}:fail_in_the_background", str(run.root))
    assert first == second
    assert "step 2 could not be saved: File too large" in first
    assert "earlier checkpoints are unchanged" in first
    assert not list(run.checkpoints.glob("step-*"))


def test_killed_while_it_writes_the_checkpoint_before_is_the_newest(run: RunDir) -> None:
    child = os.fork()
    if child == 0:
        try:
            patched = pytest.MonkeyPatch()
            with writer(run, ALONE) as checkpoints:
                checkpoints.save(position(1), held(values(1), ALONE), beat=beat)
                checkpoints.wait(beat)
                SlowDisk(patched)
                checkpoints.save(position(2), held(values(2), ALONE), beat=beat)
                while not list(run.checkpoints.glob("*.partial-*/rank-00000.safetensors")):
                    time.sleep(0.01)
                os.kill(os.getpid(), signal.SIGKILL)
        finally:
            os._exit(1)  # else an error would let this process go on with the other tests
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    newest = newest_complete(run)
    assert newest is not None
    assert newest.info.step == 1
    run.begin_attempt()
    with writer(run, ALONE) as checkpoints:
        checkpoints.save(position(2), held(values(2), ALONE), beat=beat, last=True)
    assert verify(run.checkpoint(2))


def test_auto_copies_where_memory_is_free_and_says_why_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "free_memory", lambda device: 1000)
    two = MPIContext(0, 2, 0, 2, "here", torch.device("cpu"))

    def refusal(settings: RunConfig, num_bytes: int) -> str:
        return background_refusal(settings.checkpoint.background, settings.parallel.memory_gib, two, num_bytes)

    assert refusal(config("auto"), 250) == ""
    assert "takes 251 bytes, and 500 are free" in refusal(config("auto"), 251)
    assert refusal(config(True), 251) == ""
    assert refusal(config(False), 1) == "checkpoint.background = false"
    assert "parallel.memory_gib" in refusal(config("auto", memory_gib=1), 1)
