"""Number the layers of a graph from its inputs to its outputs, for a learning rate that falls with the depth.

    embed - ln linear gelu linear add - ln linear gelu linear add - ln linear gelu linear add - norm head
      0               1                             2                             3                  4

    factor, decay 0.5:  0.0625        0.125                0.25                 0.5                 1

Where blocks repeat (repeated_blocks.py), each block is a layer, and so is what is before, between and behind them.
Elsewhere a layer is a weight of two or more dimensions with what follows it: weights that as many of these precede, on
the longest path from an input, share a layer. A weight that several layers read belongs to the first of them. Layers
without trained weights do not count. The numbers depend on the graph alone, not on how it is divided.

Source: Clark et al. 2020 (ELECTRA), https://arxiv.org/abs/2003.10555; Bao et al. 2021 (BEiT),
https://arxiv.org/abs/2106.08254: the factor of layer l of L + 1 is decay^(L - l).
"""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch
from torch import fx

from onward.trainer.errors import ConfigError
from onward.trainer.model.repeated_blocks import repeated_blocks
from onward.trainer.onnx_import.imported_graph import TEACHER_MODULE, ImportedGraph, named_weights

ELEMENTWISE = frozenset({operator.add, torch.add, operator.mul, torch.mul, operator.sub, torch.sub})
"""Functions whose weights, such as embeddings of positions, do not begin a layer."""


def layer_scales(module: ImportedGraph, decay: float) -> dict[str, float]:
    """Return initializer name -> factor on the learning rate, for every trained weight; {} if `decay` is 1.

    Raises ConfigError if the graph has one layer.
    """
    if decay == 1.0:
        return {}
    layers = number_layers(module)
    last = max(layers.values(), default=0)
    if last == 0:
        raise ConfigError(
            f"optimizer.layer_decay {decay:g}: all {len(layers)} trained weights are in one layer, so that it would "
            "have no effect; leave it out"
        )
    return {name: decay ** (last - layer) for name, layer in layers.items()}


def number_layers(module: ImportedGraph) -> dict[str, int]:
    """Return initializer name -> layer, from 0 at the inputs, for every trained weight in the order of the graph.

    The module as it was imported, before it is divided over ranks.
    """
    names = {path: name for path, name in module.onnx_names.items() if named_weights(module)[name].requires_grad}
    reads = _first_reads(module, names)
    calls = _calls_without_teacher(module)
    blocks = _blocks(module, calls)
    if any(node in block for node in reads.values() for block in blocks):
        layers = _by_blocks(calls, reads, blocks)
    else:
        layers = _by_products(module, names, reads)
    # weights that no input passes, such as one that is only returned, belong to the first layer
    layers = {name: layers.get(name, 0) for name in names.values()}
    order = {layer: number for number, layer in enumerate(sorted(set(layers.values())))}
    return {name: order[layer] for name, layer in layers.items()}


def _calls_without_teacher(module: fx.GraphModule) -> list[fx.Node]:
    """Return the calls that do not depend on what a teacher stores."""
    of_teacher: set[fx.Node] = set()
    for node in module.graph.nodes:
        stored = str(node.target).startswith(f"{TEACHER_MODULE}.")
        if stored or any(operand in of_teacher for operand in node.all_input_nodes):
            of_teacher.add(node)
    calls = [node for node in module.graph.nodes if node.op.startswith("call_")]
    return [node for node in calls if node not in of_teacher]


def _blocks(module: fx.GraphModule, calls: Sequence[fx.Node]) -> list[set[fx.Node]]:
    """Return the repeated blocks, equal ones of which one is frozen included."""
    floats = [parameter for parameter in module.parameters() if parameter.is_floating_point()]
    frozen = [parameter for parameter in floats if not parameter.requires_grad]
    # blocks are compared with `requires_grad` of their weights: freezing a layer must not give the others new numbers
    for parameter in frozen:
        parameter.requires_grad_(True)
    try:
        return [set(block) for run in repeated_blocks(module, calls) for block in run]
    finally:
        for parameter in frozen:
            parameter.requires_grad_(False)


def _by_blocks(calls: Sequence[fx.Node], reads: dict[str, fx.Node], blocks: Sequence[set[fx.Node]]) -> dict[str, int]:
    """Return the layer of each weight: the number of the stretch of nodes, block or rest, in which it is read."""
    of_node: dict[fx.Node, int] = {}
    layer = 0
    current = -1
    for node in calls:
        block_number = next((number for number, block in enumerate(blocks) if node in block), -1)
        # a new layer begins wherever the block changes, also between a block and what is beside it
        if block_number != current:
            layer += 1
            current = block_number
        of_node[node] = layer
    # a projection for a teacher reads the student's last values
    return {name: of_node.get(node, layer) for name, node in reads.items()}


def _by_products(module: ImportedGraph, names: dict[str, str], reads: dict[str, fx.Node]) -> dict[str, int]:
    """Return the layer of each weight: how many nodes that read a matrix are on the longest path to its reader."""
    weights = named_weights(module)
    matrix_reads = {node for name, node in reads.items() if weights[name].ndim >= 2}
    begins = {node for node in matrix_reads if node.target not in ELEMENTWISE}
    depth: dict[fx.Node, int] = {}
    # nodes are in the order of computation, so that the depths of all operands are known
    for node in module.graph.nodes:
        depth[node] = max((depth[operand] for operand in node.all_input_nodes), default=0)
        if node in begins:
            depth[node] += 1
    return {name: depth[node] for name, node in reads.items()}


def _first_reads(module: fx.GraphModule, names: dict[str, str]) -> dict[str, fx.Node]:
    """Return initializer name -> the first node that combines the weight with something that depends on an input.

    names: path -> initializer name. A weight may be transposed or normalised on its way.
    """
    computed: set[fx.Node] = set()
    held: dict[fx.Node, set[str]] = {}
    first_reads: dict[str, fx.Node] = {}
    for node in module.graph.nodes:
        # a weight is found where it first meets a value that depends on an input; until then it is only prepared
        if node.op == "placeholder" or any(operand in computed for operand in node.all_input_nodes):
            computed.add(node)
            for operand in node.all_input_nodes:
                for name in held.get(operand, ()):
                    first_reads.setdefault(name, node)
        elif node.op == "get_attr":
            held[node] = {names[str(node.target)]} if str(node.target) in names else set()
        else:
            held[node] = set().union(*(held.get(operand, set()) for operand in node.all_input_nodes))
        # modules, such as BatchNorm, hold weights of their own
        if node.op == "call_module":
            for path, name in names.items():
                if path.startswith(f"{node.target}."):
                    first_reads.setdefault(name, node)
    return first_reads
