"""Evaluate the model on the held-out rows: the weights, then their moving average in their place, if there is one."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from onward.trainer.attempt.restore import Trained
from onward.trainer.config.run_config import RunConfig
from onward.trainer.data.batches.batches import Batch, evaluation_batches
from onward.trainer.data.schema.signature import Signature
from onward.trainer.data.storage.shards import Shards
from onward.trainer.distributed.mesh import ParallelDims
from onward.trainer.distributed.processes import MPIContext
from onward.trainer.events import (
    ClassPrecision,
    ConfusionMatrix,
    Evaluated,
    EventWriter,
    Heartbeat,
    NonFiniteLoss,
    ObjectPrecision,
)
from onward.trainer.model.metrics.evaluation_metrics import EvaluationMetrics
from onward.trainer.model.metrics.measures import Counts
from onward.trainer.parallel.pipeline.engine import Pipeline


class Evaluation:
    """Evaluates on all rows of `held_out`, of which this rank's replica reads its share.

    explain: repeats the first evaluation whose loss is not finite, and returns why it is not; collective.
    Collective: every rank of the world, each time it is called.
    """

    def __init__(
        self,
        held_out: Shards,
        config: RunConfig,
        signature: Signature,
        trained: Trained,
        pipeline: Pipeline,
        explain: Callable[[Iterable[Batch], EvaluationMetrics, Shards], str],
        events: EventWriter,
        heartbeat: Heartbeat,
        mpi: MPIContext,
    ) -> None:
        self._held_out = held_out
        self._config = config
        self._signature = signature
        self._losses = trained.model.losses
        self._averages = trained.averages
        self._pipeline = pipeline
        self._explain = explain
        self._is_explained = False
        self._events = events
        self._heartbeat = heartbeat
        self._device = mpi.device
        self._dims = ParallelDims.of(config.parallel)
        self._coordinate = self._dims.coordinate(mpi.rank)

    def __call__(self, step: int) -> dict[str, float]:
        """Return the metrics after a step, such as evaluation/loss, and write them as events."""
        metrics: dict[str, float] = {}
        confusion: Mapping[str, Counts] = {}
        precisions: Mapping[str, Sequence[ClassPrecision]] = {}
        for prefixes in self._averages.in_turn():  # first the weights themselves, then their averages in their place
            totals = self._new_totals()
            with self._heartbeat.compiling():
                values = self._pipeline.evaluate(self._batches(), totals, self._heartbeat.beat)
            # once an attempt: the explanation repeats the whole evaluation
            if not math.isfinite(values.get("loss", 0.0)) and not self._is_explained:
                self._is_explained = True
                why = self._explain(self._batches(), self._new_totals(), self._held_out)
                text = f"the evaluation loss is {values['loss']:g}. {why}"
                self._events.emit(NonFiniteLoss(step=step, text=text))
            metrics |= {f"{prefix}/{name}": value for prefix in prefixes for name, value in values.items()}
            # those of the weights themselves, which come first
            confusion = confusion or totals.confusion
            precisions = precisions or totals.precisions
        self._events.emit(Evaluated(step=step, values=metrics))
        for loss, counts in confusion.items():
            self._events.emit(ConfusionMatrix(step=step, loss=loss, counts=counts))
        for loss, classes in precisions.items():
            self._events.emit(ObjectPrecision(step=step, loss=loss, classes=classes))
        return metrics

    def _new_totals(self) -> EvaluationMetrics:
        # tensor-parallel ranks have the same rows, which must count once
        counts = self._coordinate.tensor == 0
        return EvaluationMetrics(self._losses, self._config.metrics, device=self._device, counts=counts)

    def _batches(self) -> Iterator[Batch]:
        return evaluation_batches(
            self._held_out,
            self._config,
            self._signature,
            replica=self._coordinate.data,
            num_replicas=self._dims.data,
            device=self._device,
        )
