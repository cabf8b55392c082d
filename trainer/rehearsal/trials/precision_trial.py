"""Time one micro-batch in fp32 and in bf16 on the CPU, of which bf16 is faster only where the CPU has units for it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import torch

from onward.trainer.config.sections.training import PrecisionConfig
from onward.trainer.data.batches.batches import Batch
from onward.trainer.model.precision import autocast
from onward.trainer.rehearsal.rehearsed_graph import RehearsedGraph
from onward.trainer.run.records import ExporterWarning

TURNS = 3
FASTER = 0.9
"""bf16 is chosen if it takes at most this part of the time of fp32: it is less accurate."""
SLOWER = 1.05
"""A warning says that the configured bf16 takes at least this many times as long."""


@dataclass(frozen=True)
class PrecisionTimes:
    """Seconds of one micro-batch, forward and backward; the least of some turns."""

    fp32_s: float
    bf16_s: float

    @property
    def faster(self) -> Literal["fp32", "bf16"]:
        """Return what `precision.compute = "auto"` chooses."""
        return "bf16" if self.bf16_s <= FASTER * self.fp32_s else "fp32"

    def warnings(self) -> list[ExporterWarning]:
        """Return a warning if bf16 is the slower one."""
        if self.bf16_s < SLOWER * self.fp32_s:
            return []
        what = (
            f"precision.compute 'bf16' is slower than fp32 on this CPU: a micro-batch took {1000 * self.bf16_s:.3g} "
            f"ms, and {1000 * self.fp32_s:.3g} ms in fp32 ({self.bf16_s / self.fp32_s:.2f} times as long)"
        )
        return [ExporterWarning(key="slow_precision", what=what, remedy="precision.compute = 'fp32', or 'auto'")]


def time_precisions(graph: RehearsedGraph, batch: Batch) -> PrecisionTimes:
    """Run a training micro-batch in both, in turn. Raises what the graph raises; the weights keep gradients."""
    cpu = torch.device("cpu")
    graphs = [
        replace(graph, autocast=partial(autocast, PrecisionConfig(compute=each), cpu)) for each in ("fp32", "bf16")
    ]
    # the first turn also makes what the others reuse
    turns = [[each.run("training", batch).elapsed_s for each in graphs] for _ in range(1 + TURNS)][1:]
    # the least of the turns: other programs only add time
    fp32_s, bf16_s = map(min, zip(*turns, strict=True))
    return PrecisionTimes(fp32_s, bf16_s)
