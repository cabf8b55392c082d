"""Real runs without Prefect: a run directory made from arrays, trained by a real mpirun, killed on request.

run = make_run(tmp_path, tiny_mlp(), {"features": x, "label": y}, train={"num_steps": 8}, parallel={"data": 2})
train_run(run)
weights = final_tensors(run)
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import psutil
import torch

from onward.trainer.checkpoint.load import load
from onward.trainer.checkpoint.verification import newest_complete
from onward.trainer.config.loading import build_config
from onward.trainer.data.data_problems import data_problems
from onward.trainer.data.resolve import write_resolved
from onward.trainer.data.schema.signature import model_digest
from onward.trainer.data.storage.sharding import make_training_shards
from onward.trainer.errors import ConfigError
from onward.trainer.events import Event, read_events
from onward.trainer.run.directory import RunDir, read_config
from onward.trainer.run.records import AttemptResult, RunIdentity, read_record, write_record
from tests.support import rank_server
from tests.support.ranks import ROOT, SETTINGS

Array = np.ndarray[Any, np.dtype[Any]]


def make_run(folder: Path, proto: onnx.ModelProto, columns: Mapping[str, Array], /, **sections: Any) -> RunDir:
    """A run directory ready to train, as the tasks before `train` leave it; needs no Prefect.

    A `proto` that refers to other files for its tensors finds them in `folder` already.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model.onnx").write_bytes(proto.SerializeToString())
    np.savez(folder / "data.npz", **columns)
    fast = {"start_timeout_s": 90, "heartbeat_timeout_s": 60, "threads_per_rank": 1}
    config = build_config(
        {
            "name": "test",
            **sections,
            "model": {"path": folder / "model.onnx"} | sections.get("model", {}),
            "data": {"source": str(folder / "data.npz"), "evaluation_fraction": 0.2} | sections.get("data", {}),
            # the default, an evaluation after each epoch, is tested in test_loop.py: these data have few rows
            "train": {"evaluation_period": 0} | sections.get("train", {}),
            "launch": fast | {"device": "cpu"} | sections.get("launch", {}),
        }
    )
    run = RunDir(folder / "run")
    write_record(run.config, config)
    digest = model_digest(folder / "model.onnx")
    write_record(run.identity, RunIdentity(run_id="run", name="test", created_at="2026-01-01", model_sha256=digest))
    os.environ["ONWARD_HOME"] = str(folder / "home")
    shards, manifest, _ = make_training_shards(config, folder / "home" / "shards")
    if problems := data_problems(config, manifest.table):
        raise ConfigError(problems)
    run.shards.symlink_to(shards, target_is_directory=True)
    if not config.quantize.aware:  # the model that is trained is made later
        write_resolved(run)
    return run


def start_attempt(
    run: RunDir,
    *,
    pause_at: tuple[str, int] | None = None,
    starve_at: tuple[str, int] | None = None,
) -> subprocess.Popen[bytes]:
    """Start mpirun on the run's next attempt, as bare as it can be.

    pause_at, starve_at: see tests/support/paused.py and starved.py.
    """
    attempt = run.begin_attempt()
    pause = ["tests.support.paused", *map(str, pause_at)] if pause_at else []
    starve = ["tests.support.starved", *map(str, starve_at)] if starve_at else []
    ranks = [*rank_server.command(), "-m", *pause, *starve, "onward.trainer", "train", str(run.root)]
    with run.log(attempt).open("wb") as log:
        return subprocess.Popen(
            [f"{sys.prefix}/bin/mpirun", "-n", str(read_config(run).world_size), "--bind-to", "none", *ranks],
            env=os.environ | SETTINGS,
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def train_run(run: RunDir, *, timeout_s: float = 120) -> AttemptResult:
    """Train to the end; raises AssertionError with the log's tail when no result was left."""
    job = start_attempt(run)
    job.wait(timeout_s)
    attempt = run.current_attempt
    assert run.result(attempt).exists(), f"{run.first_error(attempt)}\n{run.log(attempt).read_text()[-4000:]}"
    return read_record(run.result(attempt), AttemptResult)


def train_until(
    run: RunDir, reached: Callable[[Event], bool] | tuple[str, int], number: int = signal.SIGKILL, *, rank: int = 1
) -> None:
    """Start an attempt and send one rank a signal as soon as an event of it says so; wait for the job's end.

    reached: which event. Rank 0 waits behind an event that is given by its kind and step: for those near the end of a
    run, which a slow machine would otherwise see too late.
    """
    offset = run.events.stat().st_size if run.events.exists() else 0
    job = start_attempt(run, pause_at=reached if isinstance(reached, tuple) else None)
    deadline = time.monotonic() + 90
    while job.poll() is None and time.monotonic() < deadline:
        for event, after in read_events(run.events, offset):
            offset = after
            if (event.kind, event.step) == reached if isinstance(reached, tuple) else reached(event):
                os.kill(rank_pids(job.pid)[rank], number)
                job.wait(60)
                return
        time.sleep(0.005)
    raise AssertionError(f"never came so far:\n{run.log(run.current_attempt).read_text()[-4000:]}")


def rank_pids(mpirun: int) -> list[int]:
    """Process ids of the ranks below mpirun, in the order of ranks."""
    ranks = [child for child in psutil.Process(mpirun).children(recursive=True) if "onward.trainer" in child.cmdline()]
    return [child.pid for child in sorted(ranks, key=lambda child: int(child.environ()["PMIX_RANK"]))]


def final_tensors(run: RunDir) -> dict[str, torch.Tensor]:
    """Weights and optimizer state of the newest whole checkpoint."""
    newest = newest_complete(run)
    assert newest is not None
    return load(newest)[1]


def events(run: RunDir, kind: str) -> list[Event]:
    """All events of a kind, in the order of the log."""
    return [event for event, _ in read_events(run.events) if event.kind == kind]


def losses(run: RunDir) -> dict[int, float]:
    """Training loss by step, the last one logged for each."""
    return {e.step: e.values["train/loss"] for e in events(run, "scalars") if "train/loss" in e.values}


def assert_equal_bits(found: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> None:
    """Every tensor, every bit."""
    assert found.keys() == wanted.keys()
    differing = [name for name in wanted if not torch.equal(found[name], wanted[name])]
    assert not differing, f"{len(differing)} of {len(wanted)} tensors differ: {differing[:5]}"


def assert_close(found: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor], tolerance: float) -> None:
    """Every tensor, to rounding relative to its largest value."""
    assert found.keys() == wanted.keys()
    far = {
        name: float((found[name] - wanted[name]).abs().max() / wanted[name].abs().max().clamp(min=1e-6))
        for name in wanted
        if wanted[name].is_floating_point()
    }
    worst = max(far, key=far.__getitem__)
    assert far[worst] <= tolerance, f"{worst} is {far[worst]:.2e} off, above {tolerance:.0e}"


def tiny_text(rows: int, *, length: int = 12, vocabulary: int = 32, seed: int = 0) -> dict[str, Array]:
    """Token sequences that a tiny transformer can learn: the label of a token is the token after it."""
    random = np.random.default_rng(seed)
    text = (np.cumsum(random.integers(1, 4, (rows, length + 1)), axis=1) % vocabulary).astype(np.int64)
    return {"input_ids": text[:, :-1].copy(), "label": text[:, 1:].copy()}


def tiny_images(rows: int, *, size: int = 8, channels: int = 3, classes: int = 4, seed: int = 0) -> dict[str, Array]:
    """Noisy images whose brightest quadrant is the label."""
    random = np.random.default_rng(seed)
    label = random.integers(0, classes, rows)
    image = random.normal(0, 1, (rows, channels, size, size)).astype(np.float32)
    half = size // 2
    for row, quadrant in enumerate(label):
        y, x = divmod(int(quadrant), 2)
        image[row, :, y * half : (y + 1) * half, x * half : (x + 1) * half] += 2.0
    return {"image": image, "label": label.astype(np.int64)}
