"""What a trace says, on a trace that was written by hand: there is no GPU where most tests run."""

from __future__ import annotations

from typing import Any

import pytest

from tests.gpu import traces


def event(cat: str, name: str, start: float, duration: float, *, tid: int = 1, **args: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "ts": start, "dur": duration, "tid": tid, "args": args}


TRACE = [
    event("user_annotation", "Optimizer.step#Adam.step", 0, 20),
    event("cpu_op", "aten::_foreach_norm", 30, 10),
    event("cuda_runtime", "cudaLaunchKernel", 5, 1, correlation=1),
    event("cuda_runtime", "cudaLaunchKernel", 35, 1, correlation=2),
    event("cuda_runtime", "cudaLaunchKernel", 36, 1, tid=2, correlation=3),
    event("cuda_runtime", "cudaStreamSynchronize", 50, 8, correlation=5),
    event("kernel", "multi_tensor_apply", 10, 40, tid=7, correlation=1),
    event("kernel", "lpnorm", 50, 10, tid=7, correlation=2),
    event("kernel", "nchwToNhwcKernel", 80, 20, tid=7, correlation=3),
    event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 40, 40, tid=8, correlation=4),
    event("gpu_memcpy", "Memcpy DtoH (Device -> Pageable)", 100, 10, tid=7, correlation=6),
]


def test_counts_and_shares_of_a_step() -> None:
    assert traces.step_figures(TRACE, steps=1) == pytest.approx(
        {
            "kernels": 3,
            "busy_ms": 0.1,
            "idle_share": 0.0,
            "copies_to_host": 1,
            "copies_to_device": 1,
            "waits": 1,
            "waits_ms": 0.008,
            "optimizer_us": 40,
            "norm_us": 10,
            "cast_share": 0,
            "layout_share": 20 / 70,
        }
    )


def test_a_launch_of_another_thread_does_not_belong_to_an_operator() -> None:
    assert traces.device_us(TRACE, ["aten::_foreach_norm"]) == 10


def test_overlap_of_copies_with_kernels() -> None:
    assert traces.overlap_share(TRACE) == 0.5  # 40 .. 60 of 40 .. 80


def test_a_step_without_a_device_has_no_kernels() -> None:
    assert set(traces.step_figures(TRACE[:2], steps=1).values()) == {0.0}


def test_slowest_kernels_come_first() -> None:
    assert list(traces.slowest_kernels(TRACE, 2)) == ["multi_tensor_apply", "nchwToNhwcKernel"]
