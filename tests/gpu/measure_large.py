"""Measure a GPT-2 of about a billion parameters in bf16, compiled and not, beside the loop written by hand.

Its memory: 16 bytes for each parameter on each side, and the activations of one side, which the other side's steps use
again: about 45 GiB for 16 sequences of 1,024 tokens, and half of that for 8, which fit a device of 80 GB.
"""

from __future__ import annotations

from functools import partial

import torch

from tests.bench.handwritten import gpt2_from, gpt2_model
from tests.bench.memory_prediction import text
from tests.gpu.device import DEVICE, REHEARSAL
from tests.gpu.measure import compare, connected
from tests.gpu.measure_gpt2 import TINY
from tests.gpu.results import attempt, is_finished

SIZES = {"vocabulary": 50257, "length": 1024, "layers": 18, "heads": 16, "width": 2048}
"""12 layers width^2 + (vocabulary + length) width = 1.01 billion parameters."""
CHECKS = {"GPT-2 1.0B, bf16, compiled": True, "GPT-2 1.0B, bf16": False}
"""Check -> whether both sides are compiled."""
GOAL = "48 k tokens/s on an H100 or H200, compiled"


def main() -> None:
    """Make both checks."""
    if all(map(is_finished, CHECKS)):  # making the model takes a minute
        return
    sizes, batch = (TINY, 2) if REHEARSAL else (SIZES, _batch())
    model = gpt2_model(sizes)
    module = gpt2_from(model, sizes)
    columns = text(batch, sizes["length"], sizes["vocabulary"])
    options = {"compute": "bf16", "unit": "tokens", "per_sample": sizes["length"], "goal": GOAL}
    with connected() as mpi:
        for check, compiled in CHECKS.items():
            attempt(check, partial(compare, mpi, model, module, columns, compiled=compiled, **options))


def _batch() -> int:
    return 16 if torch.cuda.get_device_properties(DEVICE).total_memory > 100e9 else 8


if __name__ == "__main__":
    main()
