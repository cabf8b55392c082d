"""An ONNX node whose rule runs each time the graph runs, on real tensors, because its result depends on data.

The module holds no tensors of its own: weights and constants are passed to it as operands, so they keep their names,
their gradients and their device.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import onnx
import torch
from torch import nn

from onward.trainer.errors import UnsupportedNode
from onward.trainer.onnx_graph.files.operators import FunctionKey
from onward.trainer.onnx_import.tracing.eager import EagerTracer
from onward.trainer.onnx_import.tracing.tracing import ANCHOR
from onward.trainer.onnx_import.tracing.values import Value

LocalFunctions = Mapping[FunctionKey, onnx.FunctionProto]


@dataclass(frozen=True)
class NodeContext:
    """What the meaning of a node depends on besides its operands."""

    opsets: Mapping[str, int]
    functions: LocalFunctions


EagerLowering = Callable[[onnx.NodeProto, Mapping[str, Value], NodeContext, EagerTracer], Sequence[Value]]
"""Computes a node, given the values of its operands and of the outer names that its inner graphs read."""


class RuntimeNode(nn.Module):
    """One ONNX node, computed by its rule each time the graph runs. Follows train() and eval()."""

    def __init__(
        self,
        node: onnx.NodeProto,
        names: Sequence[str],
        context: NodeContext,
        lower: EagerLowering,
        *,
        statistics: Collection[str] = (),
    ) -> None:
        super().__init__()
        self.node = node
        self.names = tuple(names)
        """The names of the arguments: the node's operands, then the outer names that its inner graphs read."""
        self.statistics = frozenset(statistics)
        """Those of `names` that are running statistics, which a BatchNormalization inside updates in place."""
        self.frozen_statistics: frozenset[str] = frozenset()
        """The statistics whose BatchNormalization is frozen: it normalises by them, and leaves them as they are."""
        self.context = context
        self.lower = lower
        # follows `module.to`, so that tensors which the rule creates are on the module's device
        self.register_buffer(ANCHOR, torch.empty(0), persistent=False)

    def forward(self, *args: Any) -> Any:
        """Compute the node and return one value for each output.

        args: a tensor, a sequence of tensors or None for each of `names`.
        """
        dynamo = sys.modules.get("torch._dynamo")  # imported only by torch.compile; importing it takes seconds
        return self._compute(*args) if dynamo is None else dynamo.disable(self._compute)(*args)

    def _compute(self, *args: Any) -> Any:
        # by name, as the rule reads them while a graph is lowered
        values = dict(zip(self.names, args, strict=True))
        statistics = [values[name] for name in self.statistics - self.frozen_statistics]
        tracer = EagerTracer(self.get_buffer(ANCHOR).device, training=self.training, statistics=statistics)
        device = tracer.anchor.device
        with contextlib.nullcontext() if device.type == "cpu" else device:  # default device of new tensors
            try:
                results = self.lower(self.node, values, self.context, tracer)
            except UnsupportedNode as error:
                raise RuntimeError(f"node {self.node.name or self.node.output[0]!r}: {error}") from error
        outputs = tuple(tracer.to_tensor(result) for result in results)
        # a rule may leave out outputs at the end, but the recorded graph takes one item for each
        outputs += (None,) * (len(self.node.output) - len(outputs))
        return outputs[: len(self.node.output)] if len(self.node.output) > 1 else outputs[0]

    def extra_repr(self) -> str:
        return f"{self.node.op_type}: {', '.join(self.names)}"


# torch.compile does not trace it, nor what it calls: its control flow depends on data
RuntimeNode.forward._torchdynamo_disable = True  # type: ignore[attr-defined]
