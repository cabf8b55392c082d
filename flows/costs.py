"""What a training has cost, in one line for people: throughput, MFU, memory, data wait and checkpoint stall."""

from __future__ import annotations

from collections.abc import Iterator

from onward.trainer.run.records import MetricsSummary


def cost_line(metrics: MetricsSummary | None) -> str:
    """Return it, of what is known; "" for a training without a line of metrics. See docs/how-to/follow-a-run.md."""
    return ", ".join(_parts(metrics)) if metrics and metrics.samples_per_s else ""


def _parts(metrics: MetricsSummary) -> Iterator[str]:
    costs = metrics.costs
    yield f"{metrics.samples_per_s:.4g} samples/s"
    if "tokens_per_s" in costs:
        yield f"{costs['tokens_per_s']:.4g} tokens/s"
    if "tflops" in costs:
        yield f"{costs['tflops']:.3g} TFLOP/s"
    if "mfu" in costs:
        yield f"MFU {costs['mfu']:.1%}"
    if costs.get("memory_bytes"):
        yield f"{costs['memory_bytes'] / 2**30:.3g} GiB a rank"
    yield f"data wait {metrics.data_wait:.1%}"
    if "checkpoint_stall_s" in costs:
        yield f"checkpoint stall {costs['checkpoint_stall_s']:.1f} s"
