"""A job computes in the type that its slowest device has, and torch's switches say so."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from onward.trainer.config.loading import build_config
from onward.trainer.config.run_config import RunConfig
from onward.trainer.config.sections.training import PrecisionConfig
from onward.trainer.distributed import arithmetic
from onward.trainer.distributed.arithmetic import named_if_not_deterministic, resolve_precision, set_arithmetic
from onward.trainer.distributed.processes import MPIContext
from onward.trainer.errors import UnsupportedModel
from tests.support.ranks import ROOT

CPU, VOLTA, AMPERE, HOPPER = (0, 0), (7, 0), (8, 0), (9, 0)


@pytest.fixture(autouse=True)
def switches() -> Iterator[None]:
    """Every global switch as it was before the test."""
    matmul, cudnn = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    yield
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = matmul, cudnn
    torch.set_flush_denormal(False)
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.backends.cudnn.deterministic = False


def config(**sections: Any) -> RunConfig:
    train = {"num_steps": 1} | sections.pop("train", {})
    return build_config({"model": {"path": Path("m.onnx")}, "data": {"source": "x"}, "train": train, **sections})


def rank(device: str) -> MPIContext:
    return MPIContext(0, 1, 0, 1, "here", torch.device(device))


@pytest.mark.parametrize(
    ("compute", "capability", "chosen"),
    [
        ("fp32", CPU, "fp32"),
        ("fp32", HOPPER, "fp32"),
        ("tf32", CPU, "fp32"),
        ("tf32", VOLTA, "fp32"),
        ("tf32", AMPERE, "tf32"),
        ("auto", CPU, "fp32"),
        ("auto", VOLTA, "fp32"),
        ("auto", AMPERE, "bf16"),
        ("auto", HOPPER, "bf16"),
        ("bf16", CPU, "bf16"),
        ("fp16", VOLTA, "fp16"),
    ],
)
def test_the_compute_capability_decides_what_auto_and_tf32_mean(
    compute: str, capability: tuple[int, int], chosen: str
) -> None:
    asked = PrecisionConfig.model_validate({"compute": compute, "loss_scale": ("dynamic", 8.0)})
    found = resolve_precision(asked, capability)
    assert (found.compute, found.initial_scale) == (chosen, 8.0)


@pytest.mark.parametrize("compute", ["auto", "tf32"])
def test_a_cpu_computes_in_fp32_and_the_log_says_so(compute: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        found = set_arithmetic(config(precision={"compute": compute}), rank("cpu"))
    assert found.precision.compute == "fp32"
    assert f"precision.compute '{compute}': computing in fp32 on the CPU" in caplog.text


@pytest.mark.parametrize(("compute", "on"), [("fp32", False), ("tf32", True), ("auto", False), ("bf16", False)])
def test_tf32_is_off_on_gpus_unless_it_is_asked_for_in_convolutions_too(
    compute: str, on: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arithmetic, "capability_of", lambda device: AMPERE)
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = not on, not on
    set_arithmetic(config(precision={"compute": compute}), rank("cuda"))
    assert torch.backends.cuda.matmul.allow_tf32 is on
    assert torch.backends.cudnn.allow_tf32 is on
    # what torch.compile reads, which refuses a mixture of old and new switches
    assert torch.get_float32_matmul_precision() == ("high" if on else "highest")


def test_deterministic_algorithms_are_on_with_a_workspace_that_cublas_accepts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":0:0")
    set_arithmetic(config(), rank("cpu"))
    assert not torch.are_deterministic_algorithms_enabled()
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":0:0"
    set_arithmetic(config(train={"deterministic": True}), rank("cpu"))
    assert torch.are_deterministic_algorithms_enabled()
    assert not torch.is_deterministic_algorithms_warn_only_enabled()
    assert torch.backends.cudnn.deterministic
    assert not torch.backends.cudnn.benchmark
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"


def test_an_operator_without_a_deterministic_implementation_is_named_with_the_setting() -> None:
    set_arithmetic(config(train={"deterministic": True}), rank("cpu"))
    refused = pytest.raises(UnsupportedModel, match=r"train.deterministic: .* of max_unpooling2d_forward_out")
    with refused, named_if_not_deterministic():
        F.max_unpool2d(torch.ones(1, 1, 1, 1), torch.zeros(1, 1, 1, 1, dtype=torch.int64), 2)
    with pytest.raises(RuntimeError, match="another"), named_if_not_deterministic():
        raise RuntimeError("another")


SWITCHES = """
import json, os
from onward.trainer.run.machine.this_machine import ignore_lower_precision

if os.environ["SETS"] == "1":
    ignore_lower_precision()
import torch
import torch.nn.functional as F
from onward.trainer.config.loading import build_config
from onward.trainer.distributed.arithmetic import set_arithmetic
from onward.trainer.distributed.processes import MPIContext

config = build_config({"model": {"path": "m.onnx"}, "data": {"source": "x"}, "train": {"num_steps": 1}})
if os.environ["SETS"] == "1":
    set_arithmetic(config, MPIContext(0, 1, 0, 1, "here", torch.device("cpu")))
torch.manual_seed(0)
torch.set_num_threads(4)
momentum = torch.full((1 << 20,), 1e-44)
momentum.mul_(0.9)  # 1 << 20 elements: all threads take a part
image, weight = torch.randn(4, 32, 16, 16), torch.randn(32, 32, 3, 3)
print(json.dumps({
    "tiny": int((momentum.view(torch.int32) != 0).sum()),
    "convolution": float(F.conv2d(image, weight, padding=1).double().sum()),
    "matmul": torch.get_float32_matmul_precision(),
}))
"""


def switched(*, sets: bool, **environment: str) -> dict[str, Any]:
    """What a process computes after `set_arithmetic` (or without it), started with these variables."""
    words = [sys.executable, "-c", SWITCHES]
    variables = {**os.environ, **environment, "SETS": str(int(sets))}
    done = subprocess.run(words, env=variables, cwd=ROOT, check=True, capture_output=True, text=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.slow
def test_the_momentum_of_weights_without_gradients_becomes_zero_on_all_threads() -> None:
    assert switched(sets=False)["tiny"] == 1 << 20  # the smallest numbers, times 0.9, are themselves
    assert switched(sets=True)["tiny"] == 0


@pytest.mark.slow
def test_no_environment_variable_changes_the_products_of_fp32() -> None:
    plain = switched(sets=True)
    given = {"ONEDNN_DEFAULT_FPMATH_MODE": "BF16", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "1"}
    assert switched(sets=False, **given)["matmul"] == "high"
    assert switched(sets=True, **given) == plain
    assert plain["matmul"] == "highest"
