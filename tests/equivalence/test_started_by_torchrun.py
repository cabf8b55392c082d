"""Ranks that torchrun or another launcher without MPI has started: the same bits as under mpirun, without mpi4py."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from onward.trainer.run.directory import RunDir
from onward.trainer.run.records import AttemptResult, read_record
from tests.support import graphs
from tests.support.ranks import ROOT
from tests.support.runs import assert_equal_bits, events, final_tensors, make_run, tiny_images, train_run

SETTINGS = {
    "train": {"global_batch_size": 8, "num_steps": 40},
    "checkpoint": {"period": 5},
    "parallel": {"data": 2},
}


def start(run: RunDir, *options: str, without_mpi: Path | None = None) -> subprocess.Popen[str]:
    """torchrun with two ranks of a run. without_mpi: a folder in which to write a mpi4py that cannot be imported."""
    paths = [str(ROOT / ".package"), str(ROOT)]
    if without_mpi:
        (without_mpi / "mpi4py").mkdir(parents=True)
        (without_mpi / "mpi4py" / "__init__.py").write_text("raise ImportError('not installed here')")
        paths.insert(0, str(without_mpi))
    words = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", *options]
    return subprocess.Popen(
        [*words, "-m", "onward.trainer", "train", str(run.root)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def ranks_of(run: RunDir) -> dict[int, psutil.Process]:
    found = {}
    for process in psutil.process_iter(["cmdline", "environ"]):
        if (process.info["cmdline"] or [])[-2:] == ["train", str(run.root)] and "RANK" in process.info["environ"]:
            found[int(process.info["environ"]["RANK"])] = process
    return found


@pytest.mark.mpi
@pytest.mark.slow
def test_torchrun_trains_the_same_bits_as_mpirun_and_goes_on_after_a_killed_rank(tmp_path: Path) -> None:
    by_mpirun = make_run(tmp_path / "mpirun", graphs.tiny_conv_net(), tiny_images(80), **SETTINGS)
    train_run(by_mpirun)

    run = make_run(tmp_path / "torchrun", graphs.tiny_conv_net(), tiny_images(80), **SETTINGS)
    job = start(run, "--max-restarts", "1", "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0",
                without_mpi=tmp_path / "hidden")  # fmt: skip
    deadline = time.monotonic() + 120
    while not events(run, "checkpoint") and time.monotonic() < deadline:
        time.sleep(0.01)
    ranks_of(run)[1].send_signal(signal.SIGKILL)
    said, _ = job.communicate(timeout=180)
    assert job.returncode == 0, said[-4000:]
    first, second = events(run, "start")
    assert (first.step, second.step > 0) == (0, True), "the second start did not resume"
    assert read_record(run.result(1), AttemptResult).status == "done"
    assert_equal_bits(final_tensors(run), final_tensors(by_mpirun))


@pytest.mark.mpi
@pytest.mark.slow
def test_variables_alone_start_a_job_and_wrong_ones_are_named(tmp_path: Path) -> None:
    """RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, as Kubeflow's TrainJob sets them: rank 0 opens the store."""
    run = make_run(tmp_path, graphs.tiny_conv_net(), tiny_images(80), **SETTINGS)

    def ended(size: int, address: str, port: int, ranks: int) -> list[tuple[int, str]]:
        shared = {"WORLD_SIZE": str(size), "MASTER_ADDR": address, "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
        jobs = [
            subprocess.Popen(
                [sys.executable, "-m", "onward.trainer", "train", str(run.root)],
                env={**os.environ, **shared, "RANK": str(rank), "PYTHONPATH": f"{ROOT / '.package'}:{ROOT}"},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for rank in range(ranks)
        ]
        said = [job.communicate(timeout=180)[0] for job in jobs]
        return [(job.returncode, text) for job, text in zip(jobs, said, strict=True)]

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        ((status, said),) = ended(2, "127.0.0.1", port, 1)
        assert status == 78
        assert f"rank 0 cannot listen at 127.0.0.1:{port}" in said
    ((status, said),) = ended(3, "127.0.0.1", port, 1)
    assert status == 78
    assert "the job needs 2 ranks, but the launcher has started 3" in said
    assert [status for status, _ in ended(2, "127.0.0.1", port, 2)] == [0, 0]
    assert read_record(run.result(1), AttemptResult).step == 40
