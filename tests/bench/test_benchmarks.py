"""Every benchmark still runs: quick ones at their smallest in every run of the tests, all of them in `make slow`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.bench import imported_graph, pipeline_bubble
from tests.support.ranks import ROOT, run_ranks

SMALLEST: dict[str, tuple[str, ...]] = {
    "auto_choice": ("--turns", "1", "--cases", "SqueezeNet 32"),
    "checkpoint_speed": ("--rounds", "1", "--layers", "1", "--width", "64", "--words", "256"),
    "checkpoint_stall": (),
    "command_costs": ("--rounds", "1", "--commands", "import torch", "diff"),
    "data_loading": ("--images", "40", "--steps", "3", "--rows", "2000", "--rounds", "1"),
    "detector_loops": ("--epochs", "1"),
    "first_prediction": ("--here", "--jobs", "table"),
    "fork_server": ("--turns", "1"),
    "graph_import": ("--layers", "1", "2"),
    "imported_graph": ("--models", "gpt2", "squeezenet", "--rounds", "1"),
    "large_plan": ("--layers", "2", "--width", "128", "--layouts", "tensor 4 x pipeline 2"),
    "layouts": ("--turns", "2", "--layouts", "dp2, MPI"),
    "onnxruntime_training": ("--rounds", "1"),
    "optimizers": ("--steps", "2", "--names", "muon", "adafactor"),
    "metric_costs": ("--turns", "1", "--steps", "30"),
    "lost_hosts": ("--rounds", "1", "--faults", "reset"),
    "limited_links": ("--rates", "400", "--hosts", "2", "--steps", "4"),
    "many_runs": ("--runs", "3", "--rounds", "1"),
    "memory_format": ("--models", "unet", "--batches", "1", "--size", "16", "--rounds", "1"),
    "memory_prediction": ("SqueezeNet 96: micro-batches 1", "SqueezeNet 96: pipeline"),
    "packaged_detector": ("--epochs", "1"),
    "pipeline_bubble": ("--ranks", "2", "--micro-batches", "2", "--forward-ms", "1"),
    "products": ("--rows", "32", "--width", "16", "--rounds", "1"),
    "rank_memory": ("--layers", "2", "--width", "64", "--layouts", "tensor 2"),
    "recompute": (),
    "roles": ("swish",),
    "quantization": ("--models", "mobile_net", "--steps", "3"),
    "rehearsal": ("--rounds", "1"),
    "safety_costs": ("--turns", "1"),
    "reduction": ("--sizes-kib", "64", "--rounds", "3"),
    "shard_reading": ("--gigabytes", "0.02"),
    "sharding_cores": ("--megabytes", "2", "--rounds", "1"),
    "sharding_memory": ("2", "4"),
    "sharding_speed": ("--megabytes", "2", "--rounds", "1"),
    "stash": ("--models", "unet", "--batch", "2", "--size", "16", "--rounds", "1"),
    "suspend_time": ("--rounds", "1"),
    "time_prediction": ("--cases", "SqueezeNet 96: micro-batches 1", "--seconds", "2"),
    "threads": ("--models", "squeezenet", "--ranks", "1", "--rounds", "2"),
    "update_time": ("--rounds", "1"),
    "zero_time": ("--rounds", "1", "--tokens", "128", "--sides", "ZeRO 1", "ZeRO 1, waiting"),
}
"""Benchmark -> its arguments for the least work."""
NO_BENCHMARKS = {"__init__", "handwritten", "test_benchmarks"}


def test_every_benchmark_is_in_the_table() -> None:
    assert {path.stem for path in Path(__file__).parent.glob("*.py")} - NO_BENCHMARKS == set(SMALLEST)


def test_an_imported_graph_and_its_module_have_one_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(imported_graph, "ROUND_S", 0.01)
    row = imported_graph.compare("gpt2", "legacy-14", 1, compiled=False, device=torch.device("cpu"), rounds=1)
    assert row.startswith("| gpt2, legacy-14, batch 1, eager |")


@pytest.mark.slow
@pytest.mark.mpi
def test_an_update_is_timed_beside_the_loop_written_by_hand() -> None:
    (found,) = run_ranks(1, "tests.bench.update_time:compare", "squeezenet", 1)
    assert found["onward_ms"] > 0 < found["handwritten_ms"]


@pytest.mark.slow
@pytest.mark.mpi
def test_the_bubble_of_a_pipeline_is_measured() -> None:
    cases = [(*schedule, 2) for schedule in pipeline_bubble.SCHEDULES]
    for times in run_ranks(2, "tests.bench.pipeline_bubble:step_s", cases, 0.001):
        assert len(times) == len(cases)


@pytest.mark.slow
@pytest.mark.mpi
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", SMALLEST)
def test_a_benchmark_runs_at_its_smallest(name: str) -> None:
    words = [sys.executable, "-m", f"tests.bench.{name}", *SMALLEST[name]]
    ended = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=580)
    if "hosts of their own need" in ended.stderr:
        pytest.skip(ended.stderr)
    # 1 = a bound was not kept, which a busy machine and sizes as small as these may do
    assert ended.returncode in (0, 1), ended.stdout + ended.stderr
    assert "Traceback" not in ended.stderr, ended.stderr
    assert len(ended.stdout.splitlines()) > 1, ended.stdout
