"""What the planner knows of a device: which layout it prefers there, and what memory it keeps free."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from onward.flows.shown.inspection_report import show_plan
from onward.trainer.config.sections.ranks import ParallelConfig
from onward.trainer.errors import ConfigError
from onward.trainer.parallel.planning import device_model, planner
from onward.trainer.parallel.planning.device_model import (
    COMMUNICATOR_BYTES,
    CONTEXT_BYTES,
    CPU,
    Device,
    describe,
    gpu,
    reserve,
    typical,
)
from onward.trainer.parallel.planning.planner import plan
from tests.trainer.parallel.planning.test_planner import gpt2

CUDA = torch.device("cuda")
H100 = gpu("NVIDIA H100 80GB HBM3", "fp32")
GIB = 2**30


def test_a_gpu_is_found_by_its_name_and_computes_as_fast_as_its_type_of_arithmetic() -> None:
    assert gpu("NVIDIA H200", "bf16").flops_per_s == pytest.approx(0.6 * 989e12)
    assert gpu("NVIDIA H200", "tf32").flops_per_s == pytest.approx(0.6 * 494e12)
    assert gpu("NVIDIA H100 PCIe", "bf16").link_bytes_per_s < gpu("NVIDIA H100 80GB HBM3", "bf16").link_bytes_per_s
    assert gpu("NVIDIA L4", "bf16").flops_per_s < gpu("NVIDIA L40S", "bf16").flops_per_s
    unknown = gpu("NVIDIA Z1000", "fp16")
    assert unknown.name == "NVIDIA Z1000 (taken for A100)"
    assert unknown.flops_per_s == typical("cuda", "fp16").flops_per_s


def test_a_cpu_is_described_without_a_gpu_and_a_gpu_by_its_properties(monkeypatch: pytest.MonkeyPatch) -> None:
    assert describe(torch.device("cpu"), "fp32") is typical("cpu", "fp32") is CPU
    properties = SimpleNamespace(name="Tesla V100-SXM2-16GB", total_memory=16 * GIB)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    assert describe(CUDA, "fp16").link_bytes_per_s == pytest.approx(0.8 * 150e9)


def test_a_gpu_starts_operators_while_it_computes_and_a_cpu_does_not() -> None:
    flops, calls = 1e9, 1000
    assert CPU.pass_s(flops, calls) == pytest.approx(flops / 80e9 + calls * 10e-6)
    assert H100.pass_s(flops, calls) == calls * H100.call_s, "limited by the host"
    assert H100.pass_s(1e15, calls) == 1e15 / H100.flops_per_s, "limited by the GPU"


def described(monkeypatch: pytest.MonkeyPatch) -> Callable[[Device], None]:
    def use(device: Device) -> None:
        monkeypatch.setattr(device_model, "describe", lambda *_: device)

    return use


@pytest.mark.slow
def test_auto_chooses_by_what_messages_and_calls_cost_on_the_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parallel, train = {"sizes": "auto", "memory_gib": 10.0}, {"global_batch_size": 16, "num_steps": 1}
    config = gpt2(tmp_path, parallel=parallel, train=train, launch={"num_ranks": 2})
    # a small model with few samples: sending its gradients over gloo takes longer than sending activations, but these
    # are more messages; a GPU computes less time than it takes to call the operators, which tensor parallelism does not
    # divide
    for message_s, sizes in ((0.0, (1, 2)), (CPU.message_s, (2, 1))):
        described(monkeypatch)(replace(CPU, link_bytes_per_s=0.4e9, message_s=message_s))
        chosen = plan(config)
        assert (chosen.parallel.data, chosen.parallel.tensor, chosen.device[:4]) == (*sizes, "CPU,")
        assert chosen.reserve.total == 0
    described(monkeypatch)(H100)
    chosen = plan(config)
    assert (chosen.parallel.data, chosen.parallel.tensor) == (2, 1)
    assert chosen.device == "NVIDIA H100 80GB HBM3, 40.2 TFLOP/s in fp32, 360 GB/s"
    assert chosen.reserve.communicators == 2 * COMMUNICATOR_BYTES, "of the world and of the data axis"


@pytest.mark.slow
def test_what_is_not_the_models_is_kept_free_shown_and_named_when_nothing_fits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    described(monkeypatch)(H100)
    config = gpt2(tmp_path, parallel={"sizes": "auto", "memory_gib": 2.0}, launch={"num_ranks": 1})
    found = plan(config)
    kept = reserve(ParallelConfig(), "cuda", 2 * GIB)
    assert found.reserve == kept
    assert kept.context + kept.workspaces + kept.communicators + kept.fragmentation == kept.total > GIB
    show_plan(found, everything=False)
    assert "kept free" in capsys.readouterr().out
    little = config.parallel.model_copy(update={"memory_gib": 1.0})
    with pytest.raises(ConfigError, match=r"fits into 1 GiB a rank, of which at least 1\.\d+ GiB are kept free"):
        plan(config.model_copy(update={"parallel": little}))


def test_each_used_axis_has_a_communicator() -> None:
    def number(**parallel: int) -> int:
        return reserve(ParallelConfig.model_validate(parallel), "cuda", 0).communicators // COMMUNICATOR_BYTES

    assert number() == 1
    assert number(data=2) == number(tensor=2) == number(pipeline=2) == 2
    assert number(data=2, zero=3) == 3
    assert number(data=4, zero=3, shard=2, tensor=2, pipeline=2) == 6
    assert reserve(ParallelConfig(data=8), "cpu", GIB).total == 0


def test_ranks_that_share_a_gpu_divide_its_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = gpt2(tmp_path, parallel={"sizes": "auto"}, launch={"num_ranks": 4})
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (70 * GIB, 80 * GIB))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=80 * GIB))
    for num_gpus, sharing in ((4, 1), (2, 2), (3, 2), (1, 4)):
        monkeypatch.setattr(torch.cuda, "device_count", lambda number=num_gpus: number)
        # the context of the process that asks ends with it
        assert planner._memory_of_a_rank(config.launch, CUDA) == (70 * GIB + CONTEXT_BYTES) // sharing
    launch = config.launch.model_copy(update={"hostfile": "hosts", "ranks_per_gpu": 2})
    on_hosts = config.model_copy(update={"launch": launch})
    assert planner._memory_of_a_rank(on_hosts.launch, CUDA) == (70 * GIB + CONTEXT_BYTES) // 2
