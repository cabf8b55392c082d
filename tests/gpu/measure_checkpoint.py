"""Measure how long a checkpoint keeps the training loop from training. About 2 minutes on an H200.

With a checkpoint after every 150 steps:

    step    ... 149  150            151  152  ...  299  300            301 ...
                |----|--------------|----|----     |----|--------------|
                      stall_s         slowed_s: what all other steps take longer than their median, together
"""

from __future__ import annotations

import statistics
from functools import partial
from typing import Any

import onnx

from onward.trainer.distributed.processes import MPIContext
from tests.bench.handwritten import gpt2_model
from tests.bench.memory_prediction import text
from tests.gpu.device import REHEARSAL
from tests.gpu.measure import connected, run_of, time_training
from tests.gpu.measure_gpt2 import SIZES, TINY
from tests.gpu.results import attempt

PERIOD, CHECKPOINTS = (3, 1) if REHEARSAL else (150, 2)
GPT2 = TINY if REHEARSAL else SIZES
CHECKS = {"GPT-2 124M, written in the background": True, "GPT-2 124M, written while training waits": False}


def stall(mpi: MPIContext, model: onnx.ModelProto, sizes: dict[str, int], *, background: bool) -> dict[str, Any]:
    """Return the seconds that a step with a checkpoint takes longer than one without, and those of the steps after."""
    sections = {
        "precision": {"compute": "bf16"},
        "checkpoint": {"period": PERIOD, "keep_newest": 1, "background": background},
    }
    with run_of(model, text(2, sizes["length"], sizes["vocabulary"]), **sections) as run:
        # to a period after the last checkpoint: it may be written beside the steps that follow it
        times = time_training(run, mpi, steps=PERIOD * (CHECKPOINTS + 1) - 2, warm_up=2)
        found = [path.stat().st_size for path in run.checkpoints.rglob("*.safetensors")]
        count = len(list(run.checkpoints.glob("step-*[0-9]")))
    steps = [(step, ms / 1e3) for step, ms in enumerate(times, start=3)]
    saving = [seconds for step, seconds in steps if step % PERIOD == 0 and step <= PERIOD * CHECKPOINTS]
    others = [seconds for step, seconds in steps if step % PERIOD]
    step_s = statistics.median(others)
    return {
        "stall_s": statistics.median(saving) - step_s,
        "slowed_s": sum(seconds - step_s for seconds in others) / CHECKPOINTS,
        "step_s": step_s,
        "checkpoint_gb": sum(found) / max(1, count) / 1e9,
    }


def main() -> None:
    """Make each check."""
    model = gpt2_model(GPT2)
    with connected() as mpi:
        for check, background in CHECKS.items():
            attempt(check, partial(stall, mpi, model, GPT2, background=background))


if __name__ == "__main__":
    main()
