"""Measure GPT-2 124M in every precision beside the loop written by hand: tokens/s, MFU. About 6 minutes on an H200."""

from __future__ import annotations

from functools import partial

from tests.bench.handwritten import gpt2_from, gpt2_model
from tests.bench.memory_prediction import text
from tests.gpu.device import REHEARSAL
from tests.gpu.measure import compare, connected
from tests.gpu.results import attempt

SIZES = {"vocabulary": 50257, "length": 1024, "layers": 12, "heads": 12, "width": 768}
TINY = {"vocabulary": 64, "length": 16, "layers": 1, "heads": 2, "width": 16}


CHECKS = {
    "bf16": (16, {"compute": "bf16"}, ""),
    "bf16, compiled": (16, {"compute": "bf16", "compiled": True}, "460 k tokens/s on an H100 or H200"),
    "bf16, batch 1": (1, {"compute": "bf16"}, ""),
    "bf16, compiled, batch 1": (1, {"compute": "bf16", "compiled": True}, ""),
    "TF32": (16, {"compute": "tf32"}, ""),
    "fp32": (16, {"compute": "fp32"}, ""),
}
"""Check -> (sequences in a step, arguments of `compare`, goal)."""


def main() -> None:
    """Make each check; the launch of kernels decides at batch 1."""
    sizes = TINY if REHEARSAL else SIZES
    model = gpt2_model(sizes)
    module = gpt2_from(model, sizes)
    with connected() as mpi:
        for check, (batch, arguments, goal) in CHECKS.items():
            columns = text(2 if REHEARSAL else batch, sizes["length"], sizes["vocabulary"])
            common = {"unit": "tokens", "per_sample": sizes["length"], **arguments}
            attempt(check, partial(compare, mpi, model, module, columns, **common, goal=goal))


if __name__ == "__main__":
    main()
