"""Run one micro-batch through the imported graph as the training loop does, and name the node at which it fails."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_leaves

from onward.trainer.config.sections.metrics import MetricConfig
from onward.trainer.data.batches.batches import Batch
from onward.trainer.errors import ConfigError, OnwardError, reason_of
from onward.trainer.model.losses.loss import Loss, Losses
from onward.trainer.model.metrics.evaluation_metrics import EvaluationMetrics
from onward.trainer.onnx_import.imported_graph import ImportedGraph, statistics_kept
from onward.trainer.rehearsal.sizes import Kind
from onward.trainer.run.records import RehearsedBatch


@dataclass(frozen=True)
class RehearsedGraph:
    """The graph, the losses and the arithmetic of a run, on the CPU."""

    module: ImportedGraph
    losses: Losses
    autocast: Callable[[], contextlib.AbstractContextManager[object]]
    """Makes the context of a forward pass."""
    metrics: tuple[MetricConfig, ...] = ()
    """The metrics that are configured, which are computed in evaluation."""

    def run(self, kind: Kind, batch: Batch, call: Callable[..., Any] | None = None) -> RehearsedBatch:
        """Run a micro-batch; gradients stay with the weights. Running statistics are left as they were.

        call: what computes the outputs in place of the module.
        """
        started_at = time.monotonic()
        self.module.train(kind == "training")
        # so that a weight without a gradient is known by None
        self.module.zero_grad(set_to_none=True)
        with torch.set_grad_enabled(kind != "evaluation"), statistics_kept(self.module):
            with self.autocast():
                outputs = (call or self.module)(*batch.inputs)
            outputs = batch.own_rows((outputs,) if isinstance(outputs, Tensor) else outputs)
            self.losses.check_labels(batch, outputs)
            loss = self.loss_of(outputs, batch)
            if kind == "evaluation" and self.metrics:
                self._measure(outputs, batch)
            if loss.requires_grad:  # not in evaluation, and not if it depends on no weight
                loss.backward()  # type: ignore[no-untyped-call]
        mean = float(loss.detach()) if any(batch.num_targets) else math.nan
        return RehearsedBatch(what=kind, rows=batch.size, loss=mean, elapsed_s=time.monotonic() - started_at)

    def loss_of(self, outputs: Sequence[Tensor], batch: Batch) -> Tensor:
        """Return the loss per target, a scalar, for the outputs [B, ...] of the batch's own rows."""
        sums: list[Tensor] = []
        for place, loss in enumerate(self.losses.each):
            sums += self._terms(place, loss, outputs, batch)
        # labels of soft losses come behind those of the others
        soft = zip(self.losses.soft, batch.labels[len(self.losses.each) :], strict=True)
        sums += [loss(outputs, counted, batch.size) for loss, counted in soft]
        counts = list(batch.num_targets)
        if self.losses.own_divisor is not None:
            counts[0] = float(self.losses.own_divisor.clamp(min=1.0))
        return self.losses.weighted([value / (count or 1) for value, count in zip(sums, counts, strict=True)])

    @torch.no_grad()
    def outputs(self, batch: Batch) -> Sequence[Tensor]:
        """Return the outputs of a micro-batch in evaluation mode, [B, ...] each, without its padding."""
        self.module.eval()
        with self.autocast():
            outputs = self.module(*batch.inputs)
        return batch.own_rows((outputs,) if isinstance(outputs, Tensor) else outputs)

    def _terms(self, place: int, loss: Loss, outputs: Sequence[Tensor], batch: Batch) -> tuple[Tensor, ...]:
        """Return the summed terms of one loss. Raises ConfigError if the output and the labels do not fit."""
        own = batch.labels[place]
        try:
            return loss.terms(outputs, own, batch.size)
        except (RuntimeError, ValueError, IndexError) as error:
            # too little memory is no misfit of the loss
            if "allocate memory" in str(error):
                raise
            labels = "" if own is None else f" and the labels are {list(own.shape)}"
            raise ConfigError(
                f"the loss {loss.name!r} cannot be computed: for {batch.size} rows, output {self._name(loss)!r} "
                f"is {list(outputs[loss.index].shape)}{labels} ({str(error).splitlines()[0]}); name the output "
                "with the scores of each row in model.output, or another model.loss"
            ) from error

    def _measure(self, outputs: Sequence[Tensor], batch: Batch) -> None:
        """Compute the metrics. Raises ConfigError if one does not fit the output and the labels."""
        totals = EvaluationMetrics(self.losses, self.metrics, device=torch.device("cpu"))
        try:
            totals.update(outputs, batch.labels, batch.size)
            totals.compute()
        except (RuntimeError, ValueError, IndexError) as error:
            names = ", ".join(metric.key for metric in self.metrics)
            raise ConfigError(
                f"metrics ({names}) cannot be computed for {self.loss_outputs} of {batch.size} rows: "
                f"{str(error).splitlines()[0]}"
            ) from error

    @property
    def loss_outputs(self) -> str:
        """Return the names of the outputs that the losses read."""
        names = [self._name(loss) for loss in self.losses.each]
        if not names:
            names = [loss.name for loss in self.losses.soft]
        return " and ".join(dict.fromkeys(map(repr, names)))

    def _name(self, loss: Loss) -> str:
        return self.module.output_names[loss.index]

    def kept_bytes_per_row(self, batch: Batch) -> float:
        """Return the bytes that a forward pass keeps for the backward pass, without weights; 0 if it does not run."""
        kept: dict[int, int] = {}
        weights = {tensor.untyped_storage()._cdata for tensor in self.module.parameters()}

        def count(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage._cdata not in weights:
                # each storage once, however many operators save it
                kept[storage._cdata] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor), contextlib.suppress(Exception):
            self.run("padding", batch)  # in evaluation mode: BatchNormalization refuses a single row in training
        return sum(kept.values()) / (batch.filled_to or batch.size)

    def error_of(self, kind: Kind, batch: Batch, error: Exception) -> str:
        """Return a clause that says what went wrong in a pass, and where in the graph."""
        if isinstance(error, OnwardError):
            return "; ".join(error.problems)
        where = failing_node(self.module, lambda call: self.run(kind, batch, call))
        return reason_of(error).rstrip(".") + (f" (at the node that computes {where!r})" if where else "")


# -- where a pass fails


class _NodeByNode(fx.Interpreter):
    """Run a graph one node after the other, and keep the one that computes, forward or backward, in `current`."""

    def __init__(self, module: ImportedGraph) -> None:
        super().__init__(module)
        self.current: fx.Node | None = None

    def run_node(self, n: fx.Node) -> Any:
        self.current = n
        result = super().run_node(n)
        if n.op != "output":
            for tensor in tree_leaves(result):
                # called when the backward pass reaches the operation that computed the tensor
                if isinstance(tensor, Tensor) and tensor.grad_fn is not None:
                    tensor.grad_fn.register_prehook(lambda _, node=n: self._reached(node))
        return result

    def _reached(self, node: fx.Node) -> None:
        self.current = node


def failing_node(module: ImportedGraph, attempt: Callable[[Callable[..., Any]], object]) -> str:
    """Return the name of the tensor at which `attempt` fails; "" if it does not fail in the graph.

    attempt: takes what to call in place of the module, and repeats what failed.
    """
    interpreter = _NodeByNode(module)
    try:
        attempt(interpreter.run)
    except Exception:  # the error is known; only the place is asked for
        return _tensor_name(interpreter.current)
    return ""


def _tensor_name(node: fx.Node | None) -> str:
    """Return the ONNX tensor that a node computes; where it computes none, the nearest one after it."""
    while node is not None and node.op != "root":
        if names := node.meta.get("onnx"):
            return str(names[0])
        node = node.next
    return ""
