"""Disk space is compared with what a run will write, before its ranks start."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from onward.tasks.checks.disk_space import Share, most_checkpoints, shares, space_problems
from onward.tasks.init_runtime import init_runtime
from onward.trainer.config.loading import build_config
from onward.trainer.config.run_config import RunConfig
from onward.trainer.errors import RuntimeUnavailable
from onward.trainer.run.directory import RunDir
from onward.trainer.run.records import Needs, Rehearsal, write_record

NEEDS = Needs(rank_bytes=1, checkpoint_bytes=30_000_000, model_bytes=10_000_000)


def config(tmp_path: Path, **sections: Any) -> RunConfig:
    (tmp_path / "model.onnx").write_bytes(bytes(100))
    given: dict[str, Any] = {
        "model": {"path": str(tmp_path / "model.onnx")},
        "data": {"source": "digits"},
        "train": {"num_steps": 40, "global_batch_size": 4},
        "launch": {"device": "cpu", "start_timeout_s": 60},
        "checkpoint": {"period": 10, "minutes": 0},
    }
    exported = {"checkpoint": "last"} | sections.pop("export", {})
    return build_config(given | sections | {"export": exported})


def disk(monkeypatch: pytest.MonkeyPatch, *, free: int, inodes: int = 10**9, has_inodes: bool = True) -> None:
    """Let every file system have this much room."""
    found = SimpleNamespace(f_bavail=free, f_frsize=1, f_favail=inodes, f_files=10**9 if has_inodes else 0)
    monkeypatch.setattr(os, "statvfs", lambda path: found)


def test_the_sum_of_all_that_is_written_to_one_file_system_is_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = config(tmp_path, export={"path": str(tmp_path / "new" / "out.onnx"), "variants": ["fp16"]})
    uri = f"sqlite:///{tmp_path}/mlflow/mlflow.db"
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    found = list(shares(RunDir(tmp_path), chosen, NEEDS, tracking_uri=uri))
    assert sum(share.bytes for share in found) == 4 * 30_000_000 + 5 * 10_000_000
    disk(monkeypatch, free=170_000_000)
    assert list(space_problems(found)) == []
    disk(monkeypatch, free=169_000_000)
    assert list(space_problems(found)) == [
        f"169 MB of disk are free on the file system of {tmp_path}, but the run needs at least 170 MB there: "
        "4 checkpoints of 30 MB 120 MB, the exported file and 1 file made of it 20 MB, the exported file while it is "
        "packed 10 MB, the exported file in MLflow 10 MB, the exported file at export.path 10 MB; make room, lower "
        "checkpoint.keep_newest, or set ONWARD_HOME to a directory on a larger disk"
    ]


def test_checkpoints_that_a_resumed_run_has_already_need_no_further_room(tmp_path: Path) -> None:
    run, chosen = RunDir(tmp_path), config(tmp_path)

    def left() -> int:
        return next(share.bytes for share in shares(run, chosen, NEEDS, tracking_uri="http://h"))

    assert left() == 120_000_000
    for step in (10, 20, 30):
        folder = run.checkpoints / f"step-{step:09d}"
        folder.mkdir(parents=True)
        with (folder / "rank-00000.safetensors").open("wb") as file:
            file.truncate(30_000_000)
    assert left() == 30_000_000
    (folder / "rank-00000.safetensors").write_bytes(b"")
    (run.checkpoints / "step-000000020").rename(run.checkpoints / "step-000000020.damaged")
    assert left() == 60_000_000


def test_no_more_checkpoints_are_counted_than_the_run_saves(tmp_path: Path) -> None:
    def most(period: int, minutes: float = 0.0, exported: str = "last", **train: Any) -> int:
        tables = {"checkpoint": {"period": period, "minutes": minutes}, "export": {"checkpoint": exported}}
        chosen = config(tmp_path, train={"global_batch_size": 4} | train, **tables)
        return most_checkpoints(chosen.checkpoint, chosen.train, chosen.export)

    assert most(0, num_steps=40) == 1
    assert most(30, num_steps=40) == 2
    assert most(1, num_steps=40) == 5
    assert most(10, num_epochs=3) == 5
    assert most(0, 10.0, num_steps=40) == 5, "how many there will be by time is not known"
    assert most(0, 10.0, num_steps=2) == 2
    assert most(0, exported="best", num_steps=40) == 5, "how many evaluations will be the best so far is not known"


def test_a_file_system_without_inodes_left_is_reported_and_one_without_such_a_limit_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = [Share("3 checkpoints", tmp_path, 3, 112)]
    disk(monkeypatch, free=10**9, inodes=111)
    assert list(space_problems(found)) == [
        f"111 inodes are free on the file system of {tmp_path}, but the run writes about 112 files there; delete "
        "files, or set ONWARD_HOME to a directory on another file system"
    ]
    disk(monkeypatch, free=10**9, inodes=0, has_inodes=False)
    assert list(space_problems(found)) == []


@pytest.mark.mpi
def test_a_run_that_the_disk_cannot_hold_is_refused_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunDir(tmp_path)
    write_record(run.config, config(tmp_path))
    write_record(run.rehearsal, Rehearsal(needs=NEEDS.model_copy(update={"checkpoint_bytes": 10**18})))
    with pytest.raises(RuntimeUnavailable, match=r"of disk are free on .*: 4 checkpoints of 1,000,000,000,000 MB"):
        init_runtime.fn(run)
    assert not run.runtime.exists()
