"""Replay the step whose loss or gradient is not finite, and say where the first bad value comes from, and of which row.

    the step       forward, backward, sums over the ranks: a NaN on any rank is noticed by all of them, as ever
    the replay     the same micro-batches, dropout masks, weights and collectives; every node is looked at
    afterwards     each rank sends what it found to all others; the first finding of all ranks makes the message

Nothing is looked at while all is finite. The replay changes nothing: no weight is updated, and the running statistics
are put back.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from onward.trainer.config.run_config import RunConfig
from onward.trainer.data.batches.batches import Batch, Batches
from onward.trainer.data.schema.columns import Array
from onward.trainer.data.schema.signature import Signature
from onward.trainer.data.storage.recipe import recipe_of
from onward.trainer.data.storage.row_origins import row_origins
from onward.trainer.data.storage.shards import Shards, Split
from onward.trainer.distributed.exchange import gather_bytes
from onward.trainer.distributed.failures import lost_a_peer
from onward.trainer.distributed.mesh import ParallelDims
from onward.trainer.distributed.processes import MPIContext
from onward.trainer.errors import Diverged
from onward.trainer.model.metrics.evaluation_metrics import EvaluationMetrics
from onward.trainer.onnx_graph.files.model_files import node_of_output
from onward.trainer.parallel.nonfinite.nonfinite_findings import Finding, describe
from onward.trainer.parallel.nonfinite.nonfinite_report import find_outlier, merged, sentence
from onward.trainer.parallel.nonfinite.probes import ProbedLosses, Probes
from onward.trainer.parallel.pipeline.engine import Pipeline
from onward.trainer.parallel.rank_model import RankModel
from onward.trainer.parallel.replicas.norms import gradient

log = logging.getLogger(__name__)

GROWTH = 1e3
"""A weight whose largest value has grown by this factor is the cause, and not a row of the data."""


@dataclass(frozen=True)
class Update:
    """A step that changed the weights."""

    norm: float
    step: int
    rows: Array
    """int64 [n]: the rows of its samples, on all replicas."""


@dataclass
class BadValues:
    """Finds the origin of bad values for one rank. Every method is collective: every rank of the world."""

    config: RunConfig
    signature: Signature
    model: RankModel
    pipeline: Pipeline
    rows: Shards
    """Of the training."""
    batches: Batches
    mpi: MPIContext
    beat: Callable[[], None]
    step: int
    """The last one that is trained already."""

    def __post_init__(self) -> None:
        self.remember_weights(self.step)

    def remember_weights(self, step: int) -> None:
        """Remember how large the weights are, to say later whether they have grown since."""
        self._since = step
        self._largest = _largest(self.model)
        # of the steps since: the greatest gradient norm, its step, and the position and number of its samples
        self._worst = (0.0, 0, 0, 0)

    def note(self, step: int, norm: float, position: int, size: int) -> None:
        """Remember the step with the greatest gradient norm. Not collective."""
        if norm > self._worst[0] and math.isfinite(norm):
            self._worst = (norm, step, position, size)

    def diverged(
        self,
        step: int,
        loss: float,
        norm: float,
        rate: float,
        micro_batches: Sequence[Batch],
        *,
        scale: float,
        reseed: Callable[[], object],
    ) -> Diverged:
        """Replay a training step, and return the error that says where its first bad value comes from.

        norm: of its gradients. rate: of learning. scale: of the loss. reseed: called before the step.
        """
        where = self.explain_step(micro_batches, scale=scale, reseed=reseed)
        return Diverged(
            f"step {step}: loss {loss:g}, gradient norm {norm:g} at learning rate {rate:g} and loss scale {scale:g}; "
            f"lower the learning rate, lengthen the warm-up, or compute in bf16 or fp32. {where}"
        )

    def explain_step(self, micro_batches: Sequence[Batch], *, scale: float, reseed: Callable[[], object]) -> str:
        """Replay a training step, and return sentences about the first bad value. reseed: called before the step."""
        try:
            probes = self._replay(micro_batches, scale, reseed)
        except Exception as error:  # such as out of memory: that the step has diverged is what matters
            if lost_a_peer(error):
                raise
            return f"Where it began is not known, because the step could not be replayed: {error}"
        # the step with the largest gradient since the weights were remembered is the one that may have made them grow
        norm, step, position, size = self._worst
        largest_step = Update(norm, step, self.batches.rows(position, size)) if size else None
        return self._explain(probes, "train", self.rows, len(micro_batches), largest_step)

    def _replay(self, micro_batches: Sequence[Batch], scale: float, reseed: Callable[[], object]) -> Probes:
        probes = Probes(self.beat)
        reducer = self.model.reducer
        probes.batches = list(micro_batches)
        # the dropout masks of the step, which may be the cause
        reseed()
        with probes.installed(self.model.stages), self._probed_losses(probes, evaluating=False):
            self.pipeline.run(micro_batches, reducer, scale=scale, beat=self.beat)
        reducer.reduce()
        # the replay has updated the running statistics a second time
        reducer.undo()
        for weight in self.model.trained:
            if not bool(torch.isfinite(gradient(weight)).all()):
                found = describe(f"the gradient of {weight.name}", gradient(weight))
                probes.add(Finding(phase="gradient", tensor=weight.name, place=0, stage=0, micro_batch=0, found=found))
        return probes

    def explain_evaluation(self, batches: Iterable[Batch], totals: EvaluationMetrics, rows: Shards) -> str:
        """Repeat an evaluation, and return sentences about the first bad value."""
        probes = Probes(self.beat)
        with probes.installed(self.model.stages), self._probed_losses(probes, evaluating=True):
            self.pipeline.evaluate(probes.take(batches), totals, self.beat)
        return self._explain(probes, "evaluation", rows, len(probes.batches))

    def _probed_losses(self, probes: Probes, *, evaluating: bool) -> contextlib.AbstractContextManager[None]:
        last = max(stage.index for stage in self.model.stages)
        return self.pipeline.with_losses(ProbedLosses(self.model.losses, probes, last, evaluating=evaluating))

    # -- what the ranks found, together

    def _explain(
        self, probes: Probes, split: Split, rows: Shards, num_batches: int, update: Update | None = None
    ) -> str:
        # findings are made without knowing where, and are compared with those of other ranks from here on
        place = {"rank": self.mpi.rank, "replica": ParallelDims.of(self.config.parallel).coordinate(self.mpi.rank).data}
        mine = [each.model_copy(update=place).model_dump() for each in probes.findings]
        told = [json.loads(text) for text in gather_bytes(self.mpi, json.dumps([mine, self._weights()]).encode())]
        text = ""
        if self.mpi.rank == 0:  # the others wait: one reads the file and the source
            try:
                text = self._sentences(told, split, rows, num_batches, update)
            except Exception as error:  # that it is not finite must reach the user in any case
                log.warning("the findings of the replay could not be described", exc_info=True)
                text = f"The findings of the replay could not be described: {type(error).__name__}: {error}"
        return gather_bytes(self.mpi, text.encode())[0].decode()

    def _sentences(
        self, told: Sequence[Any], split: Split, rows: Shards, num_batches: int, update: Update | None
    ) -> str:
        """Return the message. told: of each rank its findings and its weights."""
        found = sorted((Finding.model_validate(each) for part, _ in told for each in part), key=lambda f: f.order)
        weights = sorted({tuple(each) for _, part in told for each in part}, key=_growth, reverse=True)
        sentences = self._growth(weights, split, rows, update)
        if found:
            first = merged(found)
            wanted = {*first.rows, *(each.extreme_row for each in first.operands)} - {-1}
            # where the weights have grown, the rows of this step are not the cause
            where = {} if sentences else self._where(wanted, split, rows)
            sentences.append(sentence(first, self._node(first), where, split, num_batches, self.mpi.world_size))
        return ". ".join(sentences or ["Replayed, every value and every gradient was finite"])

    def _growth(
        self, weights: Sequence[tuple[str, float, float]], split: Split, rows: Shards, update: Update | None
    ) -> list[str]:
        """Return sentences about weights that have grown, and about the row that made them grow, if one did."""
        # they are sorted, so that the first one has grown most
        if not weights or _growth(weights[0]) <= GROWTH:
            return []
        name, before, now = weights[0]
        sentences = [
            f"The weights have grown: the largest magnitude in {name} was {before:.4g} after step {self._since} and is "
            + (f"{now:.4g} now" if math.isfinite(now) else "not finite now")
        ]
        if update is not None:
            sentences[0] += f"; the greatest gradient norm since then was {update.norm:.4g}, in step {update.step}"
            outlier = find_outlier(rows, update.rows)
            if outlier is not None:
                where = self._where({outlier.row}, split, rows)
                sentences.append(f"In that step {outlier.describe(where.get(outlier.row, ''))}")
                return sentences
        return [f"{sentences[0]}. The updates are the cause, and not a row of the data"]

    def _where(self, wanted: Collection[int], split: Split, rows: Shards) -> Mapping[int, str]:
        """Return row -> its place in the source."""
        # the other ranks wait for rank 0 in a collective, which must not time out meanwhile
        limit_s = min(20.0, 0.3 * self.config.collective_timeout_s)
        try:
            if not wanted:
                return {}
            return row_origins(recipe_of(self.config, self.signature), rows, split, wanted, limit_s=limit_s)
        except Exception:  # the message is worth more without the places than nothing
            log.warning("the rows were not found in the source", exc_info=True)
            return {}

    def _node(self, finding: Finding) -> str:
        tensor = finding.readers[0] if finding.readers else finding.tensor
        found = node_of_output(self.config.model.path, tensor)
        return f"node {found[0]!r} ({found[1]}), output {tensor!r}" if found else f"tensor {tensor!r}"

    def _weights(self) -> list[tuple[str, float, float]]:
        """Return (name, largest magnitude before, now) of the trained weights that have grown most on this rank."""
        now = {name: float(value) for name, value in _largest(self.model).items()}
        before = {name: float(value) for name, value in self._largest.items()}
        pairs = [(name, before.get(name, 0.0), value) for name, value in now.items()]
        return sorted(pairs, key=_growth, reverse=True)[:3]


def _largest(model: RankModel) -> dict[str, Tensor]:
    weights = [weight for weight in model.trained if weight.tensor.numel()]
    if not weights:
        return {}
    norms = torch._foreach_norm([weight.tensor.detach() for weight in weights], ord=math.inf)
    return {weight.name: norm for weight, norm in zip(weights, norms, strict=True)}


def _growth(weight: Sequence[object]) -> float:
    _, before, now = weight
    assert isinstance(before, float)
    assert isinstance(now, float)
    if not math.isfinite(now):
        return math.inf
    # a weight that began at zero has grown by nothing that can be said as a factor
    return now / before if before else 0.0
