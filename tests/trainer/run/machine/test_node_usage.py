"""What the job uses of a node: recorded by one rank of each node, also over several attempts."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from onward.trainer.events import read_events
from onward.trainer.run.directory import RunDir
from onward.trainer.run.machine import node_usage
from onward.trainer.run.machine.node_usage import gpu_values, recorded_usage


def test_the_first_rank_of_a_node_records_and_a_second_attempt_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_usage, "FIRST_S", 0.01)
    run = RunDir(tmp_path)
    for attempt in (1, 2):
        with (
            recorded_usage(run, attempt=attempt, rank=8, local_rank=0, host="gpu-2"),
            recorded_usage(run, attempt=attempt, rank=9, local_rank=1, host="gpu-2"),
        ):
            deadline = time.monotonic() + 20
            while len([event for event, _ in read_events(run.usage_of(8)) if event.attempt == attempt]) < 1:
                assert time.monotonic() < deadline, "nothing was recorded"
                time.sleep(0.01)
    found = [event for event, _ in read_events(run.usage_of(8))]
    assert [event.step for event in found] == list(range(1, len(found) + 1))
    assert len(found) == 4, "one line of each attempt, and one at its end"
    assert {event.node for event in found} == {"gpu-2"}
    assert found[0].values["system_memory_usage_megabytes"] > 10
    assert not run.usage_of(9).exists()


def test_a_directory_that_cannot_be_written_does_not_end_the_block(tmp_path: Path) -> None:
    (tmp_path / "nodes").write_text("a file in place of the directory")
    with recorded_usage(RunDir(tmp_path), attempt=1, rank=0, local_rank=0, host="a"):
        pass


def test_gpus_are_read_from_the_lines_of_nvidia_smi() -> None:
    values = gpu_values("0, 93, 1000, 2000, 310.5\n1, 0, 500, 2000, [N/A]\n")
    assert values == {
        "gpu_0_utilization_percentage": 93.0,
        "gpu_0_memory_usage_megabytes": pytest.approx(1048.576),
        "gpu_0_memory_usage_percentage": 50.0,
        "gpu_0_power_usage_watts": 310.5,
        "gpu_1_utilization_percentage": 0.0,
        "gpu_1_memory_usage_megabytes": pytest.approx(524.288),
        "gpu_1_memory_usage_percentage": 25.0,
    }
    assert gpu_values("") == {}
