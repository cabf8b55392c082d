"""Run the graphs of a rank's stages node by node, each ONNX node in a range of the profiler that has its name.

    forward     |-- conv1 --| |-- relu --|     ranges; each notes the autograd sequence numbers that it used: 7-8, 8-9
    backward    autograd: evaluate_function ReluBackward0, sequence number 8        --> relu, backward
                autograd: evaluate_function ConvolutionBackward0, sequence number 7 --> conv1, backward

autograd gives a number to every function that it will differentiate, in the order of the forward pass, and the profiler
records it with the backward pass of the function. The calls and their order are those of the graph's own code, so the
results have the same bits.
"""

from __future__ import annotations

import contextlib
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.profiler import record_function
from torch.utils._pytree import tree_leaves

from onward.trainer.data.batches.batches import Batch
from onward.trainer.model.compile import Compiled
from onward.trainer.onnx_import.lowering.node_origins import FUSED, Origin, origin_of
from onward.trainer.parallel.pipeline.engine import BatchLosses, ObservedLosses, replaced_forwards
from onward.trainer.parallel.pipeline.stage import Stage

LOSS = Origin("", "loss", "")
"""What stands for the loss among the nodes."""
PHASES = ("data wait", "pipeline", "gradient reduction", "optimizer", "other")
"""The ranges of the training loop, whose names no node may have."""
STEP = "step "
"""Before the number of a step, in the name of its range."""
RECOMPUTED = " (recomputed)"
"""Behind the name of a node whose forward pass runs a second time, in the backward pass."""


class NodeRanges:
    """What the forward passes of the profiled steps have run."""

    def __init__(self) -> None:
        self.origins: dict[str, Origin] = {LOSS.name: LOSS}
        """Name of a range -> its node. Names of nodes may be equal in a file; those of ranges are not."""
        self.fused: dict[Origin, dict[Origin, None]] = {}
        self.calls: Counter[Origin] = Counter()
        self.output_bytes: dict[Origin, int] = {}
        self._names: dict[Origin, str] = {LOSS: LOSS.name}
        self._begins: list[int] = []
        self._spans: list[tuple[int, Origin]] = []
        """(end, node) of the sequence numbers from each of `_begins` on, in order."""

    def installed(self, stages: Sequence[Stage]) -> contextlib.AbstractContextManager[None]:
        """Run these stages node by node inside a block, but not what is compiled."""
        graphs = [module for stage in stages for module in eager_graphs(stage)]
        return replaced_forwards({module: _forward_of(module, self) for module in graphs})

    @contextlib.contextmanager
    def range(self, origin: Origin) -> Iterator[None]:
        """Record what runs inside a block as that of a node."""
        # a second forward pass, of recomputation: its autograd functions are never run
        again = torch._C._current_graph_task_id() != -1
        begin = torch.autograd._get_sequence_nr()  # type: ignore[attr-defined]
        with record_function(self.name_of(origin) + RECOMPUTED * again):
            yield
        end = torch.autograd._get_sequence_nr()  # type: ignore[attr-defined]
        if not again and end > begin:
            self._begins.append(begin)
            self._spans.append((end, origin))

    def name_of(self, origin: Origin) -> str:
        """Return the name of a node's range: its own, with its output where something else has the same."""
        if origin not in self._names:
            # a range is known by its name alone when the recording is read
            taken = origin.name in (*self.origins, *PHASES) or origin.name.startswith((STEP, "FSDP::"))
            name = f"{origin.name} -> {origin.output}" if taken else origin.name
            self._names[origin], self.origins[name] = name, origin
        return self._names[origin]

    def of_sequence_number(self, number: int) -> Origin | None:
        """Return the node whose forward pass used a sequence number of autograd."""
        # the last range that began at or before the number
        place = bisect_right(self._begins, number) - 1
        return self._spans[place][1] if place >= 0 and number < self._spans[place][0] else None

    def note(self, origin: Origin, call: fx.Node, value: Any, *, is_last: bool) -> None:
        """Note what a call of a node has returned. is_last: whether it is the last one of its node."""
        # inside a backward pass: a second forward pass, which is no further call
        if torch._C._current_graph_task_id() != -1:
            return
        self.calls[origin] += is_last
        if FUSED in call.meta:
            self.fused.setdefault(origin, {}).update(dict.fromkeys(call.meta[FUSED]))
        if "onnx" in call.meta or is_last:
            size = sum(each.numel() * each.element_size() for each in tree_leaves(value) if isinstance(each, Tensor))
            self.output_bytes[origin] = max(self.output_bytes.get(origin, 0), size)


def _forward_of(module: fx.GraphModule, ranges: NodeRanges) -> Callable[..., Any]:
    """Return what runs a module in place of its own code."""
    run = _NodeByNode(module, ranges)
    original = type(module).forward

    def forward(*values: Any) -> Any:
        # an evaluation has nothing to do with the steps
        return run.run(*values) if torch.is_grad_enabled() else original(module, *values)

    return forward


class _NodeByNode(fx.Interpreter):
    """Run one graph; successive calls of one ONNX node are one range."""

    def __init__(self, module: fx.GraphModule, ranges: NodeRanges) -> None:
        super().__init__(module)
        self._ranges = ranges
        calls = [node for node in module.graph.nodes if node.op in ("call_function", "call_method", "call_module")]
        found = {node: origin_of(node) for node in calls}
        self._origins = {node: origin for node, origin in found.items() if origin is not None}
        # later nodes overwrite earlier ones, so that the last call of each origin stays
        self._last = {*{origin: node for node, origin in self._origins.items()}.values()}
        self._open = contextlib.ExitStack()
        self._current: Origin | None = None

    def run(self, *values: Any, **options: Any) -> Any:
        try:
            return super().run(*values, **options)
        finally:
            # after an error, too: an open range would cover whatever comes next
            self._enter(None)

    def run_node(self, n: fx.Node) -> Any:
        if n.op in ("placeholder", "get_attr", "output"):
            return super().run_node(n)
        origin = self._origins.get(n)
        # calls of one ONNX node follow one another, and are one range
        if origin != self._current:
            self._enter(origin)
        value = super().run_node(n)
        if origin is not None:
            self._ranges.note(origin, n, value, is_last=n in self._last)
        return value

    def _enter(self, origin: Origin | None) -> None:
        self._open.close()
        self._current = origin
        if origin is not None:
            self._open.enter_context(self._ranges.range(origin))


class TimedLosses(ObservedLosses):
    """The losses of a pipeline, in a range of their own."""

    def __init__(self, losses: BatchLosses, ranges: NodeRanges) -> None:
        super().__init__(losses)
        self._ranges = ranges

    def check_labels(self, batch: Batch, outputs: Tensor | Sequence[Tensor]) -> None:
        with self._ranges.range(LOSS):
            super().check_labels(batch, outputs)

    def __call__(
        self, outputs: Tensor | Sequence[Tensor], labels: Sequence[Tensor | None], size: int
    ) -> tuple[Tensor, ...]:
        with self._ranges.range(LOSS):
            return super().__call__(outputs, labels, size)

    def weighted(self, values: Sequence[Tensor], scale: float | Sequence[Tensor] = 1.0) -> Tensor:
        with self._ranges.range(LOSS):
            return super().weighted(values, scale)


def is_compiled(stages: Sequence[Stage]) -> bool:
    """Return whether a stage is computed by compiled code, in which the nodes are fused."""
    return any(isinstance(module, Compiled) for stage in stages for module in stage.chain.modules())


def eager_graphs(stage: Stage) -> Iterator[fx.GraphModule]:
    """Yield the graphs of a stage, but for those that run compiled."""
    for unit in stage.chain.units:
        if not any(isinstance(each, Compiled) for each in unit.modules()):
            yield from (module for module in unit.modules() if isinstance(module, fx.GraphModule))
