"""Recognise stages that compute the same: what one takes, the other takes as well.

    transformer of 8 layers, pipeline 4        stage 0: table, 2 layers     one key
                                               stage 1: 2 layers            } one key, by what they call, on weights and
                                               stage 2: 2 layers            } values of which shapes
                                               stage 3: 2 layers, head      one key

Names and the values of weights are no part of the key. What cannot be compared by value counts as equal to itself only.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from operator import attrgetter
from typing import Any

import torch
from google.protobuf.message import Message  # type: ignore[import-untyped]
from torch import Tensor, fx, nn

from onward.trainer.parallel.pipeline.stage import Stage
from onward.trainer.parallel.recomputation.recompute import Recomputed

PLAIN = (bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size, torch.memory_format, type(None))
SKIPPED = frozenset({"_parameters", "_buffers", "_non_persistent_buffers_set", "_is_full_backward_hook"})
"""Attributes of a module that are compared otherwise, or do not change what it computes."""


def stage_key(stage: Stage, inputs: Sequence[Tensor]) -> Hashable:
    """Return what equal stages have in common. inputs: all inputs of the graph for a micro-batch, [B, ...]."""
    return _StageKey().of(stage, inputs)


class _Itself:
    """An object that is equal to itself alone; keeps it alive, so that its address is not given to another one."""

    def __init__(self, value: object) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Itself) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


class _StageKey:
    """Numbers tensors and values in the order in which the stage has them, so that names do not matter."""

    def __init__(self) -> None:
        self._tensors: dict[Tensor, int] = {}
        self._names: dict[str, int] = {}

    def of(self, stage: Stage, inputs: Sequence[Tensor]) -> Hashable:
        # a stage reads inputs of the graph directly, beside what the stage before it sends
        read = [inputs[position] for position in stage.input_positions]
        chain = stage.chain
        taken = self._wires(chain.input_names)
        units = []
        for unit, part in zip(chain.units, chain.parts, strict=True):
            # recomputation changes what a unit keeps, and so its memory and time
            mode = ("selective" if unit.selective else "whole") if isinstance(unit, Recomputed) else "none"
            wires = self._wires(part.input_names), self._wires(part.output_names)
            units.append((mode, unit.training, *wires, self._module(part.module)))
        arguments = tuple(_meta(value) for value in (*stage.received_meta, *read))
        # the shapes of all arguments: the same calls on other shapes cost other numbers
        return chain.training, taken, arguments, tuple(units), self._wires(chain.output_names)

    def _wires(self, names: Sequence[str]) -> tuple[int, ...]:
        # the number of a name is the order of its first use, which two equal stages share
        return tuple(self._names.setdefault(name, len(self._names)) for name in names)

    def _module(self, module: nn.Module) -> Hashable:
        if isinstance(module, fx.GraphModule):
            return module.training, self._graph(module)  # its type is of this module alone
        # a module that a graph calls: its type and all that it holds, hooks included
        stored = (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
        plain = {key: value for key, value in vars(module).items() if key not in SKIPPED}
        return type(module), tuple((name, self._stored(tensor)) for name, tensor in stored), self._value(plain, {})

    def _graph(self, module: fx.GraphModule) -> Hashable:
        order: dict[fx.Node, int] = {}
        calls = []
        for node in module.graph.nodes:
            target: Hashable = None
            # what a graph reads of its module: a tensor by its shape and number, else the object itself
            if node.op == "get_attr":
                stored = attrgetter(str(node.target))(module)
                target = self._stored(stored) if isinstance(stored, Tensor) else _Itself(stored)
            elif node.op == "call_module":
                target = self._module(module.get_submodule(str(node.target)))
            # functions are compared by identity: two lambdas may compute different things
            elif node.op in ("call_function", "call_method"):
                target = node.target if isinstance(node.target, str) else _Itself(node.target)
            calls.append((node.op, target, self._value(node.args, order), self._value(node.kwargs, order)))
            # nodes are numbered as they come, so that their names do not matter
            order[node] = len(order)
        return tuple(calls)

    def _stored(self, tensor: Tensor) -> Hashable:
        # a tied weight has one number wherever it is read
        return self._tensors.setdefault(tensor, len(self._tensors)), _meta(tensor)

    def _value(self, value: Any, order: dict[fx.Node, int]) -> Hashable:
        if isinstance(value, fx.Node):
            return "node", order[value]
        if isinstance(value, PLAIN):
            return type(value), value  # 1, 1.0 and True are different
        if isinstance(value, tuple | list):
            return "sequence", tuple(self._value(each, order) for each in value)
        if isinstance(value, dict):
            return "mapping", tuple((key, self._value(each, order)) for key, each in value.items())
        if isinstance(value, slice):
            return "slice", *(self._value(each, order) for each in (value.start, value.stop, value.step))
        # a module inside of another one, such as the activation of a layer
        if isinstance(value, nn.Module):
            return self._module(value)
        # ONNX's messages compare by content; their bytes are made in a fixed order
        if isinstance(value, Message):
            return type(value), value.SerializeToString(deterministic=True)
        return _Itself(value)


def _meta(tensor: Tensor) -> Hashable:
    """Return all that is known of a tensor but its data."""
    is_parameter = isinstance(tensor, nn.Parameter)
    return tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad, is_parameter
