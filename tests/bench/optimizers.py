"""Compare the optimizers on a small GPT-2: held-out loss at the best of three rates, state, time of an update.

    python -m tests.bench.optimizers [--steps 120] [--names adamw muon]        about 5 minutes on one core

The data are bytes of the Python standard library; the learning rate falls linearly to 0. A loss on data that were not
trained on, in nats per byte. One run each: differences of a few hundredths are noise.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from onward.trainer.config.sections.training import OptimizerConfig
from onward.trainer.distributed.weights import Placement, Weight
from onward.trainer.onnx_graph.examples.reference_models import build_gpt2
from onward.trainer.onnx_import.driver import to_module
from onward.trainer.onnx_import.imported_graph import named_weights
from onward.trainer.optim.optimizers import build_optimizer, clip_factor, set_learning_rate
from onward.trainer.optim.state import state_bytes
from onward.trainer.parallel.matrices import find_matrices

LENGTH, BATCH = 64, 16
RATES: dict[str, Sequence[float]] = {
    "adamw": (1e-3, 3e-3, 1e-2),
    "lamb": (3e-2, 1e-1, 3e-1),
    "sgd": (0.03, 0.1, 0.3),
    "nadam": (1e-3, 3e-3, 1e-2),
    "radam": (1e-2, 3e-2, 1e-1),
    "rmsprop": (3e-4, 1e-3, 3e-3),
    "adagrad": (3e-3, 1e-2, 3e-2),
    "lion": (3e-4, 1e-3, 3e-3),
    "adafactor": (3e-2, 1e-1, 3e-1),
    "muon": (2e-2, 5e-2, 1e-1),
}
SETTINGS: dict[str, dict[str, Any]] = {"sgd": {"momentum": 0.9}, "muon": {"muon": {"adamw_learning_rate": 3e-3}}}


def text() -> Tensor:
    """Bytes of the standard library's modules."""
    folder = Path(statistics.__file__).parent
    return torch.tensor(list(b"".join(path.read_bytes() for path in sorted(folder.glob("[a-f]*.py")))))


def trained(name: str, rate: float, data: Tensor, steps: int) -> tuple[float, float, float]:
    """Return (loss on held-out bytes, bytes of state per weight element, seconds of an update)."""
    model = build_gpt2(vocab_size=256, sequence_length=LENGTH, num_layers=2, num_heads=4, width=64, dropout=0.0)
    module = to_module(model)
    matrices = find_matrices(module)
    weights = [
        Weight(key, tensor, Placement.full(tensor.shape), trained=True, outputs=matrices.get(key))
        for key, tensor in named_weights(module).items()
        if tensor.requires_grad
    ]
    config = OptimizerConfig.model_validate({"name": name, "learning_rate": rate, **SETTINGS.get(name, {})})
    optimizer, tensors = build_optimizer(config, weights), [weight.tensor for weight in weights]
    draw = torch.Generator().manual_seed(0)
    cut = len(data) * 9 // 10

    def loss(first: int, last: int, rows: int) -> Tensor:
        starts = torch.randint(first, last - LENGTH - 1, (rows,), generator=draw)
        batch = data[starts[:, None] + torch.arange(LENGTH + 1)]
        return F.cross_entropy(module(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())

    seconds = []
    for step in range(steps):
        for tensor in tensors:
            tensor.grad = None
        loss(0, cut, BATCH).backward()
        gradients = [tensor.grad for tensor in tensors if tensor.grad is not None]
        norm = float(torch.nn.utils.get_total_norm(gradients))
        torch._foreach_mul_(gradients, clip_factor(norm, 1.0))
        set_learning_rate(optimizer, rate * (1 - step / steps))
        began = time.perf_counter()
        optimizer.step()
        seconds.append(time.perf_counter() - began)
    with torch.no_grad():
        held_out = statistics.mean(float(loss(cut, len(data), 64)) for _ in range(8))
    numel = sum(tensor.numel() for tensor in tensors)
    return held_out, state_bytes(config, weights) / numel, statistics.median(seconds)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--names", nargs="+", default=list(RATES))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    data = text()
    print("| optimizer | learning rate | loss | bytes of state per weight | update |\n|---|---|---|---|---|")
    for name in arguments.names:
        found = {rate: trained(name, rate, data, arguments.steps) for rate in RATES[name]}
        best = min(found, key=lambda rate: found[rate][0])
        loss, state, seconds = found[best]
        print(f"| `{name}` | {best:g} | {loss:.3f} | {state:.2f} | {1e3 * seconds:.1f} ms |", flush=True)


if __name__ == "__main__":
    main()
