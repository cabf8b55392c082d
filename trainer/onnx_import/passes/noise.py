"""Give the nodes of a graph that draw random numbers a further input, from which they make them (ops/random.py).

    before    x ---------------- RandomNode(like x) ---        the numbers of torch's generator
    after     x ----------------- RandomNode(like x) ---       a function of the samples
              onward.noise [B, 2] -/

Nodes inside the bodies of Loop, Scan and If keep the generator: a body may run several times, each with new numbers.
"""

from __future__ import annotations

import torch
from torch import fx

from onward.trainer.onnx_graph.surgery.stochastic_depth import NOISE
from onward.trainer.onnx_import.imported_graph import ImportedGraph
from onward.trainer.onnx_import.ops.random import RandomNode


def add_noise_input(module: ImportedGraph) -> None:
    """Add an input NOISE, int64 [B, 2], behind the others, that all random nodes of the graph read; in place."""
    graph = module.graph
    inputs = graph.find_nodes(op="placeholder")
    with graph.inserting_after(inputs[-1]):
        keys = graph.placeholder("onward_noise")
    # as many rows as the samples at each trial size, which the tracer notes of every other input
    pairs = [pair for node in inputs if (pair := node.meta.get("probes"))]
    probes = next((pair for pair in pairs if pair[0].ndim), None)
    if probes:
        keys.meta["probes"] = tuple(torch.empty((len(rows), 2), dtype=torch.int64, device="meta") for rows in probes)
    for node in random_calls(module):
        # whatever stood in the place of the keys is replaced; a node without `like` gets None for it
        anchor, like = (*node.args, None)[:2]
        node.args = (anchor, like, keys)
    module.input_names = (*module.input_names, NOISE)
    graph.lint()
    module.recompile()


def random_calls(module: ImportedGraph) -> list[fx.Node]:
    """Return the calls of random nodes in a graph."""
    names = {name for name, child in module.named_modules() if isinstance(child, RandomNode)}
    return [node for node in module.graph.find_nodes(op="call_module") if str(node.target) in names]
