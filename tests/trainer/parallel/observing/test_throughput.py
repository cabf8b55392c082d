"""Throughput is work over time, MFU is relative to the peak of all ranks, and a device that is not known has none."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import torch

from onward.trainer.config.loading import build_config
from onward.trainer.config.run_config import RunConfig
from onward.trainer.data.batches.batches import Batch
from onward.trainer.distributed.processes import MPIContext
from onward.trainer.parallel.observing import throughput
from onward.trainer.parallel.observing.step_clock import StepClock
from onward.trainer.parallel.observing.throughput import Throughput, Work, peak_memory
from onward.trainer.parallel.planning import peak_flops as peak
from onward.trainer.parallel.planning.device_model import GPUS, peak_flops_per_s
from onward.trainer.parallel.planning.peak_flops import measure_cpu, peak_of_ranks
from onward.trainer.parallel.planning.sample_flops import Lengths, SampleFlops

CPU = MPIContext(0, 1, 0, 1, "host", torch.device("cpu"))
GPU = MPIContext(0, 1, 0, 1, "host", torch.device("cuda"))


def configured(compute: str = "fp32", **sections: dict[str, object]) -> RunConfig:
    usual = {"model": {"path": "model.onnx"}, "data": {"source": "digits"}, "train": {"num_steps": 1}}
    return build_config({**usual, "precision": {"compute": compute}, **sections})


def peak_of(config: RunConfig, mpi: MPIContext) -> float | None:
    return peak_of_ranks(config.precision.compute, config.launch.ranks_per_gpu, mpi)


# -- the scalars of a line


class Clock(StepClock):
    """A clock that the test sets, of an attempt in its steps."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(throughput.time, "monotonic", lambda: self.now)
        super().__init__(began_at=self.now, compiled_s=lambda: 0.0)
        self.begin_steps()


def of(size: int, num_tokens: int = 0) -> Batch:
    lengths = np.empty((size, 0), np.int64)
    return Batch((), (), size, (float(size),), lengths=lengths, num_tokens=num_tokens)


EACH = SampleFlops(Lengths((), ()), (3e9,), 3e9)
"""3 GFLOP a sample."""


def test_a_line_says_what_was_done_since_the_line_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    pace = Throughput(EACH, 50e9, CPU, clock, counts=True, is_text=True, step=10)
    for _ in range(2):
        clock.now += 2.0
        clock.waited(0.5)
        pace.add(8, pace.work_of([of(4, 30), of(4, 20)]))
    with clock("evaluation"):
        clock.now += 90.0  # which is no time of a step
    found = pace.values(12)
    memory = found.pop("memory_bytes")
    assert found == {
        "samples_per_s": 4.0,
        "data_wait": 0.25,
        "step_s": 2.0,
        "tokens_per_s": 25.0,
        "tflops": pytest.approx(16 * 3e9 / 4.0 / 1e12),
        "mfu": pytest.approx(16 * 3e9 / 4.0 / 50e9),
    }
    assert memory == pytest.approx(peak_memory(CPU.device), rel=0.01)
    pace.begin(12)
    pace.add(8, Work(0.0, 0.0, 0.0))
    clock.now += 1.0
    found = pace.values(13)
    assert (found["samples_per_s"], found["tflops"], found["tokens_per_s"]) == (8.0, 0.0, 0.0)


def test_a_peak_that_the_training_exceeds_is_called_measured_too_low_once_and_shown_no_more(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clock = Clock(monkeypatch)
    pace = Throughput(EACH, 1e9, CPU, clock, counts=True, is_text=False, step=0)
    shown = []
    for step in (1, 2):
        pace.add(8, pace.work_of([of(8)]))
        clock.now += 1.0
        shown.append(pace.values(step).get("mfu"))
    assert math.isnan(shown[0])
    assert shown[1] is None
    (record,) = caplog.records
    assert "2400 % of the peak of 0.001 TFLOP/s" in record.getMessage()


def test_what_is_not_known_is_left_out_and_one_rank_of_a_replica_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    keys = {"samples_per_s", "data_wait", "step_s", "memory_bytes"}
    for flops, rate, is_text, more in (
        (EACH, None, False, {"tflops"}),
        (None, 1e9, False, set[str]()),
        (None, None, True, {"tokens_per_s"}),
        (EACH, 1e9, True, {"tflops", "mfu", "tokens_per_s"}),
    ):
        pace = Throughput(flops, rate, CPU, clock, counts=False, is_text=is_text, step=0)
        assert pace.work_of([of(4, 30)]) == (0.0, 0.0, 1.0)
        clock.now += 1.0
        assert pace.values(1).keys() == keys | more


def test_the_memory_is_looked_at_once_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, looks = Clock(monkeypatch), iter([5e9, 7e9])
    monkeypatch.setattr(throughput, "peak_memory", lambda device: next(looks))
    pace, found = Throughput(EACH, None, CPU, clock, counts=True, is_text=False, step=0), []
    for step in range(1, 6):
        clock.now += 0.4
        pace.add(4, pace.work_of([of(4)]))
        found.append(pace.values(step)["memory_bytes"])
    assert found == [5e9, 5e9, 5e9, 7e9, 7e9]


def test_the_memory_of_a_process_is_the_most_that_it_had() -> None:
    before = peak_memory(CPU.device)
    held = np.ones(64 << 17)  # 64 MiB
    after = peak_memory(CPU.device)
    some = 1 << 20  # the kernel adds the threads' pages up from time to time
    assert after + some >= psutil.Process().memory_info().rss >= held.nbytes
    del held
    assert peak_memory(CPU.device) + some >= after >= before - some


# -- the peak


@pytest.mark.parametrize(
    ("name", "compute", "tflops"),
    [
        ("NVIDIA H100 80GB HBM3", "bf16", 989),
        ("NVIDIA H100 80GB HBM3", "tf32", 494),
        ("NVIDIA H100 80GB HBM3", "fp32", 67),
        ("NVIDIA H100 PCIe", "bf16", 756),
        ("NVIDIA H200", "fp16", 989),
        ("NVIDIA GH200 480GB", "bf16", 989),
        ("NVIDIA GB200", "bf16", 2500),
        ("NVIDIA A100-SXM4-80GB", "bf16", 312),
        ("NVIDIA A100 80GB PCIe", "tf32", 156),
        ("Tesla V100-SXM2-16GB", "fp16", 125),
        ("Tesla V100-PCIE-32GB", "fp16", 112),
        ("Tesla T4", "fp32", 8.1),
        ("NVIDIA A10", "bf16", 125),
        ("NVIDIA L4", "bf16", 121),
        ("NVIDIA L40S", "bf16", 362),
        ("NVIDIA RTX A4000", "fp32", 19.2),
        ("NVIDIA RTX 6000 Ada Generation", "bf16", 364.2),
        ("NVIDIA GeForce RTX 4090", "bf16", 165.2),
        # another card, another cut of a card, or a part of one
        ("NVIDIA A10G", "bf16", None),
        ("NVIDIA RTX A400", "fp32", None),
        ("NVIDIA RTX A1000", "fp32", None),
        ("NVIDIA T400", "fp32", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "bf16", None),
        ("NVIDIA GeForce RTX 3090 Ti", "bf16", None),
        ("NVIDIA A100-SXM4-80GB MIG 1g.10gb", "bf16", None),
    ],
)
def test_the_peak_of_a_gpu_is_found_by_its_whole_name(name: str, compute: str, tflops: float | None) -> None:
    assert peak_flops_per_s(name, compute) == (None if tflops is None else pytest.approx(tflops * 1e12))


def test_no_gpu_computes_faster_with_more_bits() -> None:
    for name, rates in GPUS.items():
        assert rates.half >= rates.tf32 >= rates.fp32 > 0, name


def test_a_gpu_that_is_not_known_has_no_peak_and_the_log_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    names = iter(["NVIDIA H200", "NVIDIA H200", "NVIDIA Z1000"])
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(name=next(names)))
    assert peak_of(configured("bf16"), GPU) == pytest.approx(989e12)
    assert peak_of(configured("bf16", launch={"ranks_per_gpu": 2}), GPU) == pytest.approx(989e12 / 2)
    assert caplog.text == ""
    assert peak_of(configured("bf16"), GPU) is None
    assert "the peak of NVIDIA Z1000 is not known" in caplog.text


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_cpu_is_measured_without_random_numbers(dtype: torch.dtype) -> None:
    random = torch.get_rng_state()
    assert measure_cpu(dtype) > 1e8, "a core multiplies more than 100 million numbers a second"
    assert torch.equal(torch.get_rng_state(), random)


def test_the_measurement_is_in_the_type_of_the_training(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[torch.dtype] = []
    monkeypatch.setattr(peak, "measure_cpu", lambda dtype: asked.append(dtype) or 7e9)
    assert [peak_of(configured(compute), CPU) for compute in ("fp32", "bf16", "tf32")] == [7e9] * 3
    assert asked == [torch.float32, torch.bfloat16, torch.float32]
