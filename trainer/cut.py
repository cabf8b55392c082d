"""Cutting the graph: into stages for the pipeline, and stages into units for ZeRO and recomputation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from trainer.graph import ImportedGraph


@dataclass(frozen=True)
class Part:
    """A stretch of the graph, contiguous in its order, as a module of its own."""

    module: nn.Module
    """Called with `reads` in order; returns the tuple `gives`, always a tuple. `module.onnx_names` as ImportedGraph's,
    of the tensors that it uses."""
    reads: tuple[str, ...]
    """Values that come from earlier parts, and inputs of the graph, by name."""
    gives: tuple[str, ...]
    """Values it computes that later parts or the caller need."""


class Chain(nn.Module):
    """Parts one after the other. Called with `reads` in order; returns the tuple `gives`."""

    def __init__(self, parts: Sequence[Part], *, reads: Sequence[str], gives: Sequence[str]) -> None:
        super().__init__()
        self.units = nn.ModuleList(part.module for part in parts)
        self.parts = tuple(parts)
        self.reads, self.gives = tuple(reads), tuple(gives)

    def forward(self, *values: Tensor) -> tuple[Tensor, ...]:
        known = dict(zip(self.reads, values, strict=True))
        for unit, part in zip(self.units, self.parts, strict=True):  # a unit may have been wrapped since
            known.update(zip(part.gives, unit(*(known[name] for name in part.reads)), strict=True))
        return tuple(known[name] for name in self.gives)


@dataclass(frozen=True)
class Stage:
    """One stage of the pipeline, on the rank that holds it."""

    index: int
    num_stages: int
    chain: Chain
    """Reads `receives`, then `inputs`."""
    receives: tuple[str, ...]
    """What crosses from the stage before, in order, values on their way to a later stage included."""
    inputs: tuple[int, ...]
    """Which of the graph's inputs it reads, by position: they come from the data, not from the stage before."""
    gives: tuple[str, ...]
    """What crosses to the next stage; the graph's outputs in order if it is the last."""
    crossing: tuple[Tensor, ...]
    """On the meta device, what `receives` are for one micro-batch of the example, `requires_grad` included."""
    produced: tuple[Tensor, ...]
    """The same of `gives`."""


def whole(module: ImportedGraph) -> Stage:
    """The graph as the only stage, in one unit."""
    part = Part(_AsTuple(module), module.input_names, module.output_names)
    chain = Chain([part], reads=part.reads, gives=part.gives)
    return Stage(0, 1, chain, (), tuple(range(len(part.reads))), part.gives, (), ())


class _AsTuple(nn.Module):
    """A graph whose single output is given as a tuple, too."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.graph = module

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        outputs = self.graph(*inputs)
        return (outputs,) if isinstance(outputs, Tensor) else tuple(outputs)
