"""Runs a function on real ranks: a real mpirun, real processes, gloo.

    def halves(mpi: MPIContext, total: float) -> float: ...

    assert run_ranks(2, "tests.trainer.test_x:halves", 3.0) == [1.5, 1.5]

Each rank connects, calls the function with its MPIContext and the arguments, and leaves the result as JSON.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parent.parent
SETTINGS = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_pml": "ob1",
    "OMPI_MCA_btl": "^ofi,uct,openib,usnic",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "OMP_NUM_THREADS": "1",
}


def run_ranks(num_ranks: int, function: str, *arguments: Any, timeout_s: float = 60) -> list[Any]:
    """Call `module:function(mpi, *arguments)` on every rank; returns the results in the order of ranks.

    Raises AssertionError with the traceback of the rank that failed first, or the output after `timeout_s`.
    """
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder, (Path(folder) / "log").open("w+") as log:
        rank = [sys.executable, "-m", "tests.ranks", folder, function, json.dumps(arguments)]
        job = subprocess.Popen(
            [str(Path(sys.prefix) / "bin" / "mpirun"), "-n", str(num_ranks), "--bind-to", "none", *rank],
            env=os.environ | SETTINGS,
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            job.wait(timeout_s)
        except subprocess.TimeoutExpired:
            pass
        finally:
            late = job.poll() is None
            _sweep(job)
        return [_result(Path(folder), number, late=late) for number in range(num_ranks)]


def _result(folder: Path, rank: int, *, late: bool) -> Any:
    errors = sorted(json.loads(path.read_text()) for path in folder.glob("*.error"))
    assert not errors, f"rank {errors[0][2]} failed:\n{errors[0][3]}"
    result = folder / f"{rank}.json"
    output = (folder / "log").read_text()[-4000:]
    assert result.exists(), f"rank {rank} {'did not finish in time' if late else 'died without a word'}:\n{output}"
    return json.loads(result.read_text())


def _sweep(job: subprocess.Popen[bytes]) -> None:
    """Kill what is left of the session, and wait until it is gone."""
    members = [process for process in psutil.process_iter() if _session(process.pid) == job.pid]
    for process in members:
        process.kill()
    psutil.wait_procs(members, timeout=10)
    job.wait(10)


def _session(pid: int) -> int:
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return -1


def _rank(folder: Path, function: str, arguments: list[Any]) -> None:
    from trainer.distributed import PEER_DELAY_S, connect, disconnect, launched_rank, lost_a_peer

    try:
        module, _, name = function.partition(":")
        size = int(os.environ["OMPI_COMM_WORLD_SIZE"])
        mpi = connect(expected_world_size=size, timeout_s=30, device="cpu", threads=1)
        result = getattr(importlib.import_module(module), name)(mpi, *arguments)
        partial = folder / f"{mpi.rank}.partial"
        partial.write_text(json.dumps(result))
        partial.rename(folder / f"{mpi.rank}.json")
        disconnect()
    except BaseException as error:
        peer = lost_a_peer(error)
        report = [peer, time.time(), launched_rank(), traceback.format_exc()]
        (folder / f"{launched_rank()}.error").write_text(json.dumps(report))
        if peer:  # let the rank that is to blame speak first
            time.sleep(PEER_DELAY_S)
        os._exit(70)


if __name__ == "__main__":
    _rank(Path(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3]))
