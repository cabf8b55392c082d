"""A resume verifies its checkpoint once: what was verified is passed on as a value."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onward.trainer.distributed.processes import MPIContext
from onward.trainer.run.directory import RunDir, read_config
from tests.support import graphs
from tests.support.ranks import run_ranks
from tests.support.runs import make_run


def files_hashed_by(mpi: MPIContext, root: str, attempt: int) -> list[str]:
    """Run the training loop; return the checkpoint files that this rank has read for their digest, in order."""
    from onward.trainer import loop
    from onward.trainer.events import Heartbeat

    hashed: list[str] = []
    plain_open = Path.open

    def recording_open(path: Path, mode: str = "r", buffering: int = -1, *others: Any, **options: Any) -> Any:
        if path.suffix == ".safetensors" and mode == "rb" and buffering == 0:
            hashed.append(path.name)
        return plain_open(path, mode, buffering, *others, **options)

    run = RunDir(Path(root))
    Path.open = recording_open  # type: ignore[assignment,method-assign]
    result = loop.train(
        read_config(run),
        run,
        mpi,
        attempt=attempt,
        heartbeat=Heartbeat(run.heartbeat),
        stop_requested=lambda: False,
    )
    assert (result.status, result.step) == ("done", 2)
    return hashed


@pytest.mark.mpi
def test_a_resume_hashes_each_file_of_its_checkpoint_once(tmp_path: Path) -> None:
    rows = np.random.default_rng(0)
    columns = {"features": rows.normal(size=(40, 4)).astype(np.float32), "label": np.ones((40, 1), np.float32)}
    run = make_run(
        tmp_path,
        graphs.tiny_mlp(),
        columns,
        model={"loss": "mse"},
        train={"global_batch_size": 8, "num_steps": 2},
        parallel={"data": 2},
    )
    program = f"{__name__}:files_hashed_by"
    assert run_ranks(2, program, str(run.root), run.begin_attempt(), timeout_s=240) == [[], []]
    resumed = run_ranks(2, program, str(run.root), run.begin_attempt(), timeout_s=240)
    assert sorted(resumed) == [["rank-00000.safetensors"], ["rank-00001.safetensors"]]
