"""Histograms and norms of chosen weights and their gradients, as events."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase

import torch
from torch import Tensor

from trainer.config import MonitorConfig
from trainer.events import EventWriter

NUM_BINS = 30


def summarise(events: EventWriter, step: int, weights: Mapping[str, Tensor], *, config: MonitorConfig) -> None:
    """Record what `monitor.histograms` and `monitor.norms` choose, every `monitor.summary_period` steps.

    weights: initializer name -> parameter whose `.grad` is this step's, reduced and clipped. Call
    between that and the optimizer's step.
    """
    if step % config.summary_period:
        return
    norms: dict[str, float] = {}
    for name, weight in weights.items():
        views = {"weight": weight.detach(), "gradient": weight.grad}
        for kind, tensor in views.items():
            if tensor is None:
                continue
            if _chosen(name, config.histograms):
                counts, edges = torch.histogram(tensor.float().cpu().flatten(), bins=NUM_BINS)
                events.histogram(step, f"{kind}/{name}", counts.long().tolist(), edges.tolist())
            if _chosen(name, config.norms):
                norms[f"{kind}_norm/{name}"] = float(torch.linalg.vector_norm(tensor))
    if norms:
        events.scalars(step, **norms)


def _chosen(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)
