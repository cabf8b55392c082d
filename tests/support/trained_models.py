"""What tests read from a module and its file: running statistics, and the model with the module's weights."""

from __future__ import annotations

import onnx
import torch
from torch import nn

from onward.trainer.errors import ConfigError
from onward.trainer.onnx_import.imported_graph import ImportedGraph, named_weights
from onward.trainer.onnx_import.write_back import fill_weights


def model_with_weights(module: ImportedGraph, model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a copy of `model` with the module's weights. Raises ConfigError if it has weights in other files."""
    trained, outside = fill_weights(module, model)
    if outside:
        raise ConfigError(f"weight {next(iter(outside))!r} is in another file; use write_model")
    return trained


def running_statistics(module: ImportedGraph) -> dict[str, torch.Tensor]:
    """Return {initializer name: tensor} of the running means and variances."""
    return {name: tensor for name, tensor in named_weights(module).items() if not isinstance(tensor, nn.Parameter)}
