"""Explain what torch, CUDA and NCCL print when a device or its links fail: the cause, and whether a retry can help.

Their texts are read, because most of them reach no Python code: a kernel fails long after it was started, and NCCL's
watchdog ends the process without an exception.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from onward.trainer.config.run_config import RunConfig
from onward.trainer.errors import DeviceAssertion, OnwardError, OutOfMemory, TrainingFailed


@dataclass(frozen=True)
class Cause:
    """Why a rank failed."""

    kind: type[OnwardError]
    """TrainingFailed if a retry may help."""
    sentence: str


def explain(text: str) -> Cause | None:
    """Return the cause that a message, or the last output of a rank, describes; None if it is none of these."""
    for pattern, kind, sentence in _CAUSES:
        if found := pattern.search(text):
            return Cause(kind, sentence(found))
    return None


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether torch, CUDA or Python has got no more memory."""
    if isinstance(error, MemoryError):
        return True
    cause = explain(str(error)) if isinstance(error, RuntimeError) else None
    return cause is not None and cause.kind is OutOfMemory


def memory_advice(config: RunConfig) -> str:
    """Return what to change so that a rank needs less memory, with the present values."""
    parallel, size = config.parallel, config.micro_batch_size
    choices = []
    if size > 1:
        steps = config.train.gradient_accumulation_steps
        choices.append(f"raise train.gradient_accumulation_steps (now {steps}: a micro-batch has {size} samples)")
    if config.recompute.mode in ("none", "compressed"):
        choices.append("set recompute.mode = 'whole'")
    if parallel.data > 1 and parallel.zero < 3:
        choices.append(f"raise parallel.zero (now {parallel.zero})")
    if config.precision.compute not in ("bf16", "fp16"):
        choices.append(f"set precision.compute = 'bf16' (now {config.precision.compute!r})")
    choices.append("divide the model over more ranks (parallel.tensor, parallel.pipeline)")
    return f"To need less memory: {', '.join(choices[:-1])}{' or ' * (len(choices) > 1)}{choices[-1]}"


def _out_of_memory(found: re.Match[str]) -> str:
    # torch's message has the numbers: what was asked for, and what is free, allocated and reserved
    return " ".join(found[0].split())


def _assertion(found: re.Match[str]) -> str:
    kernel = re.search(r"[^\s:/]+\.cuh?:\d+: .*?Assertion `.*?` failed", found.string)
    return (
        "a GPU kernel was given an index out of range, such as a label or token id beyond the model's table (CUDA "
        f"device-side assert{f': {kernel[0]}' if kernel else ''}); compare the least and greatest label or id of the "
        "data with the shapes that `onward doctor` lists. With CUDA_LAUNCH_BLOCKING=1 in the environment the traceback "
        "names the operator"
    )


def _collective(found: re.Match[str]) -> str:
    return (
        f"a collective timed out: {found[2]} number {found[1]} waited {int(found[3]) / 1000:g} s for the other ranks "
        "(launch.collective_timeout_s)"
    )


_CAUSES: Sequence[tuple[re.Pattern[str], type[OnwardError], Callable[[re.Match[str]], str]]] = (
    # in this order: what follows from an earlier failure comes after it
    (re.compile("device-side assert triggered"), DeviceAssertion, _assertion),
    (
        re.compile(
            r"(CUDA out of memory|CUDA error: out of memory|CUBLAS_STATUS_ALLOC_FAILED|"
            r"DefaultCPUAllocator: can't allocate memory)(?:(?! If reserved but unallocated).)*"
        ),
        OutOfMemory,
        _out_of_memory,
    ),
    (re.compile(r"CUDA error: ([^\n]+)"), TrainingFailed, lambda found: f"a GPU failed: {found[1].strip()}"),
    (
        re.compile(r"collective operation timeout: Work\w+\(SeqNum=(\d+), OpType=(\w+).*? ran for (\d+) milliseconds"),
        TrainingFailed,
        _collective,
    ),
    (re.compile(r"(NCCL error[^\n]*|nccl\w+Error[^\n]*)"), TrainingFailed, lambda found: found[1].strip()),
    (
        re.compile(r"Timeout \((\d+:\d+:\d+(?:\.\d+)?)\)!"),
        TrainingFailed,
        lambda found: (
            f"it made no progress for {found[1]} (launch.heartbeat_timeout_s; until the first step was complete, "
            "launch.start_timeout_s; while it compiled, launch.compile_timeout_s)"
        ),
    ),
)
