"""Run operator rules on real tensors at once: what a RuntimeNode does when the graph runs."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import numpy as np
import torch
from torch import nn

from onward.trainer.onnx_import.tracing.probing import as_function
from onward.trainer.onnx_import.tracing.tracing import Tracer
from onward.trainer.onnx_import.tracing.values import ShapeArray, Value, shape_array


class EagerTracer(Tracer):
    """A Tracer whose calls compute, with gradients, on real tensors of one device. It records no graph."""

    def __init__(
        self, device: torch.device, *, training: bool, statistics: Collection[torch.Tensor | None] = ()
    ) -> None:
        """statistics: the operands that are running statistics of the module."""
        super().__init__(training=training)
        self._statistics = {id(tensor) for tensor in statistics}
        self._empty = torch.empty(0, device=device)
        self.constants_device = device

    def call_as_is(self, function: Callable[..., Any] | str, args: Any, kwargs: Any) -> Value:
        return as_function(function)(*args, **kwargs)

    def call_module(self, name: str, module: nn.Module, *args: Any) -> Value:
        # operands 1 and 2 are scale and bias; the module was made just now, long after model.freeze was applied
        own = [arg for arg in args[1:3] if isinstance(arg, nn.Parameter)]
        if hasattr(module, "frozen"):  # a BatchNorm keeps its statistics if its scale and bias are frozen
            vars(module)["frozen"] = bool(own) and not any(parameter.requires_grad for parameter in own)
        return module.to(self._empty.device).train(self.training)(*args)

    def size(self, tensor: Value, dim: int) -> Value:
        return tensor.shape[dim]

    def is_running_statistic(self, value: Value) -> bool:
        return id(value) in self._statistics

    @property
    def anchor(self) -> Value:
        return self._empty

    def shape_ints(self, value: Value) -> ShapeArray | None:
        if isinstance(value, np.ndarray):
            return value
        return shape_array(value) if isinstance(value, torch.Tensor) and not value.is_floating_point() else None
