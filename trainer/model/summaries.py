"""Record histograms and norms of selected weights and their gradients as events."""

from __future__ import annotations

from collections.abc import Collection
from fnmatch import fnmatchcase
from typing import Protocol

import torch
from torch import Tensor

from onward.trainer.config.sections.results import MonitorConfig
from onward.trainer.events import EventWriter, Histogram

NUM_BINS = 30
SUMMARY_PERIOD = 100
"""Steps between histograms and norms."""


class Model(Protocol):
    """A model that gathers its sharded weights (trainer/parallel/rank_model.py)."""

    @property
    def trained_names(self) -> frozenset[str]: ...
    def full_weights(self, names: Collection[str]) -> dict[str, tuple[Tensor, Tensor]]: ...


def summarise(events: EventWriter, step: int, model: Model, *, config: MonitorConfig, is_last: bool) -> None:
    """Record the weights that `monitor.histograms` and `monitor.norms` match, every 100 steps and in the last one.

    Call it after clipping and before the optimizer step, so that gradients are those of the update. Collective: every
    rank.
    """
    if step % SUMMARY_PERIOD and not is_last:
        return
    norms: dict[str, float] = {}
    # gathered once for both, since `full_weights` is collective and takes time
    chosen = [name for name in model.trained_names if _chosen(name, (*config.histograms, *config.norms))]
    for name, pair in model.full_weights(chosen).items():
        for kind, tensor in zip(("weight", "gradient"), pair, strict=True):
            if _chosen(name, config.histograms):
                counts, edges = torch.histogram(tensor.flatten(), bins=NUM_BINS)
                histogram = Histogram(
                    step=step, name=f"{kind}/{name}", counts=counts.long().tolist(), edges=edges.tolist()
                )
                events.emit(histogram)
            if _chosen(name, config.norms):
                norms[f"{kind}_norm/{name}"] = float(torch.linalg.vector_norm(tensor))
    if norms:
        events.scalars(step, **norms)


def _chosen(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)
