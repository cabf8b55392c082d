"""Compile the units of a rank's stages, and decide how where `graph.compile` does not say it.

    shapes    static if all samples have one shape, else dynamic
    mode      reduce-overhead (CUDA graphs) if nothing forbids them and kernels are launch-bound, else default

A model is launch-bound if launching its kernels takes longer than computing them, by this estimate for one micro-batch:

    launches      LAUNCH_S x nodes of the graph        compiled, forward and backward make about one kernel for each
    computing     3 x (FLOPs of the forward pass / FLOPs per s of a typical GPU + bytes of its results / BYTES_PER_S)

A CUDA graph is launched as one, but its memory is never given to anything else, and what it reads must stay at one
address. So larger models keep the ordinary mode, in which the host runs ahead of the GPU.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, fx

from onward.trainer.config.sections.model import CompileMode, GraphConfig
from onward.trainer.config.sections.ranks import ParallelConfig
from onward.trainer.errors import ConfigError, UnsupportedModel
from onward.trainer.model.compile import CompileChoice, Compiler, runtime_nodes
from onward.trainer.parallel.cost import Autocast, estimate_costs
from onward.trainer.parallel.pipeline.stage import Stage
from onward.trainer.parallel.planning.device_model import typical

log = logging.getLogger(__name__)

LAUNCH_S = 5e-6
"""Time to launch one kernel from the host."""
BYTES_PER_S = 1.5e12
"""Order of magnitude of the bandwidth of a GPU's memory."""


def compile_stages(
    stages: Sequence[Stage],
    graph: fx.GraphModule,
    config: GraphConfig,
    parallel: ParallelConfig,
    compute: str,
    example: Sequence[Tensor],
    *,
    device: torch.device,
    one_shape: bool,
    autocast: Autocast,
    beat: Callable[[], None],
) -> None:
    """Replace the units of a rank's stages by compiled ones, in place, if `graph.compile` is set.

    graph: the whole graph; compute: `precision.compute`; example: its inputs for one micro-batch. one_shape: whether
    all samples have one shape.
    beat: called before and after each compilation. Raises ConfigError for what cannot be compiled as configured.
    """
    if not config.compiles:
        return
    choice = choose(graph, config, parallel, compute, example, device=device, one_shape=one_shape, autocast=autocast)
    for stage in stages:
        compiler = Compiler(choice, device=device, beat=beat)
        for number, part in enumerate(stage.chain.parts):
            assert isinstance(part.module, fx.GraphModule)
            # unit by unit, so that ZeRO and recomputation still see their borders
            stage.chain.units[number] = compiler.compile(stage.chain.units[number], part.module)
        inputs = [*stage.received_meta, *(example[position] for position in stage.input_positions)]
        compiler.watch(stage.chain, tuple(tuple(value.shape) for value in inputs))
        log.info(
            "graph.compile: %d modules of stage %d, each at its first forward pass, for training and for evaluation",
            compiler.num_modules,
            stage.index,
        )


def choose(
    graph: fx.GraphModule,
    config: GraphConfig,
    parallel: ParallelConfig,
    compute: str,
    example: Sequence[Tensor],
    *,
    device: torch.device,
    one_shape: bool,
    autocast: Autocast,
) -> CompileChoice:
    """Return how to compile, and log it; the same on every rank. Arguments and errors as of `compile_stages`."""
    is_static = one_shape and config.compile != "dynamic"
    wanted = config.compile_mode
    mode, reason = wanted or "default", ""
    obstacles = list(_cuda_graph_obstacles(graph, config, parallel, device, is_static=is_static))
    if wanted == "reduce-overhead" and obstacles:
        raise ConfigError(
            "graph.compile 'reduce-overhead' captures CUDA graphs, which is impossible "
            f"{' and '.join(obstacles)}; use 'default'"
        )
    # tensor parallelism would put collectives into the graph, which nothing here has tried
    if not (wanted or obstacles) and parallel.tensor == 1:
        mode, reason = _estimated_mode(graph, example, compute, autocast)
    choice = CompileChoice(
        shapes="static" if is_static else "dynamic",
        mode=mode,
        regions="repeated" if config.compile == "repeated" else "whole",
    )
    log.info("graph.compile: %s shapes, mode %s%s, %s", choice.shapes, mode, reason, choice.regions)
    return choice


def _estimated_mode(
    graph: fx.GraphModule, example: Sequence[Tensor], compute: str, autocast: Autocast
) -> tuple[CompileMode, str]:
    """Return the mode of torch.compile on a GPU, and the reason in brackets."""
    nodes = {node.name: node for node in graph.graph.nodes}
    try:
        costs = estimate_costs(graph, example, autocast=autocast)
    except UnsupportedModel:
        return "default", ""
    # inputs and weights launch nothing
    calls = sum(bool(cost.outputs) for name, cost in costs.items() if nodes[name].op not in ("placeholder", "get_attr"))
    flops, num_bytes = (sum(each) for each in zip(*((c.flops, c.output_bytes) for c in costs.values()), strict=True))
    launch_ms = 1e3 * LAUNCH_S * calls
    # 3: the backward pass takes twice as long as the forward pass
    computing_ms = 3e3 * (flops / typical("cuda", compute).flops_per_s + num_bytes / BYTES_PER_S)
    reason = f" (estimated for a micro-batch: {launch_ms:.3f} ms of launches, {computing_ms:.3f} ms of computing)"
    return "reduce-overhead" if launch_ms > computing_ms else "default", reason


def _cuda_graph_obstacles(
    graph: fx.GraphModule, config: GraphConfig, parallel: ParallelConfig, device: torch.device, *, is_static: bool
) -> Iterable[str]:
    """Yield what forbids CUDA graphs. The rules of the configuration refuse some of it before a job starts."""
    if device.type != "cuda":
        yield "on a CPU"
    if not is_static:
        yield "with dynamic shapes"
    if parallel.pipeline > 1:
        yield f"with parallel.pipeline {parallel.pipeline}, which keeps results of several micro-batches"
    if parallel.zero:
        yield f"with parallel.zero {parallel.zero}, which gathers weights at other addresses"
    if config.compile == "repeated":
        yield "with graph.compile 'repeated', where one graph reads the weights of several layers"
    if breaks := runtime_nodes(graph):
        yield f"with {len(breaks)} nodes that are computed by Python"
