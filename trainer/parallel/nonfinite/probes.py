"""Run the graphs of a rank's stages node by node, and find the node that makes the first bad value.

    x ── scores ── where ── softmax ── y          where: -inf at masked places, which softmax takes as it should
          ok       -inf       ok      ok

    x ── log ── mul ── add ── y                   from the bad output back to the first bad operand: log
         NaN    NaN    NaN   NaN

So a bad value alone says little. The search begins at the outputs of the stage, goes back along bad operands and ends
at a node whose operands are good. NaN and +inf are bad everywhere, -inf only where it reaches an output of the graph:
masks are made of it.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves

from onward.trainer.data.batches.batches import Batch
from onward.trainer.model.compile import Compiled
from onward.trainer.onnx_import.lowering.node_origins import nearest
from onward.trainer.parallel.nonfinite.nonfinite_findings import NUM_ROWS, Finding, Phase, bad_rows, describe
from onward.trainer.parallel.pipeline.engine import BatchLosses, ObservedLosses, replaced_forwards
from onward.trainer.parallel.pipeline.stage import Stage


class Probes:
    """Looks at every value of the forward passes of a rank, and at every gradient of the backward passes.

    with probes.installed(stages): ...      the forward passes in here are looked at; compiled modules run eagerly
    probes.findings                         the first bad value of each micro-batch, in each phase
    """

    def __init__(self, beat: Callable[[], None]) -> None:
        self.findings: list[Finding] = []
        self.batches: list[Batch] = []
        """The micro-batches, in the order in which each stage runs them."""
        self._beat = beat
        self._handles: list[Any] = []
        self._count = 0

    @contextlib.contextmanager
    def installed(self, stages: Sequence[Stage]) -> Iterator[None]:
        """Look at what these stages compute inside a block."""
        forwards: dict[nn.Module, Callable[..., Any]] = {}
        for stage in stages:
            probed = _StageRun(self, stage)
            for module in stage.chain.modules():
                if isinstance(module, Compiled):
                    forwards[module] = _eager(module)
                elif isinstance(module, fx.GraphModule):
                    forwards[module] = probed.forward_of(module)
            self._handles.append(stage.chain.register_forward_pre_hook(probed.begin))
            self._handles.append(stage.chain.register_forward_hook(probed.end))
        try:
            with replaced_forwards(forwards):
                yield
        finally:
            for handle in self._handles:
                handle.remove()
            self._handles.clear()

    def take(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Yield batches, and keep them for the rows of their samples."""
        for batch in batches:
            self.batches.append(batch)
            yield batch

    def add(self, finding: Finding) -> None:
        """Keep a finding, if it is the first of its micro-batch and phase in its stage."""
        same = (finding.phase, finding.micro_batch, finding.stage)
        if all((each.phase, each.micro_batch, each.stage) != same for each in self.findings):
            self.findings.append(finding)

    def keep(self, handle: Any) -> None:
        """Remove a hook when the probes are removed."""
        self._handles.append(handle)

    def batch_of(self, micro_batch: int) -> Batch | None:
        """Return a micro-batch, if it is known."""
        return self.batches[micro_batch] if micro_batch < len(self.batches) else None

    def next_place(self) -> int:
        """Count a node, and show that the rank makes progress."""
        self._beat()
        self._count += 1
        return self._count


class _StageRun:
    """One stage: the bad values of its current forward pass, and those of its backward passes."""

    def __init__(self, probes: Probes, stage: Stage) -> None:
        self.probes = probes
        self.stage = stage
        self.active = False
        self.micro_batch = -1
        self.labels: dict[str, str] = {}
        self.readers: defaultdict[str, list[str]] = defaultdict(list)
        self._bad: dict[str, tuple[bool, list[str]]] = {}
        """Node -> (whether a value is NaN or +inf, its bad operands)."""
        self._origins: dict[str, Finding] = {}

    def begin(self, chain: nn.Module, inputs: object) -> None:
        """Begin a forward pass. Recomputed forward passes are skipped: they do not call the hooks of the chain."""
        self.active = True
        self.micro_batch += 1
        self._bad = {}
        self._origins = {}

    def end(self, chain: nn.Module, inputs: object, outputs: tuple[Tensor, ...]) -> None:
        """End a forward pass: go back from its bad outputs."""
        self.active = False
        is_last = self.stage.index == self.stage.num_stages - 1
        reached = set[str]()
        waiting = [name for name in self.stage.output_names if name in self._bad]
        if not is_last:
            # -inf alone is no fault yet: it may be a mask, which a later stage takes as it should
            waiting = [name for name in waiting if self._bad[name][0]]
        while waiting:
            name = waiting.pop()
            if name not in reached:
                reached.add(name)
                waiting += self._bad[name][1]
        # several origins may reach the outputs: the first one that was computed is reported
        for name in sorted(reached & self._origins.keys(), key=lambda name: self._origins[name].place)[:1]:
            self.probes.add(self._origins[name])
        if not reached and is_last:
            for name in self.stage.output_names:
                self.readers[name].append("the loss")

    def forward_of(self, module: fx.GraphModule) -> Callable[..., Any]:
        """Return what runs a module instead of its own code."""
        original = type(module).forward
        run = _NodeByNode(module, self)

        def forward(*values: Any) -> Any:
            return run.run(*values) if self.active else original(module, *values)

        return forward

    def look(self, node: fx.Node, value: Any, operands: dict[fx.Node, Any], weights: dict[str, str]) -> None:
        """Look at what a node has computed."""
        place = self.probes.next_place()
        label = self.labels.setdefault(node.name, _onnx_name(node, weights))
        for read in operands:
            if label not in self.readers[read.name]:
                self.readers[read.name].append(label)
        tensors = _floating_point_tensors(value)
        for tensor in tensors:
            if tensor.requires_grad:
                hook = partial(self._look_at_gradient, node.name, self.micro_batch)
                self.probes.keep(tensor.register_hook(hook))  # type: ignore[no-untyped-call]
        bad = [tensor for tensor in tensors if not bool(torch.isfinite(tensor).all())]
        if not bad or node.name in self._bad:
            return
        certain = any(bool((tensor.isnan() | (tensor == torch.inf)).any()) for tensor in bad)
        causes = [read.name for read in operands if read.name in self._bad]
        if certain:
            # -inf operands, such as masks, explain -inf, but not a NaN or +inf that this node makes of them
            causes = [name for name in causes if self._bad[name][0]]
        self._bad[node.name] = (certain, causes)
        is_received = node.op == "placeholder" and node.name in self.stage.received_names
        if not causes and not is_received:
            self._origins[node.name] = self._origin(node, label, place, bad[0], operands)

    def _origin(self, node: fx.Node, label: str, place: int, tensor: Tensor, operands: dict[fx.Node, Any]) -> Finding:
        batch = self.probes.batch_of(self.micro_batch)
        rows = bad_rows(tensor, batch) or []
        phase: Phase = "forward"
        if node.op == "placeholder":
            phase = "input"
        elif node.op == "get_attr":
            phase = "weight"
            rows = []  # a weight that is as long as the batch has no samples
        ranges = []
        for operand, operand_value in operands.items():
            name = self.labels.get(operand.name, operand.name)
            ranges += [describe(name, values, batch) for values in _floating_point_tensors(operand_value)]
        return Finding(
            phase=phase,
            tensor=label,
            place=place,
            stage=self.stage.index,
            micro_batch=self.micro_batch,
            found=describe(label, tensor, batch),
            operands=tuple(ranges),
            rows=tuple(rows[:NUM_ROWS]),
            num_rows=len(rows),
            num_samples=batch.size if batch else 0,
        )

    def _look_at_gradient(self, name: str, micro_batch: int, gradient: Tensor) -> None:
        place = self.probes.next_place()
        if bool(torch.isfinite(gradient).all()):
            return
        batch = self.probes.batch_of(micro_batch)
        label = self.labels[name]
        rows = bad_rows(gradient, batch) or []
        self.probes.add(
            Finding(
                phase="backward",
                tensor=label,
                place=place,
                stage=self.stage.index,
                micro_batch=micro_batch,
                found=describe(f"the gradient of {label}", gradient, batch),
                readers=tuple(self.readers[name])[:3],
                rows=tuple(rows[:NUM_ROWS]),
                num_rows=len(rows),
                num_samples=batch.size if batch else 0,
            )
        )


class _NodeByNode(fx.Interpreter):
    """Run one graph node by node, and show each value to the stage."""

    def __init__(self, module: fx.GraphModule, stage: _StageRun) -> None:
        super().__init__(module)
        self._stage = stage
        self._weights: dict[str, str] = getattr(module, "onnx_names", {})

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        if n.op != "output":
            operands = {read: self.env[read] for read in n.all_input_nodes}
            # the interpreter frees values after their last use, so operands are looked at now
            with torch.no_grad():  # nothing here may be kept for the backward pass, which recomputation counts
                self._stage.look(n, value, operands, self._weights)
        return value


class ProbedLosses(ObservedLosses):
    """The losses of a pipeline, which are looked at as well. evaluating: compute them, which evaluation does not."""

    def __init__(self, losses: BatchLosses, probes: Probes, stage: int, *, evaluating: bool) -> None:
        super().__init__(losses)
        self._probes = probes
        self._stage = stage
        self._evaluating = evaluating
        self._calls = 0

    def check_labels(self, batch: Batch, outputs: Tensor | Sequence[Tensor]) -> None:
        super().check_labels(batch, outputs)
        if self._evaluating:
            self(outputs, batch.labels, batch.size)

    def __call__(
        self, outputs: Tensor | Sequence[Tensor], labels: Sequence[Tensor | None], size: int
    ) -> tuple[Tensor, ...]:
        values = super().__call__(outputs, labels, size)
        micro_batch = self._calls
        self._calls += 1
        bad = [value for value in values if not bool(torch.isfinite(value).all())]
        if bad and size:
            self._probes.add(self._finding(micro_batch, bad[0], outputs, labels))
        return values

    def _finding(
        self, micro_batch: int, loss: Tensor, outputs: Tensor | Sequence[Tensor], labels: Sequence[Tensor | None]
    ) -> Finding:
        batch = self._probes.batch_of(micro_batch)
        outputs = [outputs] if isinstance(outputs, Tensor) else list(outputs)
        float_labels = _floating_point_tensors(list(labels))
        rows = next((bad for values in float_labels if (bad := bad_rows(values, batch))), [])
        operands = [describe("output", output, batch) for output in _floating_point_tensors(outputs)]
        operands += [describe("labels", values, batch) for values in float_labels]
        return Finding(
            phase="loss",
            tensor="the loss",
            place=self._probes.next_place(),
            stage=self._stage,
            micro_batch=micro_batch,
            found=describe("the loss", loss),
            operands=tuple(operands),
            rows=tuple(rows[:NUM_ROWS]),
            num_rows=len(rows),
            num_samples=batch.size if batch else 0,
        )


def _floating_point_tensors(value: Any) -> list[Tensor]:
    """Return the floating-point tensors in a value of any structure."""
    tensors = [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
    return [tensor for tensor in tensors if tensor.is_floating_point()]


def _eager(module: Compiled) -> Callable[..., Any]:
    original: Any = module.compiled._orig_mod
    return lambda *values: original(*values)


def _onnx_name(node: fx.Node, weights: dict[str, str]) -> str:
    """Return the ONNX tensor that a node computes; where it computes a part of one, the nearest that depends on it."""
    source = node
    # a weight that is only transposed or cast
    while source.op != "get_attr" and "onnx" not in source.meta and len(source.all_input_nodes) == 1:
        source = source.all_input_nodes[0]
    if source.op == "get_attr":
        return weights.get(str(source.target), str(source.target))
    return str((nearest(node, "onnx") or [node.name])[0])
