"""Measure each way to compile beside the same eager loop written by hand. About 5 minutes on an H200.

So the ways are compared by `times_as_fast`; the check `eager` is Onward without torch.compile. `first_step_s` contains
the time to compile for training and for evaluation. Both models are bound by the launches of their kernels, the
larger one with one sequence in a step. What `auto` does to it is measured by measure_gpt2.py beside a compiled loop.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from tests.bench.handwritten import gpt2_from, gpt2_model
from tests.bench.memory_prediction import text
from tests.gpu.device import REHEARSAL
from tests.gpu.measure import compare, connected
from tests.gpu.measure_gpt2 import SIZES, TINY
from tests.gpu.results import Skip, attempt

SMALL = {"vocabulary": 512, "length": 64, "layers": 4, "heads": 4, "width": 128}
EAGER, AUTO, STATIC, GRAPHS, DYNAMIC, REPEATED = (
    {"compile": how} for how in (False, True, "default", "reduce-overhead", "dynamic", "repeated")
)
MODELS: dict[str, tuple[dict[str, int], int, dict[str, dict[str, Any]]]] = {
    "small GPT-2": (
        TINY if REHEARSAL else SMALL,
        2 if REHEARSAL else 8,
        {"eager": EAGER, "auto": AUTO, "static shapes": STATIC, "CUDA graphs": GRAPHS},
    ),
    "GPT-2 124M, batch 1": (
        TINY if REHEARSAL else SIZES,
        1,
        {"eager": EAGER, "CUDA graphs": GRAPHS, "dynamic shapes": DYNAMIC, "repeated blocks": REPEATED},
    ),
}
"""Model -> its sizes, sequences in a step, [graph] for each way."""
CHECKS = tuple(f"{model}, {way}" for model, (_, _, ways) in MODELS.items() for way in ways)


def compiled(mpi: Any, model: Any, module: Any, sizes: dict[str, int], rows: int, graph: dict[str, Any]) -> Any:
    """Return the figures of one way."""
    if REHEARSAL and graph["compile"] == "reduce-overhead":
        raise Skip("a CPU has no CUDA graphs")
    columns = text(rows, sizes["length"], sizes["vocabulary"])
    options = {"compute": "bf16", "unit": "tokens", "per_sample": sizes["length"], "graph": graph}
    return compare(mpi, model, module, columns, **options)


def main() -> None:
    """Make each check."""
    with connected() as mpi:
        for name, (sizes, rows, ways) in MODELS.items():
            model = gpt2_model(sizes)
            module = gpt2_from(model, sizes)
            for way, graph in ways.items():
                attempt(f"{name}, {way}", partial(compiled, mpi, model, module, sizes, rows, graph))


if __name__ == "__main__":
    main()
