"""Measure a GPT-2 of about a billion parameters in bf16 beside the loop written by hand. About 4 minutes on an H200.

Its memory: 16 bytes for each parameter on each side, and the activations of one side, 16 sequences of 1,024 tokens,
about 45 GiB, which the other side's steps use again.
"""

from __future__ import annotations

from functools import partial

from tests.bench.handwritten import gpt2_from, gpt2_model
from tests.bench.memory_prediction import text
from tests.gpu.device import REHEARSAL
from tests.gpu.measure import compare, connected
from tests.gpu.measure_gpt2 import TINY
from tests.gpu.results import attempt, is_finished

SIZES = {"vocabulary": 50257, "length": 1024, "layers": 18, "heads": 16, "width": 2048}
"""12 layers width^2 + (vocabulary + length) width = 1.01 billion parameters."""
CHECKS = ("GPT-2 1.0B, bf16",)
GOAL = "mfu of at least 0.5"


def main() -> None:
    """Make the one check."""
    if all(map(is_finished, CHECKS)):  # making the model takes a minute
        return
    sizes, batch = (TINY, 2) if REHEARSAL else (SIZES, 16)
    model = gpt2_model(sizes)
    module = gpt2_from(model, sizes)
    columns = text(batch, sizes["length"], sizes["vocabulary"])
    options = {"compute": "bf16", "unit": "tokens", "per_sample": sizes["length"], "goal": GOAL}
    with connected() as mpi:
        attempt(CHECKS[0], partial(compare, mpi, model, module, columns, **options))


if __name__ == "__main__":
    main()
