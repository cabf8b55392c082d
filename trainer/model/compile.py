"""How an imported graph is run faster: compiled, images with their channels last. Weights stay as the file has them.

    chain.units[0] = accelerate(unit, config.graph, device)

A compiled graph is one graph for all batch sizes. Nodes that are computed by Python when the graph runs (run-time
leaves, loops and branches that depend on data) break it into several: a warning names them, and the parts between
them are compiled.

Of a convolution graph only the images are converted: torch's convolutions follow the format of their input and
convert their weights as they run, which costs one pass over the weights. The parameters themselves, their gradients
in the reducer's flat buckets, the optimizer's state and the checkpoints keep the layout of the file.
"""

from __future__ import annotations

import functools
import logging
import os
import shutil
import subprocess
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

from onward.trainer.config.sections import GraphConfig
from onward.trainer.errors import ConfigError
from onward.trainer.onnx_import.runtime_node import RuntimeNode

log = logging.getLogger(__name__)

CONVOLUTIONS = (F.conv2d, F.conv_transpose2d)


def accelerate(module: fx.GraphModule, config: GraphConfig, device: torch.device) -> nn.Module:
    """What to call in place of an imported module, which is changed; its weights are the same tensors.

    Raises ConfigError where the graph is to be compiled and there is no compiler.
    """
    if _wants_channels_last(config, device) and (images := _images(module.graph)):
        _convert(module, images)
    if not config.compile:
        return module
    if problem := missing_compiler():
        raise ConfigError(problem)
    breaks = [f"{node.target} ({child.node.op_type})" for node, child in _leaves(module)]
    if breaks:
        log.warning(
            "graph.compile: %d nodes are computed by Python when the graph runs, between compiled parts: %s",
            len(breaks),
            ", ".join(breaks),
        )
    lengths = module.graph.find_nodes(op="call_method", target="item")  # that cross from another unit, as tensors
    compiled: nn.Module = torch.compile(module, fullgraph=not (breaks or lengths), dynamic=True)  # type: ignore[assignment]
    return compiled


def _leaves(module: fx.GraphModule) -> list[tuple[fx.Node, RuntimeNode]]:
    called = [(node, module.get_submodule(str(node.target))) for node in module.graph.nodes if node.op == "call_module"]
    return [(node, child) for node, child in called if isinstance(child, RuntimeNode)]


# -- images


def _wants_channels_last(config: GraphConfig, device: torch.device) -> bool:
    """`auto` is a GPU: on a CPU oneDNN has a format of its own, and the conversions cost more than they save."""
    return config.memory_format == "channels_last" or (config.memory_format == "auto" and device.type == "cuda")


def _images(graph: fx.Graph) -> list[fx.Node]:
    """The inputs that are images or come of such: four dimensions, and a convolution that depends on them."""
    reached: dict[fx.Node, bool] = {}
    for node in reversed(graph.nodes):
        is_convolution = node.op == "call_function" and node.target in CONVOLUTIONS
        reached[node] = is_convolution or any(reached[user] for user in node.users)
    inputs = graph.find_nodes(op="placeholder")
    return [node for node in inputs if reached[node] and _rank(node) == 4]


def _rank(node: fx.Node) -> int:
    """Dimensions, as they were when the graph was traced; 0 if that is not known."""
    probes = node.meta.get("probes")
    return probes[0].ndim if probes and isinstance(probes[0], torch.Tensor) else int(node.meta.get("rank") or 0)


def _convert(module: fx.GraphModule, images: list[fx.Node]) -> None:
    for image in images:
        with module.graph.inserting_after(image):
            converted = module.graph.call_method("contiguous", (image,), {"memory_format": torch.channels_last})
        converted.meta.update(image.meta)
        for user in [user for user in image.users if user is not converted]:
            user.replace_input_with(image, converted)
    module.recompile()


# -- the compiler


@functools.cache
def missing_compiler() -> str:
    """What torch.compile lacks on this machine, and what to do; empty if nothing."""
    named = os.environ.get("CXX", "")
    for compiler in (named,) if named else ("g++", "clang++"):
        if shutil.which(compiler) and _runs(compiler):
            return ""
    tried = f"CXX={named}" if named else "neither g++ nor clang++"
    return (
        f"graph.compile needs a C++ compiler, and there is {'none at ' if named else ''}{tried} on this machine; "
        "install one (apt-get install g++), name it in CXX, or set graph.compile to false"
    )


def _runs(compiler: str) -> bool:
    command: list[Any] = [compiler, "--version"]
    try:
        return subprocess.run(command, capture_output=True, timeout=30, check=False).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False
