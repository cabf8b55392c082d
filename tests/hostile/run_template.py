"""A directory with a trained run, its bundle and a sweep: the files that Onward has written and reads again."""

from __future__ import annotations

import atexit
import os
import shutil
import sys
import tempfile
import traceback
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from onward.infra.servers.service_state import directory
from onward.trainer.checkpoint.retention import Announced
from onward.trainer.run.adjustments import Adjustments
from onward.trainer.run.directory import RunDir, read_config
from onward.trainer.run.outcomes.attempt_endings import AttemptEnding
from onward.trainer.run.outcomes.run_ending import RunEnding
from onward.trainer.run.recorded.sweep_records import Range, Sweep, Trial
from onward.trainer.run.records import (
    CheckpointInfo,
    ExportedModel,
    MetricsSummary,
    RankError,
    Record,
    Rehearsal,
    RunIdentity,
    RuntimeReport,
    TrainResult,
    write_record,
)
from onward.trainer.run.remote.local_copies import LocalCopies
from tests.hostile.onnx_files import small_model

RUN = "0de13422-aaaa-4bbb-8ccc-123456789abc"
SWEEP = "5eed5eed-aaaa-4bbb-8ccc-123456789abc"


@cache
def trained() -> Path:
    """Return a directory with model.onnx, data.npz, a home with one run and one sweep, and the run's bundle.

    One rank has trained four steps, in a fork of this process. What servers and further tasks would write is made of
    the classes of the records.
    """
    folder = Path(tempfile.mkdtemp(prefix="onward-hostile-run-"))
    atexit.register(_remove, folder, os.getpid())
    child = os.fork()
    if not child:
        status = 1
        try:
            _make(folder)
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(status)
    _, status = os.waitpid(child, 0)
    assert status == 0, (folder / "made.log").read_text()
    (folder / "made.log").unlink()
    return folder


def copy_into(folder: Path) -> Path:
    """Copy the directory; return the home of the copy, whose configuration names the files of the copy."""
    made = trained()
    shutil.copytree(made, folder, symlinks=True, dirs_exist_ok=True)
    for path in (*folder.glob("home/runs/*/config.json"), *folder.glob("home/sweeps/*/sweep.json")):
        path.write_text(path.read_text().replace(str(made), str(folder)))
    return folder / "home"


def _remove(folder: Path, process: int) -> None:
    if os.getpid() == process:
        shutil.rmtree(folder, ignore_errors=True)


def _make(folder: Path) -> None:
    from onward.trainer import __main__ as rank
    from onward.trainer.checkpoint.bundle import write_bundle
    from onward.trainer.checkpoint.verification import newest_complete
    from tests.support.runs import make_run

    said = os.open(folder / "made.log", os.O_WRONLY | os.O_CREAT)
    os.dup2(said, 1)
    os.dup2(said, 2)
    values = np.random.default_rng(0).normal(size=(40, 4)).astype(np.float32)
    columns = {"x": values, "label": np.arange(40) % 3}
    settings = {"train": {"num_steps": 4, "global_batch_size": 4}, "checkpoint": {"period": 2}}
    run = make_run(folder, small_model(), columns, **settings)
    run.begin_attempt()
    trainer = os.fork()
    if not trainer:
        sys.argv = ["onward.trainer", "train", str(run.root)]
        try:
            rank.main()
        finally:
            os._exit(0)
    os.waitpid(trainer, 0)
    home = folder / "home"
    shards = run.shards.resolve()
    run.shards.unlink()
    shutil.copytree(shards, run.shards)
    shutil.rmtree(shards.parent)
    (home / "runs").mkdir()
    run = RunDir(shutil.move(run.root, home / "runs" / RUN))
    _write_records(run)
    found = newest_complete(run)
    assert found is not None
    write_bundle(run, found, folder / "run.bundle")


def _write_records(run: RunDir) -> None:
    """Write what the tasks and a sweep would have written."""
    for path, record in _records(run).items():
        write_record(path, record)
    (run.root / "job.json").write_text('{"tag": "x", "command": ["mpirun"], "started_at": 0.0, "boot_id": "x"}')
    services = directory(run.root.parents[1])
    (services / "mlflow.supervisor").write_text('{"pid": 1, "port": 5000}')
    (services / "pinned").write_text("x")


def _records(run: RunDir) -> dict[Path, Record]:
    home, checked = run.root.parents[1], CheckpointInfo
    settings = read_config(run, "given").model_dump(mode="json")
    found = [checked(step=step, path=run.checkpoint(step), bytes=1, digest="0" * 64, metrics={}) for step in (2, 4)]
    gone = RankError(attempt=1, rank=0, host="h", step=3, cause="ValueError: x", traceback="", at_ms=1)
    over = AttemptEnding(
        attempt=1, kind="rank_lost", sentence="a", action="b", step=4, began_ms=1, detected_ms=2, ended_ms=3
    )
    exported = ExportedModel(
        path=run.export / "model.onnx", sha256="0" * 64, step=4, parity=0.0, before={}, after={"loss": 1.0}, changed=2
    )
    sweep = home / "sweeps" / SWEEP
    tried: dict[str, Any] = {"optimizer.learning_rate": (0.1, 0.2)}
    return {
        run.flow_ending: RunEnding(status="failed", exit_status=1, error="TrainingFailed", problems=("x",)),
        run.train: TrainResult(status="done", attempts=1, step=4, samples_seen=16, metrics={"loss": 1.0}, elapsed_s=1),
        run.metrics: MetricsSummary(status="FINISHED", step=4, num_events=9, first={}, last={}, samples_per_s=1.0),
        run.runtime: RuntimeReport(ranks=(), launch_s=1.0, disk_free_bytes=1),
        run.rehearsal: Rehearsal(trained=3),
        run.rank_error(1, 0): gone,
        run.ending(1): over,
        run.announced: Announced(checkpoints=tuple(found)),
        run.exported: exported,
        run.remote: LocalCopies(),
        run.adjusted: Adjustments(),
        sweep / "sweep.json": Sweep(
            sweep_id=SWEEP,
            name="test",
            created_at="2026-01-01",
            settings=settings,
            choices=tried,
            ranges={"optimizer.weight_decay": Range(kind="log", low=0.1, high=1.0)},
            num_trials=2,
            seed=0,
            prune=True,
            metric="loss",
            greatest=False,
            experiment="x",
            tracking_uri="",
        ),
        sweep / "identity.json": RunIdentity(run_id=SWEEP, name="test", created_at="2026-01-01", model_sha256="0" * 64),
        sweep / "trials" / "0001.json": Trial(number=1, run_id=RUN, settings={}, status="complete", value=1.0, step=4),
    }
