"""What a training has cost, in one line for people, and how many bits per byte of text its model needs."""

from __future__ import annotations

import gzip
import lzma
import math
from collections.abc import Iterator

from onward.trainer.quantities import gib
from onward.trainer.run.records import MetricsSummary


def cost_line(metrics: MetricsSummary | None) -> str:
    """Return it, of what is known; "" for a training without a line of metrics. See docs/how-to/follow-a-run.md."""
    return ", ".join(_parts(metrics)) if metrics and metrics.samples_per_s else ""


def _parts(metrics: MetricsSummary) -> Iterator[str]:
    costs = metrics.costs
    yield f"{metrics.samples_per_s:.4g} samples/s"
    # only what the log has: FLOPs cannot be counted for every model, and the peak is not known for every device
    if "tokens_per_s" in costs:
        yield f"{costs['tokens_per_s']:.4g} tokens/s"
    if "tflops" in costs:
        yield f"{costs['tflops']:.3g} TFLOP/s"
    if "mfu" in costs:
        yield f"MFU {costs['mfu']:.1%}"
    if costs.get("memory_bytes"):
        yield f"{gib(costs['memory_bytes'])} a rank"
    yield f"data wait {metrics.data_wait:.1%}"
    if "checkpoint_stall_s" in costs:
        yield f"checkpoint stall {costs['checkpoint_stall_s']:.1f} s"


def bits_per_byte(loss: float, held_out: bytes) -> dict[str, float]:
    """Return the bits per byte of the model (loss in nats) and of two compressors on the same bytes."""
    # The loss is an average over bytes, so it converts directly; a compressor is measured by its output's length.
    bits = 8 / len(held_out)
    return {
        "model": loss / math.log(2),
        "gzip -9": bits * len(gzip.compress(held_out, 9)),
        "xz -9": bits * len(lzma.compress(held_out, preset=9)),
    }
