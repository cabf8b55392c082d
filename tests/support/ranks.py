"""Runs a function on real ranks: a real mpirun, real processes, gloo.

    def halves(mpi: MPIContext, total: float) -> float: ...

    assert run_ranks(2, "tests.trainer.test_x:halves", 3.0) == [1.5, 1.5]

Each rank connects, calls the function with its MPIContext and the arguments, and leaves the result as JSON.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from onward.infra.job import mpirun
from onward.infra.job.job import Job
from onward.infra.job.launcher import Ranks
from tests.support import rank_server

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = {**mpirun.SETTINGS, "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe", "OMP_NUM_THREADS": "1"}
"""Environment for a mpirun that a test starts by hand."""


class MpirunOfForks(mpirun.Mpirun):
    """Starts ranks as forks of one process that has imported torch."""

    def arguments(self, ranks: Ranks, python: Sequence[str], environment: Mapping[str, str]) -> list[str]:
        return super().arguments(ranks, rank_server.command(), environment)


def run_ranks(num_ranks: int, function: str, *arguments: Any, timeout_s: float = 60, forked: bool = True) -> list[Any]:
    """Call `module:function(mpi, *arguments)` on every rank; returns the results in the order of ranks.

    Raises AssertionError with the traceback of the rank that failed first, or the output after `timeout_s`.
    Leaves no process. `forked`: start the ranks as forks of one process that has imported torch.
    """
    with tempfile.TemporaryDirectory(prefix="ranks-") as name:
        folder = Path(name)
        job = Job(
            ranks=Ranks(module=("tests.support.ranks", name, function, json.dumps(arguments)), num_ranks=num_ranks),
            launcher=MpirunOfForks() if forked else mpirun.Mpirun(),
            run_dir=folder,
            log=folder / "log",
            start_timeout_s=timeout_s,
            cwd=ROOT,
        )
        late = job.run().reason == "start_timeout"
        return [_result(folder, rank, late=late) for rank in range(num_ranks)]


def _result(folder: Path, rank: int, *, late: bool) -> Any:
    errors = sorted(json.loads(path.read_text()) for path in folder.glob("*.error"))
    assert not errors, f"rank {errors[0][2]} failed:\n{errors[0][3]}"
    result = folder / f"{rank}.json"
    output = (folder / "log").read_text()[-4000:]
    assert result.exists(), f"rank {rank} {'did not finish in time' if late else 'died without a word'}:\n{output}"
    return json.loads(result.read_text())


def _rank(folder: Path, function: str, arguments: list[Any]) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported
    from onward.trainer.distributed.failures import PEER_DELAY_S, lost_a_peer
    from onward.trainer.distributed.launched import launched_rank
    from onward.trainer.distributed.processes import connect, disconnect

    try:
        module, _, name = function.partition(":")
        size = int(os.environ["OMPI_COMM_WORLD_SIZE"])
        mpi = connect(expected_world_size=size, timeout_s=30, device="cpu", threads=1)
        result = getattr(importlib.import_module(module), name)(mpi, *arguments)
        _write(folder / f"{mpi.rank}.json", result)
        disconnect()
    except BaseException as error:
        peer = lost_a_peer(error)
        _write(folder / f"{launched_rank()}.error", [peer, time.time(), launched_rank(), traceback.format_exc()])
        if peer:  # let the rank that is to blame speak first
            time.sleep(PEER_DELAY_S)
        os._exit(70)


def _write(path: Path, value: Any) -> None:
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(value))
    partial.rename(path)


if __name__ == "__main__":
    _rank(Path(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3]))
