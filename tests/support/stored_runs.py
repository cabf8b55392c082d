"""Runs for the tests of stores: a run directory with checkpoints of known content, and a program that sends them."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import sys
import time
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

from onward.tasks.checkpoint import CheckpointRetention
from onward.tasks.storing.run_sender import RunSender, begin_sending
from onward.trainer.checkpoint.manifest import FileEntry, Manifest, TensorEntry, serialise
from onward.trainer.checkpoint.train_state import TrainState
from onward.trainer.config.run_config import RunConfig
from onward.trainer.config.sections.data import DataConfig
from onward.trainer.config.sections.model import ModelConfig
from onward.trainer.config.sections.results import CheckpointConfig
from onward.trainer.config.sections.training import TrainConfig
from onward.trainer.events import EventWriter
from onward.trainer.run.directory import RunDir, read_config
from onward.trainer.run.durable_files import sha256
from onward.trainer.run.kept_settings import write_settings
from onward.trainer.run.records import RunIdentity, write_record

LOG = logging.getLogger("onward.tests.store")
RUN_ID = "11111111-2222-3333-4444-555555555555"
FILES = 3


def make_stored_run(home: Path, store: str, **checkpoint: object) -> RunDir:
    """A run as `configure` leaves it, of which nothing is in the store yet."""
    run = RunDir(home / "runs" / RUN_ID)
    run.root.mkdir(parents=True)
    model = home / "model.onnx"
    model.write_bytes(b"a model of the first machine")
    keep = CheckpointConfig.model_validate({"keep_newest": 2, "store": store, **checkpoint})
    config = RunConfig(
        model=ModelConfig(path=model), data=DataConfig(source="digits"), train=TrainConfig(num_steps=9), checkpoint=keep
    )
    write_settings(run, config)
    identity = RunIdentity(run_id=RUN_ID, name="stored-1", config_name="stored", created_at="", model_sha256="")
    write_record(run.identity, identity)
    run.begin_attempt()
    return run


def values(step: int, number: int, size: int = 2000) -> np.ndarray:
    """What file `number` of a checkpoint of this step holds."""
    return np.random.default_rng([step, number]).normal(size=size)


def save_step(run: RunDir, step: int, *, size: int = 2000, salt: int = 0) -> None:
    """Save a checkpoint of several files, as the ranks do, and its events. salt: other content of the same step."""
    writer = EventWriter(run.events, attempt=run.current_attempt, rank=0, announces=False)
    writer.scalars(step, loss=1.0 / step)
    writer.sync()
    writer.close()
    partial = run.checkpoint(step).with_name(f"step-{step:09d}.partial-001")
    shutil.rmtree(partial, ignore_errors=True)  # of a program that was killed here
    partial.mkdir(parents=True)
    files = []
    tensors = {}
    for number in range(FILES):
        path = partial / f"rank-{number:05d}.safetensors"
        save_file({f"model/w{number}": values(step + salt, number, size)}, path)
        entry = {f"model/w{number}": TensorEntry(dtype="F64", shape=(size,))}
        tensors |= entry
        files.append(FileEntry(name=path.name, bytes=path.stat().st_size, sha256=sha256(path), tensors=entry))
    state = TrainState(step=step, samples_seen=step, scaler={}, metrics={})
    manifest = Manifest(world_size=FILES, state=state, tensors=tensors, files=tuple(files))
    (partial / "manifest.json").write_bytes(serialise(manifest))
    partial.rename(run.checkpoint(step))


def holds_its_values(run: RunDir, step: int, size: int = 2000) -> bool:
    """Whether a checkpoint has the values of its step in all of its files."""
    for number in range(FILES):
        found = load_file(run.checkpoint(step) / f"rank-{number:05d}.safetensors")[f"model/w{number}"]
        if not np.array_equal(found, values(step, number, size)):
            return False
    return True


def send(run: RunDir) -> bool:
    """Verify, announce and send what the run has, as the checkpoint task does; return whether all is in the store."""
    config = read_config(run, "given").checkpoint
    begin_sending(run, config.store, LOG)
    sender = RunSender(run, LOG)
    retention = CheckpointRetention(run, config, LOG)
    retention.update()
    sender.offer(retention.kept)
    return sender.finish(patience_s=5.0)


def train_and_send(root: Path, *, first: int, last: int, size: int) -> None:
    """Save one checkpoint after the other, while they are sent; the program that the test of 40 kills kills."""
    run = RunDir(root)
    config = read_config(run, "given").checkpoint
    begin_sending(run, config.store, LOG)
    sender = RunSender(run, LOG)
    retention = CheckpointRetention(run, config, LOG)
    for step in range(first, last + 1):
        save_step(run, step, size=size)
        retention.update(sender.held)
        sender.offer(retention.kept)
        print(f"saved {step}", flush=True)
        time.sleep(0.2)
    sender.finish()
    print("sent", flush=True)


def fork_programs() -> None:
    """Fork a program for each line `ROOT FIRST LAST SIZE` of stdin, and answer with its process: imports take seconds.

    This process never touches a store, so that its forks have no thread of another one.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them
    for line in sys.stdin:
        root, *numbers = line.split()
        if pid := os.fork():
            print(pid, flush=True)
            continue
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        log = os.open(f"{root}/program.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        logging.basicConfig(level=logging.INFO, stream=sys.stderr)
        first, last, size = map(int, numbers)
        try:
            train_and_send(Path(root), first=first, last=last, size=size)
        finally:
            sys.stderr.flush()
            os._exit(0)


if __name__ == "__main__":
    fork_programs()
