"""An imported graph that runs as a rank runs it: in channels-last format and compiled, as configured."""

from __future__ import annotations

import torch
from torch import fx, nn

from onward.trainer.config.sections.model import GraphConfig
from onward.trainer.model.channels_last import use_channels_last
from onward.trainer.model.compile import CompileChoice, Compiler, Regions
from onward.trainer.model.in_place import relu_in_place


def accelerate(module: fx.GraphModule, config: GraphConfig, device: torch.device, *, rows: int = 1) -> nn.Module:
    """Return one imported graph in channels-last format and compiled, as configured; its weights are the same tensors.

    rows: samples of a micro-batch. The compiled graph takes any shapes, and is one unless its blocks repeat. Raises
    ConfigError where there is no compiler.
    """
    use_channels_last(module, config, device, rows=rows)
    relu_in_place(module)
    if not config.compiles:
        return module
    regions: Regions = "repeated" if config.compile == "repeated" else "whole"
    choice = CompileChoice(mode=config.compile_mode or "default", regions=regions)
    return Compiler(choice, device=device).compile(module, module)
