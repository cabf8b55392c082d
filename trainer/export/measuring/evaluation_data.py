"""The rows and the metrics that files are evaluated with."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from onward.trainer.config.sections.model import ModelConfig
from onward.trainer.data.batches.batches import Batch
from onward.trainer.data.file_rows import FileRows
from onward.trainer.data.storage.shards import Shards
from onward.trainer.model.metrics.evaluation_metrics import EvaluationMetrics


@dataclass(frozen=True)
class EvaluationData:
    """The data and metrics that files are evaluated with: a split, "evaluation" or "test"."""

    batches: Callable[[], Iterable[Batch]]
    """Each call iterates over all evaluation data from its beginning, on the CPU."""
    new_metrics: Callable[[Sequence[str]], EvaluationMetrics]
    """Names of the graph's outputs in order -> metrics without any batch."""
    file_rows: FileRows | None = None
    """For a file that begins with pre-processing: the same rows as the file takes them, strings included."""
    split: Literal["evaluation", "test"] = "evaluation"
    rows: Shards | None = None
    """The rows of the split as the ranks have read them."""
    model: ModelConfig | None = None
    """The settings that say where the rows of an input are, and which inputs have a value of their own; None = none."""
