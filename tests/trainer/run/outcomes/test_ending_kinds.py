"""The table of endings has every error, and the pages its kinds; what torch, CUDA and NCCL print has a cause."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, get_args

import pytest

from onward.trainer import errors
from onward.trainer.config.loading import build_config
from onward.trainer.errors import DeviceAssertion, OnwardError, OutOfMemory, TrainingFailed
from onward.trainer.run.outcomes.ending_kinds import ENDINGS, EndingKind, explain, kind_of_error, memory_advice

HOW_TO = Path(__file__).resolve().parents[4] / "docs" / "how-to"


def listed(page: str, heading: str) -> list[str]:
    """The names in the first column of the table of a page that has this heading."""
    table = (HOW_TO / page).read_text().partition(f"\n| {heading} |")[2].partition("\n\n")[0]
    return [name for row in table.splitlines()[2:] for name in re.findall(r"`(\w+)`", row.split("|")[1])]


def test_the_pages_list_each_kind_of_ending_once() -> None:
    assert sorted(listed("resume-and-retry.md", "kind")) == sorted(get_args(EndingKind))
    assert sorted(listed("follow-a-run.md", "class")) == sorted(ENDINGS.keys() - {"done"})


def test_each_error_that_a_flow_may_end_with_has_one_kind() -> None:
    classes = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, OnwardError)]
    named = [name for rule in ENDINGS.values() for name in rule.errors]
    assert sorted(named) == sorted({kind.__name__ for kind in classes} - {"OnwardError", "TrainingFailed"})
    assert kind_of_error("TrainingFailed") == "unknown"


NUMBERS = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.11 GiB of which 1.20 GiB is "
    "free. Including non-PyTorch memory, this process has 77.90 GiB memory in use. Of the allocated memory 70.10 GiB "
    "is allocated by PyTorch, and 6.10 GiB is reserved by PyTorch but unallocated."
)
ADVICE_OF_TORCH = (
    " If reserved but unallocated memory is large try setting PYTORCH_ALLOC_CONF=expandable_segments:True to avoid "
    "fragmentation.  See documentation for Memory Management"
)
ASSERTED = (
    "CUDA error: device-side assert triggered\nSearch for `cudaErrorAssert' in "
    "https://docs.nvidia.com/cuda/cuda-runtime-api/group__CUDART__TYPES.html for more information.\n"
    "CUDA kernel errors might be asynchronously reported at some other API call"
)


@pytest.mark.parametrize(
    ("text", "kind", "sentence"),
    [
        (NUMBERS + ADVICE_OF_TORCH, OutOfMemory, NUMBERS),
        ("CUDA error: out of memory\nCompile with", OutOfMemory, "CUDA error: out of memory"),
        (
            "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to "
            "allocate 4096 bytes. Error code 12 (Cannot allocate memory)",
            OutOfMemory,
            "DefaultCPUAllocator: can't allocate memory: you tried to allocate 4096 bytes. Error code 12 (Cannot "
            "allocate memory)",
        ),
        (ASSERTED, DeviceAssertion, "a GPU kernel was given an index out of range, such as a label"),
        # one error follows from another: the first cause is the one that counts
        (
            f"CUDA error: unspecified launch failure\n{ASSERTED}",
            DeviceAssertion,
            "a GPU kernel was given an index out of range",
        ),
        (
            "CUDA error: an illegal memory access was encountered\nCUDA kernel errors",
            TrainingFailed,
            "a GPU failed: an illegal memory access was encountered",
        ),
        (
            "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=1, OpType=ALLGATHER, NumelIn=1, NumelOut=4, "
            "Timeout(ms)=600000) ran for 600004 milliseconds before timing out.",
            TrainingFailed,
            "a collective timed out: ALLGATHER number 1 waited 600.004 s for the other ranks "
            "(five sixths of launch.heartbeat_timeout_s)",
        ),
        ("Timeout (0:02:00)!\nThread 0x7f", TrainingFailed, "it made no progress for 0:02:00 (launch.heart"),
    ],
)
def test_texts_of_torch_and_nccl_have_a_cause(text: str, kind: type[OnwardError], sentence: str) -> None:
    cause = explain(text)
    assert cause is not None
    assert cause.kind is kind
    assert cause.sentence.startswith(sentence)
    assert ADVICE_OF_TORCH.strip() not in cause.sentence


def test_other_texts_have_none() -> None:
    for text in ("", "ValueError: a NaN in row 17", "mat1 and mat2 shapes cannot be multiplied (4x3 and 5x2)"):
        assert explain(text) is None


def test_the_advice_names_what_is_not_used_yet() -> None:
    def config(**sections: Any) -> Any:
        given = {"model": {"path": "model.onnx"}, "data": {"source": "digits"}, **sections}
        return build_config(given)

    step = {"num_steps": 1, "global_batch_size": 16}
    assert memory_advice(config(train=step, parallel={"data": 2})) == (
        "To need less memory: raise train.gradient_accumulation_steps (now 1: a micro-batch has 8 samples), set "
        "recompute.mode = 'whole', raise parallel.zero (now 0), set precision.compute = 'bf16' (now 'fp32') or divide "
        "the model over more ranks (parallel.tensor, parallel.pipeline)"
    )
    frugal = config(
        train={**step, "gradient_accumulation_steps": 16},
        recompute={"mode": "whole"},
        precision={"compute": "bf16"},
    )
    assert memory_advice(frugal) == (
        "To need less memory: divide the model over more ranks (parallel.tensor, parallel.pipeline)"
    )
