"""Retries that change the configuration: their bits are those of a run that was configured so. The whole trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from onward.trainer.errors import Diverged
from onward.trainer.run.directory import RunDir, read_config
from onward.trainer.run.outcomes.attempt_endings import endings
from onward.trainer.run.records import TrainResult
from tests.support.graphs import tiny_conv_net
from tests.support.retried import train_to_end
from tests.support.runs import assert_equal_bits, final_tensors, losses, make_run, tiny_images

pytestmark = [pytest.mark.mpi, pytest.mark.slow, pytest.mark.timeout(400)]
SHORT_OF_MEMORY = """
import torch

calls = 0

def loss(output, labels):
    global calls
    calls += 1
    if calls > {after} and len(labels) > 2:
        raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes.")
    return torch.nn.functional.cross_entropy(output, labels.long(), reduction="sum")
"""


def new_run(folder: Path, data: dict[str, Any] | None = None, /, **sections: Any) -> RunDir:
    step = {"global_batch_size": 8, "num_steps": 40, "evaluation_period": 0} | sections.pop("train", {})
    return make_run(
        folder,
        tiny_conv_net(),
        data or tiny_images(80),
        train=step,
        checkpoint={"period": 10} | sections.pop("checkpoint", {}),
        **sections,
    )


def loss_file(folder: Path, *, after: int) -> dict[str, str]:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "loss.py").write_text(SHORT_OF_MEMORY.format(after=after))
    return {"name": "file", "file": f"{folder}/loss.py:loss", "label": "label"}


def test_after_out_of_memory_smaller_micro_batches_give_the_bits_of_a_run_configured_so(tmp_path: Path) -> None:
    loss = loss_file(tmp_path / "a", after=25)
    run = new_run(tmp_path / "a", loss=loss, launch={"on_out_of_memory": "smaller"})
    result = train_to_end(run)
    assert isinstance(result, TrainResult)
    assert [each.kind for each in endings(run)] == ["out_of_memory", "out_of_memory", "done"]
    first, second, last = endings(run)
    assert "micro-batches of 8 samples become 4, and train.gradient_accumulation_steps 2" in first.action
    assert "micro-batches of 4 samples become 2, and train.gradient_accumulation_steps 4" in second.action
    assert (read_config(run).train.gradient_accumulation_steps, result.step) == (4, 40)
    # the same run from the same checkpoint, configured so from the beginning
    start = run.checkpoint(last.resumed_from)
    assert last.resumed_from > 0
    configured = new_run(
        tmp_path / "b",
        loss=loss_file(tmp_path / "b", after=25),
        train={"gradient_accumulation_steps": 4},
        checkpoint={"load": str(start)},
    )
    train_to_end(configured)
    assert_equal_bits(final_tensors(run), final_tensors(configured))


def rows_with_an_overflow() -> dict[str, Any]:
    data = tiny_images(80)
    data["image"][5] = 3e38
    return data


def test_a_step_that_is_not_finite_is_passed_over_with_the_bits_of_a_run_configured_so(tmp_path: Path) -> None:
    short = {"num_steps": 8}
    run = new_run(
        tmp_path / "a", rows_with_an_overflow(), train=short | {"on_non_finite": "skip"}, checkpoint={"period": 2}
    )
    result = train_to_end(run)
    assert isinstance(result, TrainResult)
    first, last = endings(run)
    assert (first.kind, last.kind, result.step) == ("non_finite", "done", 8)
    assert first.action.startswith(f"step {first.step} will be passed over (train.on_non_finite): it ")
    configured = new_run(tmp_path / "b", rows_with_an_overflow(), train=short | {"skip_steps": [first.step]})
    train_to_end(configured)
    assert first.step not in losses(configured)
    assert_equal_bits(final_tensors(run), final_tensors(configured))


def test_by_default_a_step_that_is_not_finite_ends_the_run(tmp_path: Path) -> None:
    run = new_run(tmp_path, rows_with_an_overflow(), train={"num_steps": 8})
    with pytest.raises(Diverged, match="learning rate"):
        train_to_end(run)
    (only,) = endings(run)
    assert (only.kind, only.retry) == ("non_finite", 0)
