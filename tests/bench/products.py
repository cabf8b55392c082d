"""Rates of the fp32 products of a linear layer: MKL's, which torch calls, and oneDNN's, which compiled code may call.

    python -m tests.bench.products [--rows 1024] [--width 256] [--rounds 15]

GFLOP/s of one thread, of the best round, by processor time: the layers of a transformer of that width, forward (with a
bias), the gradient of the input and that of the weight.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from torch import Tensor


def rate(product: Callable[[], Tensor], flops: float, rounds: int) -> float:
    """Return GFLOP/s."""
    product()
    best = float("inf")
    for _ in range(rounds):
        started_at = time.process_time()
        product()
        best = min(best, time.process_time() - started_at)
    return flops / max(best, 1e-9) / 1e9


def main() -> None:
    """Run every product and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1024)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows, width = arguments.rows, arguments.width
    onednn = torch.ops.mkldnn._linear_pointwise.default
    print("| layer | product | MKL | oneDNN |\n|---|---|---|---|")
    for inner, outer in ((width, 3 * width), (width, width), (width, 4 * width), (4 * width, width)):
        x, weight, bias = torch.randn(rows, inner), torch.randn(inner, outer), torch.randn(outer)
        gradient = torch.randn(rows, outer)
        for name, a, b, added in (
            ("forward", x, weight, bias),
            ("input's gradient", gradient, weight.t(), None),
            ("weight's gradient", x.t(), gradient, None),
        ):

            def mkl(a: Tensor = a, b: Tensor = b, added: Tensor | None = added) -> Tensor:
                return torch.mm(a, b) if added is None else torch.addmm(added, a, b)

            def other(a: Tensor = a, b: Tensor = b, added: Tensor | None = added) -> Tensor:
                return onednn(a, b.t(), added, "none", [], "")  # type: ignore[no-any-return]

            flops = 2.0 * rows * inner * outer
            found = [rate(side, flops, arguments.rounds) for side in (mkl, other)]
            print(f"| {inner} x {outer} | {name} | {found[0]:.0f} | {found[1]:.0f} |", flush=True)


if __name__ == "__main__":
    main()
