"""Nothing that an imported graph computes is made on the wrong device; what a GPU would wait for is listed.

No GPU is needed: tests/support/on_device.py says how.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from tests.equivalence.test_any_model import EVERY, QUICK, Case
from tests.support import zoo

READ_OPERANDS = {
    "AffineGrid", "BlackmanWindow", "CenterCropPad", "Col2Im", "ConstantOfShape", "CumProd", "CumSum", "DFT", "Dropout",
    "Expand", "HammingWindow", "HannWindow", "MaxUnpool", "OneHot", "Pad", "ReduceL1", "ReduceL2", "ReduceLogSum",
    "ReduceLogSumExp", "ReduceMax", "ReduceMean", "ReduceMin", "ReduceProd", "ReduceSum", "ReduceSumSquare", "Reshape",
    "Resize", "STFT", "SequenceInsert", "Slice", "Split", "SplitToSequence", "Squeeze", "Tile", "TopK", "Trilu",
    "Unsqueeze", "Upsample",
}  # fmt: skip
"""Operators that read an operand on the host when it is not stored in the file: a shape, an axis, a limit."""

READ_DATA = {"Compress", "If", "Loop", "MelWeightMatrix", "NonMaxSuppression", "NonZero", "Range", "Unique"}
"""Operators that read their first operand on the host: what they compute, or how much of it, depends on it."""

COPIED_TO_DEVICE = {"NonMaxSuppression"}
"""Operators that copy a tensor from the host each time: it chooses boxes on the host."""

ZOO_READS = {"detector": "non-maximum suppression chooses boxes on the host"}
"""Architectures whose forward pass reads from the device or copies to it, and why."""

NOT_ON_FAKE_TENSORS = {
    "Loop": "its end depends on data",
    "LSTM": "torch's fake kernel for CUDA needs biases",
    "GRU": "torch has no fake kernel for CUDA",
}
"""Operators that torch cannot run on fake tensors, beside those of READ_OPERANDS and READ_DATA."""

NOT_IN_MIXED_TYPES = {"BitCast"}
"""Operators that mean something else in half precision."""

pytestmark = pytest.mark.timeout(1800)

Run = dict[str, Any]


def runs(*arguments: str) -> list[Run]:
    command = [sys.executable, "-X", "faulthandler", "-m", "tests.support.on_device", *arguments]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=1500)
    assert ran.returncode == 0, ran.stderr[-3000:]
    return [json.loads(line) for line in ran.stdout.splitlines()]


def files(cases: list[Case]) -> Iterator[str]:
    for name, exporter, folded in cases:
        yield f"{name}={zoo.exported_file(name, exporter, folded=folded)}"


def assert_waits_are_listed(found: list[Run]) -> set[str]:
    """Reads and copies are those of the tables; return the operators that read in a case of their own."""
    read: set[str] = set()
    for run in found:
        operators, stored = set(run["operators"].split()), run["name"].endswith(" stored")
        allowed = READ_DATA if stored else READ_DATA | READ_OPERANDS
        if run["reads"]:
            assert operators & allowed, run
            read |= operators if len(operators) == 1 else set()
        if run["copies"]:
            assert operators & COPIED_TO_DEVICE, run
        assert run["of_backward"] == [], run
    return read


STAND_IN = """
import torch
from tests.support.stand_in_device import DeviceTensor, MixedDevicesError, StandInDevice

with StandInDevice() as device:
    x = device.put(torch.tensor([[1.0, -2.0], [3.0, 4.0]]))
    for refused in (
        lambda: x + torch.ones(2), lambda: torch.cat([x, torch.ones(1, 2)]), lambda: x.numpy(),
        lambda: torch.index_select(x, 0, torch.tensor([1])), lambda: torch.ones(2).add_(x[0]),
    ):
        try:
            refused()
        except (MixedDevicesError, RuntimeError):
            continue
        raise SystemExit("not refused")
    assert isinstance(torch.where(x > 0, x, torch.tensor(0.0)) * 2, DeviceTensor)
    x.requires_grad_()
    (x.relu() * torch.arange(2, device=x.device)).sum().backward()
    assert x.grad.tolist() == [[0.0, 0.0], [0.0, 1.0]]
    assert (device.copies_to_device, len(device.host_reads)) == ([], 1), "tolist"
    for reading in (x.sum().item, (x > 0).any().__bool__, lambda: x[x > 0], lambda: torch.nonzero(x), x.cpu):
        device.host_reads.clear()
        reading()
        assert len(device.host_reads) == 1, device.host_reads
    for copying in (lambda: torch.tensor([1, 2], device=x.device), lambda: x[torch.tensor([0])]):
        device.copies_to_device.clear()
        copying()
        assert len(device.copies_to_device) == 1, device.copies_to_device
"""


@pytest.mark.slow
def test_the_stand_in_refuses_what_a_gpu_refuses_and_records_what_it_waits_for():
    ran = subprocess.run([sys.executable, "-c", STAND_IN], capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr


@pytest.mark.slow
@pytest.mark.parametrize("what", ["sample", "suite"])
def test_no_operator_mixes_devices_and_the_ones_that_wait_for_the_device_are_listed(what):
    found = runs("stand-in", what)
    assert len(found) > (2000 if what == "suite" else 200)
    assert [run for run in found if run["problem"]] == []
    read = assert_waits_are_listed(found)
    assert what == "sample" or read == READ_DATA | READ_OPERANDS, "an entry of the tables is not needed"


@pytest.mark.slow
def test_no_operator_mixes_devices_or_types_on_fake_tensors():
    found = runs("fake", "suite")
    assert len(found) > 2000
    known = READ_OPERANDS | READ_DATA | NOT_ON_FAKE_TENSORS.keys()
    for run in found:
        operators = set(run["operators"].split())
        data_dependent = run["problem"].startswith(("DataDependent", "DynamicOutputShape", "GuardOnDataDependent"))
        if "mixed types" in run["problem"]:
            assert operators & NOT_IN_MIXED_TYPES, run
        elif run["problem"]:
            assert operators & known, run
            assert data_dependent or operators & NOT_ON_FAKE_TENSORS.keys(), run


@pytest.mark.parametrize(
    "cases", [QUICK[::36], pytest.param(EVERY, marks=pytest.mark.slow)], ids=["some architectures", "every"]
)
def test_training_a_model_neither_reads_from_the_device_nor_copies_to_it(cases):
    found = runs("stand-in", "zoo", *files(cases))
    assert len(found) == len(cases)
    for run in found:
        assert run["problem"] == ""
        assert run["of_backward"] == []
        if run["name"].partition("-")[0] not in ZOO_READS:
            assert (run["name"], run["reads"], run["copies"]) == (run["name"], [], [])


@pytest.mark.slow
def test_models_run_under_cuda_autocast_on_fake_tensors():
    for run in runs("fake", "zoo", *files(QUICK)):
        known = set(run["operators"].split()) & NOT_ON_FAKE_TENSORS.keys() or run["name"].startswith("detector")
        assert known or run["problem"] == "", run
