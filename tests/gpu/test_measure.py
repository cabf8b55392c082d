"""The figures of a comparison, and which steps of the two sides they are of."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from onward.trainer.distributed.processes import MPIContext
from tests.gpu import measure
from tests.support import graphs
from tests.support.ranks import run_ranks
from tests.support.runs import make_run, tiny_text


def test_the_spread_is_that_of_the_medians_of_the_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "BLOCK", 3)
    times = measure.Times([2.0, 2.0, 90.0, 4.0, 4.0, 4.0], [6.0, 6.0, 6.0, 4.0, 80.0, 4.0], 1.5)
    found = times.figures()
    assert (found["onward_ms"], found["by_hand_ms"]) == (4.0, 6.0)
    assert found["times_as_fast"] == 1.5
    assert (found["times_as_fast_least"], found["times_as_fast_greatest"]) == (1.0, 3.0)


def test_operations_of_a_linear_layer_are_counted_forward_and_backward() -> None:
    inputs, labels = [torch.randn(5, 8)], torch.zeros(5, dtype=torch.int64)
    two_products = measure.step_flops(nn.Linear(8, 3), inputs, labels)  # the input has no gradient
    assert two_products == 2 * (2 * 5 * 8 * 3)


def turns(mpi: MPIContext, root: str) -> tuple[list[str], int, int]:
    """Train beside a loop by hand that only counts; return who ran, and the numbers of times."""
    from onward.trainer.run.directory import RunDir

    measure.WARM_UP, measure.TIMED, measure.BLOCK = 2, 4, 2  # type: ignore[misc]
    order: list[str] = []
    at_start = measure.StepStarts.beat

    def beat(self: measure.StepStarts, step: int | None = None, *, longest_step_s: float = 0.0) -> None:
        at_start(self, step)
        if step is not None:
            order.append(f"onward {step}")

    measure.StepStarts.beat = beat  # type: ignore[method-assign]
    times = measure.side_by_side(RunDir(Path(root)), mpi, lambda: order.append("by hand"))
    return order, len(times.onward), len(times.by_hand)


@pytest.mark.mpi
def test_both_sides_warm_up_and_then_take_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONWARD_GPU_REHEARSAL", "1")  # of the rank
    run = make_run(tmp_path, graphs.tiny_transformer(), tiny_text(40), train={"global_batch_size": 8, "num_steps": 99})
    ((order, onward, by_hand),) = run_ranks(1, "tests.gpu.test_measure:turns", str(run.root))
    first, second = ["onward 3", "onward 4"], ["onward 5", "onward 6"]
    assert order == ["onward 1", "onward 2", *["by hand"] * 4, *first, *["by hand"] * 2, *second]
    assert onward == by_hand == 4
