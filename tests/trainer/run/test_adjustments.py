"""What a retry changes of a run: fewer replicas on the hosts that are left, with the same batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from onward.trainer.config.loading import build_config
from onward.trainer.config.run_config import RunConfig
from onward.trainer.config.sections.ranks import ParallelConfig
from onward.trainer.errors import RecordError
from onward.trainer.run.adjustments import Adjustments, adjusted, divisors, fewer_replicas, with_adjustments
from onward.trainer.run.records import write_record


def config(batch: int, data: int, steps: int = 1, **sections: Any) -> RunConfig:
    return build_config(
        {
            "model": {"path": "model.onnx"} | sections.pop("model", {}),
            "data": {"source": "digits"},
            "train": {"num_steps": 100, "global_batch_size": batch, "gradient_accumulation_steps": steps},
            "parallel": {"data": data} | sections.pop("parallel", {}),
            "launch": {"hostfile": "hosts"},
        }
    )


@pytest.mark.parametrize(
    ("batch", "data", "steps", "ranks", "layout"),
    [
        (24, 3, 1, 2, (2, 2, 6)),  # not one replica with micro-batches of 8
        (56, 8, 1, 7, (7, 2, 4)),
        (48, 8, 1, 7, (6, 2, 4)),
        (64, 8, 1, 7, (4, 2, 8)),  # 64 samples do not divide by 7, 6 or 5
        (128, 4, 4, 3, (2, 8, 8)),
        (120, 4, 5, 3, (3, 8, 5)),
        (8, 8, 1, 7, (4, 2, 1)),
        (26, 2, 1, 1, (1, 2, 13)),
        # two replicas of 13 samples, one at a time, would take longer
        (26, 13, 1, 2, (2, 13, 1)),
        (24, 2, 1, 8, (2, 1, 12)),  # never more than configured
    ],
)
def test_fewer_replicas_use_as_many_ranks_as_the_batch_allows(
    batch: int, data: int, steps: int, ranks: int, layout: tuple[int, int, int]
) -> None:
    before = config(batch, data, steps)
    changes = fewer_replicas(before, Adjustments(), ranks=ranks, hostfile="left")
    assert changes is not None
    after = with_adjustments(before, changes)
    assert (after.parallel.data, after.train.gradient_accumulation_steps, after.micro_batch_size) == layout
    assert after.train.global_batch_size == batch
    assert after.micro_batch_size <= before.micro_batch_size
    assert (after.launch.num_ranks, after.launch.hostfile) == (after.parallel.data, "left")


def test_many_small_micro_batches_are_no_gain() -> None:
    before = config(13 * 12, 12)  # micro-batches of 13
    changes = fewer_replicas(before, Adjustments(), ranks=11, hostfile="left")
    assert changes is not None
    after = with_adjustments(before, changes)
    assert (after.parallel.data, after.micro_batch_size) == (6, 13)


def test_a_replica_of_several_ranks_stays_whole_and_fills_its_pipeline() -> None:
    before = config(32, 4, 4, parallel={"pipeline": 2})
    changes = fewer_replicas(before, Adjustments(), ranks=7, hostfile="left")
    assert changes is not None
    assert with_adjustments(before, changes).world_size == 4
    assert fewer_replicas(before, Adjustments(), ranks=1, hostfile="left") is None


def test_a_file_that_declares_its_rows_keeps_its_micro_batches() -> None:
    before = config(24, 3, model={"fixed_batch": "own"})
    changes = fewer_replicas(before, Adjustments(), ranks=2, hostfile="left")
    assert changes is not None
    assert (changes.data, with_adjustments(before, changes).micro_batch_size) == (1, 8)


def test_a_lack_of_memory_halves_the_micro_batches_of_the_hosts_that_are_left_and_of_all_later() -> None:
    before = config(24, 3)
    changes = fewer_replicas(before, Adjustments(micro_batch_divisor=2), ranks=2, hostfile="left")
    assert changes is not None
    assert with_adjustments(before, changes).micro_batch_size == 4
    smaller = changes.model_copy(update={"micro_batch_divisor": 4})
    assert with_adjustments(before, smaller).micro_batch_size == 2
    again = smaller.with_configured_layout()
    assert (again.micro_batch_divisor, with_adjustments(before, again).micro_batch_size) == (4, 2)
    # a divisor of another layout's micro-batch need not divide the configured one
    odd = Adjustments(micro_batch_divisor=3)
    assert with_adjustments(before, odd).micro_batch_size == 2


def test_another_layout_is_taken_whole_and_an_older_record_is_read(tmp_path: Path) -> None:
    before = config(24, 1, 3, parallel={"pipeline": 3})
    parallel = ParallelConfig(sizes="auto", tensor=2)
    changes = Adjustments(data=1, parallel=parallel, micro_batch=6, hostfile="left")
    after = with_adjustments(before, changes)
    assert (after.world_size, after.parallel.pipeline, after.micro_batch_size) == (2, 1, 6)
    write_record(tmp_path / "adjusted.json", changes)
    assert adjusted(before, tmp_path / "adjusted.json") == after
    (tmp_path / "adjusted.json").write_text('{"micro_batch_divisor": 2, "data": 2, "hostfile": "left"}')
    assert adjusted(config(24, 3), tmp_path / "adjusted.json").micro_batch_size == 4
    (tmp_path / "adjusted.json").write_text('{"micro_batch_divisor": 9}')
    with pytest.raises(RecordError, match="micro_batch_divisor 9 is above the 8 samples"):
        adjusted(before, tmp_path / "adjusted.json")


def test_divisors() -> None:
    assert divisors(12, 6) == [1, 2, 3, 4, 6]
    assert divisors(7, 100) == [1, 7]
