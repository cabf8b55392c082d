"""A bit that flips in one copy of a weight is noticed at the next comparison of the copies, and named. Real ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from onward.trainer import loop
from onward.trainer.checkpoint.verification import newest_complete
from onward.trainer.distributed.processes import MPIContext
from onward.trainer.errors import ReplicasDiffer
from onward.trainer.events import Heartbeat
from onward.trainer.run.directory import RunDir
from tests.support.graphs import tiny_transformer
from tests.support.quotes import assert_quoted
from tests.support.ranks import run_ranks
from tests.support.runs import make_run, tiny_text

pytestmark = pytest.mark.mpi


def train_with_a_flipped_bit(mpi: MPIContext, root: str, step: int) -> list[str]:
    """Train until it is noticed that rank 1 had one bit flipped before `step`; return the weight's name, the message,
    and the step of the newest checkpoint."""
    run, held = RunDir(Path(root)), []
    build = loop.build_rank_model

    def kept(*args: Any, **options: Any) -> Any:
        held.append(build(*args, **options))
        return held[0]

    class Flipping(Heartbeat):
        def beat(self, step_: int | None = None, *, longest_step_s: float = 0.0) -> None:
            if step_ == step and mpi.rank == mpi.world_size - 1:
                with torch.no_grad():
                    flipped().tensor.view(torch.int32).view(-1)[3] ^= 1 << 7
            super().beat(step_, longest_step_s=longest_step_s)

    def flipped() -> Any:
        # one that this rank holds complete, in every layout
        return next(weight for weight in held[0].trained if "ln" in weight.name or "norm" in weight.name)

    if mpi.rank == 0:
        run.begin_attempt()
    torch.distributed.barrier()
    loop.build_rank_model = kept
    loop.DESYNC_CHECK_STEPS = step
    try:
        with pytest.raises(ReplicasDiffer) as noticed:
            loop.train(run, mpi, attempt=1, heartbeat=Flipping(run.heartbeat), stop_requested=lambda: False)
    finally:
        loop.build_rank_model = build
    torch.distributed.barrier()
    newest = newest_complete(run)
    return [flipped().name, str(noticed.value), str(newest.manifest.state.step if newest else 0)]


def flipped_run(folder: Path, world_size: int, parallel: dict[str, Any]) -> list[list[str]]:
    sections: dict[str, Any] = {
        "train": {"global_batch_size": 8, "gradient_accumulation_steps": 2, "num_steps": 12},
        "checkpoint": {"period": 4},
        "parallel": parallel,
    }
    run = make_run(folder, tiny_transformer(), tiny_text(40), **sections)
    return run_ranks(world_size, "tests.trainer.test_desync:train_with_a_flipped_bit", str(run.root), 5)


@pytest.mark.parametrize(
    ("world_size", "parallel"),
    [
        (2, {"data": 2}),
        pytest.param(2, {"tensor": 2}, marks=pytest.mark.slow),
        pytest.param(4, {"data": 2, "pipeline": 2}, marks=pytest.mark.slow),
        pytest.param(4, {"data": 4, "shard": 2, "zero": 2}, marks=pytest.mark.slow),
    ],
)
def test_a_flipped_bit_in_one_copy_is_named_with_step_and_ranks_at_the_next_comparison(
    tmp_path: Path, world_size: int, parallel: dict[str, Any]
) -> None:
    found = flipped_run(tmp_path, world_size, parallel)
    name, message, newest = found[-1]
    assert message.startswith("after step 5: "), message
    assert f"model/{name}" in message
    assert f" is not that on rank {world_size - 1}" in message or f"on rank {world_size - 1} is not that" in message
    assert newest == "4", "the checkpoint before"
    if parallel == {"data": 2}:
        assert_quoted(message, "after step 5: ")
    assert [each[1] for each in found] == [message] * world_size
